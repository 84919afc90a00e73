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
    changed: list[int] = []
    leaving = 0
    entering = 0
    held = 1.0
    for dim, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)):
        if old is not new:
            change = space.change(old, new)
            if (
                not change.leaving
                and not (before.used | before.pending) >> new.axes[len(old.axes)] & 1
            ):
                sliced = _sliced(space, before, after.dims)
                return [_local(space, "Slice", before, sliced), *reshard(space, sliced, after)]
            changed.append(dim)
            leaving |= change.leaving
            entering |= change.entering
            # S(0) -> S(1) over 2 ranks: 4 of 8 rows, 1 / 2; of columns 1
            held *= change.held
    if not changed:
        return []
    # (8, 8) f32, S(0) -> S(1) on 2 ranks: 128 - 64 = 64 bytes
    received = after.box - int(after.box * held)
    if entering:
        return [_exchange(space, before, after, changed, leaving | entering, received)]
    # Shards of dim 0 arrive one after the other as they belong; of any other dim they are copied
    # into place.
    copied = 0 if changed == [0] else after.box
    seconds = space.links.seconds(leaving, received) + space.links.copy(copied)
    axes = _inner(after.dims, before.dims, changed)
    return [
        Edge(
            "AllGather",
            axes,
            tuple(changed),
            after,
            seconds=seconds,
            received=received,
            peak=before.box + after.box + copied,
        )
    ]


def _exchange(
    space: Space, before: State, after: State, changed: list[int], involved: int, received: int
) -> Edge:
    """Return an exchange among the ranks that hold, or that want, different shards."""
    links = space.links
    held = before.box
    wanted = after.box
    seconds = links.seconds(involved, received)
    kind = "Exchange"
    dims = tuple(changed)
    # S(0), R -> S(1), S(0): axis 0, 0b01 of 0b11
    near = involved & before.used
    axes = axes_of(involved)
    if near != involved:
        sent = sent_among(links.ranks(near), links.ranks(near & ~after.used), held, received)
        nearer = links.seconds(near, sent)
        if nearer <= seconds:
            axes = axes_of(near)
            received = sent
            seconds = nearer
    elif len(changed) == 2 and (ends := _transposed(before, after, changed)):
        kind = "AllToAll"
        dims = ends
        axes = _inner(after.dims, before.dims, ends[:1])
    # rows of dim 0 are in memory as they travel
    copied = 0 if changed == [0] else min(received, held) + wanted
    return Edge(
        kind,
        axes,
        dims,
        after,
        seconds=seconds + links.copy(copied),
        received=received,
        peak=2 * (held + wanted),
    )


def sent_among(ranks: int, copies: int, before: int, received: int) -> int:
    """Return the bytes of the busiest rank, which lacks `received`, in an exchange.

    The exchange stays among `ranks` ranks with different parts.
    """
    # Each replica serves itself, so a rank may send all it has, `before` bytes, to the `copies`
    # ranks that want it.
    # 4 ranks, 2 * 16 wanted, 8 lacked: 24
    return max(received, min(before * copies, (ranks - 1) * received))


def _transposed(before: State, after: State, changed: list[int]) -> tuple[int, int] | None:
    """Return (from, to) if the innermost axes of one dim move to the only other changed dim.

    They become its innermost axes, and all shards are even.
    """
    old = before.dims
    new = after.dims
    if not all(dims[dim].even for dim in changed for dims in (old, new)):
        return None
    for a, b in (changed, changed[::-1]):
        # S(0) -> S(1): dim 0 by axis 0, then whole: (0,), which enters dim 1
        moved = old[a].axes[len(new[a].axes) :]
        if (
            moved
            and new[a] in old[a].outers
            and old[b] in new[b].outers
            and new[b].axes == old[b].axes + moved
        ):
            return a, b
    return None


def all_reduce(space: Space, before: State) -> Edge:
    """Return the edge P -> R over all pending axes: each rank gets 2 * (n - 1) / n of the box."""
    axes = before.pending
    wide = space.widening
    ways = space.links.ranks(axes)
    # 64 bytes on 4 ranks: 2 * 64 * 3 // 4 = 96
    received = 2 * wide * before.box * (ways - 1) // ways
    after = space.state(before.dims, 0, before.becoming, before.scaled)
    # norm2 of bf16 is summed in f32: wide is 2, so 3 boxes
    peak = (1 + wide) * before.box
    return Edge(
        "AllReduce",
        axes_of(axes),
        (),
        after,
        seconds=space.links.seconds(axes, received),
        received=received,
        peak=peak,
    )


def reduce_scatter(space: Space, before: State, after: State) -> Edge:
    """Return the edge P -> S over the axes that are no longer pending.

    Each rank keeps its shard and receives (n - 1) / n of the box.
    """
    mask = before.pending & ~after.pending
    wide = space.widening
    box = before.box
    changed = _changed(before, after)
    ways = space.links.ranks(mask)
    even = all(after.dims[dim].even for dim in changed)
    # 5 rows as 3 + 2: 3 * 1
    received = wide * (box * (ways - 1) // ways if even else after.box * (ways - 1))
    packed = 0 if changed == (0,) else wide * box
    seconds = space.links.seconds(mask, received) + space.links.copy(packed)
    axes = _inner(before.dims, after.dims, changed)
    return Edge(
        "ReduceScatter",
        axes,
        changed,
        after,
        seconds=seconds,
        received=received,
        peak=box + packed + after.box,
    )


def joined(space: Space, before: State) -> Iterator[Edge]:
    """Yield local edges S -> P of axes that one collective reduces with the pending axes.

    Axes that are already reduced stay reduced.
    """
    # mesh (2, 2), P, S(1) -> S(0), S(0) of a small tensor: one reduce-scatter over both axes
    # instead of one and an all-to-all: half the latency for twice the bytes.
    reduced = space.start.pending | space.kept & before.becoming
    axes = axes_of(before.used & ~reduced) if space.joining else ()  # P, S(0): not axis 0, but 1
    # 0, 1, then both
    for chosen in [some for count in range(1, len(axes) + 1) for some in combinations(axes, count)]:
        coarse = _without(before.dims, mask_of(chosen))
        if coarse is not None:
            after = space.state(
                coarse, before.pending | mask_of(chosen), before.becoming, before.scaled
            )
            yield _local(space, "MakePartial", before, after, chosen)


def converted(space: Space, before: State) -> list[Edge]:
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
    if before.pending and (before.pending & before.becoming or not space.alike):
        return []
    if before.becoming:
        coarse = _without(before.dims, before.becoming)
        if coarse is None:
            return []
        here = _sliced(
            space, space.state(coarse, before.pending, 0, before.scaled), space.goal.dims
        )
        edges.append(_local(space, "MakePartial", before, here, axes_of(before.becoming)))
    if before.scaled:
        after = space.state(here.dims, before.pending, 0, 0)
        edges.append(_local(space, "Scale", here, after, axes_of(before.scaled)))
    return edges


def _local(
    space: Space, kind: str, before: State, after: State, axes: tuple[int, ...] = ()
) -> Edge:
    """Return a step without communication, which writes the new local tensor."""
    changed = _changed(before, after)
    axes = axes or _inner(before.dims, after.dims, changed)
    return Edge(
        kind,
        axes,
        changed,
        after,
        seconds=space.links.copy(after.box),
        received=0,
        peak=before.box + after.box,
    )


def _sliced(space: Space, before: State, goal: Dims) -> State:
    """Return the state with dims sharded towards `goal` by axes not used and not pending."""
    taken = before.used | before.pending
    dims = []
    for old, new in zip(before.dims, goal, strict=True):
        end = len(old.axes)
        if old in new.outers:
            while end < len(new.axes) and not taken >> new.axes[end] & 1:
                # a whole dim towards axes 0 and 1, axis 1 taken: by axis 0
                end += 1
            old = new.lineage[end]
        dims.append(old)
    return space.state(tuple(dims), before.pending, before.becoming, before.scaled)


def _without(dims: Dims, axes: int) -> Dims | None:
    """Return the shardings without some axes; None if one of the axes is not innermost."""
    coarse = []
    for sharded in dims:
        coarse += [outer for outer in sharded.lineage if outer.mask == sharded.mask & ~axes]
    # by 0, then 1: without axis 1 by 0; without axis 0 None
    return tuple(coarse) if len(coarse) == len(dims) else None


def _changed(before: State, after: State) -> tuple[int, ...]:
    """Return the dims whose sharding differs."""
    return tuple(
        [d for d, (a, b) in enumerate(zip(before.dims, after.dims, strict=True)) if a is not b]
    )


def _inner(coarse: Dims, fine: Dims, of: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that shard some dims further: by axis 0, and by 0, 1 and 2: (1, 2)."""
    return tuple([axis for dim in of for axis in fine[dim].axes[len(coarse[dim].axes) :]])
