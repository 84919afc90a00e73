"""Layouts of plain local tensors between styles, and the effect of torch functions on them.

A layout is an attribute of the tensor object: it lives as long as the tensor, and costs nothing
without a watch. The effect of a function is determined once per combination of layouts, by running
it on DTensors without memory.

Sizes in arguments are sizes of shards, and are replaced by global sizes. Only layouts are
considered, not values. A function that mixes the elements of shards (a softmax over sharded
features) is taken to compute what its author intended, and its result is a shard like its input.
All decisions depend only on specs and global sizes, so they are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.compiling import is_compiling
from .._torch.tensors import TensorNote, pytree
from ..dispatch.global_call import replicated_spec, specs_in
from ..errors import LayoutError
from ..layout.boxes import spans
from ..layout.dim_sharding import StridedDimSharding
from ..layout.memory_order import dense_stride, dims_by_stride
from ..layout.placements import Placement, Replicate, Shard, StridedShard
from ..layout.spec import Spec
from ..layout.tensor_meta import flatten
from ..tensor.dtensor import DTensor

_ATTRIBUTE = "_shoal_layout"
AnyShard = Shard | StridedShard


@dataclass(frozen=True, slots=True)
class LocalLayout(TensorNote):
    """The known layout of a local tensor.

    In terms of the types of plain tensors (`spmd.types.axis_types`), a dim that `spec` shards is
    S(i) with the sizes of all shards, `drawn` numbers are R, a fused output has `Parts`, and a
    tensor of unknown layout is V.
    """

    # the spec of the global tensor; None if it is unknown, or if the tensor is not known to be
    # sharded
    spec: Spec | None = None
    # why the layout is unknown; empty otherwise
    unknown: str = ""
    # whether the tensor holds random numbers that are equal on all ranks along the axes on which
    # `spec` is replicated
    drawn: bool = False
    # for a fused output, the specs of its parts, which follow each other along the last dim
    blocks: tuple[Spec, ...] = ()

    @property
    def plain(self) -> bool:
        """True if the tensor is not known to be sharded and its layout is not unknown."""
        return self.spec is None and not self.unknown


UNSEEN = LocalLayout()
"""The layout of tensors that no watched function has returned. It is compared by identity."""
PLAIN = LocalLayout()
"""The layout of tensors that a watched function has returned and that are not sharded."""


def layout_of(tensor: Tensor) -> LocalLayout:
    """Return the known layout of a tensor.

    For a DTensor on some of the axes, it is the layout of its local shard on all axes.
    """
    layout: LocalLayout = getattr(tensor, _ATTRIBUTE, None) or UNSEEN
    if (
        layout.spec is None
        or layout.spec.local_shape == tensor.shape
        or hasattr(tensor, "device_mesh")
    ):
        return layout
    return LocalLayout(unknown="its shape was changed in place")


def spec_of(value: Any) -> Spec | None:
    """Return the spec of the global tensor that a local tensor is a shard of; None if unknown."""
    return layout_of(value).spec if isinstance(value, Tensor) else None


def note_layout(tensor: Tensor, layout: LocalLayout) -> None:
    """Attach a layout to a tensor."""
    setattr(tensor, _ATTRIBUTE, layout)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims by descending stride; of equal strides, a dim of size 1 is the inner one."""
    # Strides may be symbols, which cannot be sorted. Compiled code is not watched, so any order is
    # right.
    if is_compiling():
        return tuple(range(tensor.ndim))
    return dims_by_stride(tensor.stride(), tensor.shape)


def global_stride(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of a dense global tensor with the local tensor's memory order."""
    return dense_stride(shape, _memory_order(local))


def in_memory_as(like: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor with the memory order of dims of another one.

    Draws into it fill the same elements.
    """
    order = _memory_order(like)
    if order == _memory_order(tensor):
        return tensor
    held = tensor.new_empty([tensor.shape[dim] for dim in order])
    return held.permute([order.index(dim) for dim in range(tensor.ndim)]).copy_(tensor)


# --- the effect of functions on layouts -----------------------------------------------------------

_MOST_ENTRIES = 4096
# layouts of the results of functions, by the function and the layouts of its arguments
_results: dict[Any, tuple[LocalLayout, ...]] = {}
WAY_OUT = (
    "Assert its type where the layout is not known any more, "
    "shoal_spmd_types.assert_type(x, {axis: S(dim)}), draw where the layout is known (before the "
    "function), let the module run on DTensors (use_local_output=False), or let every rank draw "
    "different numbers: shoal_dtensor.random_mode('local')"
)


class UnknownLayoutError(Exception):
    """The error for shards that do not determine the layout of a result, with the reason."""


def followed(
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outs: Sequence[Tensor],
    layouts: Sequence[LocalLayout],
) -> Sequence[LocalLayout]:
    """Return the layouts of a function's results, given the layouts of its tensors."""
    for layout in layouts:
        if layout.unknown:
            taken = _taken_blocks(next(flatten(args)), layout, outs) if layout.blocks else []
            return taken or [LocalLayout(unknown=layout.unknown)] * len(outs)
    drawn = any(layout.drawn for layout in layouts)
    specs = [layout.spec for layout in layouts if layout.spec is not None]
    if all(spec.replicated for spec in specs):
        return [LocalLayout(replicated_spec(specs[0].mesh, out), drawn=True) for out in outs]
    key = (func, *((out.shape, out.dtype) for out in outs), _describe_argument((args, kwargs)))
    try:
        return _results[key]
    except (KeyError, TypeError):
        pass
    given, named = pytree.tree_map(
        lambda value: spec_of(value) or value, (tuple(args), dict(kwargs))
    )
    try:
        results = tuple(
            LocalLayout(spec, drawn=drawn)
            for spec in _results_of(name, func, given, named, outs=outs)
        )
    except UnknownLayoutError as error:
        if drawn:
            raise LayoutError(
                f"{name}: equal random numbers on all ranks are combined with shards of different "
                f"elements ({error}). Draw them with the sharded tensor (rand_like, dropout). "
                f"{WAY_OUT}"
            ) from error
        results = (LocalLayout(unknown=f"{name}: {error}"),) * len(outs)
    if len(_results) < _MOST_ENTRIES:
        # Some arguments cannot be part of a key.
        with suppress(TypeError):
            _results[key] = results
    return results


def _results_of(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outs: Sequence[Tensor],
) -> list[Spec]:
    """Return the specs of the tensors `outs` that a function returned.

    In the arguments, `Spec`s stand for shards and for replicated tensors.
    """
    if name in _RESIZING:
        function = torch.reshape
        args = _resized(name, args, kwargs, outs[0])
        kwargs = {}
    elif name == "expand":
        spec = args[0]
        shape = outs[0].shape
        if not isinstance(spec, Spec):
            raise UnknownLayoutError(
                "a tensor that is not sharded is expanded by the size of a shard"
            )
        # Example: (4,) expanded to (3, 4) has 1 new dim, the first.
        new = len(shape) - spec.ndim
        kept = [n if n != 1 else shape[new + d] for d, n in enumerate(spec.shape)]
        args = (spec, *shape[:new], *kept)
        kwargs = {}
    elif name in ("new_empty", "new_zeros", "new_ones", "new_full"):
        return [_made_like(args[0], outs[0])]
    return _run_on_specs(function, args, kwargs, outs)


def _run_on_specs(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outs: Sequence[Tensor],
) -> list[Spec]:
    """Return the specs of the function's results for DTensors without memory.

    The tensors `outs` must be this rank's shards of these results.
    """
    # Imported here, because only the first call of a function with these layouts needs it.
    from .shadow_calls import run_without_memory

    inputs = specs_in((args, kwargs))
    try:
        results: list[Any] = run_without_memory(inputs[0].mesh, function, args, kwargs)
    except Exception as error:
        # An error of any type is the reason why the layout is unknown.
        raise UnknownLayoutError(str(error).partition("\n")[0]) from error
    if len(results) != len(outs) or not all(isinstance(result, DTensor) for result in results):
        raise UnknownLayoutError("it returns another result for DTensors")
    specs: list[Spec] = [result.spec for result in results]
    for spec, out in zip(specs, outs, strict=True):
        if spec.partials:
            raise UnknownLayoutError("ranks hold summands of it")
        for axis, placement in enumerate(spec.placements):
            if placement.is_shard() and not _has_fractions_of_input(spec, axis, inputs):
                raise UnknownLayoutError("it takes a part of a sharded dim")
        if spec.local_shape != out.shape:
            raise UnknownLayoutError(
                f"its shape {tuple(out.shape)} is not that of a shard of {spec}"
            )
    return [
        spec.with_(dtype=out.dtype, stride=spec.stride)
        for spec, out in zip(specs, outs, strict=True)
    ]


def _has_fractions_of_input(spec: Spec, axis: int, inputs: Sequence[Spec]) -> bool:
    """Tell whether each rank along an axis holds the same fraction of the result as of some input.

    This is not so if a function has selected a part of the input.
    """
    # Example: shards of (2, 2) are half of the result, like shards of (4, 4). The shards (3, 0) of
    # x[:3] are not.
    sizes = extents(spec, axis)
    total = sum(sizes)
    for operand in inputs:
        if not operand.placements[axis].is_shard():
            continue
        input_sizes = extents(operand, axis)
        input_total = sum(input_sizes)
        # The fractions are compared as products, without division.
        if all(
            size * input_total == input_size * total
            for size, input_size in zip(sizes, input_sizes, strict=True)
        ):
            return True
    return False


@lru_cache(maxsize=1024)
def extents(spec: Spec, axis: int) -> tuple[int, ...]:
    """Return the elements of the dim that an axis shards, on each rank of the axis."""
    dim = getattr(spec.placements[axis], "dim", None)
    assert dim is not None, "the axis shards a dim"
    # Example: for the rank at (1, 0), the ranks along axis 1 are at (1, 0) and (1, 1).
    coordinate = [*(spec.coordinate or (0,) * spec.mesh.ndim)]
    sizes = []
    for rank in range(spec.mesh.size(axis)):
        coordinate[axis] = rank
        sizes.append(spec.dim_shardings[dim].size(coordinate))
    return tuple(sizes)


def shard_of(spec: Spec, axis: int) -> AnyShard | None:
    """Return an axis' placement with the sizes of all its shards; None if it does not shard."""
    placement = spec.placements[axis]
    if not isinstance(placement, Shard | StridedShard):
        return None
    sharding = spec.dim_shardings[placement.dim]
    is_even_strided = isinstance(placement, StridedShard) and sharding.even
    if is_even_strided or isinstance(sharding, StridedDimSharding):
        return placement
    return Shard(placement.dim, sizes=extents(spec, axis))


# --- sizes that are given as arguments ------------------------------------------------------------

_RESIZING = frozenset(("view", "reshape", "unflatten"))


def _resized(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor
) -> tuple[Any, ...]:
    """Return the arguments of the `reshape` of the global tensor, for a reshaped shard."""
    spec = args[0]
    given = [*args[1:], *kwargs.values()]
    if not isinstance(spec, Spec) or spec.is_strided or isinstance(given[0], torch.dtype):
        raise UnknownLayoutError("it reinterprets memory")
    # `unflatten` gets a dim, and sizes for the dims of the result from this dim on.
    start, requested = (given[0] % spec.ndim, given[1:]) if name == "unflatten" else (0, given)
    requested = list(requested[0]) if isinstance(requested[0], tuple | list) else requested
    # the dim of the result whose size was given as -1
    inferred = start + requested.index(-1) if -1 in requested else None
    sizes = list(out.shape)
    for dim in {p.dim for p in spec.placements if isinstance(p, Shard | StridedShard)}:
        target, size = _dim_after_reshape(spec, dim, tuple(out.shape), inferred)
        sizes[target] = size if sizes[target] == out.shape[target] else -1
    if -1 in sizes or prod(sizes) != spec.shape.numel():
        raise UnknownLayoutError(
            "its sizes do not show which dims are sharded; write -1 for a sharded dim"
        )
    return spec, sizes


def _made_like(source: Any, out: Tensor) -> Spec:
    """Return the spec of a tensor that was made from a shard with explicit sizes.

    A dim of the size of a shard is sharded.

    For `x` with rows (4, 6) on each of 2 ranks, `x.new_empty(4, 1)` is a shard of (8, 1), and
    `x.new_empty(1, 6)` is replicated.
    """
    if not isinstance(source, Spec) or source.is_strided:
        raise UnknownLayoutError("it was made with explicit sizes, from a tensor in runs")
    placements: list[Placement] = [Replicate()] * source.mesh.ndim
    shape = list(out.shape)
    for axis, placement in enumerate(source.placements):
        if not isinstance(placement, Shard):
            continue
        dim = placement.dim
        size = out.shape[dim] if dim < out.ndim else 1
        if 1 in source.sizes(dim):
            raise UnknownLayoutError(
                "it was made with explicit sizes; where a rank has one row, a size of 1 may be "
                "the size of a shard"
            )
        if size == source.local_shape[dim]:
            placements[axis] = placement
            shape[dim] = source.shape[dim]
        elif size != 1:
            raise UnknownLayoutError(
                "it was made with explicit sizes, which may be the sizes of a shard"
            )
    if not any(placement.is_shard() for placement in placements):
        raise UnknownLayoutError(
            "it was made with explicit sizes, none of them the size of a shard"
        )
    return Spec(source.mesh, placements, shape, None, dtype=out.dtype)


def _dim_after_reshape(
    spec: Spec, dim: int, out: tuple[int, ...], inferred: int | None
) -> tuple[int, int]:
    """Return the dim of a reshaped tensor that a sharded dim went to, and its global size.

    In the order of memory, `dim` and the dims after it have `local_shape[dim:].numel()` elements.
    Therefore the sharded dim of the result is the dim that has the same number of elements together
    with the dims after it. If shards have size 1 on some rank, other dims fit as well, and only a
    -1 determines the dim.
    """
    targets = _targets_of(spec.local_shape, dim, out)
    target = inferred if inferred in targets.dims else targets.dims[0]
    total = spec.shape[dim]
    size, rest = _global_size(spec, dim, out, target)
    if rest:
        raise UnknownLayoutError("the sizes of shards are not multiples of it")
    for rows in set(spec.sizes(dim)):
        # Example: a rank with 3 of 8 elements would have 3 * 4 / 8 of a dim of 4.
        if total and rows * size % total:
            raise UnknownLayoutError("the sizes of shards are not multiples of it")
        is_certain = target == inferred or not targets.are_exact
        if not is_certain and rows and (rows == 1) != (rows * size == total):
            raise UnknownLayoutError(
                "its sizes do not show which dim is sharded; write -1 for the sharded dim"
            )
    return target, size


class _Targets(NamedTuple):
    """The dims of a reshaped tensor that a sharded dim may have gone to.

    Attributes:
        dims: these dims.
        are_exact: whether the elements of the sharded dim and of the dims after it are those of
            such a dim and of the dims after it; otherwise the dim was folded into a larger one.
    """

    dims: list[int]
    are_exact: bool


def _targets_of(local: Sequence[int], dim: int, out: tuple[int, ...]) -> _Targets:
    """Return the dims of the shape `out` that a sharded dim of a local shape may have gone to."""
    if not local[dim]:
        dims = [j for j, n in enumerate(out) if n == 0]
        if len(dims) != 1:
            raise UnknownLayoutError("a sharded dim does not go to one dim of the result")
        return _Targets(dims, are_exact=True)
    # Example: in a local shape of (2, 4, 6) with dim 1 sharded, `inner` is 24. Reshaped to (2, 2,
    # 2, 6), `exact` is [1]. Reshaped to (8, 6), `folded` is [0].
    inner = prod(local[dim:])
    # elements from dim j on, and one entry more for none: (8, 6) -> [48, 6, 1]
    from_dim = [prod(out[j:]) for j in range(len(out) + 1)]
    exact = [j for j in range(len(out)) if from_dim[j] == inner]
    if exact:
        return _Targets(exact, are_exact=True)
    folded = [j for j in range(len(out)) if from_dim[j + 1] < inner < from_dim[j]]
    if not folded:
        raise UnknownLayoutError("a sharded dim does not go to one dim of the result")
    return _Targets(folded, are_exact=False)


def _global_size(spec: Spec, dim: int, out: tuple[int, ...], target: int) -> tuple[int, int]:
    """Return the global size of the dim that a sharded dim went to, and the rest of the division."""
    local = spec.local_shape
    total = spec.shape[dim]
    if local[dim]:
        # Example: if the dim has 2 elements on this rank, which has 4 of 8 elements of the source,
        # it has 2 * 8 // 4 = 4 elements in all.
        return divmod(out[target] * total, local[dim])
    # Example: an empty shard (0, 6) of 8 rows as (0, 2, 3) gives 6 * 8 // 6 = 8.
    others = prod(n for d, n in enumerate(local) if d != dim)
    others_of_out = prod(n for n in out if n)
    return others * total // others_of_out, 0


def _describe_argument(value: Any) -> Hashable:
    """Return all properties of an argument that a layout can depend on, as part of a key."""
    if isinstance(value, Tensor):
        return spec_of(value) or (value.shape, value.stride(), value.dtype)
    if type(value) in (tuple, list):
        return tuple(map(_describe_argument, value))
    if type(value) is dict:
        return tuple((name, _describe_argument(item)) for name, item in value.items())
    if type(value) is slice:
        return value.start, value.stop, value.step
    # The type tells values that are equal apart, such as 1 and True.
    return type(value), value


def _taken_blocks(source: Tensor, layout: LocalLayout, outs: Sequence[Tensor]) -> list[LocalLayout]:
    """Return for each view the layout of the block of a fused output that it is.

    Return [] if a view is another part of the output.
    """
    taken: list[LocalLayout] = []
    places = spans(spec.local_shape[-1] for spec in layout.blocks)
    block_at = dict(zip(places, layout.blocks, strict=True))
    start = 0
    for out in outs:
        has_strides = out.stride() == source.stride()
        if not has_strides or out.shape[:-1] != source.shape[:-1]:
            return []
        # Several views follow each other; a single view may be anywhere.
        if len(outs) == 1:
            distance = out.storage_offset() - source.storage_offset()
            start = distance // source.stride(-1)
        stop = start + out.shape[-1]
        if (start, stop) not in block_at:
            return []
        taken.append(LocalLayout(block_at[start, stop]))
        start = stop
    return taken
