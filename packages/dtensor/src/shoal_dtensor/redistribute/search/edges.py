"""The edges along a way through the search space: kind, axes, bytes and memory, as `plan` makes steps of them.

Seconds and bytes are those of `costs`.  The search itself asks only for costs; edges are made of the ways it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .tokens import Dims

if TYPE_CHECKING:
    from .costs import Costs, State


class Edge(NamedTuple):
    """One edge of the search: what `plan` makes a step of.

    Attributes:
        kind: name of the step class.
        axes: mesh axes, in the order of the collective's blocks.
        tensor_dims: dims whose sharding changes; (from, to) of an all-to-all.
        dims: the state's shardings afterwards.
        pending: axes still to be reduced afterwards.
        seconds, received, peak: time, bytes of the busiest rank, memory of input, output and buffers.
    """

    kind: str
    axes: tuple[int, ...]
    tensor_dims: tuple[int, ...]
    dims: Dims
    pending: tuple[int, ...]
    seconds: float
    received: int
    peak: int


def edges_between(costs: Costs, before: State, after: State) -> list[Edge]:
    """The edges of one hop of the search: a resharding, a reduction or a conversion."""
    if before.converted != after.converted:
        return _convert(costs, before, after)
    if before.pending == after.pending:
        return _reshard(costs, before, after)
    if len(before.pending) < len(after.pending):
        return [_join(costs, before, after)]
    return [_all_reduce(costs, before) if before.dims == after.dims else _reduce_scatter(costs, before, after)]


def _reshard(costs: Costs, before: State, after: State) -> list[Edge]:
    """S(i) -> S(j): a slice, a collective, both or nothing."""
    edges: list[Edge] = []
    way = costs.reshard(before, after)
    seconds, sliced = way.seconds, way.sliced
    if sliced is not None:
        sliced_seconds = costs.slice(sliced)
        changed = _changed(before.dims, sliced.dims)
        axes = tuple(t // 3 for d in changed for t in sliced.dims[d][len(before.dims[d]) :])
        peak = before.box + sliced.box
        edges.append(Edge("Slice", axes, changed, sliced.dims, before.pending, sliced_seconds, 0, peak))
        seconds, before = seconds - sliced_seconds, sliced
    if not way.kind:
        return edges
    old, new = before.dims, after.dims
    changed = _changed(old, new)
    peak = 2 * (before.box + after.box)
    match way.kind:
        case "AllGather":
            axes = tuple(t // 3 for d in changed for t in old[d][len(new[d]) :])
            peak = before.box + after.box * (1 if changed == (0,) else 2)
        case "AllToAll":
            changed = costs.transposed(old, new) or changed
            axes = tuple(t // 3 for t in old[changed[0]][len(new[changed[0]]) :])
        case _:
            axes = _axes(way.axes)
    edges.append(Edge(way.kind, axes, changed, new, after.pending, seconds, way.received, peak))
    return edges


def _all_reduce(costs: Costs, before: State) -> Edge:
    """P -> R over all axes that are left."""
    seconds, received = costs.all_reduce(before)
    peak = (1 + costs.space.widening) * before.box
    return Edge("AllReduce", before.pending, (), before.dims, (), seconds, received, peak)


def _reduce_scatter(costs: Costs, before: State, after: State) -> Edge:
    """P -> S over the pending axes that are no longer pending, each rank keeping its shard."""
    seconds, received, packed = costs.reduce_scatter(before, after)
    changed = _changed(before.dims, after.dims)
    axes = tuple(t // 3 for d in changed for t in after.dims[d][len(before.dims[d]) :])
    assert sorted(axes) == sorted({*before.pending} - {*after.pending}), (
        "the axes that are reduced are those that shard"
    )
    peak = before.box + packed + after.box
    return Edge("ReduceScatter", axes, changed, after.dims, after.pending, seconds, received, peak)


def _join(costs: Costs, before: State, after: State) -> Edge:
    """S -> P of axes that are reduced next; local."""
    axes = tuple(a for a in after.pending if a not in before.pending)
    changed, peak = _changed(before.dims, after.dims), before.box + after.box
    return Edge("MakePartial", axes, changed, after.dims, after.pending, costs.join(after), 0, peak)


def _convert(costs: Costs, before: State, after: State) -> list[Edge]:
    """R or S -> P, then P(sum) <-> P(avg): local."""
    space, edges, old = costs.space, [], before
    seconds = costs.convert(after) / space.conversions
    for kind, axes in (("MakePartial", space.becoming), ("Scale", space.scaled)):
        if axes:
            changed, peak = _changed(old.dims, after.dims), old.box + after.box
            edges.append(Edge(kind, axes, changed, after.dims, after.pending, seconds, 0, peak))
            old = after
    return edges


def _changed(old: Dims, new: Dims) -> tuple[int, ...]:
    return tuple([d for d, (a, b) in enumerate(zip(old, new, strict=True)) if a != b])


def _axes(mask: int) -> tuple[int, ...]:
    return tuple([a for a in range(mask.bit_length()) if mask >> a & 1])
