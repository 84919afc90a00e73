"""What a step is on one rank: prepare a buffer, one collective, finish.

`kernel(step, coordinate)` resolves a step to integers once.  `prepare` and `finish` work on plain
local tensors and know no communication; the collective between them is data.  So the same kernels
run over process groups (`run`), merged with others (`coalesce`) and in one process for all
ranks (`shoal_dtensor.testing.simulate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import RedistributeError
from ..placements import norm_order
from ..spec import Box, Spec
from .blocks import Blocks, exchange_blocks, volume
from .norms import powers, root
from .packing import adjacent_rows, grid_of, join, regular, shape_of, slices_of, split, unpack
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Pad,
    ReduceScatter,
    Reshape,
    Scale,
    Share,
    Slice,
    Step,
    Transfer,
)

__all__ = [
    "Collective",
    "Kernel",
    "blocks_of",
    "box_of",
    "identity_of",
    "kernel",
    "members",
    "transfer_boxes",
    "transfer_kernel",
]

Coordinate = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of shoal_mesh's collectives.

    Attributes:
        kind: name of the function: all_gather, all_gather_v, reduce_scatter, reduce_scatter_v, all_reduce,
            all_to_all, all_to_all_v.
        axes: mesh axes of the communicator, in the order of its members.
        dim: tensor dim of the pieces; of all_to_all the dim that is split.
        op: reduction.
        sizes: lengths of the members' pieces (of all_to_all_v: elements sent to each).
        receives: of all_to_all_v: elements received from each; of all_to_all: the dim that is joined.
        ranks: global ranks of the communicator where it is not along axes of one mesh.
    """

    kind: str
    axes: tuple[int, ...]
    dim: int = 0
    op: str = "sum"
    sizes: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A step on one rank.

    Attributes:
        prepare: local tensor -> buffer to communicate; None if it is the local tensor.
        collective: None for a local step: then `finish` does all.
        finish: (what the collective gave, local tensor) -> new local tensor; None if it is the result already.
    """

    prepare: Callable[[Tensor], Tensor] | None = None
    collective: Collective | None = None
    finish: Callable[[Tensor, Tensor], Tensor] | None = None


def kernel(step: Step, coordinate: Coordinate | None) -> Kernel:
    """What the rank at a coordinate of the step's mesh does; nothing if it is outside (None), but for a transfer."""
    if coordinate is None and type(step) is not Transfer:
        return Kernel()
    return _KERNELS[type(step)](step, coordinate)


def members(spec: Spec, axes: Sequence[int], coordinate: Coordinate) -> list[Coordinate]:
    """Coordinates of the ranks that differ from one only along `axes`, row-major in the order of `axes`.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Shard
        >>> members(Spec(abstract_mesh((2, 2, 2)), [Shard(0)] * 3, (8,)), (2, 0), (0, 1, 0))
        [(0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1)]
    """
    found = []
    for position in product(*(range(spec.mesh.shape[axis]) for axis in axes)):
        other = list(coordinate)
        for axis, i in zip(axes, position, strict=True):
            other[axis] = i
        found.append(tuple(other))
    return found


def blocks_of(step: Exchange, coordinate: Coordinate) -> Blocks:
    """Who sends what to whom in an exchange, members counted along the step's axes."""
    group = members(step.src, step.axes, coordinate)
    before = [step.src.box(c) for c in group]
    after = [step.dst.box(c) for c in group]
    return exchange_blocks(group.index(coordinate), before, after)


def _slice(step: Slice, coordinate: Coordinate) -> Kernel:
    before, after = step.src.box(coordinate), step.dst.box(coordinate)
    cuts = [(d, j - i, k - j) for d, ((i, m), (j, k)) in enumerate(zip(before, after, strict=True)) if (i, m) != (j, k)]

    def finish(local: Tensor, _: Tensor) -> Tensor:
        for dim, start, length in cuts:
            local = local.narrow(dim, start, length)
        return local

    return Kernel(finish=finish)


def _reshape(step: Reshape, coordinate: Coordinate) -> Kernel:
    shape = step.dst.local_shape_at(coordinate)
    return Kernel(finish=lambda local, _: local.reshape(shape))


def _share(step: Share, coordinate: Coordinate) -> Kernel:
    ops = {axis: op for axis, op in step.dst.partials if axis in step.axes}
    once = [axis for axis, op in ops.items() if op in _COUNTED or norm_order(op) is not None]
    if all(coordinate[axis] == 0 for axis in once):
        return Kernel(finish=lambda local, _: local.clone(memory_format=torch.contiguous_format))
    value = identity_of(ops[once[0]], step.dst.dtype)
    return Kernel(finish=lambda local, _: torch.full_like(local, value, memory_format=torch.contiguous_format))


def _pad(step: Pad, coordinate: Coordinate) -> Kernel:
    before, after = step.src.box(coordinate), step.dst.box(coordinate)
    ops = {axis: op for axis, op in step.dst.partials if axis in step.axes}
    value = identity_of(next(iter(ops.values())), step.dst.dtype)
    factor = prod(step.dst.mesh.shape[axis] for axis, op in ops.items() if op == "avg")
    shape, inner = shape_of(after), slices_of(before, after)

    def finish(local: Tensor, _: Tensor) -> Tensor:
        out = local.new_full(shape, value)
        out[inner] = local if factor == 1 else local * factor
        return out

    return Kernel(finish=finish)


def _scale(step: Scale, coordinate: Coordinate) -> Kernel:
    factor, divisor = step.factor, step.divisor
    if divisor == 1:
        return Kernel(finish=lambda local, _: local * factor)
    return Kernel(finish=lambda local, _: local * (factor / divisor))


def _all_gather(step: AllGather, coordinate: Coordinate) -> Kernel:
    boxes = [step.src.box(c) for c in members(step.src, step.axes, coordinate)]
    frame = step.dst.box(coordinate)
    shape = shape_of(frame)
    if not volume(frame):
        return Kernel(finish=lambda local, _: local.new_empty(shape))
    if len(step.dims) == 1:
        dim = step.dims[0]
        sizes = tuple(box[dim][1] - box[dim][0] for box in boxes)
        if len(set(sizes)) == 1:
            return Kernel(collective=Collective("all_gather", step.axes, dim=dim))
        return Kernel(collective=Collective("all_gather_v", step.axes, dim=dim, sizes=sizes))
    counts = tuple(map(volume, boxes))
    if regular(boxes):
        grid = grid_of(step.src, step.dst, step.dims)
        return Kernel(
            prepare=_flatten,
            collective=Collective("all_gather", step.axes),
            finish=lambda got, _: join(got, grid, shape_of(boxes[0]), step.dims).reshape(shape),
        )

    def finish(got: Tensor, _: Tensor) -> Tensor:
        out = got.new_empty(shape)
        unpack(out, frame, boxes, got)
        return out

    return Kernel(_flatten, Collective("all_gather_v", step.axes, sizes=counts), finish)


def _reduce_scatter(step: ReduceScatter, coordinate: Coordinate) -> Kernel:
    boxes = [step.dst.box(c) for c in members(step.dst, step.axes, coordinate)]
    frame, shape = step.src.box(coordinate), shape_of(step.dst.box(coordinate))
    if not volume(frame):
        return Kernel(finish=lambda local, _: local.new_empty(shape))
    divide = _division(step.divisor, step.src.dtype)
    if len(step.dims) == 1:
        dim = step.dims[0]
        sizes = tuple(box[dim][1] - box[dim][0] for box in boxes)
        if len(set(sizes)) == 1:
            return Kernel(collective=Collective("reduce_scatter", step.axes, dim=dim, op=step.op), finish=divide)
        collective = Collective("reduce_scatter_v", step.axes, dim=dim, op=step.op, sizes=sizes)
        return Kernel(collective=collective, finish=divide)

    def finish(got: Tensor, local: Tensor) -> Tensor:
        got = got.view(shape)
        return got if divide is None else divide(got, local)

    if regular(boxes):
        grid = grid_of(step.dst, step.src, step.dims)
        return Kernel(
            prepare=lambda local: split(local, grid, shape, step.dims),
            collective=Collective("reduce_scatter", step.axes, op=step.op),
            finish=finish,
        )
    where = [slices_of(box, frame) for box in boxes]
    collective = Collective("reduce_scatter_v", step.axes, op=step.op, sizes=tuple(map(volume, boxes)))
    return Kernel(lambda local: torch.cat([local[w].reshape(-1) for w in where]), collective, finish)


def _all_reduce(step: AllReduce, coordinate: Coordinate) -> Kernel:
    if not volume(step.src.box(coordinate)):
        return Kernel(finish=lambda local, _: local.clone())
    collective = Collective("all_reduce", step.axes, op=step.op)
    return Kernel(collective=collective, finish=_division(step.divisor, step.src.dtype))


def _reducing(step: ReduceScatter | AllReduce, coordinate: Coordinate) -> Kernel:
    """A reduction; that of a norm is a sum of powers, of which the root is taken."""
    made = _reduce_scatter if isinstance(step, ReduceScatter) else _all_reduce
    order, dtype = norm_order(step.op), step.src.dtype
    if order is None:
        return made(step, coordinate)  # type: ignore[arg-type]  # the function for this type was chosen above
    work = made(replace(step, op="sum"), coordinate)  # type: ignore[arg-type]  # the same
    if work.collective is None:
        return work
    prepare, finish = work.prepare, work.finish or _first

    def prepared(local: Tensor) -> Tensor:
        parts = powers(local, order)
        return parts if prepare is None else prepare(parts)

    return Kernel(prepared, work.collective, lambda got, local: root(finish(got, local), order, dtype))


def _first(got: Tensor, _: Tensor) -> Tensor:
    return got


def _all_to_all(step: AllToAll, coordinate: Coordinate) -> Kernel:
    shape = shape_of(step.dst.box(coordinate))
    if not volume(step.dst.box(coordinate)):
        return Kernel(finish=lambda local, _: local.new_empty(shape))
    return Kernel(collective=Collective("all_to_all", step.axes, dim=step.dst_dim, receives=(step.src_dim,)))


def _exchange(step: Exchange, coordinate: Coordinate) -> Kernel:
    group = members(step.src, step.axes, coordinate)
    blocks = blocks_of(step, coordinate)
    collective = Collective("all_to_all_v", step.axes, **_counts(blocks, len(group)))
    return Kernel(*_moves(blocks, step.src.box(coordinate), step.dst.box(coordinate), collective))


def _transfer(step: Transfer, coordinate: Coordinate | None) -> Kernel:
    """`coordinate` is not used: a rank may be on either mesh, so it is known by its global rank."""
    return transfer_kernel(step, step.src.mesh.get_rank())


def transfer_kernel(step: Transfer, rank: int) -> Kernel:
    """What a global rank does in a transfer; nothing if it is on neither mesh."""
    if rank not in step.ranks:
        return Kernel()
    me = step.ranks.index(rank)
    before, after = transfer_boxes(step)
    blocks = exchange_blocks(me, before, after)
    collective = Collective("all_to_all_v", (), ranks=step.ranks, **_counts(blocks, len(step.ranks)))
    mine, wanted = before[me], after[me]
    nothing: Box = ((0, 0),)
    return Kernel(*_moves(blocks, nothing if mine is None else mine, nothing if wanted is None else wanted, collective))


def transfer_boxes(step: Transfer) -> tuple[list[Box | None], list[Box | None]]:
    """The boxes that the ranks of a transfer have and shall have; None where they are not in the mesh."""
    return [box_of(step.src, rank) for rank in step.ranks], [box_of(step.dst, rank) for rank in step.ranks]


def box_of(spec: Spec, rank: int) -> Box | None:
    """What a global rank holds; None if it is not in the mesh."""
    coordinate = spec.mesh.coordinate_of(rank)
    return None if coordinate is None else spec.box(coordinate)


def _counts(blocks: Blocks, size: int) -> dict[str, Any]:
    """Elements sent to and received from each of `size` members."""
    sends, receives = [0] * size, [0] * size
    for member, box in blocks.sends:
        sends[member] += volume(box)
    for member, box in blocks.receives:
        receives[member] += volume(box)
    return {"sizes": tuple(sends), "receives": tuple(receives)}


def _moves(
    blocks: Blocks, before: Box, after: Box, collective: Collective
) -> tuple[Callable[[Tensor], Tensor], Collective, Callable[[Tensor, Tensor], Tensor]]:
    """Packing, the exchange and unpacking of blocks."""
    shape = shape_of(after)
    where = [slices_of(box, before) for _, box in blocks.sends]
    boxes = [box for _, box in blocks.receives]
    kept = blocks.kept
    source = slices_of(kept, before) if kept is not None else ()
    target = slices_of(kept, after) if kept is not None else ()

    rows = adjacent_rows([box for _, box in blocks.sends], before)
    whole = kept is None and (not boxes or adjacent_rows(boxes, after) == (0, shape[0] if shape else 1))

    def prepare(local: Tensor) -> Tensor:
        if rows is not None:
            return local[rows[0] : rows[1]].reshape(-1)
        return torch.cat([local[w].reshape(-1) for w in where]) if where else local.new_empty(0)

    def finish(got: Tensor, local: Tensor) -> Tensor:
        if whole:
            return got.view(shape)
        out = local.new_empty(shape)
        if kept is not None:
            out[target] = local[source]
        unpack(out, after, boxes, got)
        return out

    return prepare, collective, finish


def _flatten(local: Tensor) -> Tensor:
    return local.reshape(-1)


def _division(divisor: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor] | None:
    if divisor == 1:
        return None
    if dtype.is_floating_point or dtype.is_complex:
        return lambda got, _: got.div_(divisor)
    return lambda got, _: got.floor_divide_(divisor)


_COUNTED = frozenset({"sum", "product", "bxor"})  # reductions that count a value as often as it occurs


def identity_of(op: str, dtype: torch.dtype) -> float | int | bool:
    """The value that a reduction ignores.

    Example:
        >>> identity_of("sum", torch.float32), identity_of("min", torch.int8), identity_of("band", torch.int32)
        (0, 127, -1)
    """
    order = norm_order(op)
    if order is not None:
        return 0.0 if order > 0 else float("inf")
    if op in ("sum", "avg", "bor", "bxor"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op in ("min", "band")
    if op == "band":
        return -1 if dtype.is_signed else torch.iinfo(dtype).max
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    if dtype.is_complex:
        raise RedistributeError(f"{op} is not defined for {dtype}")
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min


_KERNELS: dict[type[Step], Callable[[Any, Any], Kernel]] = {
    Slice: _slice,
    Reshape: _reshape,
    Share: _share,
    Pad: _pad,
    Scale: _scale,
    AllGather: _all_gather,
    ReduceScatter: _reducing,
    AllReduce: _reducing,
    AllToAll: _all_to_all,
    Exchange: _exchange,
    Transfer: _transfer,
}
