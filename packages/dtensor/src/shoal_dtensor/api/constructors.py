"""Factories of DTensors from plain tensors, modules, stored tensors, sizes and numbers.

`distribute_tensor` and `distribute_module` shard existing values. The factories (`empty`, `zeros`,
`rand`, ...) have the names and arguments of torch's.

A docstring that begins with `V -> placements` converts V, a plain tensor that may differ by rank
("varying"), to the layout of `placements`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypedDict, TypeVar, Unpack
from weakref import ReferenceType, ref

import torch
from torch import nn

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import FUNCTION, near_miss, require

from .._torch.compiling import whole_when_compiled
from .._torch.tensors import is_followed, transform_error
from ..argument_types import require_tensor, suggests_keywords
from ..errors import ArgumentTypeError, ArgumentValueError, PlacementError, PlacementIndexError
from ..layout.boxes import slices_of
from ..layout.dim_sharding import ShardOrder
from ..layout.memory_order import dense_order
from ..layout.partition_spec import Placements, read_placements
from ..layout.placements import Partial, Placement
from ..layout.spec import Spec
from ..redistribute.execution.execute import run_plan
from ..redistribute.plan import plan
from ..redistribute.scatter import Scatter, shard_of
from ..rng.draw import ranks_must_agree
from ..rng.state import check_in_step, generator_of
from ..spmd.first_check import types_unchecked
from ..tensor.dtensor import DTensor
from ..tensor.spec_arguments import mesh_or_current


class Sliceable(Protocol):
    """A stored tensor that is read by slices: the result of `safe_open(...).get_slice(name)`."""

    def get_shape(self) -> Sequence[int]: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


@whole_when_compiled
@suggests_keywords()
def distribute_tensor(
    tensor: torch.Tensor | Sliceable,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: ShardOrder | None = None,
) -> DTensor:
    """`V -> placements`: return a DTensor with the values of one rank's plain tensor.

    Every rank except the source needs memory only for its own shard (pass, for example,
    `torch.empty(1).expand(shape)` there). A tensor on the meta device gives meta shards on every
    rank.

    Args:
        tensor: the global tensor, of the same shape and dtype on every rank. It must be a leaf of
            autograd. A DTensor that already has the requested layout is returned as it is. A stored
            tensor, `safetensors.safe_open(...).get_slice(name)`, is allowed too if all ranks can
            read it: each rank reads its own shard, and nothing is sent.
        device_mesh: the mesh; the mesh of the enclosing `with mesh:` block when left out.
        placements: one per mesh axis, or a `PartitionSpec`; all replicated when left out. Along a
            partial axis, the ranks' values reduce to the tensor's values.
        src_data_rank: one index. The rank that has this index on every mesh axis provides the
            values: 1 is the rank at (1, 1) of a 2-D mesh. None: each rank slices its own tensor,
            and reads only its shard of a memory-mapped one (`torch.load(mmap=True)`); nothing is
            sent, so layouts are not compared either.
        shard_order: pairs (tensor dim, mesh axes outermost first) for axes that do not shard in
            ascending order. Example: with ((0, (1, 0)),), axis 1 splits the rows into blocks,
            and axis 0 splits each block.

    Raises:
        PlacementError: if the placements do not fit, if the tensor is not a leaf, or if it is a
            DTensor of another layout.
        LockstepError: if ranks pass different placements, shapes or dtypes; on all ranks. They are
            compared in the message that is sent, so the group stays usable.

    Example:
        >>> from shoal_dtensor import Shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     x = distribute_tensor(torch.zeros(10, 3), init_device_mesh("cpu", (4,)), [Shard(0)])
        ...     x.shape, x.to_local().shape  # rows of 3, 3, 3 and 1
        (torch.Size([10, 3]), torch.Size([3, 3]))
    """
    mesh = mesh_or_current(device_mesh)
    wanted, shard_order = read_placements(mesh, placements, shard_order)
    require(
        src_data_rank,
        (int, type(None)),
        "distribute_tensor: src_data_rank is an int or None",
        ArgumentTypeError,
    )
    if isinstance(tensor, DTensor):
        requested = Spec(
            mesh,
            wanted,
            tensor.shape,
            tensor._spec.stride,
            dtype=tensor.dtype,
            shard_order=shard_order,
        )
        if tensor._spec.same_layout(requested):
            return tensor
        raise PlacementError(
            f"distribute_tensor: the tensor is a DTensor already, {tensor._spec!r}; use "
            f"redistribute to {requested!r}"
        )
    if not isinstance(tensor, torch.Tensor):
        return _read(tensor, mesh, wanted, shard_order)
    require_tensor(tensor, "distribute_tensor: tensor is a tensor")
    spec = _layout_of(tensor, mesh, wanted, shard_order)
    with torch.no_grad(), types_unchecked():
        values = tensor.detach()
        local = _local_values(spec, lambda start: shard_of(values, start, src_data_rank, spec))
    # Checked after the collective. If this rank raised before it, other ranks, whose tensors may be
    # leaves, would wait for this rank.
    _check_leaf(tensor)
    result = DTensor(local, spec, requires_grad=tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        parameter: Any = nn.Parameter(result, requires_grad=tensor.requires_grad)
        return parameter  # type: ignore[no-any-return]  # nn.Parameter keeps the DTensor class
    return result


def _local_values(spec: Spec, values: Callable[[Spec], torch.Tensor]) -> torch.Tensor:
    """Return the local tensor of global values in a layout.

    `values` returns the local tensor in a layout without partials. Along partial axes the values
    are first replicated; then each rank keeps its term.
    """
    if not spec.partials:
        return values(spec)
    replicated = spec.without_partials()
    return run_plan(plan(replicated, spec), values(replicated))


def distribute_with(
    scatter: Scatter, tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    """Return the result of `distribute_tensor` for a plain tensor; `scatter` sends its values.

    The shard has its values when the block of `scatter` ends. A style distributes all parameters of
    a module in one block, so that many of them share a collective.
    """
    spec = _layout_of(tensor, mesh, placements)
    shard = scatter.shard(tensor.detach(), spec)
    _check_leaf(tensor)
    return DTensor(shard, spec, requires_grad=tensor.requires_grad)


def _layout_of(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shard_order: ShardOrder | None = None,
) -> Spec:
    """Return the layout of a plain tensor on a mesh.

    The values of a tensor are sent in row-major order. A dense meta tensor has no values to send,
    and keeps its memory order, in which its random values are drawn later.
    """
    is_dense = dense_order(tensor.shape, tensor.stride()) is not None
    keeps_order = tensor.is_contiguous() or (tensor.is_meta and is_dense)
    # None is the row-major stride.
    stride = tensor.stride() if keeps_order else None
    return Spec(mesh, placements, tensor.shape, stride, dtype=tensor.dtype, shard_order=shard_order)


def _check_leaf(tensor: torch.Tensor) -> None:
    # torch.func.grad, vmap and forward-mode AD follow the operators on a tensor. They cannot follow
    # its values to other ranks.
    if is_followed(tensor):
        raise transform_error("distribute_tensor")
    if not tensor.is_leaf:
        raise PlacementError(
            "distribute_tensor: the tensor is not a leaf, so its gradient would stop here; use "
            "DTensor.from_local, which is differentiable"
        )


def _read(
    stored: Sliceable,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shard_order: ShardOrder | None,
) -> DTensor:
    """Read this rank's own box of a stored tensor, and nothing else."""
    if not hasattr(stored, "get_shape"):
        raise PlacementError(
            "distribute_tensor: expected a tensor, or a stored one with get_shape() and slices, as "
            f"safetensors' get_slice(name) gives, got {type(stored).__name__}"
        )
    shape = tuple(stored.get_shape())
    if any(isinstance(p, Partial) for p in placements):
        raise PlacementError(
            "distribute_tensor: a stored tensor can be read as Shard or Replicate only, got "
            f"{list(placements)}"
        )
    # The dtype is read from an empty slice. A number cannot be sliced, so it is read whole.
    index: Any = tuple(slice(0, 0) for _ in shape) if shape else ...
    empty_or_number = stored[index]
    dtype = empty_or_number.dtype
    spec = Spec(mesh, placements, shape, None, dtype=dtype, shard_order=shard_order)
    device = torch.device(mesh.device_type)
    if spec.coordinate is None:
        # This rank is not in the mesh, so it has no elements.
        return DTensor(torch.empty(0, dtype=dtype, device=device), spec)
    part = stored[slices_of(spec.box(spec.coordinate))] if shape else empty_or_number
    shard = part.to(device).contiguous()
    # A view would keep memory alive that does not belong to the shard.
    is_view = shard.untyped_storage().nbytes() != shard.nbytes
    return DTensor(shard.clone() if is_view else shard, spec)


@suggests_keywords()
def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Convert a module's parameters and buffers to DTensors in place, and its inputs and outputs.

    Args:
        module: the module, changed in place and returned. A parameter shared by several modules
            stays shared.
        device_mesh: the mesh; the mesh of the enclosing `with mesh:` block when left out.
        partition_fn: called with the name, module and mesh of every sub-module, to replace
            parameters by DTensors; parameters that it leaves plain are replicated.
        input_fn: `input_fn(module, inputs, mesh)` before forward, or `input_fn(inputs, mesh)`, the
            older form of torch; its result replaces the inputs.
        output_fn: `output_fn(module, outputs, mesh)` after forward, with the same alternative.

    Raises:
        PlacementError: if the module was distributed before, or `partition_fn` gives a shared
            parameter two layouts.
        ArgumentValueError: if a function takes another number of arguments.
    """
    mesh = mesh_or_current(device_mesh)
    require(module, nn.Module, "distribute_module: module is an nn.Module", ArgumentTypeError)
    for name, function in (
        ("partition_fn", partition_fn),
        ("input_fn", input_fn),
        ("output_fn", output_fn),
    ):
        require(
            function,
            FUNCTION | None,
            f"distribute_module: {name} is a function or None",
            ArgumentTypeError,
        )
    before = _with_module("input_fn", input_fn)
    after = _with_module("output_fn", output_fn)
    if getattr(module, "_shoal_distributed", False):
        raise PlacementError(
            "distribute_module: this module was distributed before; distribute a fresh one"
        )
    places = _places(module)
    shared = {tensor: paths for tensor, paths in places.items() if len(paths) > 1}
    plain_before = [ref(param) for param in module.parameters() if not isinstance(param, DTensor)]
    for name, child in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, child, mesh)
    _replace_plain_tensors(module, mesh, shared)
    # Without these keys, a replaced parameter lives only if the program refers to it.
    places.clear()
    shared.clear()
    _note_replaced(plain_before)
    if before is not None:
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, mesh))
    if after is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs, mesh))
    module._shoal_distributed = True  # type: ignore[assignment]  # a mark, not a submodule
    return module


def _with_module(name: str, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a function of (module, values, mesh) for a function with or without the module."""
    if function is None:
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function in C may not have a signature
        return function
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) == 3 or takes_all:
        return function
    if len(positional) == 2:
        return lambda module, values, mesh: function(values, mesh)
    raise ArgumentValueError(
        f"distribute_module: {name} must take (module, values, mesh) or (values, mesh), got a "
        f"function with {len(positional)} arguments"
    )


def _places(module: nn.Module) -> dict[torch.Tensor, list[tuple[dict[str, Any], str]]]:
    """Return the places (dict, name) of the plain parameters and buffers of a module."""
    places: dict[torch.Tensor, list[tuple[dict[str, Any], str]]] = {}
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                if tensor is not None and not isinstance(tensor, DTensor):
                    places.setdefault(tensor, []).append((table, name))
    return places


def _replace_plain_tensors(
    module: nn.Module,
    mesh: DeviceMesh,
    shared: Mapping[torch.Tensor, Sequence[tuple[dict[str, Any], str]]],
) -> None:
    """Replicate the tensors that `partition_fn` left plain, and keep shared tensors shared.

    Args:
        module: the module after `partition_fn`.
        mesh: the mesh.
        shared: the places (dict, name) of the tensors that had several before `partition_fn`.
    """
    # Imported here, because tensors can be distributed without it.
    from ..modules.owners import carry_attached

    # If `partition_fn` replaced a shared tensor in one of its places only, the plain tensor is
    # still in the other places. The loop below stores the replacement there, too.
    replacements = _unify_replacements(shared)
    for tensor, paths in _places(module).items():
        if tensor not in replacements:
            replacements[tensor] = distribute_tensor(tensor, mesh)
            carry_attached(tensor, replacements[tensor])
        for table, name in paths:
            table[name] = replacements[tensor]


def _unify_replacements(
    shared: Mapping[torch.Tensor, Sequence[tuple[dict[str, Any], str]]],
) -> dict[torch.Tensor, DTensor]:
    """Return the DTensors that replace shared tensors, by the replaced tensor.

    If `partition_fn` made several DTensors of one tensor, the first is stored in place of the
    others.

    Raises:
        PlacementError: if the DTensors have different layouts.
    """
    replacements: dict[torch.Tensor, DTensor] = {}
    for tensor, paths in shared.items():
        for table, name in paths:
            made = table.get(name)
            if not isinstance(made, DTensor):
                continue
            first = replacements.setdefault(tensor, made)
            if not made._spec.same_layout(first._spec):
                raise PlacementError(
                    "distribute_module: partition_fn gave a shared parameter two layouts, "
                    f"{first._spec!r} and {made._spec!r}"
                )
            table[name] = first
    return replacements


def _note_replaced(references: Sequence[ReferenceType[nn.Parameter]]) -> None:
    """Make a step raise if its optimizer holds one of these replaced parameters."""
    from ..modules.owners import note_replaced

    for reference in references:
        param = reference()
        # The program still refers to this parameter, perhaps by an optimizer.
        if param is not None:
            note_replaced(param)


# --- factories ------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


class Keywords(TypedDict, total=False):
    """The keyword arguments of every factory."""

    # element type; torch's default, or the type of the fill value, when left out
    dtype: torch.dtype | None
    layout: torch.layout  # only `torch.strided`
    # whether autograd records operations on the tensor
    requires_grad: bool
    # the mesh; the mesh of the enclosing `with mesh:` block when left out
    device_mesh: DeviceMesh | None
    # one per mesh axis, or a `PartitionSpec`; all replicated when left out
    placements: Placements | None


# The first or last of evenly spaced values. For type checkers, int and float are complex, too.
EndPoint = complex | torch.Tensor

_DEFAULTS = Keywords(
    dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None
)


def _factory(function: F) -> F:
    """Decorate a factory to be one node of compiled graphs.

    Its signature lists the names of `Keywords` in place of `**keywords`, for `help()` and editors.
    """
    factory = whole_when_compiled(function)
    signature = inspect.signature(factory)
    own_parameters = [*signature.parameters.values()][:-1]  # without **keywords
    defaults: dict[str, Any] = {**_DEFAULTS}
    listed = []
    for name, hint in Keywords.__annotations__.items():
        # The annotations of this file are not evaluated: each hint is a `ForwardRef` with a text.
        parameter = inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=hint.__forward_arg__,
        )
        listed.append(parameter)
    shown = signature.replace(parameters=[*own_parameters, *listed])
    factory.__signature__ = shown  # type: ignore[attr-defined]  # inspect reads it
    return factory


def _new(
    size: Sequence[Any],
    keywords: Keywords,
    dtype: torch.dtype | None = None,
    number: complex | None = None,
) -> DTensor:
    """Make a tensor of a size (integers or one sequence), filled with `number` if it is given.

    Its dtype is `dtype` unless the keywords name one.
    """
    unknown = [name for name in keywords if name not in _DEFAULTS]
    if unknown:
        raise ArgumentTypeError(
            f"unexpected keyword {unknown[0]!r}{near_miss(unknown[0], _DEFAULTS)}; allowed are "
            f"{', '.join(_DEFAULTS)}"
        )
    options = _DEFAULTS | keywords
    if options["layout"] is not torch.strided:
        raise PlacementIndexError(
            f"only torch.strided tensors can be distributed, got {options['layout']}"
        )
    is_one_sequence = len(size) == 1 and isinstance(size[0], Sequence)
    shape = tuple(size[0]) if is_one_sequence else tuple(size)
    for n in shape:
        require(
            n,
            (int, torch.SymInt),
            "a factory: its size consists of integers or is one sequence of them",
            ArgumentTypeError,
        )
    mesh = mesh_or_current(options["device_mesh"])
    placements, shard_order = read_placements(mesh, options["placements"])
    dtype = options["dtype"] or dtype or torch.get_default_dtype()
    device = mesh.device_type
    spec = Spec(mesh, placements, shape, None, dtype=dtype, shard_order=shard_order)
    if number is None:
        local = torch.empty(spec.local_shape, dtype=dtype, device=device)
    else:
        local = _local_values(
            spec, lambda start: torch.full(start.local_shape, number, dtype=dtype, device=device)
        )
    return DTensor(local, spec, requires_grad=options["requires_grad"])


def _draw_tensor(
    size: Sequence[Any],
    keywords: Keywords,
    fill: Callable[[DTensor], object],
    dtype: torch.dtype | None = None,
) -> DTensor:
    """Make a tensor of a size, filled in place by `fill` before gradients are recorded."""
    result = _new(size, {**keywords, "requires_grad": False}, dtype)
    fill(result)
    return result.requires_grad_(keywords.get("requires_grad", False))


@_factory
def empty(*size: Any, **keywords: Unpack[Keywords]) -> DTensor:
    """Return an uninitialized DTensor of global shape `size`.

    Args:
        size: global shape, as integers or one sequence.
        keywords: the keywords of torch's factories that make sense for a DTensor, `device_mesh` and
            `placements`: `Keywords`. All ranks pass the same ones: a factory sends nothing, so they
            are not compared.

    Raises:
        PlacementError: if the placements do not fit, or if `layout` is not `torch.strided`.

    Example:
        >>> from shoal_dtensor import Shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     x = empty(8, 3, device_mesh=init_device_mesh("cpu", (4,)), placements=[Shard(0)])
        ...     x.shape, x.to_local().shape
        (torch.Size([8, 3]), torch.Size([2, 3]))
    """
    return _new(size, keywords)


@_factory
def full(
    size: int | Sequence[int], fill_value: float | bool | complex, **keywords: Unpack[Keywords]
) -> DTensor:
    """Return a DTensor filled with `fill_value`, also where a placement is partial.

    The keywords are as for `empty`.
    """
    require(
        fill_value, (bool, int, float, complex), "full: fill_value is a number", ArgumentTypeError
    )
    sizes = (size,) if isinstance(size, int) else tuple(size)
    # As in torch, a float takes the default dtype, and another number the dtype of its type.
    dtype = None
    if not isinstance(fill_value, float):
        dtype = torch.tensor(fill_value, device="cpu").dtype
    return _new((sizes,), keywords, dtype, fill_value)


@_factory
def zeros(*size: Any, **keywords: Unpack[Keywords]) -> DTensor:
    """Return a DTensor of zeros; arguments as for `empty`."""
    return _new(size, keywords, number=0.0)


@_factory
def ones(*size: Any, **keywords: Unpack[Keywords]) -> DTensor:
    """Return a DTensor of ones; arguments as for `empty`."""
    return _new(size, keywords, number=1.0)


@_factory
def rand(
    *size: Any, generator: torch.Generator | None = None, **keywords: Unpack[Keywords]
) -> DTensor:
    """Draw uniform numbers in [0, 1), the values that `torch.rand` draws on one device.

    The arguments are as for `empty`.
    """
    return _draw_tensor(size, keywords, lambda drawn: drawn.uniform_(generator=generator))


@_factory
def randn(
    *size: Any, generator: torch.Generator | None = None, **keywords: Unpack[Keywords]
) -> DTensor:
    """Draw standard normal numbers, the values that `torch.randn` draws on one device.

    The arguments are as for `empty`.
    """
    return _draw_tensor(size, keywords, lambda drawn: drawn.normal_(generator=generator))


@_factory
def randint(
    low: int,
    high: int,
    size: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    **keywords: Unpack[Keywords],
) -> DTensor:
    """Draw integers in `[low, high)`, the values that `torch.randint` draws on one device.

    The keywords are as for `empty`.
    """
    return _draw_tensor(
        (tuple(size),),
        keywords,
        lambda drawn: drawn.random_(low, high, generator=generator),
        torch.int64,
    )


@_factory
def randperm(
    n: int, *, generator: torch.Generator | None = None, **keywords: Unpack[Keywords]
) -> DTensor:
    """Draw a permutation of `range(n)`, the one that `torch.randperm` draws on one device.

    Every rank draws the whole permutation, in O(n) memory, and keeps its shard.

    The keywords are as for `empty`.

    Raises:
        RandomStateError: if the ranks' generators are out of step, as for `rand`.
    """
    result = _new((n,), keywords, torch.int64)
    spec = result._spec
    local = result._local_tensor
    if ranks_must_agree(local):
        check_in_step(spec.mesh, generator or generator_of(local.device))
    # A rank outside the mesh draws too, so that its generator stays in step.
    whole = torch.randperm(n, dtype=local.dtype, device=local.device, generator=generator)
    if spec.coordinate is not None:
        local.copy_(_local_values(spec, lambda start: shard_of(whole, start, None)))
    return result


@_factory
def linspace(start: EndPoint, end: EndPoint, steps: int, **keywords: Unpack[Keywords]) -> DTensor:
    """Return `steps` values evenly spaced from `start` to `end`, as `torch.linspace` does.

    Every rank computes all of them, in O(steps) memory, and keeps its shard.

    Args:
        start: the first value: a number or a tensor of one element, also a DTensor.
        end: the last value, likewise.
        steps: the number of values.
        keywords: as for `empty`.

    Raises:
        ArgumentTypeError: if `start` or `end` is something else. It is also a TypeError.
        PlacementError: if the placements do not fit.

    Example:
        >>> from shoal_dtensor import Shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     linspace(0, 1, 5, device_mesh=mesh, placements=[Shard(0)]).to_local()
        tensor([0.0000, 0.2500])
    """
    ends = _number("linspace", "start", start), _number("linspace", "end", end)
    return _from_computed_values(keywords, partial(torch.linspace, *ends, steps))


@_factory
def logspace(
    start: EndPoint,
    end: EndPoint,
    steps: int,
    base: float = 10.0,
    **keywords: Unpack[Keywords],
) -> DTensor:
    """Return `steps` values from `base**start` to `base**end`, as `torch.logspace` does.

    Every rank computes all of them, in O(steps) memory, and keeps its shard.

    Args:
        start: the exponent of the first value: a number or a tensor of one element, also a DTensor.
        end: the exponent of the last value, likewise.
        steps: the number of values.
        base: the base of the powers.
        keywords: as for `empty`.

    Raises:
        ArgumentTypeError: if `start` or `end` is something else. It is also a TypeError.
        PlacementError: if the placements do not fit.

    Example:
        >>> from shoal_dtensor import Shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     logspace(0, 4, 5, device_mesh=mesh, placements=[Shard(0)]).to_local()
        tensor([ 1., 10.])
    """
    ends = _number("logspace", "start", start), _number("logspace", "end", end)
    return _from_computed_values(keywords, partial(torch.logspace, *ends, steps, base))


def _number(function: str, name: str, value: EndPoint) -> Any:
    """Return a number, which may be the value of a tensor of one element."""
    kinds = (int, float, complex, torch.Tensor)
    require(
        value,
        kinds,
        f"{function}: {name} is a number or a tensor of one element",
        ArgumentTypeError,
    )
    return value.item() if isinstance(value, torch.Tensor) else value


def _from_computed_values(keywords: Keywords, compute: Callable[..., torch.Tensor]) -> DTensor:
    """Return the DTensor of values that every rank computes, in the dtype that torch chooses."""
    # Values on the meta device have only a length and a dtype.
    without_values = compute(dtype=keywords.get("dtype"), device="meta")
    dtype = without_values.dtype
    result = _new((len(without_values),), {**keywords, "requires_grad": False}, dtype)
    spec = result._spec
    if spec.coordinate is not None:
        whole = compute(dtype=dtype, device=result._local_tensor.device)
        local = _local_values(spec, lambda start: shard_of(whole, start, None))
        result._local_tensor.copy_(local)
    return result.requires_grad_(keywords.get("requires_grad", False))
