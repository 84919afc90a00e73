"""The edges of the search: one function per kind, which computes its time, bytes and memory.

Time is latency + received bytes / bandwidth. Boxes are the largest, ranks the busiest. A collective
over several axes runs at the pace of its slowest axis. Copies on the device (packing blocks,
gathering along an inner dim) are counted too, at `COPY_SPEEDUP` times the fastest link, so that
among plans of equal time the plan that copies less wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from .links import axes_of, mask_of

if TYPE_CHECKING:
    from .space import Dims, Space, State


class Edge(NamedTuple):
    """One edge of the search, which `plan` turns into a step."""

    kind: str  # name of the step class
    # mesh axes, in the order of the collective's blocks
    axes: tuple[int, ...]
    # dims whose sharding changes; (from, to) of an all-to-all
    tensor_dims: tuple[int, ...]
    after: State  # the state that it leads to
    # time, bytes of the busiest rank, memory of input, output and buffers
    seconds: float
    received: int
    peak: int


def reshard(space: Space, before: State, after: State) -> list[Edge]:
    """Return the edges of S(i) -> S(j): slice first, then at most one collective.

    The collective is over all axes that change.
    """
    occupied = before.sharding_axes | before.to_reduce
    changed: list[int] = []
    leaving = 0
    entering = 0
    held = 1.0
    for dim, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)):
        if old is new:
            continue
        change = space.change(old, new)
        if not change.leaving:
            next_axis = new.axes[len(old.axes)]
            is_free = not occupied >> next_axis & 1
            if is_free:
                return _slice_first(space, before, after)
        changed.append(dim)
        leaving |= change.leaving
        entering |= change.entering
        # S(0) -> S(1) over 2 ranks: 4 of 8 rows, 1 / 2; of columns 1
        held *= change.held
    if not changed:
        return []
    # (8, 8) f32, S(0) -> S(1) on 2 ranks: 128 - 64 = 64 bytes
    received = after.box_bytes - int(after.box_bytes * held)
    if entering:
        involved = leaving | entering
        return [_exchange(space, before, after, changed, involved=involved, received=received)]
    return [_all_gather(space, before, after, changed, received=received)]


def _slice_first(space: Space, before: State, after: State) -> list[Edge]:
    """Return the edges that slice by all axes that are free, and those on from there."""
    sliced = _slice_towards(space, before, after.dims)
    return [_local(space, "Slice", before, sliced), *reshard(space, sliced, after)]


def _all_gather(
    space: Space, before: State, after: State, changed: list[int], received: int
) -> Edge:
    """Return the edge that gathers the shards of some dims along the axes that leave them."""
    # Shards of dim 0 arrive one after the other as they belong; of any other dim they are copied
    # into place.
    copied = 0 if changed == [0] else after.box_bytes
    axes = _finer_axes(after.dims, before.dims, changed)
    communication = space.links.seconds(mask_of(axes), received)
    seconds = communication + space.links.copy(copied)
    peak = before.box_bytes + after.box_bytes + copied
    dims = tuple(changed)
    return Edge("AllGather", axes, dims, after, seconds=seconds, received=received, peak=peak)


def _exchange(
    space: Space, before: State, after: State, changed: list[int], involved: int, received: int
) -> Edge:
    """Return an exchange among the ranks that hold, or that want, different shards."""
    links = space.links
    held = before.box_bytes
    wanted = after.box_bytes
    seconds = links.seconds(involved, received)
    kind = "Exchange"
    dims = tuple(changed)
    axes = axes_of(involved)
    # S(0), R -> S(1), S(0): axis 0, 0b01 of 0b11
    holding = involved & before.sharding_axes
    ends = _transposed_dims(before, after, changed) if holding == involved else None
    if ends is not None:
        source, _ = ends
        kind = "AllToAll"
        dims = ends
        axes = _finer_axes(after.dims, before.dims, [source])
    elif holding != involved:
        copies = links.ranks(holding & ~after.sharding_axes)
        sent = sent_among(links.ranks(holding), copies, held, received)
        seconds_among_holders = links.seconds(holding, sent)
        if seconds_among_holders <= seconds:
            axes = axes_of(holding)
            received = sent
            seconds = seconds_among_holders
    # rows of dim 0 are in memory as they travel
    copied = 0 if changed == [0] else min(received, held) + wanted
    seconds += links.copy(copied)
    peak = 2 * (held + wanted)
    return Edge(kind, axes, dims, after, seconds=seconds, received=received, peak=peak)


def sent_among(ranks: int, copies: int, before: int, received: int) -> int:
    """Return the bytes of the busiest rank, which lacks `received`, in an exchange.

    The exchange stays among `ranks` ranks with different parts.
    """
    # Each replica serves itself, so a rank may send all it has, `before` bytes, to the `copies`
    # ranks that want it.
    # 4 ranks, 2 * 16 wanted, 8 lacked: 24
    wanted_of_one = before * copies
    lacked_by_others = (ranks - 1) * received
    return max(received, min(wanted_of_one, lacked_by_others))


def _transposed_dims(before: State, after: State, changed: list[int]) -> tuple[int, int] | None:
    """Return (from, to) if the innermost axes of one dim move to the only other changed dim.

    They become its innermost axes, and all shards are even.
    """
    if len(changed) != 2:
        return None
    old = before.dims
    new = after.dims
    if not all(old[dim].even and new[dim].even for dim in changed):
        return None
    for source, target in (changed, changed[::-1]):
        # S(0) -> S(1): dim 0 by axis 0, then whole: (0,), which enters dim 1
        moved = old[source].axes[len(new[source].axes) :]
        is_left = new[source] in old[source].outers
        is_entered = old[target] in new[target].outers
        has_moved = new[target].axes == old[target].axes + moved
        if moved and is_left and is_entered and has_moved:
            return source, target
    return None


def all_reduce(space: Space, before: State) -> Edge:
    """Return the edge P -> R over all pending axes: each rank gets 2 * (n - 1) / n of the box."""
    axes = before.to_reduce
    ranks = space.links.ranks(axes)
    box_on_wire = space.accumulate_factor * before.box_bytes
    # 64 bytes on 4 ranks: 2 * 64 * 3 // 4 = 96
    received = 2 * box_on_wire * (ranks - 1) // ranks
    after = space.state(before.dims, 0, before.to_make_partial, before.to_rescale)
    seconds = space.links.seconds(axes, received)
    # norm2 of bf16 is summed in f32: the factor is 2, so 3 boxes
    peak = before.box_bytes + box_on_wire
    return Edge(
        "AllReduce", axes_of(axes), (), after, seconds=seconds, received=received, peak=peak
    )


def reduce_scatter(space: Space, before: State, after: State) -> Edge:
    """Return the edge P -> S over the axes that are no longer pending.

    Each rank keeps its shard and receives (n - 1) / n of the box.
    """
    reduced = before.to_reduce & ~after.to_reduce
    ranks = space.links.ranks(reduced)
    changed = _changed_dims(before, after)
    box_on_wire = space.accumulate_factor * before.box_bytes
    if all(after.dims[dim].even for dim in changed):
        received = space.accumulate_factor * (before.box_bytes * (ranks - 1) // ranks)
    else:
        # 5 rows as 3 + 2: 3 * 1
        received = space.accumulate_factor * after.box_bytes * (ranks - 1)
    packed = 0 if changed == (0,) else box_on_wire
    communication = space.links.seconds(reduced, received)
    axes = _finer_axes(before.dims, after.dims, changed)
    seconds = communication + space.links.copy(packed)
    peak = before.box_bytes + packed + after.box_bytes
    return Edge(
        "ReduceScatter", axes, changed, after, seconds=seconds, received=received, peak=peak
    )


def join_pending(space: Space, before: State) -> Iterator[Edge]:
    """Yield local edges S -> P of axes that one collective reduces with the pending axes.

    Axes that are already reduced stay reduced.
    """
    if not space.joinable_op:
        return
    # mesh (2, 2), P, S(1) -> S(0), S(0) of a small tensor: one reduce-scatter over both axes
    # instead of one and an all-to-all: half the latency for twice the bytes.
    reduced = space.start.to_reduce | space.partial_at_both_ends & before.to_make_partial
    # P, S(0): not axis 0, but 1
    axes = axes_of(before.sharding_axes & ~reduced)
    for chosen in subsets(axes):
        joined = mask_of(chosen)
        coarse = _coarsen(before.dims, joined)
        if coarse is not None:
            to_reduce = before.to_reduce | joined
            after = space.state(coarse, to_reduce, before.to_make_partial, before.to_rescale)
            yield _local(space, "MakePartial", before, after, axes=chosen)


def subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the non-empty subsets of some axes, the smallest first: (0,), (1,), (0, 1)."""
    for count in range(1, len(axes) + 1):
        yield from combinations(axes, count)


def convert_partials(space: Space, before: State) -> list[Edge]:
    """Return the local edges R or S -> P, then P(sum) <-> P(avg); [] if they are not possible yet.

    The values become partial as in the destination.

    Axes that become partial must be innermost: then the shards of their ranks fill the coarser
    shard, and the rest of it has the neutral value of the reduction. Only the part of a coarser
    shard that the goal's replicated axes leave is kept:

        mesh (2, 2), 8 columns: R, S(1) -> S(1), P         rank      (0, 0)    (0, 1)    (1, 0)    (1, 1)
        it has columns                                               0 1 2 3   4 5 6 7   0 1 2 3   4 5 6 7
        it has to hold columns, to be added over axis 1              0 1 2 3   0 1 2 3   4 5 6 7   4 5 6 7
        so it holds                                                  0 1 2 3   0 0 0 0   0 0 0 0   4 5 6 7
    """
    edges = []
    here = before
    is_in_the_way = before.to_reduce & before.to_make_partial or not space.reductions_commute
    if before.to_reduce and is_in_the_way:
        return []
    if before.to_make_partial:
        coarse = _coarsen(before.dims, before.to_make_partial)
        if coarse is None:
            return []
        made = space.state(coarse, before.to_reduce, 0, before.to_rescale)
        here = _slice_towards(space, made, space.goal.dims)
        axes = axes_of(before.to_make_partial)
        edges.append(_local(space, "MakePartial", before, here, axes=axes))
    if before.to_rescale:
        after = space.state(here.dims, before.to_reduce, 0, 0)
        edges.append(_local(space, "Scale", here, after, axes=axes_of(before.to_rescale)))
    return edges


def _local(
    space: Space, kind: str, before: State, after: State, axes: tuple[int, ...] = ()
) -> Edge:
    """Return a step without communication, which writes the new local tensor."""
    changed = _changed_dims(before, after)
    axes = axes or _finer_axes(before.dims, after.dims, changed)
    seconds = space.links.copy(after.box_bytes)
    peak = before.box_bytes + after.box_bytes
    return Edge(kind, axes, changed, after, seconds=seconds, received=0, peak=peak)


def _slice_towards(space: Space, before: State, goal: Dims) -> State:
    """Return the state with dims sharded towards `goal` by axes not used and not pending."""
    occupied = before.sharding_axes | before.to_reduce
    dims = []
    for old, new in zip(before.dims, goal, strict=True):
        if old not in new.outers:
            dims.append(old)
            continue
        end = len(old.axes)
        while end < len(new.axes) and not occupied >> new.axes[end] & 1:
            # a whole dim towards axes 0 and 1, axis 1 occupied: by axis 0
            end += 1
        dims.append(new.lineage[end])
    return space.state(tuple(dims), before.to_reduce, before.to_make_partial, before.to_rescale)


def _coarsen(dims: Dims, axes: int) -> Dims | None:
    """Return the shardings without some axes; None if one of the axes is not innermost."""
    coarse = []
    for sharded in dims:
        remaining = sharded.mask & ~axes
        coarse += [outer for outer in sharded.lineage if outer.mask == remaining]
    # by 0, then 1: without axis 1 by 0; without axis 0 None
    return tuple(coarse) if len(coarse) == len(dims) else None


def _changed_dims(before: State, after: State) -> tuple[int, ...]:
    """Return the dims whose sharding differs."""
    pairs = enumerate(zip(before.dims, after.dims, strict=True))
    return tuple([dim for dim, (old, new) in pairs if old is not new])


def _finer_axes(coarse: Dims, fine: Dims, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that shard some dims further: by axis 0, and by 0, 1 and 2: (1, 2)."""
    axes: tuple[int, ...] = ()
    for dim in dims:
        axes += fine[dim].axes[len(coarse[dim].axes) :]
    return axes
