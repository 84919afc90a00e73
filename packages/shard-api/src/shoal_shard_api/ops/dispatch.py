"""Dispatch of functions on ShardedTensors; the first of these that applies is used.

1. the user's override of the function, ``custom_sharded_op_impl``;
2. the user's override for the class of the spec, ``custom_sharding_spec_op``;
3. the tables below: DESCRIBE (metadata), SHARDWISE (each shard alone), HANDLERS (special code) and
   REFUSED;
4. embedding and embedding_bag with plain indices, lookup.py;
5. each shard alone, if the function is pointwise and a layout has no placements, via_dtensor.py;
6. by way of DTensors, via_dtensor.py. Results without dims are plain tensors. Results with dims are
   ShardedTensors, so a replicated or partial DTensor is sharded first: like an argument of the same
   shape, or along dim 0 if no argument has this shape.

A layout without placements (several shards on a rank, or no grid) is refused in 6, or moved inside
``implicit_reshard()``. Functions get the class ShardedTensor as the argument ``cls``, because its
module imports this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from shoal_dtensor.internal import pytree
from shoal_mesh import all_reduce
from shoal_mesh.internal import FUNCTION, require

from .._torch import DisableTorchFunctionSubclass, has_compatible_shallow_copy_type
from ..arguments import require_plain
from ..errors import ArgumentTypeError, LocalShardError, UnsupportedOpError
from ..spec.specs import ShardingSpec
from .lookup import LOOKUPS, look_up
from .via_dtensor import DTensorCall, block_for, run_shardwise

Function = Callable[..., Any]
Handler = Callable[[Any, Function, tuple[Any, ...], dict[str, Any]], Any]
CustomOp = Callable[[tuple[type, ...], tuple[Any, ...], "dict[str, Any]", ProcessGroup], Any]
"""An override: (types, args, kwargs, process_group) -> result, as in ``__torch_function__``."""

# By (class of spec, function); the class is None for overrides for any spec.
# declared mutable state: the overrides that the user's program registers
_OVERRIDES: dict[tuple[type | None, Function], CustomOp] = {}


def local_tensors_in_layout_of(tensor: Any, value: Any) -> list[torch.Tensor]:
    """Return the values of ``value`` in the layout of ``tensor``; all ranks call it.

    Args:
        tensor: A ShardedTensor, of which only the layout is used.
        value: A ShardedTensor of its shape, or a replicated plain tensor that broadcasts to it.

    Returns:
        This rank's local tensors.
    """
    if isinstance(value, type(tensor)):
        if value.shape != tensor.shape:
            raise LocalShardError(
                f"sizes differ: {tuple(value.shape)} does not fit {tuple(tensor.shape)}"
            )
        if value.process_group is not tensor.process_group:
            raise UnsupportedOpError("the two ShardedTensors are on different process groups")
        if value._layout != tensor._layout:
            value = value.resharded(tensor.sharding_spec())
        return list(value._local_tensors)
    # The two texts are the name of the call and of the argument in the error.
    require_plain(
        value,
        "a ShardedTensor with the values of another tensor: that tensor is a plain strided tensor",
    )
    shape = tuple(tensor.shape)
    if not _broadcasts(value.shape, shape):
        raise LocalShardError(f"sizes differ: {tuple(value.shape)} does not broadcast to {shape}")
    boxes = [shard.metadata.box for shard in tensor.local_shards()]
    if not boxes:
        # A rank without shards has one empty local tensor in their place.
        return [value.new_empty(0)]
    return [block_for(value, box, shape) for box in boxes]


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Tell whether a tensor of a shape broadcasts to another shape."""
    if len(shape) > len(target):
        return False
    # Dims are aligned at the end, and missing first dims broadcast: (3,) broadcasts to (2, 3).
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return all(size in (1, target_size) for size, target_size in pairs)


class _TwoTensors(NamedTuple):
    """The arguments of a function of two tensors, which are given by position or by name."""

    first: Any
    second: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def read(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _TwoTensors:
        """Split arguments into the two tensors and the others."""
        names = [name for name in ("input", "self", "other", "src") if name in kwargs]
        # The tensors that are passed by position come before the tensors that are passed by name.
        tensors = [*args[:2], *map(kwargs.__getitem__, names)]
        if len(tensors) != 2:
            raise ArgumentTypeError(
                f"the function needs two tensors, got {len(args)} arguments and {sorted(kwargs)}"
            )
        first, second = tensors
        others = {name: value for name, value in kwargs.items() if name not in names}
        return cls(first, second, args[2:], others)


def _type_as(cls: Any, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``a.type_as(b)``, which uses only dtype and device of b."""
    tensor, other, *_ = _TwoTensors.read(args, kwargs)
    like = other._local_tensors[0] if isinstance(other, cls) else other
    return tensor.to(like)


def _copy(cls: Any, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``a.copy_(b)``: a sharded b may have any layout; a plain a receives the full tensor."""
    tensor, source, rest, kwargs = _TwoTensors.read(args, kwargs)
    if not isinstance(tensor, cls):
        if not _broadcasts(source.shape, tensor.shape):
            raise LocalShardError(
                f"copy_: {tuple(source.shape)} does not broadcast to {tuple(tensor.shape)}"
            )
        return tensor.copy_(source.full_tensor(), *rest, **kwargs)
    sources = local_tensors_in_layout_of(tensor, source)
    for local, new in zip(tensor._local_tensors, sources, strict=True):
        local.copy_(new, *rest, **kwargs)
    return tensor


def _compare(cls: Any, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run ``equal`` or ``allclose``: each rank compares its shards, and the answers are reduced."""
    a, b, rest, kwargs = _TwoTensors.read(args, kwargs)
    if a.shape != b.shape:
        if func in (torch.equal, torch.Tensor.equal):
            return False
        raise LocalShardError(f"allclose: sizes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    sharded = a if isinstance(a, cls) else b
    local_a = local_tensors_in_layout_of(sharded, a)
    local_b = local_tensors_in_layout_of(sharded, b)
    pairs = zip(local_a, local_b, strict=True)
    is_same = all(func(x, y, *rest, **kwargs) for x, y in pairs)
    device = sharded._local_tensors[0].device
    own_verdict = torch.tensor(int(is_same), device=device)
    verdict = all_reduce(own_verdict, sharded._comm, "min")
    return bool(verdict.item())


def _gradients(cls: Any, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``torch.autograd.grad`` on the shards of its arguments."""
    names = ("outputs", "inputs", "grad_outputs")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    outputs = _as_list(options.pop("outputs"))
    inputs = _as_list(options.pop("inputs"))
    grads = _as_list(options.pop("grad_outputs", None))
    if not grads:
        grads = [None] * len(outputs)

    local_outputs = list[Any]()
    local_grads = list[Any]()
    for output, grad in zip(outputs, grads, strict=True):
        shards = _local_parts(cls, output)
        local_outputs += shards
        if isinstance(output, cls) and grad is not None:
            local_grads += local_tensors_in_layout_of(output, grad)
        else:
            local_grads += [grad] * len(shards)
    local_inputs = [local for tensor in inputs for local in _local_parts(cls, tensor)]

    # The function returns one gradient per local tensor, in the order of the inputs. Each input
    # takes as many of them as it has local tensors.
    gradients = iter(func(local_outputs, local_inputs, local_grads, **options))
    results = []
    for tensor in inputs:
        gradients_of_shards = [next(gradients) for _ in _local_parts(cls, tensor)]
        first = gradients_of_shards[0]
        if isinstance(tensor, cls) and first is not None:
            results.append(tensor._with_local_tensors(gradients_of_shards))
        else:
            results.append(first)
    return tuple(results)


def _local_parts(cls: Any, tensor: Any) -> list[Any]:
    """Return the local tensors of a ShardedTensor; a plain tensor itself."""
    return tensor._local_tensors if isinstance(tensor, cls) else [tensor]


def _as_list(value: Any) -> list[Any]:
    """Return the entries of a sequence, one value as a list, None as an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


T = torch.Tensor

ATTRIBUTES = [
    *("shape", "dtype", "layout", "device", "ndim", "itemsize"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "_version"),
]
DESCRIBE: set[Any] = {
    # For a read of an attribute, torch passes the attribute's getter as the function.
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
    # `nn.Module.to` calls this function to choose between two ways to change a parameter: True
    # would set `param.data`, and False replaces the parameter.
    has_compatible_shallow_copy_type: lambda *_: False,
    T.type_as: _type_as,
    T.copy_: _copy,
    **dict.fromkeys([torch.equal, T.equal, torch.allclose, T.allclose], _compare),
    torch.autograd.grad: _gradients,
}
REFUSED: dict[Any, str] = {
    **dict.fromkeys(
        [T.register_hook, T.register_post_accumulate_grad_hook, T.retain_grad],
        "autograd records the shards: register the hook on shard.tensor of local_shards()",
    ),
    **dict.fromkeys(
        (
            *(T.numpy, T.tolist, T.data_ptr, T.untyped_storage, T.storage),
            *(T.share_memory_, T.pin_memory, T.set_, T.__array__),
        ),
        "its memory is distributed over ranks: use local_shards(), local_tensor() or full_tensor()",
    ),
}


# --- overrides, and the dispatch of a call --------------------------------------------------------


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[[CustomOp], CustomOp]:
    """Register the decorated function in place of ``func`` for calls with a ShardedTensor.

    The decorated function is called with ``(types, args, kwargs, process_group)``.

    Args:
        func: A function of torch, or a method of torch.Tensor.

    Raises:
        ArgumentTypeError: ``func``, or the decorated function, is not callable.

    Example:
        >>> @custom_sharded_op_impl(torch.asin)
        ... def asin(types, args, kwargs, process_group): ...
    """
    return _register_override("custom_sharded_op_impl", None, func)


_sharded_op_impl = custom_sharded_op_impl  # the name of torch for its own ops


def custom_sharding_spec_op(
    sharding_spec_class: type, func: Callable[..., Any]
) -> Callable[[CustomOp], CustomOp]:
    """Register the decorated function in place of ``func`` for tensors with a spec of a class.

    Args:
        sharding_spec_class: The class itself; subclasses have overrides of their own.
        func: A function of torch, or a method of torch.Tensor.

    Raises:
        ArgumentTypeError: ``sharding_spec_class`` is not a class, or ``func`` is not callable.

    Example:
        >>> @custom_sharding_spec_op(ChunkShardingSpec, torch.digamma)
        ... def digamma(types, args, kwargs, process_group): ...
    """
    require(
        sharding_spec_class,
        type,
        "custom_sharding_spec_op: sharding_spec_class is a class",
        ArgumentTypeError,
    )
    return _register_override("custom_sharding_spec_op", sharding_spec_class, func)


def _register_override(
    call: str, sharding_spec_class: type | None, func: Callable[..., Any]
) -> Callable[[CustomOp], CustomOp]:
    """Return the decorator that registers an override; a class of None means any spec."""
    require(func, FUNCTION, f"{call}: func is a function", ArgumentTypeError)

    def register(implementation: CustomOp) -> CustomOp:
        require(implementation, FUNCTION, f"{call} decorates a function", ArgumentTypeError)
        _OVERRIDES[sharding_spec_class, func] = implementation
        return implementation

    return register


def _has_custom_op(sharding_spec: ShardingSpec, op: Callable[..., Any]) -> bool:
    """Tell whether an override of ``op`` is registered for the class of this spec."""
    return (type(sharding_spec), op) in _OVERRIDES


def _dispatch_custom_op(
    sharding_spec: ShardingSpec,
    op: Callable[..., Any],
    types: tuple[type, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    process_group: ProcessGroup,
) -> Any:
    """Run the override of ``op`` for the class of this spec.

    Raises:
        UnsupportedOpError: There is none.
    """
    if not _has_custom_op(sharding_spec, op):
        raise UnsupportedOpError(f"{op} is not overridden for {type(sharding_spec).__name__}")
    return _OVERRIDES[type(sharding_spec), op](types, args, kwargs, process_group)


def run_function(
    cls: Any,
    func: Callable[..., Any],
    types: tuple[type, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a function with ShardedTensors among its arguments; all ranks call it."""
    leaves = pytree.tree_leaves((args, kwargs))
    by_id = {id(leaf): leaf for leaf in leaves if isinstance(leaf, cls)}
    tensors = list(by_id.values())
    if tensors:
        override = _override_of(func, tensors[0])
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
    # In calls by torch there is a ShardedTensor, but not in every direct call of
    # `ShardedTensor.__torch_function__`.
    if not tensors:
        raise UnsupportedOpError(
            f"{name}: at least one argument must be a ShardedTensor with a process group"
        )
    group = tensors[0].process_group
    if any(tensor.process_group is not group for tensor in tensors):
        raise UnsupportedOpError(
            f"{name} has ShardedTensors of different process groups among its arguments"
        )
    call = DTensorCall(cls, func, tensors)
    if func in LOOKUPS:
        return look_up(call, args, kwargs)
    return call.run(args, kwargs)


def _override_of(func: Function, tensor: Any) -> CustomOp | None:
    """Return the user's override of a function; None if there is no override.

    An override for any spec comes before an override for the class of the tensor's spec.
    """
    for_any_spec = _OVERRIDES.get((None, func))
    if for_any_spec is not None:
        return for_any_spec
    cls = type(tensor.sharding_spec())
    return _OVERRIDES.get((cls, func))
