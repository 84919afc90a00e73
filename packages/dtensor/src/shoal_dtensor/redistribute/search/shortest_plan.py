"""A* search for the cheapest path between two specs, over the layouts of `Candidates`.

`Bound` is an admissible lower bound on the remaining cost. A state is pruned only if no path
through it can beat a known complete path. If the search considers all layouts and ends by itself,
its plan is therefore optimal for these edges in the cost model. After `MOST_PRICED` prices the
search stops with the best path so far, and `Plan.floor` is a lower bound on the cost of every path.
Among paths of equal cost the first one is chosen, direct paths first, so every rank gets the same
plan.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import count
from math import inf, prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import RedistributeError
from ...layout.placements import Partial, Placement, Replicate
from ..steps import Plan, Step
from .bound import Bound
from .edges import (
    Edge,
    all_reduce,
    convert_partials,
    join_pending,
    reduce_scatter,
    reshard,
    subsets,
)
from .links import Links, axes_of, has_axis, mask_of
from .space import Candidates, Space, State

if TYPE_CHECKING:
    from ...layout.spec import Spec


# After it has priced this many hops (about 8 us each), the search ends with the best path so far.
# It prices a third of them if it does not consider all layouts.
MOST_PRICED = 1200
# a path must be faster by more than rounding errors to be preferred
EPSILON = 1e-9
_NOTICEABLY_LESS = 1 - EPSILON

Edges = tuple[Edge, ...]


class FoundPlan(NamedTuple):
    """A complete path, ordered by its cost in seconds and then by the order of its discovery."""

    seconds: float
    tie_breaker: int
    edges: Edges


def cheapest_plans(
    src: Spec, dst: Spec, links: Links, memory_limit: int | None = None, wanted: int = 1
) -> list[Plan]:
    """Return the cheapest plan within `memory_limit` bytes, and up to `wanted` - 1 other plans."""
    space = Space(src.example or src, dst.example or dst, links)
    search = _Search(space, memory_limit, wanted)
    floor = search.search_all_starts()
    if not search.found:
        # For the message, search many paths without the limit.
        leanest = _Search(space, None, 32)
        leanest.search_all_starts()
        least = min([leanest.peak(found.edges) for found in leanest.found])
        source = space.start.box_bytes
        destination = space.goal.box_bytes
        raise RedistributeError(
            f"no redistribution stays within memory_limit={memory_limit} bytes: the leanest plan "
            f"found needs {least} (source box {source}, destination box {destination})"
        )
    # several paths may have the same edges
    seconds_of = {found.edges: found.seconds for found in search.found}
    plans = []
    for edges in [*seconds_of][:wanted]:
        seconds = seconds_of[edges]
        received = sum(edge.received for edge in edges)
        peak = search.peak(edges)
        steps = _steps(src, dst, space, edges)
        floor_of_plan = min(seconds, floor)
        plan = Plan(
            src,
            dst,
            steps,
            seconds,
            bytes_sent=received,
            peak_bytes=peak,
            floor=floor_of_plan,
        )
        plans.append(plan)
    return plans


def _steps(src: Spec, dst: Spec, space: Space, edges: Edges) -> tuple[Step, ...]:
    """Return the steps for the edges of a path."""
    between = [_spec(src, dst, space, edge.after) for edge in edges[:-1]]
    # A path without edges has no steps.
    ends = zip((src, *between), (*between, dst), edges, strict=False)
    return tuple([_step(before, after, edge) for before, after, edge in ends])


def _spec(src: Spec, dst: Spec, space: Space, state: State) -> Spec:
    """Return the spec of a state."""
    placements: dict[int, Placement] = dict.fromkeys(range(src.mesh.ndim), Replicate())
    # Axes that are still partial as in the source: at the start of [P, R] -> [R, P], axis 0.
    of_source = state.to_reduce | state.to_rescale
    for axis in axes_of(state.to_reduce | space.partial & ~state.to_make_partial):
        spec = src if has_axis(of_source, axis) else dst
        placement = spec.placements[axis]
        is_partial = isinstance(placement, Partial)
        placements[axis] = placement if is_partial else Partial(space.joinable_op)
    for dim, sharded in enumerate(state.dims):
        placements |= sharded.sharding.placements(dim)
    order = tuple((dim, sharded.axes) for dim, sharded in enumerate(state.dims) if sharded.axes)
    return src.with_(placements=tuple(placements.values()), stride=dst.stride, shard_order=order)


def _step(before: Spec, after: Spec, edge: Edge) -> Step:
    """Return the step for an edge."""
    ops = dict(before.partials)
    sizes = before.mesh.shape
    summed = prod([sizes[axis] for axis in edge.axes if ops.get(axis) == "sum"])
    averaged = prod([sizes[axis] for axis in edge.axes if ops.get(axis) == "avg"])
    arithmetic: dict[str, Any] = {}
    if edge.kind == "Scale":
        # Example: sum -> avg on 2 ranks multiplies by 2, avg -> sum by 1/2.
        arithmetic = {"factor": summed, "divisor": averaged}
    elif edge.kind in ("AllReduce", "ReduceScatter"):
        ops_of_edge = {ops[axis] for axis in edge.axes}
        if len(ops_of_edge) == 1:
            arithmetic = {"op": ops_of_edge.pop()}
        else:
            # A reduction of sums and averages is a sum that is divided afterwards by the number of
            # averaged ranks.
            arithmetic = {"op": "sum", "divisor": averaged}
    return Step(
        edge.kind,
        before,
        after,
        edge.axes,
        dims=edge.tensor_dims,
        seconds=edge.seconds,
        bytes=edge.received,
        peak_bytes=edge.peak,
        **arithmetic,
    )


class _Trail(NamedTuple):
    """A path from a start to a state: its cost in seconds and its edges."""

    seconds: float
    state: State
    edges: Edges

    def extended_by(self, hop: list[Edge]) -> _Trail:
        """Return the path extended by some edges."""
        if not hop:
            return self
        seconds = self.seconds
        for edge in hop:
            seconds += edge.seconds
        return _Trail(seconds, hop[-1].after, (*self.edges, *hop))


class _Search:
    """The state of one search: trails to extend, and the best complete paths so far.

    Attributes:
        found: complete paths, in order of cost.
        cost_to_beat: the seconds that a path has to beat in order to be kept.
        heap: trails to extend, by the lower bound on the cost of paths through them.
        priced: hops priced so far.
        nearest_states: by (axes to reduce, to make partial, to rescale), all states with these axes
            and the bound of each, nearest to the goal first.
    """

    def __init__(self, space: Space, memory_limit: int | None, plans_wanted: int) -> None:
        self.space = space
        self.limit = memory_limit
        # Several paths may have the same edges, so more paths are kept than plans are wanted.
        self.most_found = 1 if plans_wanted == 1 else 8 * plans_wanted
        bound = Bound(space)
        self.bound = cache(bound.seconds)
        self.least_latency = bound.least_latency
        self.heap: list[tuple[float, int, _Trail]] = []
        # favors the first of several trails of equal cost, so that trails are never compared
        self.tie_breaker = count()
        self.priced = 0
        self.found: list[FoundPlan] = []
        self.cost_to_beat = inf
        self.nearest_states: dict[tuple[int, int, int], list[tuple[float, State]]] = {}

    def search_all_starts(self) -> float:
        """Fill `found`; return a lower bound on the cost of every path that is not in it."""
        return min([self.search(_Trail(0.0, start, ())) for start in self.starts()])

    def starts(self) -> Iterator[State]:
        """Yield the source, and states in which axes that are partial at both ends are reduced too.

        These axes are made partial again at the end.
        """
        # Example: mesh (4 fast, 2 slow), [P, S(0)] -> [P, R]. After a reduce-scatter over the fast
        # axis, only a quarter has to be gathered over the slow one. Making values partial again
        # needs no communication.
        space = self.space
        start = self.space.start
        yield start
        has_to_move = start.dims != space.goal.dims
        if not space.reductions_commute:
            return
        if has_to_move or start.to_reduce or start.to_make_partial:
            # Example: for axes 0 and 1 the masks are 0b01, 0b10 and 0b11.
            for chosen in subsets(axes_of(space.partial_at_both_ends)):
                axes = mask_of(chosen)
                to_reduce = start.to_reduce | axes
                to_make_partial = start.to_make_partial | axes
                to_rescale = start.to_rescale & ~axes
                yield space.state(start.dims, to_reduce, to_make_partial, to_rescale)

    def search(self, start: _Trail) -> float:
        """Search paths from one start; return a lower bound on the cost of paths not in `found`."""
        self.candidates = Candidates(self.space, start.state)
        is_complete = self.candidates.complete
        self.most = MOST_PRICED if is_complete else MOST_PRICED // 3
        floor = inf if is_complete else self.bound(start.state)
        # seconds of the fastest path to a state so far
        self.reached: dict[State, float] = {}
        self.push(start)
        plain = self.push_plain_reduction(start)
        has_many_axes = self.space.multi_rank_axes.bit_count() > 2
        if has_many_axes and not self.is_beaten(self.bound(start.state)):
            self.seed(plain)
        while self.heap:
            bound, _, trail = heappop(self.heap)
            if self.is_beaten(bound):
                self.heap.clear()
            elif self.is_over():
                self.heap.clear()
                floor = min(floor, bound)
            elif trail.seconds <= self.reached[trail.state]:
                self.expand(trail)
        return floor

    def is_beaten(self, seconds: float) -> bool:
        """Tell whether a path of this cost is not noticeably better than the paths found."""
        return seconds >= self.cost_to_beat * _NOTICEABLY_LESS

    def is_over(self) -> bool:
        """Tell whether the search has used up its prices and has found a path."""
        return self.priced >= self.most and bool(self.found)

    def push_plain_reduction(self, trail: _Trail) -> _Trail:
        """Push the path that reduces at once, to the goal's sharding; it is often the best path."""
        space = self.space
        state = trail.state
        if not state.to_reduce:
            return trail
        after = space.after_reduce_scatter(state, self.candidates.dims_after_reduce_scatter(state))
        if after is not state:
            trail = self.push(trail.extended_by([reduce_scatter(space, state, after)]))
        if after.to_reduce:
            trail = self.push(trail.extended_by([all_reduce(space, after)]))
        return trail

    def seed(self, trail: _Trail) -> None:
        """Seed the search with simple paths that leave nothing to reduce.

        They move the axes of one speed, or one axis, after the other. The result is never worse
        than these paths.
        """
        bandwidth = self.space.links.bandwidth
        axes = axes_of(self.space.multi_rank_axes & ~trail.state.to_make_partial)
        by_speed: dict[float, list[int]] = {}
        for axis in sorted(axes, key=lambda axis: bandwidth[axis]):
            by_speed.setdefault(bandwidth[axis], []).append(axis)
        speeds = [*by_speed.values()]
        single = [[axis] for axis in axes]
        self.push_in_turns(trail, speeds, nested=True)
        self.push_in_turns(trail, speeds[::-1], nested=True)
        self.push_in_turns(trail, single, nested=False)
        self.push_in_turns(trail, single[::-1], nested=False)

    def push_in_turns(
        self, trail: _Trail, groups: Sequence[Sequence[int]], *, nested: bool
    ) -> None:
        """Push the path that moves one group of axes after the other to its place in the goal."""
        settled = 0
        for group in groups:
            # Example: one axis after the other: 0b01, then 0b11.
            settled |= mask_of(group)
            state = trail.state
            dims = self.candidates.dims_settled_on(state, settled, nested=nested)
            after = self.space.state(dims, 0, state.to_make_partial, state.to_rescale)
            trail = self.push(trail.extended_by(reshard(self.space, state, after)))

    def expand(self, trail: _Trail) -> None:
        """Push the states that one hop may profitably lead to, nearest to the goal first."""
        seconds, state, _ = trail
        if state.to_reduce:
            self.push_reductions(trail)
        links = self.space.links
        for ahead, after in self.nearest(state):
            if seconds + ahead >= self.cost_to_beat or self.is_over():
                return
            if self.reached.get(after, inf) <= seconds or after is state:
                continue
            # All axes that leave a dim take part in the collective. Example: if 2 axes of 2 ranks
            # leave, a rank has at most a quarter of its new shard.
            leaving = 0
            for old, new in zip(state.dims, after.dims, strict=True):
                leaving += old.mask & ~new.mask
            received = after.box_bytes - after.box_bytes / links.ranks(leaving)
            least = links.seconds(leaving, received)
            if seconds + least + ahead < self.cost_to_beat:
                self.priced += 1
                self.push(trail.extended_by(reshard(self.space, state, after)))

    def push_reductions(self, trail: _Trail) -> None:
        """Push the states that reductions lead to."""
        space = self.space
        state = trail.state
        # One all-reduce reduces all axes that are left. After two in a row, replicas could differ
        # in the last bit.
        self.push(trail.extended_by([all_reduce(space, state)]))
        for edge in join_pending(space, state):
            self.push(trail.extended_by([edge]))
        # All layouts but the first one, which is the present layout. Example: for [P, P] and one
        # dim, it is sharded by axes (1,), (0,), (0, 1) or (1, 0).
        _, *layouts = self.candidates.inside(state.dims, state.to_reduce)
        for dims in layouts:
            after = space.after_reduce_scatter(state, dims)
            latency = space.links.seconds(state.to_reduce & ~after.to_reduce, 0)
            least = trail.seconds + latency + self.bound(after)
            if least < self.cost_to_beat and not self.is_over():
                self.priced += 1
                self.push(trail.extended_by([reduce_scatter(space, state, after)]))

    def nearest(self, state: State) -> list[tuple[float, State]]:
        """Return states with equal axes to reduce and make partial, nearest to the goal first."""
        key = (state.to_reduce, state.to_make_partial, state.to_rescale)
        nearest = self.nearest_states.get(key)
        if nearest is None:
            space = self.space
            axes = space.movable_axes(state) & ~state.to_reduce
            states = [space.state(dims, *key) for dims in self.candidates.inside(space.whole, axes)]
            nearest = sorted([(self.bound(other), other) for other in states], key=itemgetter(0))
            self.nearest_states[key] = nearest
        return nearest

    def push(self, trail: _Trail) -> _Trail:
        """Push a path to a state, unless it cannot lead to one of the best paths.

        Also push the path after its conversion to the destination's partials. If nothing is
        pending, record the complete path that goes straight to the goal.
        """
        seconds, state, edges = trail
        bound = seconds + self.bound(state)
        # No path through this state beats the paths found.
        if bound >= self.cost_to_beat:
            return trail
        # A path to this state that is not slower has been pushed before.
        if self.reached.get(state, inf) <= seconds:
            return trail
        if self.exceeds_memory(edges):
            return trail
        self.reached[state] = seconds
        if not state.partials_done:
            conversion = convert_partials(self.space, state)
            if conversion:
                self.push(trail.extended_by(conversion))
        elif not state.to_reduce:
            self.priced += 1
            to_goal = reshard(self.space, state, self.space.goal)
            self.record_plan(trail.extended_by(to_goal))
            # The path with one more collective has just been recorded. Other paths need at least
            # two, unless they slice by free axes before the one collective. Slices are varied in
            # this way only if all layouts are considered.
            free_axes = self.space.movable_axes(state) & ~state.sharding_axes
            if not (self.candidates.complete and free_axes):
                bound += self.least_latency
        if bound < self.cost_to_beat:
            heappush(self.heap, (bound, next(self.tie_breaker), trail))
        return trail

    def record_plan(self, trail: _Trail) -> None:
        """Keep a complete path if it is among the best, unless it exceeds the memory limit."""
        seconds, _, edges = trail
        if self.is_beaten(seconds) or self.exceeds_memory(edges):
            return
        insort(self.found, FoundPlan(seconds, next(self.tie_breaker), edges))
        del self.found[self.most_found :]
        if len(self.found) == self.most_found:
            self.cost_to_beat = self.found[-1].seconds

    def exceeds_memory(self, edges: Edges) -> bool:
        """Tell whether some edges need more memory than the limit."""
        return self.limit is not None and self.peak(edges) > self.limit

    def peak(self, edges: Edges) -> int:
        """Return the bytes at the worst moment of some edges.

        The caller holds the source box throughout. It is also the input of the first edge, whose
        peak already includes it.
        """
        box = self.space.start.box_bytes
        peaks = [edge.peak + box for edge in edges]
        if edges:
            peaks[0] -= box
        return max([box, *peaks])
