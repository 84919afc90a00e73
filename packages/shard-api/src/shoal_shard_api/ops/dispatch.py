"""What a function of ShardedTensors does: the first of these that applies.

1. the user's override of the function, ``custom_sharded_op_impl``;
2. the user's override for the class of the spec, ``custom_sharding_spec_op``;
3. the tables below: metadata, work on each shard, code of its own, refusals;
4. shard by shard, if the function is pointwise and a layout has no placements, via_dtensor.py;
5. embedding and embedding_bag with plain indices, lookup.py;
6. by way of DTensors, via_dtensor.py. Results without dims are plain tensors, others
   ShardedTensors: a replicated or partial result is sharded like an argument of its shape, else
   along dim 0.

A layout without placements (several shards on a rank, no grid) is refused in 6, or moved inside
``implicit_reshard()``. The class ShardedTensor is an argument here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shoal_dtensor.internal import pytree
from shoal_mesh import all_reduce

from .._torch import DisableTorchFunctionSubclass, has_compatible_shallow_copy_type
from ..arguments import expect, expect_plain
from ..errors import ArgumentTypeError, LocalShardError, UnsupportedOpError
from ..spec.specs import ShardingSpec
from .lookup import LOOKUPS, look_up
from .via_dtensor import DTensorCall, block_for, run_shardwise

Function = Callable[..., Any]
Handler = Callable[[Any, Function, tuple[Any, ...], dict[str, Any]], Any]
CustomOp = Callable[[tuple[type, ...], tuple[Any, ...], "dict[str, Any]", ProcessGroup], Any]
"""An override: (types, args, kwargs, process_group) -> result; the first three as in ``__torch_function__``."""

# By class of spec, or None for any, and function.
_OVERRIDES: dict[tuple[type | None, Function], CustomOp] = {}  # declared mutable state


def with_layout_of(tensor: Any, value: Any) -> list[torch.Tensor]:
    """The values of a ShardedTensor, or a replicated plain tensor, in the layout of ``tensor``; all ranks call it."""
    if isinstance(value, type(tensor)):
        if value.shape != tensor.shape:
            raise LocalShardError(
                f"sizes differ: {tuple(value.shape)} does not fit {tuple(tensor.shape)}"
            )
        if value.process_group is not tensor.process_group:
            raise UnsupportedOpError("the two ShardedTensors are on different process groups")
        moved = (
            value if value._layout == tensor._layout else value.resharded(tensor.sharding_spec())
        )
        return list(moved._local_tensors)
    expect_plain("a ShardedTensor with the values of another tensor", "that tensor", value)
    shape = tuple(tensor.shape)
    if not _broadcasts(value.shape, shape):
        raise LocalShardError(f"sizes differ: {tuple(value.shape)} does not broadcast to {shape}")
    boxes = [shard.metadata.box for shard in tensor.local_shards()]
    return [block_for(value, box, shape) for box in boxes] or [value.new_empty(0)]


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(n in (1, m) for n, m in pairs)


def _two(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, tuple[Any, ...], dict[str, Any]]:
    """The two tensors of a function, by position or name, and its other arguments."""
    names = [name for name in ("input", "self", "other", "src") if name in kwargs]
    tensors = [*args[:2], *(kwargs[name] for name in names)]
    if len(tensors) != 2:
        raise ArgumentTypeError(
            f"the function takes two tensors, got {len(args)} arguments and {sorted(kwargs)}"
        )
    return *tensors, args[2:], {name: value for name, value in kwargs.items() if name not in names}


def _type_as(cls: Any, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Only dtype and device of the other tensor are used."""
    tensor, other, _, _ = _two(args, kwargs)
    return tensor.to(other._local_tensors[0] if isinstance(other, cls) else other)


def _copy(cls: Any, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``a.copy_(b)``: a sharded b has any layout; a plain a receives the full tensor."""
    tensor, source, rest, kwargs = _two(args, kwargs)
    if not isinstance(tensor, cls):
        if not _broadcasts(source.shape, tensor.shape):
            raise LocalShardError(
                f"copy_: {tuple(source.shape)} does not broadcast to {tuple(tensor.shape)}"
            )
        return tensor.copy_(source.full_tensor(), *rest, **kwargs)
    for local, new in zip(tensor._local_tensors, with_layout_of(tensor, source), strict=True):
        local.copy_(new, *rest, **kwargs)
    return tensor


def _compare(cls: Any, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``equal`` and ``allclose``: each rank compares its shards, and the answers are reduced."""
    a, b, rest, kwargs = _two(args, kwargs)
    if a.shape != b.shape:
        if func in (torch.equal, torch.Tensor.equal):
            return False
        raise LocalShardError(f"allclose: sizes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    sharded = a if isinstance(a, cls) else b
    of_a, of_b = (
        sharded._local_tensors if each is sharded else with_layout_of(sharded, each)
        for each in (a, b)
    )
    same = all(func(x, y, *rest, **kwargs) for x, y in zip(of_a, of_b, strict=True))
    verdict = torch.tensor(int(same), device=sharded._local_tensors[0].device)
    return bool(all_reduce(verdict, sharded._comm, "min").item())


def _gradients(cls: Any, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad`` of the shards of its arguments."""
    names = ("outputs", "inputs", "grad_outputs")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    outputs, inputs = (_listed(options.pop(name)) for name in names[:2])
    grads = _listed(options.pop("grad_outputs", None)) or [None] * len(outputs)
    of_outputs, of_inputs = (
        [e._local_tensors if isinstance(e, cls) else [e] for e in each]
        for each in (outputs, inputs)
    )
    of_grads = [
        with_layout_of(output, grad)
        if isinstance(output, cls) and grad is not None
        else [grad] * len(local_tensors)
        for output, grad, local_tensors in zip(outputs, grads, of_outputs, strict=True)
    ]
    gradients = iter(
        func(
            *(list(chain.from_iterable(each)) for each in (of_outputs, of_inputs, of_grads)),
            **options,
        )
    )
    groups = [[next(gradients) for _ in local_tensors] for local_tensors in of_inputs]
    return tuple(
        each._with(group) if isinstance(each, cls) and group[0] is not None else group[0]
        for each, group in zip(inputs, groups, strict=True)
    )


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, Sequence) else [value]


T = torch.Tensor

ATTRIBUTES = [
    *("shape", "dtype", "layout", "device", "ndim", "itemsize"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "_version"),
]
DESCRIBE: set[Any] = {
    *(getattr(T, name).__get__ for name in ATTRIBUTES),
    *(
        T.size,
        T.dim,
        T.ndimension,
        T.stride,
        T.numel,
        T.nelement,
        T.element_size,
        T.__len__,
        torch.numel,
    ),
    *(
        T.is_contiguous,
        T.is_floating_point,
        T.is_complex,
        T.is_signed,
        T.storage_offset,
        T.is_inference,
    ),
    *(
        torch.is_floating_point,
        torch.is_complex,
        torch.is_signed,
        torch.is_inference,
        torch.is_same_size,
    ),
}
SHARDWISE: set[Any] = {
    *(
        T.clone,
        torch.clone,
        T.contiguous,
        T.detach,
        torch.detach,
        T.detach_,
        torch.detach_,
        T.requires_grad_,
    ),
    *(
        T.float,
        T.double,
        T.half,
        T.bfloat16,
        T.int,
        T.long,
        T.short,
        T.char,
        T.byte,
        T.bool,
        T.type,
    ),
    *(T.zero_, torch.zero_, T.fill_, torch.fill_, torch.nn.init.constant_),
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
}
HANDLERS: dict[Any, Handler] = {
    # a module that changes dtype replaces the tensor, not its data
    has_compatible_shallow_copy_type: lambda *_: False,
    T.type_as: _type_as,
    T.copy_: _copy,
    **dict.fromkeys([torch.equal, T.equal, torch.allclose, T.allclose], _compare),
    torch.autograd.grad: _gradients,
}
REFUSED: dict[Any, str] = {
    **dict.fromkeys(
        [T.register_hook, T.register_post_accumulate_grad_hook, T.retain_grad],
        "the autograd graph has the shards: register the hook on shard.tensor of local_shards()",
    ),
    **dict.fromkeys(
        (
            *(T.numpy, T.tolist, T.data_ptr, T.untyped_storage, T.storage),
            *(T.share_memory_, T.pin_memory, T.set_, T.__array__),
        ),
        "its storage is distributed: use local_shards(), local_tensor() or full_tensor()",
    ),
}


# --- overrides, and which of them all a call is ---------------------------------------------------


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[[CustomOp], CustomOp]:
    """A decorator that registers a function in place of ``func`` for arguments that include a ShardedTensor.

    The decorated function is called with ``(types, args, kwargs, process_group)``.

    Args:
        func: A function of torch, or a method of torch.Tensor.

    Raises:
        ArgumentTypeError: ``func``, or the decorated function, is not callable.

    Example:
        >>> @custom_sharded_op_impl(torch.asin)
        ... def asin(types, args, kwargs, process_group): ...
    """
    return _overriding("custom_sharded_op_impl", None, func)


_sharded_op_impl = custom_sharded_op_impl  # the name of torch for its own ops


def custom_sharding_spec_op(
    sharding_spec_class: type, func: Callable[..., Any]
) -> Callable[[CustomOp], CustomOp]:
    """A decorator that registers a function in place of ``func`` for ShardedTensors whose spec is of this class.

    Args:
        sharding_spec_class: The class itself; subclasses have overrides of their own.
        func: A function of torch, or a method of torch.Tensor.

    Raises:
        ArgumentTypeError: The class is no class, or ``func`` is not callable.

    Example:
        >>> @custom_sharding_spec_op(ChunkShardingSpec, torch.digamma)
        ... def digamma(types, args, kwargs, process_group): ...
    """
    expect("custom_sharding_spec_op", "sharding_spec_class", sharding_spec_class, type)
    return _overriding("custom_sharding_spec_op", sharding_spec_class, func)


def _overriding(
    call: str, sharding_spec_class: type | None, func: Callable[..., Any]
) -> Callable[[CustomOp], CustomOp]:
    """The decorator of both; without a class for ShardedTensors of any spec."""
    expect(call, "func", func, Callable)

    def register(implementation: CustomOp) -> CustomOp:
        expect(call, "the decorated function", implementation, Callable)
        _OVERRIDES[sharding_spec_class, func] = implementation
        return implementation

    return register


def _has_custom_op(sharding_spec: ShardingSpec, op: Callable[..., Any]) -> bool:
    """Whether an override of ``op`` is registered for the class of this spec."""
    return (type(sharding_spec), op) in _OVERRIDES


def _dispatch_custom_op(
    sharding_spec: ShardingSpec,
    op: Callable[..., Any],
    types: tuple[type, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    process_group: ProcessGroup,
) -> Any:
    """Result of the override of ``op`` for the class of this spec; an UnsupportedOpError if there is none."""
    if not _has_custom_op(sharding_spec, op):
        raise UnsupportedOpError(f"{op} is not overridden for {type(sharding_spec).__name__}")
    return _OVERRIDES[type(sharding_spec), op](types, args, kwargs, process_group)


def run(
    cls: Any,
    func: Callable[..., Any],
    types: tuple[type, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Result of ``func``, some of whose arguments are ShardedTensors; all ranks call it."""
    tensors = list(
        {
            id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)
        }.values()
    )
    if tensors:
        override = _OVERRIDES.get((None, func)) or _OVERRIDES.get(
            (type(tensors[0].sharding_spec()), func)
        )
        if override is not None:
            return override(types, args, kwargs, tensors[0].process_group)
    if func in DESCRIBE:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in SHARDWISE:
        return run_shardwise(func, args, kwargs, tensors)
    if func in HANDLERS:
        return HANDLERS[func](cls, func, args, kwargs)
    name = getattr(func, "__name__", func)
    if func in REFUSED:
        raise UnsupportedOpError(f"{name} on a ShardedTensor: {REFUSED[func]}")
    if not tensors:
        raise UnsupportedOpError(
            f"{name} has no ShardedTensor with a process group among its arguments"
        )
    if any(each.process_group is not tensors[0].process_group for each in tensors):
        raise UnsupportedOpError(
            f"{name} has ShardedTensors of different process groups among its arguments"
        )
    call = DTensorCall(cls, func, tensors)
    return look_up(call, args, kwargs) if func in LOOKUPS else call.run(args, kwargs)
