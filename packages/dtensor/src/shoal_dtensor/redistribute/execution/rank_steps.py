"""The part of each step on one rank: preparation of a buffer, one collective, and a conclusion.

`rank_step(step, coordinate)` resolves a step to integers once. `prepare` and `finish` work on plain
local tensors. The collective between them is data, so that the same rank steps run alone over a
process group, merged with others, and in a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal_mesh.internal import contribution, pack_blocks, unpack_blocks, with_dependence

from ...layout.boxes import Box, intersect, shape_of, slices_of, volume
from ...layout.placements import norm_order
from ...layout.tensor_meta import has_symbols
from ..blocks import Blocks, boxes_of_rank, exchange_blocks
from ..steps import Step
from .reduced_values import identity_of, is_counted, powers, root

if TYPE_CHECKING:
    from ...layout.spec import Spec


Coordinate = tuple[int, ...]


class CollectiveCall(NamedTuple):
    """One call of a collective of shoal_mesh; its members' blocks are in order along dim 0."""

    # all_gather, reduce_scatter, all_reduce or all_to_all
    kind: str
    # mesh axes of the communicator, in the order of its members
    axes: tuple[int, ...]
    op: str = "sum"  # reduction
    # lengths of the members' blocks if they differ (for an all_to_all, of the blocks sent)
    sizes: tuple[int, ...] = ()
    # for an all_to_all with sizes: lengths of the blocks received from each
    receives: tuple[int, ...] = ()
    # shape of the result, -1 for the length of the blocks: flat by default
    shape: tuple[int, ...] = (-1,)
    # global ranks of the communicator where it is not along axes of one mesh
    ranks: tuple[int, ...] = ()


def keep_local(local: Tensor) -> Tensor:
    """Return the local tensor: the `prepare` of a step that communicates the tensor as it is."""
    return local


def take_received(got: Tensor, local: Tensor) -> Tensor:
    """Return the received tensor: the `finish` of a step whose collective gives the result."""
    return got


class RankStep(NamedTuple):
    """A step on one rank."""

    prepare: Callable[[Tensor], Tensor] = keep_local  # local tensor -> buffer to communicate
    # None for a local step, which `finish` does alone
    collective: CollectiveCall | None = None
    # (result of the collective, local tensor) -> new local tensor
    finish: Callable[[Tensor, Tensor], Tensor] = take_received


def rank_step(step: Step, coordinate: Coordinate | None) -> RankStep:
    """Return the part of a step for the rank at a coordinate of the step's mesh.

    It does nothing if the rank is outside the mesh (None), except for a transfer.
    """
    if coordinate is None and step.name != "Transfer":
        return RankStep()
    return _RANK_STEPS[step.name](step, coordinate)


def members(spec: Spec, axes: Sequence[int], coordinate: Coordinate) -> list[Coordinate]:
    """Return the coordinates of ranks that differ from `coordinate` only along `axes`.

    They are row-major in the order of `axes`.
    """
    # Example: on a mesh of (2, 2, 2), over axes 2 and 0 from (0, 1, 0): (0, 1, 0), (1, 1, 0),
    # (0, 1, 1), (1, 1, 1).
    positions = [range(spec.mesh.shape[axis]) for axis in axes]
    coordinates = []
    for position in product(*positions):
        member = [*coordinate]
        for axis, i in zip(axes, position, strict=True):
            member[axis] = i
        coordinates.append(tuple(member))
    return coordinates


def blocks_of(step: Step, coordinate: Coordinate) -> Blocks:
    """Return the blocks of this rank in an exchange, with members counted along the step's axes."""
    group = members(step.src, step.axes, coordinate)
    src = step.src.example or step.src
    dst = step.dst.example or step.dst
    sources = [[src.box(member)] for member in group]
    targets = [[dst.box(member)] for member in group]
    blocks = exchange_blocks(group.index(coordinate), sources, targets)
    if src is step.src:
        return blocks
    # Dims of symbolic sizes do not move, so along them every block has the length of this box.
    own_box = step.src.box(coordinate)

    def with_symbols(box: Box) -> Box:
        spans = zip(box, own_box, strict=True)
        return tuple([whole if has_symbols(whole) else span for span, whole in spans])

    sends = [(member, with_symbols(box)) for member, box in blocks.sends]
    receives = [(member, with_symbols(box)) for member, box in blocks.receives]
    return Blocks(tuple(sends), tuple(receives), tuple(map(with_symbols, blocks.kept)))


def _slice(step: Step, coordinate: Coordinate) -> RankStep:
    """Return the rank step of a Slice: a part of the box is kept."""
    before = step.src.box(coordinate)
    after = step.dst.box(coordinate)
    # (dim, start, length). Example: from rows 4:8 to rows 6:8 it is (0, 2, 2).
    narrowed = []
    for dim, (whole, part) in enumerate(zip(before, after, strict=True)):
        if whole != part:
            start, stop = part
            narrowed.append((dim, start - whole[0], stop - start))

    def finish(local: Tensor, _: Tensor) -> Tensor:
        for dim, start, length in narrowed:
            local = local.narrow(dim, start, length)
        return local

    return RankStep(finish=finish)


def _reshape(step: Step, coordinate: Coordinate) -> RankStep:
    shape = step.dst.local_shape_at(coordinate)
    return RankStep(finish=lambda local, _: local.reshape(shape))


def _make_partial(step: Step, coordinate: Coordinate) -> RankStep:
    """Return the rank step of R or S -> P: every element is held once along the axes.

    Elements may be held any number of times for reductions that ignore duplicates.
    """
    mesh = step.dst.mesh
    before = step.src.box(coordinate)
    after = step.dst.box(coordinate)
    ops = {axis: op for axis, op in step.dst.partials if axis in step.axes}
    first_op = next(iter(ops.values()))
    neutral = identity_of(first_op, step.dst.dtype)
    shape = shape_of(after)
    own_box = intersect(before, after)
    if own_box is None:
        return RankStep(
            finish=lambda local, _: with_dependence(local.new_full(shape, neutral), local)
        )
    averaged, counted_once = _axes_of_terms(step.src, ops)
    # R -> P(avg) changes no values. S -> P(avg) over 2 ranks doubles them: x = (2x + 0) / 2.
    factor = prod([mesh.shape[axis] for axis in averaged])
    # R -> P(sum): x on coordinate 0, and 0 elsewhere
    this_rank_contributes = not any(coordinate[axis] for axis in counted_once)
    # Example: from columns 2:4 to columns 0:4, local columns 0:2 are copied to 2:4.
    source = slices_of(own_box, before)
    target = slices_of(own_box, after)
    is_whole = own_box == after

    def finish(local: Tensor, _: Tensor) -> Tensor:
        if _is_traced(local):
            if counted_once:
                local = contribution(local, this_rank_contributes, neutral)
        elif not this_rank_contributes:
            return local.new_full(shape, neutral)
        local = local[source]
        if factor != 1:
            local = local * factor
        elif is_whole:
            return local.clone(memory_format=torch.contiguous_format)
        if is_whole:
            return local
        out = local.new_full(shape, neutral)
        out[target] = local
        return out

    return RankStep(finish=finish)


def _axes_of_terms(src: Spec, ops: Mapping[int, str]) -> tuple[list[int], list[int]]:
    """Return the axes that need a factor, and the axes along which one rank alone keeps its values.

    Args:
        src: the layout before.
        ops: the reduction of each axis that becomes partial.

    Returns:
        The sharding axes of averages, and the replicated axes along which one rank alone has terms.
    """
    sharding_axes = {axis for sharding in src.dim_shardings for axis in sharding.axes}
    averaged = []
    counted_once = []
    for axis, op in ops.items():
        if axis in sharding_axes:
            averaged += [axis] if op == "avg" else []
        elif is_counted(op):
            counted_once.append(axis)
    return averaged, counted_once


def _is_traced(local: Tensor) -> bool:
    """Tell whether a local tensor is of a subclass, such as the tensors of a tracer."""
    return type(local) is not Tensor


def _scale(step: Step, coordinate: Coordinate) -> RankStep:
    factor = step.factor if step.divisor == 1 else step.factor / step.divisor
    return RankStep(finish=lambda local, _: local * factor)


class _BlockGrid(NamedTuple):
    """The boxes of the ranks along some axes, as blocks of a larger box in a flat buffer.

    Attributes:
        shape: the shape of the larger box.
        boxes: the boxes of the ranks, in the order of the axes; one box if all shards are even.
        places: the slices of each box in the larger box.
        is_regular: whether all boxes have the same shape.
        sizes: the sizes of the grid and then of a block. They are used if the grid is regular.
        order: the dim that each of `sizes` has in the larger box, when the box is viewed with a dim
            for each of them.
    """

    shape: tuple[int, ...]
    boxes: list[Box]
    places: list[tuple[slice, ...]]
    is_regular: bool
    sizes: list[int]
    order: list[int]

    @classmethod
    def of(cls, fine: Spec, coarse: Spec, step: Step, coordinate: Coordinate) -> _BlockGrid:
        """Return the grid that the shards of `fine` form in the box of `coarse` at a coordinate."""
        all_even = all(fine.dim_sharding(dim).even for dim in step.dims)
        group = [coordinate] if all_even else members(fine, step.axes, coordinate)
        # Example: 5 rows on 2 ranks have the boxes 0:3 and 3:5, and the larger box 0:5.
        boxes = [fine.box(member) for member in group]
        whole = coarse.box(coordinate)
        places = [slices_of(box, whole) for box in boxes]
        is_regular = all(shape_of(box) == shape_of(boxes[0]) for box in boxes)
        block = shape_of(fine.box(coordinate))
        sizes, order = _grid_of_blocks(fine, coarse, step.dims, block)
        return cls(tuple(shape_of(whole)), boxes, places, is_regular, sizes=sizes, order=order)

    def lengths_of_rows(self) -> tuple[int, ...]:
        """Return the length of each block along dim 0; () if all are equally long."""
        if self.is_regular:
            return ()
        # In the example of `of`: (3, 2).
        return tuple(stop - start for (start, stop), *_ in self.boxes)

    def elements(self) -> tuple[int, ...]:
        """Return the number of elements of each block; () if all have equally many."""
        return () if self.is_regular else tuple(map(volume, self.boxes))

    def split(self, local: Tensor) -> Tensor:
        """Return the elements of the larger box block by block, flat."""
        if not self.is_regular:
            return pack_blocks([local[place] for place in self.places])
        # Example: (4, 6) in 4 blocks of (2, 3) is viewed as (2, 2, 2, 3), and its dims are permuted
        # to the two dims of the grid and the two dims of a block.
        interleaved = [self.sizes[i] for i in self.order]
        blocks_first = sorted(range(len(self.order)), key=self.order.__getitem__)
        return local.reshape(interleaved).permute(blocks_first).reshape(-1)

    def join(self, flat: Tensor) -> Tensor:
        """Return the larger box, given its elements block by block."""
        if self.is_regular:
            # Example: 2 x 2 blocks of (2, 3) make up (4, 6).
            return flat.view(self.sizes).permute(self.order).reshape(self.shape).contiguous()
        out = flat.new_empty(self.shape)
        unpack_blocks(flat, [out[place] for place in self.places])
        return out


def _all_gather(step: Step, coordinate: Coordinate) -> RankStep:
    """Return an AllGather's rank step: blocks of the ranks along the axes make up a larger box."""
    shape = shape_of(step.dst.box(coordinate))
    if not volume(step.dst.box(coordinate)):
        return RankStep(finish=lambda local, _: local.new_empty(shape))
    grid = _BlockGrid.of(step.src, step.dst, step, coordinate)
    if step.dims == (0,):
        rows = (-1, *shape[1:])
        call = CollectiveCall("all_gather", step.axes, step.op, grid.lengths_of_rows(), shape=rows)
        return RankStep(collective=call)
    call = CollectiveCall("all_gather", step.axes, step.op, grid.elements())
    return RankStep(torch.flatten, call, lambda got, _: grid.join(got))


def _reduce_scatter(step: Step, coordinate: Coordinate) -> RankStep:
    """Return a ReduceScatter's rank step: it splits a box into blocks for ranks along the axes."""
    shape = shape_of(step.dst.box(coordinate))
    if not volume(step.src.box(coordinate)):
        return RankStep(finish=lambda local, _: local.new_empty(shape))
    grid = _BlockGrid.of(step.dst, step.src, step, coordinate)
    op, divide = _reduction(step)
    if step.dims == (0,):
        rows = (-1, *shape[1:])
        lengths = grid.lengths_of_rows()
        call = CollectiveCall("reduce_scatter", step.axes, op, lengths, shape=rows)
        return RankStep(collective=call, finish=divide)
    call = CollectiveCall("reduce_scatter", step.axes, op, grid.elements())
    return RankStep(grid.split, call, lambda got, local: divide(got.view(shape), local))


def _all_reduce(step: Step, coordinate: Coordinate) -> RankStep:
    """Return the rank step of an AllReduce: the boxes of the ranks along the axes are reduced."""
    if not volume(step.src.box(coordinate)):
        return RankStep(finish=lambda local, _: local.clone())
    op, divide = _reduction(step)
    shape = tuple(step.src.local_shape_at(coordinate))
    collective = CollectiveCall("all_reduce", step.axes, op, shape=shape)
    return RankStep(collective=collective, finish=divide)


def _reduce(step: Step, coordinate: Coordinate) -> RankStep:
    """Return the rank step of a reduction; a norm is the root of a sum of powers."""
    rank_step_of = _reduce_scatter if step.name == "ReduceScatter" else _all_reduce
    order = norm_order(step.op)
    dtype = step.src.dtype
    if order is None:
        return rank_step_of(step, coordinate)
    work = rank_step_of(replace(step, op="sum"), coordinate)
    if work.collective is None:
        return work
    prepare = work.prepare
    finish = work.finish

    def prepare_powers(local: Tensor) -> Tensor:
        return prepare(powers(local, order))

    def finish_root(got: Tensor, local: Tensor) -> Tensor:
        return root(finish(got, local), order, dtype)

    return RankStep(prepare_powers, work.collective, finish_root)


def _all_to_all(step: Step, coordinate: Coordinate) -> RankStep:
    """Return the rank step of an AllToAll: boxes are split along one dim, joined along another."""
    (src_dim, dst_dim) = step.dims
    before = step.src.box(coordinate)
    after = shape_of(step.dst.box(coordinate))
    ranks = prod(step.src.mesh.shape[axis] for axis in step.axes)
    if not volume(before):
        return RankStep(finish=lambda local, _: local.new_empty(after))
    # Example: S(0) -> S(1) on 4 ranks, from boxes of (2, 8) to boxes of (8, 2). Blocks are (2, 2).
    block = shape_of(before)
    block[dst_dim] = after[dst_dim]

    def prepare(local: Tensor) -> Tensor:
        return local if dst_dim == 0 else torch.cat(local.chunk(ranks, dst_dim))

    def finish(got: Tensor, _: Tensor) -> Tensor:
        return got if src_dim == 0 else torch.cat(got.chunk(ranks), src_dim)

    collective = CollectiveCall("all_to_all", step.axes, shape=(-1, *block[1:]))
    return RankStep(prepare, collective, finish)


def _exchange(step: Step, coordinate: Coordinate) -> RankStep:
    size = prod(step.src.mesh.shape[axis] for axis in step.axes)
    blocks = blocks_of(step, coordinate)
    before = step.src.box(coordinate)
    after = step.dst.box(coordinate)
    return _move_blocks(blocks, before, after, size, axes=step.axes)


def transfer_rank_step(step: Step, rank: int) -> RankStep:
    """Return the part of a global rank in a transfer; it does nothing outside both meshes."""
    if rank not in step.ranks:
        return RankStep()
    position = step.ranks.index(rank)
    sources = [boxes_of_rank(step.src, member) for member in step.ranks]
    targets = [boxes_of_rank(step.dst, member) for member in step.ranks]
    blocks = exchange_blocks(position, sources, targets)
    before = _first_box(sources[position])
    after = _first_box(targets[position])
    return _move_blocks(blocks, before, after, len(step.ranks), ranks=step.ranks)


def _first_box(boxes: Sequence[Box]) -> Box:
    """Return the box of a rank; an empty one for a rank outside of a mesh."""
    return boxes[0] if boxes else ((0, 0),)


def _move_blocks(
    blocks: Blocks,
    before: Box,
    after: Box,
    size: int,
    *,
    axes: tuple[int, ...] = (),
    ranks: tuple[int, ...] = (),
) -> RankStep:
    """Return a rank step that packs, exchanges blocks among `size` members, and unpacks."""
    sends = [0] * size
    for member, box in blocks.sends:
        # Example: [0, 4] for a block of (2, 2) to member 1 of 2.
        sends[member] += volume(box)
    receives = [0] * size
    for member, box in blocks.receives:
        receives[member] += volume(box)
    shape = shape_of(after)
    boxes = [box for _, box in blocks.receives]
    sent_places = [slices_of(box, before) for _, box in blocks.sends]
    places = [slices_of(box, after) for box in boxes]
    kept = [(slices_of(box, before), slices_of(box, after)) for box in blocks.kept]
    arrives_in_order = not kept and _are_consecutive_rows(boxes, after)

    def prepare(local: Tensor) -> Tensor:
        return pack_blocks([local[place] for place in sent_places], like=local)

    def finish(got: Tensor, local: Tensor) -> Tensor:
        if arrives_in_order:
            return got.view(shape)
        out = local.new_empty(shape)
        for source, target in kept:
            out[target] = local[source]
        unpack_blocks(got, [out[place] for place in places])
        # Without received blocks, a compiler would not see that `out` depends on the collective.
        return out if places else with_dependence(out, got)

    collective = CollectiveCall(
        "all_to_all", axes, sizes=tuple(sends), receives=tuple(receives), ranks=ranks
    )
    return RankStep(prepare, collective, finish)


def _are_consecutive_rows(boxes: Sequence[Box], whole: Box) -> bool:
    """Tell whether boxes are full rows that follow each other, for example rows 4:5, then 5:7.

    Such boxes are received in the order of the result, so they need not be copied.
    """
    if any(box[1:] != whole[1:] for box in boxes):
        return False
    rows = [box[0] for box in boxes]
    return all(stop == start for (_, stop), (start, _) in pairwise(rows))


def _grid_of_blocks(
    fine: Spec, coarse: Spec, dims: Sequence[int], block: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the sizes of a regular grid over `dims` and of a block, and their order in the tensor.

    Example: 2 x 3 blocks of (4, 5, 6) over dims 0 and 1. The sizes are [2, 3, 4, 5, 6]. In the
    larger box of (8, 15, 6), viewed as (2, 4, 3, 5, 6), the order is that of the entries
    [0, 2, 1, 3, 4] of the sizes.
    """
    # Example: from 2 shards to 8 shards of a dim, its grid has 4 blocks.
    grid = [fine.dim_sharding(d).shards // coarse.dim_sharding(d).shards for d in dims]
    order: list[int] = []
    for dim in range(len(block)):
        if dim in dims:
            # The number of the block comes before the position inside the block.
            order.append(list(dims).index(dim))
        order.append(len(grid) + dim)
    return [*grid, *block], order


def _reduction(step: Step) -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return the reduction of a step's collective, and the division after it.

    A sum over some axes and an average over others is a sum, divided afterwards. In a half type the
    sum may overflow, so the collective averages over all axes and the result is multiplied by the
    number of ranks of the sum.
    """
    divisor = step.divisor
    dtype = step.src.dtype
    if divisor == 1 or dtype not in (torch.float16, torch.bfloat16):
        return step.op, _division(divisor, dtype)
    ranks_of_sum = prod(step.src.mesh.shape[axis] for axis in step.axes) // divisor
    return "avg", lambda got, _: got.mul_(ranks_of_sum)


def _division(divisor: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    if divisor == 1:
        return take_received
    if dtype.is_floating_point or dtype.is_complex:
        return lambda got, _: got.div_(divisor)
    return lambda got, _: got.floor_divide_(divisor)


_RANK_STEPS: dict[str, Callable[[Step, Any], RankStep]] = {
    "Slice": _slice,
    "Reshape": _reshape,
    "MakePartial": _make_partial,
    "Scale": _scale,
    "AllGather": _all_gather,
    "ReduceScatter": _reduce,
    "AllReduce": _reduce,
    "AllToAll": _all_to_all,
    "Exchange": _exchange,
    # its rank may be on either mesh
    "Transfer": lambda step, _: transfer_rank_step(step, step.src.mesh.get_rank()),
}
