"""The edges of the search: one function per kind, which computes its time, bytes and memory.

The time of a collective is latency + received bytes / bandwidth, for the busiest rank and the
largest box. A collective over several axes has the latency and bandwidth of its slowest axis.
Copies on the device (packing blocks, gathering along an inner dim) are counted too, at
`COPY_SPEEDUP` times the bandwidth of the fastest link, so that among plans that are otherwise equal
the one with fewer copies is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from .links import axes_of, has_axis, mask_of

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
    held_fraction = 1.0
    for dim, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)):
        if old is new:
            continue
        change = space.change(old, new)
        if not change.leaving:
            next_axis = new.axes[len(old.axes)]
            if not has_axis(occupied, next_axis):
                return _slice_first(space, before, after)
        changed.append(dim)
        leaving |= change.leaving
        entering |= change.entering
        # Example: (8, 8), S(0) -> S(1) over 2 ranks. A rank has 1/2 of the rows of its new box, and
        # all of the columns.
        held_fraction *= change.held
    if not changed:
        return []
    # In the example with float32: 128 - 64 = 64 bytes.
    received = after.box_bytes - int(after.box_bytes * held_fraction)
    if entering:
        involved = leaving | entering
        return [_exchange(space, before, after, changed, involved=involved, received=received)]
    return [_all_gather(space, before, after, changed, received=received)]


def _slice_first(space: Space, before: State, after: State) -> list[Edge]:
    """Return the edge that slices by all free axes, and the edges from there to `after`."""
    sliced = _slice_towards(space, before, after.dims)
    return [_local(space, "Slice", before, sliced), *reshard(space, sliced, after)]


def _all_gather(
    space: Space, before: State, after: State, changed: list[int], received: int
) -> Edge:
    """Return the edge that gathers the shards of some dims along the axes that leave them."""
    # Shards of dim 0 arrive in the order of the result. Shards of other dims are copied into place.
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
    # The axes that shard the source. Ranks along the other axes hold replicas.
    # Example: [S(0), R] -> [S(1), S(0)] involves 0b11 and is held along 0b01.
    holding = involved & before.sharding_axes
    ends = _transposed_dims(before, after, changed) if holding == involved else None
    if ends is not None:
        source, _ = ends
        kind = "AllToAll"
        dims = ends
        axes = _finer_axes(after.dims, before.dims, [source])
    elif holding != involved:
        # Each replica can make the exchange without the others.
        copies = links.ranks(holding & ~after.sharding_axes)
        sent = sent_among(links.ranks(holding), copies, held, received)
        seconds_among_holders = links.seconds(holding, sent)
        if seconds_among_holders <= seconds:
            axes = axes_of(holding)
            received = sent
            seconds = seconds_among_holders
    # Rows of dim 0 are contiguous in memory, so they are not packed.
    copied = 0 if changed == [0] else min(received, held) + wanted
    seconds += links.copy(copied)
    peak = 2 * (held + wanted)
    return Edge(kind, axes, dims, after, seconds=seconds, received=received, peak=peak)


def sent_among(ranks: int, copies: int, before: int, received: int) -> int:
    """Return the bytes that the busiest rank sends or receives in an exchange inside a replica.

    Args:
        ranks: the ranks of the replica, which hold different shards.
        copies: how many of these ranks want the same data.
        before: bytes that a rank holds.
        received: bytes that a rank lacks.
    """
    # A rank sends at most all that it holds to each rank that wants it, and at most all that the
    # other ranks lack. Example: 4 ranks, 2 * 16 bytes wanted, 3 * 8 bytes lacked: 24.
    wanted_of_one = before * copies
    lacked_by_others = (ranks - 1) * received
    return max(received, min(wanted_of_one, lacked_by_others))


def _transposed_dims(before: State, after: State, changed: list[int]) -> tuple[int, int] | None:
    """Return (from, to) if the innermost axes of one dim become the innermost axes of another dim.

    No other dim may change, and all shards must be even. Otherwise return None.
    """
    if len(changed) != 2:
        return None
    old = before.dims
    new = after.dims
    if not all(old[dim].even and new[dim].even for dim in changed):
        return None
    for source, target in (changed, changed[::-1]):
        # Example: S(0) -> S(1). Axis (0,) leaves dim 0 and enters dim 1.
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
    # Example: 64 bytes on 4 ranks: 2 * 64 * 3 // 4 = 96.
    received = 2 * box_on_wire * (ranks - 1) // ranks
    after = space.state(before.dims, 0, before.to_make_partial, before.to_rescale)
    seconds = space.links.seconds(axes, received)
    # Example: norm2 of float32 is summed in float64. The factor is 2, so the peak is 3 boxes.
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
        # Example: 5 rows on 2 ranks are 3 and 2. A rank receives 3 rows from 1 other rank.
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
    # Example: a small tensor on a mesh of (2, 2), [P, S(1)] -> [S(0), S(0)]. One reduce-scatter
    # over both axes replaces a reduce-scatter and an all-to-all. It has half the latency
    # and twice the bytes.
    reduced = space.start.to_reduce | space.partial_at_both_ends & before.to_make_partial
    # Example: for [P, S(0)], axis 1 only.
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

    After them, the values are partial as in the destination.

    Axes that become partial must be innermost on their dim. Each rank then holds its old shard
    inside the coarser shard, and the neutral value of the reduction in the rest. If a replicated
    axis is to shard the same dim in the goal, only its part of the coarser shard is kept:

        mesh (2, 2), 8 columns: R, S(1) -> S(1), P   rank      (0, 0)    (0, 1)    (1, 0)    (1, 1)
        it has columns                                         0 1 2 3   4 5 6 7   0 1 2 3   4 5 6 7
        it has to hold columns, to be added over axis 1        0 1 2 3   0 1 2 3   4 5 6 7   4 5 6 7
        so it holds                                            0 1 2 3   0 0 0 0   0 0 0 0   4 5 6 7
    """
    edges = []
    state = before
    reduces_first = before.to_reduce & before.to_make_partial or not space.reductions_commute
    if before.to_reduce and reduces_first:
        return []
    if before.to_make_partial:
        coarse = _coarsen(before.dims, before.to_make_partial)
        if coarse is None:
            return []
        made = space.state(coarse, before.to_reduce, 0, before.to_rescale)
        state = _slice_towards(space, made, space.goal.dims)
        axes = axes_of(before.to_make_partial)
        edges.append(_local(space, "MakePartial", before, state, axes=axes))
    if before.to_rescale:
        after = space.state(state.dims, before.to_reduce, 0, 0)
        edges.append(_local(space, "Scale", state, after, axes=axes_of(before.to_rescale)))
    return edges


def _local(
    space: Space, kind: str, before: State, after: State, axes: tuple[int, ...] = ()
) -> Edge:
    """Return the edge of a step without communication; its cost is writing the new local tensor."""
    changed = _changed_dims(before, after)
    axes = axes or _finer_axes(before.dims, after.dims, changed)
    seconds = space.links.copy(after.box_bytes)
    peak = before.box_bytes + after.box_bytes
    return Edge(kind, axes, changed, after, seconds=seconds, received=0, peak=peak)


def _slice_towards(space: Space, before: State, goal: Dims) -> State:
    """Return the state with dims sharded towards `goal` by axes that are replicated so far."""
    occupied = before.sharding_axes | before.to_reduce
    dims = []
    for old, new in zip(before.dims, goal, strict=True):
        if old not in new.outers:
            dims.append(old)
            continue
        end = len(old.axes)
        while end < len(new.axes) and not has_axis(occupied, new.axes[end]):
            # Example: a whole dim is to be sharded by axes 0 and 1. If axis 1 is occupied, it is
            # sharded by axis 0 only.
            end += 1
        dims.append(new.lineage[end])
    return space.state(tuple(dims), before.to_reduce, before.to_make_partial, before.to_rescale)


def _coarsen(dims: Dims, axes: int) -> Dims | None:
    """Return the shardings without some axes; None if one of the axes is not innermost."""
    coarse = []
    for sharded in dims:
        remaining = sharded.mask & ~axes
        coarse += [outer for outer in sharded.lineage if outer.mask == remaining]
    # Example: a dim sharded by axes (0, 1). Without axis 1 it is sharded by (0,); without axis 0
    # the result is None.
    return tuple(coarse) if len(coarse) == len(dims) else None


def _changed_dims(before: State, after: State) -> tuple[int, ...]:
    """Return the dims whose sharding differs."""
    pairs = enumerate(zip(before.dims, after.dims, strict=True))
    return tuple([dim for dim, (old, new) in pairs if old is not new])


def _finer_axes(coarse: Dims, fine: Dims, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that shard some dims in `fine` but not in `coarse`.

    For example (1, 2) for a dim that is sharded by axis 0 and by axes 0, 1 and 2.
    """
    axes: tuple[int, ...] = ()
    for dim in dims:
        axes += fine[dim].axes[len(coarse[dim].axes) :]
    return axes
