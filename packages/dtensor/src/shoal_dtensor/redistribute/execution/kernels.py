"""What a step is on one rank: prepare a buffer, one collective, finish.

`kernel(step, coordinate)` resolves a step to integers once.  `prepare` and `finish` work on plain
local tensors and know no communication; the collective between them is data.  So the same kernels
run over process groups (`run`), merged with others (`coalesce`) and in one process for all
ranks (`shoal_dtensor.testing.simulate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal_mesh.internal import bound, contribution, pack_blocks, unpack_blocks

from ...layout.boxes import Box, intersect, shape_of, slices_of, volume
from ...layout.placements import norm_order
from ...layout.tensor_meta import has_symbols
from ..blocks import Blocks, adjacent_rows, boxes_of_rank, exchange_blocks, regular
from ..reductions import identity_of, powers, root

if TYPE_CHECKING:
    from ...layout.spec import Spec
    from ..steps import Step


Coordinate = tuple[int, ...]


class CollectiveCall(NamedTuple):
    """One call of shoal_mesh's collectives.  The blocks of its members follow one another along dim 0."""

    kind: str  # all_gather, reduce_scatter, all_reduce or all_to_all
    axes: tuple[int, ...]  # mesh axes of the communicator, in the order of its members
    op: str = "sum"  # reduction
    sizes: tuple[int, ...] = ()  # lengths of the members' blocks if they differ (of an all_to_all those sent to each)
    receives: tuple[int, ...] = ()  # of an all_to_all with sizes: lengths of the blocks received from each
    shape: tuple[int, ...] = (-1,)  # of what it gives, -1 for the length of the blocks: flat, if nothing else is said
    ranks: tuple[int, ...] = ()  # global ranks of the communicator where it is not along axes of one mesh


def unchanged(local: Tensor) -> Tensor:
    """The `prepare` of a step that communicates the local tensor as it is."""
    return local


def received(got: Tensor, local: Tensor) -> Tensor:
    """The `finish` of a step whose collective gives the result."""
    return got


class Kernel(NamedTuple):
    """A step on one rank."""

    prepare: Callable[[Tensor], Tensor] = unchanged  # local tensor -> buffer to communicate
    collective: CollectiveCall | None = None  # None for a local step: then `finish` does all
    # (what the collective gave, local tensor) -> new local tensor
    finish: Callable[[Tensor, Tensor], Tensor] = received


def kernel(step: Step, coordinate: Coordinate | None) -> Kernel:
    """What the rank at a coordinate of the step's mesh does; nothing if it is outside (None), but for a transfer."""
    if coordinate is None and step.name != "Transfer":
        return Kernel()
    return _KERNELS[step.name](step, coordinate)


def members(spec: Spec, axes: Sequence[int], coordinate: Coordinate) -> list[Coordinate]:
    """Coordinates of the ranks that differ from one only along `axes`, row-major in the order of `axes`.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Shard, Spec
        >>> members(Spec(abstract_mesh((2, 2, 2)), [Shard(0)] * 3, (8,)), (2, 0), (0, 1, 0))
        [(0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1)]
    """
    coordinates = []
    for position in product(*(range(spec.mesh.shape[axis]) for axis in axes)):
        along = dict(zip(axes, position, strict=True))
        coordinates.append(tuple(along.get(axis, i) for axis, i in enumerate(coordinate)))
    return coordinates


def _boxes(spec: Spec, step: Step, coordinate: Coordinate) -> list[Box]:
    """The boxes of the ranks along a step's axes; where all have the same shape, this rank's stands for them."""
    even = all(spec.dim_sharding(dim).even for dim in step.dims)
    return [spec.box(c) for c in ([coordinate] if even else members(spec, step.axes, coordinate))]


def blocks_of(step: Step, coordinate: Coordinate) -> Blocks:
    """Who sends what to whom in an exchange, members counted along the step's axes.

    Along dims of symbolic sizes, which do not move (`plan`), every block is as long as the shard.
    """
    group = members(step.src, step.axes, coordinate)
    src, dst = (spec.example or spec for spec in (step.src, step.dst))
    blocks = exchange_blocks(group.index(coordinate), *([[spec.box(c)] for c in group] for spec in (src, dst)))
    if src is step.src:
        return blocks
    own = step.src.box(coordinate)

    def whole(box: Box) -> Box:
        return tuple([b if has_symbols(b) else a for a, b in zip(box, own, strict=True)])

    sends, receives = ([(member, whole(box)) for member, box in part] for part in (blocks.sends, blocks.receives))
    return Blocks(tuple(sends), tuple(receives), tuple(map(whole, blocks.kept)))


def _slice(step: Step, coordinate: Coordinate) -> Kernel:
    before, after = step.src.box(coordinate), step.dst.box(coordinate)
    narrowed = [  # (dim, start, length): rows 4:8 -> 6:8 are (0, 2, 2)
        (d, j - i, k - j) for d, ((i, m), (j, k)) in enumerate(zip(before, after, strict=True)) if (i, m) != (j, k)
    ]

    def finish(local: Tensor, _: Tensor) -> Tensor:
        for dim, start, length in narrowed:
            local = local.narrow(dim, start, length)
        return local

    return Kernel(finish=finish)


def _reshape(step: Step, coordinate: Coordinate) -> Kernel:
    shape = step.dst.local_shape_at(coordinate)
    return Kernel(finish=lambda local, _: local.reshape(shape))


def _make_partial(step: Step, coordinate: Coordinate) -> Kernel:
    """R or S -> P: every element is held once along the axes; or as often as it was, if the reduction ignores that."""
    before, after = step.src.box(coordinate), step.dst.box(coordinate)
    ops = {axis: op for axis, op in step.dst.partials if axis in step.axes}
    sharded = {axis for dim in range(step.src.ndim) for axis in step.src.dim_sharding(dim).axes}
    value = identity_of(next(iter(ops.values())), step.dst.dtype)
    factor = prod(step.dst.mesh.shape[axis] for axis, op in ops.items() if op == "avg" and axis in sharded)
    shape, own = shape_of(after), intersect(before, after)
    once = [axis for axis, op in ops.items() if axis not in sharded and (op in _COUNTED or norm_order(op) is not None)]
    if own is None:
        return Kernel(finish=lambda local, _: bound(local.new_full(shape, value), local))
    source, target = slices_of(own, before), slices_of(own, after)  # columns 2:4 -> 0:4: local 0:2 to 2:4
    held = not any(coordinate[axis] for axis in once)  # R -> P(sum): x on coordinate 0, else 0

    def finish(local: Tensor, _: Tensor) -> Tensor:
        if not held and type(local) is Tensor:
            return local.new_full(shape, value)
        if once and type(local) is not Tensor:
            local = contribution(local, held, value)
        local = local[source]
        if own == after:
            return local.clone(memory_format=torch.contiguous_format) if factor == 1 else local * factor
        out = local.new_full(shape, value)
        out[target] = local if factor == 1 else local * factor
        return out

    return Kernel(finish=finish)


def _scale(step: Step, coordinate: Coordinate) -> Kernel:
    factor = step.factor if step.divisor == 1 else step.factor / step.divisor
    return Kernel(finish=lambda local, _: local * factor)


def _all_gather(step: Step, coordinate: Coordinate) -> Kernel:
    boxes = _boxes(step.src, step, coordinate)  # 5 rows on 2 ranks: 0:3, 3:5; even ones: its own only
    local_box = step.dst.box(coordinate)
    shape = shape_of(local_box)
    if not volume(local_box):
        return Kernel(finish=lambda local, _: local.new_empty(shape))
    if step.dims == (0,):
        return Kernel(collective=_of_rows("all_gather", step, boxes, shape))
    if regular(boxes):
        sizes, order = _grid_of_blocks(step.src, step.dst, step.dims, shape_of(boxes[0]))
        return Kernel(
            prepare=torch.flatten,
            collective=CollectiveCall("all_gather", step.axes),
            finish=lambda got, _: got.view(sizes).permute(order).reshape(shape),  # 2 x 2 blocks of (2, 3): (4, 6)
        )

    def finish(got: Tensor, _: Tensor) -> Tensor:
        out = got.new_empty(shape)
        unpack_blocks(got, [out[slices_of(box, local_box)] for box in boxes])
        return out

    collective = CollectiveCall("all_gather", step.axes, sizes=tuple(map(volume, boxes)))
    return Kernel(torch.flatten, collective, finish)


def _of_rows(kind: str, step: Step, boxes: Sequence[Box], shape: Sequence[int]) -> CollectiveCall:
    """The collective of a step along dim 0, which gives a tensor of this shape."""
    sizes = tuple(stop - start for (start, stop), *_ in boxes)  # 5 rows on 2 ranks: (3, 2)
    if all(size == sizes[0] for size in sizes):
        sizes = ()
    return CollectiveCall(kind, step.axes, step.op, sizes, shape=(-1, *shape[1:]))


def _reduce_scatter(step: Step, coordinate: Coordinate) -> Kernel:
    boxes = _boxes(step.dst, step, coordinate)
    local_box, shape = step.src.box(coordinate), shape_of(step.dst.box(coordinate))
    if not volume(local_box):
        return Kernel(finish=lambda local, _: local.new_empty(shape))
    divide = _division(step.divisor, step.src.dtype)
    if step.dims == (0,):
        return Kernel(collective=_of_rows("reduce_scatter", step, boxes, shape), finish=divide)

    def finish(got: Tensor, local: Tensor) -> Tensor:
        return divide(got.view(shape), local)

    if regular(boxes):
        sizes, order = _grid_of_blocks(step.dst, step.src, step.dims, shape)  # (4, 6): [2, 2, 2, 3], [0, 2, 1, 3]
        interleaved, back = [sizes[i] for i in order], sorted(range(len(order)), key=order.__getitem__)
        return Kernel(
            prepare=lambda local: local.reshape(interleaved).permute(back).reshape(-1),  # (4, 6) to 4 blocks of (2, 3)
            collective=CollectiveCall("reduce_scatter", step.axes, step.op),
            finish=finish,
        )
    where = [slices_of(box, local_box) for box in boxes]
    collective = CollectiveCall("reduce_scatter", step.axes, step.op, tuple(map(volume, boxes)))
    return Kernel(lambda local: pack_blocks([local[w] for w in where]), collective, finish)


def _all_reduce(step: Step, coordinate: Coordinate) -> Kernel:
    if not volume(step.src.box(coordinate)):
        return Kernel(finish=lambda local, _: local.clone())
    collective = CollectiveCall("all_reduce", step.axes, step.op, shape=tuple(step.src.local_shape_at(coordinate)))
    return Kernel(collective=collective, finish=_division(step.divisor, step.src.dtype))


def _reducing(step: Step, coordinate: Coordinate) -> Kernel:
    """A reduction; that of a norm is a sum of powers, of which the root is taken."""
    kernel_of = _reduce_scatter if step.name == "ReduceScatter" else _all_reduce
    order, dtype = norm_order(step.op), step.src.dtype
    if order is None:
        return kernel_of(step, coordinate)
    work = kernel_of(replace(step, op="sum"), coordinate)
    if work.collective is None:
        return work
    prepare, finish = work.prepare, work.finish
    return Kernel(
        prepare=lambda local: prepare(powers(local, order)),
        collective=work.collective,
        finish=lambda got, local: root(finish(got, local), order, dtype),
    )


def _all_to_all(step: Step, coordinate: Coordinate) -> Kernel:
    (src_dim, dst_dim), before = step.dims, step.src.box(coordinate)
    after, ranks = shape_of(step.dst.box(coordinate)), prod(step.src.mesh.shape[axis] for axis in step.axes)
    if not volume(before):
        return Kernel(finish=lambda local, _: local.new_empty(after))
    block = shape_of(before)  # (2, 8) S(0) -> S(1) on 4 ranks: blocks of (2, 2), which make (8, 2)
    block[dst_dim] = after[dst_dim]

    def prepare(local: Tensor) -> Tensor:
        return local if dst_dim == 0 else torch.cat(local.chunk(ranks, dst_dim))

    def finish(got: Tensor, _: Tensor) -> Tensor:
        return got if src_dim == 0 else torch.cat(got.chunk(ranks), src_dim)

    return Kernel(prepare, CollectiveCall("all_to_all", step.axes, shape=(-1, *block[1:])), finish)


def _exchange(step: Step, coordinate: Coordinate) -> Kernel:
    size = prod(step.src.mesh.shape[axis] for axis in step.axes)
    blocks = blocks_of(step, coordinate)
    return _moved(blocks, step.src.box(coordinate), step.dst.box(coordinate), size, axes=step.axes)


def transfer_kernel(step: Step, rank: int) -> Kernel:
    """What a global rank does in a transfer; nothing if it is on neither mesh."""
    if rank not in step.ranks:
        return Kernel()
    me = step.ranks.index(rank)
    before, after = ([boxes_of_rank(spec, r) for r in step.ranks] for spec in (step.src, step.dst))
    mine, wanted = ([*boxes[me], ((0, 0),)][0] for boxes in (before, after))  # an empty box outside of a mesh
    return _moved(exchange_blocks(me, before, after), mine, wanted, len(step.ranks), ranks=step.ranks)


def _moved(
    blocks: Blocks, before: Box, after: Box, size: int, *, axes: tuple[int, ...] = (), ranks: tuple[int, ...] = ()
) -> Kernel:
    """Packing, an exchange of blocks among `size` members, and unpacking."""
    sends, receives = [0] * size, [0] * size
    for counts, moves in ((sends, blocks.sends), (receives, blocks.receives)):
        for member, box in moves:
            counts[member] += volume(box)  # to member 1 a (2, 2) block: sends [0, 4]
    shape = shape_of(after)
    boxes = [box for _, box in blocks.receives]
    where = [slices_of(box, before) for _, box in blocks.sends]
    places = [slices_of(box, after) for box in boxes]
    kept = [(slices_of(box, before), slices_of(box, after)) for box in blocks.kept]
    arrives_in_order = not kept and (not boxes or adjacent_rows(boxes, after) == (0, shape[0] if shape else 1))

    def prepare(local: Tensor) -> Tensor:
        return pack_blocks([local[w] for w in where], like=local)

    def finish(got: Tensor, local: Tensor) -> Tensor:
        if arrives_in_order:
            return got.view(shape)
        out = local.new_empty(shape)
        for source, target in kept:
            out[target] = local[source]
        unpack_blocks(got, [out[place] for place in places])
        return out if places else bound(out, got)

    collective = CollectiveCall("all_to_all", axes, sizes=tuple(sends), receives=tuple(receives), ranks=ranks)
    return Kernel(prepare, collective, finish)


def _grid_of_blocks(fine: Spec, coarse: Spec, dims: Sequence[int], block: Sequence[int]) -> tuple[list[int], list[int]]:
    """A regular grid over `dims` of blocks: its sizes and then those of a block, and where these stand in the tensor.

    2 x 3 blocks of (4, 5, 6) over dims 0 and 1: [2, 3, 4, 5, 6], and in the tensor they are dims [0, 2, 1, 3, 4].
    """
    grid = [fine.dim_sharding(d).shards // coarse.dim_sharding(d).shards for d in dims]  # from 2 shards to 8: 4 blocks
    order: list[int] = []
    for dim in range(len(block)):
        if dim in dims:
            order.append(list(dims).index(dim))  # number of its block, then position inside of that
        order.append(len(grid) + dim)
    return [*grid, *block], order


def _division(divisor: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    if divisor == 1:
        return received
    if dtype.is_floating_point or dtype.is_complex:
        return lambda got, _: got.div_(divisor)
    return lambda got, _: got.floor_divide_(divisor)


_COUNTED = frozenset({"sum", "product", "bxor"})  # reductions that count a value as often as it occurs


_KERNELS: dict[str, Callable[[Step, Any], Kernel]] = {
    "Slice": _slice,
    "Reshape": _reshape,
    "MakePartial": _make_partial,
    "Scale": _scale,
    "AllGather": _all_gather,
    "ReduceScatter": _reducing,
    "AllReduce": _reducing,
    "AllToAll": _all_to_all,
    "Exchange": _exchange,
    "Transfer": lambda step, _: transfer_kernel(step, step.src.mesh.get_rank()),  # on either mesh
}
