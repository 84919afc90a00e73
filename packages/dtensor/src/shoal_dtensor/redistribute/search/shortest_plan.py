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
from collections.abc import Iterator
from functools import cache
from heapq import heappop, heappush
from itertools import combinations, count
from math import inf, prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import RedistributeError
from ...layout.placements import Partial, Placement, Replicate
from ..steps import Plan, Step
from .edges import Edge, all_reduce, converted, joined, reduce_scatter, reshard
from .links import Links, axes_of, mask_of
from .space import Candidates, Space, State

if TYPE_CHECKING:
    from ...layout.spec import Spec


# Hops priced, about 8 us each, before the search settles for the best way so far.  A third of them
# where it looks at some layouts only.
MOST_PRICED = 1200
# a way must be faster by more than rounding errors to be preferred
_ALIKE = 1 - 1e-9

Edges = tuple[Edge, ...]


def cheapest_plans(
    src: Spec, dst: Spec, links: Links, memory_limit: int | None = None, wanted: int = 1
) -> list[Plan]:
    """Return the cheapest plan within `memory_limit` bytes, and up to `wanted` - 1 other plans."""
    space = Space(src.example or src, dst.example or dst, links)
    search = _Search(space, memory_limit, wanted)
    floor = search.run()
    if not search.found:
        leanest = _Search(space, None, 32)
        leanest.run()
        least = min([leanest.peak(edges) for _, _, edges in leanest.found])
        raise RedistributeError(
            f"no redistribution stays within memory_limit={memory_limit} bytes: the leanest plan "
            f"found needs {least} (source box {space.start.box}, destination box {space.goal.box})"
        )
    plans = []
    for edges, seconds in list({edges: seconds for seconds, _, edges in search.found}.items())[
        :wanted
    ]:
        between = [_spec(src, dst, space, edge.after) for edge in edges[:-1]]
        # without edges there is no spec between
        ends = zip((src, *between), (*between, dst), edges, strict=False)
        steps = tuple([_step(here, there, edge) for here, there, edge in ends])
        received = sum(edge.received for edge in edges)
        plans.append(
            Plan(
                src,
                dst,
                steps,
                seconds,
                bytes_sent=received,
                peak_bytes=search.peak(edges),
                floor=min(seconds, floor),
            )
        )
    return plans


def _spec(src: Spec, dst: Spec, space: Space, state: State) -> Spec:
    """Return the spec of a state."""
    placements: dict[int, Placement] = dict.fromkeys(range(src.mesh.ndim), Replicate())
    # P, R -> R, P at first: axis 0
    for axis in axes_of(state.pending | space.partial & ~state.becoming):
        here = src if (state.pending | state.scaled) >> axis & 1 else dst
        before = here.placements[axis]
        placements[axis] = before if isinstance(before, Partial) else Partial(space.joining)
    for dim, sharded in enumerate(state.dims):
        placements |= sharded.sharding.placements(dim)
    order = tuple((dim, sharded.axes) for dim, sharded in enumerate(state.dims) if sharded.axes)
    return src.with_(placements=tuple(placements.values()), stride=dst.stride, shard_order=order)


def _step(here: Spec, there: Spec, edge: Edge) -> Step:
    """Return the step for an edge."""
    ops = dict(here.partials)
    sizes = here.mesh.shape
    summed, averaged = (
        prod(sizes[a] for a in edge.axes if ops.get(a) == op) for op in ("sum", "avg")
    )
    more: dict[str, Any] = {}
    if edge.kind == "Scale":
        # sum -> avg on 2 ranks: by 2; avg -> sum: by 1/2
        more = {"factor": summed, "divisor": averaged}
    elif edge.kind in ("AllReduce", "ReduceScatter"):
        # a mixture of sums and averages is a sum, divided afterwards
        kinds = {ops[a] for a in edge.axes}
        # avg over 4: sum / 4
        more = {"op": kinds.pop()} if len(kinds) == 1 else {"op": "sum", "divisor": averaged}
    return Step(
        edge.kind,
        here,
        there,
        edge.axes,
        dims=edge.tensor_dims,
        seconds=edge.seconds,
        bytes=edge.received,
        peak_bytes=edge.peak,
        **more,
    )


class _Trail(NamedTuple):
    """A path from a start to a state: its cost in seconds and its edges."""

    seconds: float
    here: State
    edges: Edges

    def then(self, hop: list[Edge]) -> _Trail:
        """Return the path extended by some edges."""
        seconds = self.seconds
        for edge in hop:
            seconds += edge.seconds
        return _Trail(seconds, hop[-1].after if hop else self.here, (*self.edges, *hop))


class _Search:
    def __init__(self, space: Space, memory_limit: int | None, wanted: int) -> None:
        self.space = space
        self.limit = memory_limit
        self.wanted = wanted
        bound = Bound(space)
        self.bound = cache(bound.seconds)
        self.fastest_start = bound.start
        # trails to extend, by the lower bound on the cost of paths through them
        self.heap: list[tuple[float, int, _Trail]] = []
        # breaks ties in favor of the first trail, so that trails are never compared
        self.ticket = count()
        self.priced = 0
        self.found: list[tuple[float, int, Edges]] = []  # whole ways, in order of cost
        self.worst = inf  # the cost that a path has to beat
        self.near: dict[tuple[int, int, int], list[tuple[float, State]]] = {}

    def run(self) -> float:
        """Fill `found`; return a lower bound on the cost of every path that is not in it."""
        return min([self.search(_Trail(0.0, start, ())) for start in self.starts()])

    def starts(self) -> Iterator[State]:
        """Yield the source, and states where axes partial at both ends are reduced first.

        These axes are made partial again at the end.
        """
        # mesh (4 fast, 2 slow), P, S(0) -> P, R: to reduce-scatter over the fast axis first leaves
        # a quarter to gather over the slow one, and making values partial again costs no
        # communication.
        space = self.space
        start = self.space.start
        yield start
        if space.alike and (start.dims != space.goal.dims or start.pending or start.becoming):
            # (0, 1): reduced and made again are 0b01, 0b10 or 0b11
            kept = axes_of(space.kept)
            for axes in (
                mask_of(some) for n in range(1, len(kept) + 1) for some in combinations(kept, n)
            ):
                yield space.state(
                    start.dims, start.pending | axes, start.becoming | axes, start.scaled & ~axes
                )

    def search(self, start: _Trail) -> float:
        """Search paths from one start; return a lower bound on the cost of paths not in `found`."""
        self.candidates = Candidates(self.space, start.here)
        self.most = MOST_PRICED if self.candidates.complete else MOST_PRICED // 3
        floor = inf if self.candidates.complete else self.bound(start.here)
        # seconds of the fastest way there so far
        self.reached: dict[State, float] = {}
        self.offer(start)
        plain = self.reduced(start)
        if self.bound(start.here) < self.worst * _ALIKE and self.space.large.bit_count() > 2:
            self.settle(plain)
        while self.heap:
            bound, _, trail = heappop(self.heap)
            if bound >= self.worst * _ALIKE:
                self.heap.clear()
            elif self.is_over():
                self.heap.clear()
                floor = min(floor, bound)
            elif trail.seconds <= self.reached[trail.here]:
                self.expand(trail)
        return floor

    def is_over(self) -> bool:
        """Tell whether the search has used up its prices and has found a path."""
        return self.priced >= self.most and bool(self.found)

    def reduced(self, trail: _Trail) -> _Trail:
        """Offer the path of the plain reduction to the goal's axes, often the best path."""
        space = self.space
        here = trail.here
        if here.pending:
            after = space.scattered(here, self.candidates.scattered(here))
            if after is not here:
                trail = self.offer(trail.then([reduce_scatter(space, here, after)]))
            if after.pending:
                trail = self.offer(trail.then([all_reduce(space, after)]))
        return trail

    def settle(self, trail: _Trail) -> None:
        """Seed the search with simple paths that leave nothing to reduce.

        They move the axes of one speed, or one axis, after the other. The result is never worse
        than these paths.
        """
        space = self.space
        here = trail.here
        bandwidth = self.space.links.bandwidth
        axes = axes_of(space.large & ~here.becoming)
        speeds = [
            [a for a in axes if bandwidth[a] == speed]
            for speed in sorted({bandwidth[a] for a in axes})
        ]
        single = [[a] for a in axes]
        for groups, nested in (
            (speeds, True),
            (speeds[::-1], True),
            (single, False),
            (single[::-1], False),
        ):
            last = trail
            settled = 0
            for group in groups:
                settled |= mask_of(group)  # axes one by one: 0b01, 0b11
                here = last.here
                dims = self.candidates.settled(here, settled, nested=nested)
                after = space.state(dims, 0, here.becoming, here.scaled)
                last = self.offer(last.then(reshard(space, here, after)))

    def expand(self, trail: _Trail) -> None:
        """Offer the states that one hop may profitably lead to, nearest to the goal first."""
        seconds, here, _ = trail
        if here.pending:
            self.reduce(trail)
        links = self.space.links
        for ahead, after in self.nearest(here):
            if seconds + ahead >= self.worst or self.is_over():
                return
            if self.reached.get(after, inf) <= seconds or after is here:
                continue
            # Axes that leave a dim all take part in the collective. 2 axes of 2 ranks: of its new
            # shard a rank had a quarter at most.
            leaving = sum(
                [old.mask & ~new.mask for old, new in zip(here.dims, after.dims, strict=True)]
            )
            least = links.seconds(leaving, after.box - after.box / links.ranks(leaving))
            if seconds + least + ahead < self.worst:
                self.priced += 1
                self.offer(trail.then(reshard(self.space, here, after)))

    def reduce(self, trail: _Trail) -> None:
        """Offer the states that reductions lead to."""
        space = self.space
        here = trail.here
        # An all-reduce takes all axes that are left: two in a row could leave replicas that differ
        # in the last bit.
        self.offer(trail.then([all_reduce(space, here)]))
        for edge in joined(space, here):
            self.offer(trail.then([edge]))
        # P, P on one dim: by 1, 0, 0 and 1, 1 and 0
        for dims in self.candidates.inside(here.dims, here.pending)[1:]:
            after = space.scattered(here, dims)
            start = space.links.seconds(here.pending & ~after.pending, 0)
            if trail.seconds + start + self.bound(after) < self.worst and not self.is_over():
                self.priced += 1
                self.offer(trail.then([reduce_scatter(space, here, after)]))

    def nearest(self, here: State) -> list[tuple[float, State]]:
        """Return states with the same pending and becoming axes, nearest to the goal first."""
        key = here.pending, here.becoming, here.scaled
        near = self.near.get(key)
        if near is None:
            space = self.space
            layouts = self.candidates.inside(space.whole, space.moving(here) & ~here.pending)
            states = [space.state(dims, *key) for dims in layouts]
            near = sorted([(self.bound(state), state) for state in states], key=itemgetter(0))
            self.near[key] = near
        return near

    def offer(self, trail: _Trail) -> _Trail:
        """Record a path to a state, its conversion and, if nothing is pending, the path on."""
        seconds, here, edges = trail
        bound = seconds + self.bound(here)
        if bound >= self.worst or self.reached.get(here, inf) <= seconds:
            return trail
        if self.limit is not None and self.peak(edges) > self.limit:
            return trail
        self.reached[here] = seconds
        if not here.made:
            conversion = converted(self.space, here)
            if conversion:
                self.offer(trail.then(conversion))
        elif not here.pending:
            self.priced += 1
            self.note(trail.then(reshard(self.space, here, self.space.goal)))
            # It takes two collectives to go on, unless something else can be sliced before the one.
            # Where not all layouts are looked at, ways of one collective are not varied.
            if not (self.candidates.complete and self.space.moving(here) & ~here.used):
                bound += self.fastest_start
        if bound < self.worst:
            heappush(self.heap, (bound, next(self.ticket), trail))
        return trail

    def note(self, trail: _Trail) -> None:
        """Keep a complete path if it is among the best, unless it exceeds the memory limit."""
        seconds, _, edges = trail
        if seconds >= self.worst * _ALIKE or (
            self.limit is not None and self.peak(edges) > self.limit
        ):
            return
        insort(self.found, (seconds, next(self.ticket), edges))
        kept = 1 if self.wanted == 1 else 8 * self.wanted  # several may be made of the same edges
        del self.found[kept:]
        if len(self.found) == kept:
            self.worst = self.found[-1][0]

    def peak(self, edges: Edges) -> int:
        """Return the bytes at the worst moment of some edges.

        The caller holds the source box throughout; it is counted once while it is the input.
        """
        box = self.space.start.box
        return max([box, *[edge.peak + (box if i else 0) for i, edge in enumerate(edges)]])


class Bound:
    """Admissible lower bound on the seconds from a state to the goal.

    It accounts for the slowest latency and for the bytes received over links of each speed.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        # (8, 6) of f32: 192
        self.whole = space.itemsize * prod(sharded.longest for sharded in space.whole)
        axes = axes_of(space.large)
        links = space.links
        # Seconds of the fastest start of a collective.
        self.start: float = min([links.latency[a] for a in axes], default=0.0)
        # The axes that are not faster than each speed.  Axis 0 slow, axis 1 fast: (0b01, slow),
        # (0b11, fast)
        speeds = sorted({links.bandwidth[a] for a in axes})
        self._levels = [
            (mask_of([a for a in axes if links.bandwidth[a] <= speed]), speed) for speed in speeds
        ]
        self._fastest = speeds[-1] if speeds else inf

    def seconds(self, here: State) -> float:
        """Return a lower bound on the seconds from a state to the goal."""
        links = self.space.links
        moving = self.space.moving(here)
        leaving = here.pending | here.leaving & ~here.becoming
        seconds = links.seconds(leaving, 0)
        # local steps make values partial as in the destination: of the finest shard at least
        if not here.made:
            finest = self.whole / links.ranks(moving & ~here.becoming)
            seconds += (bool(here.becoming) + bool(here.scaled)) * links.copy(finest)
        if leaving:
            # 10 bytes over slow links, 30 in all: 10 of them at the slow speed, the other 20 at the
            # fast one
            before = 0.0
            for axes, speed in self._levels:
                volume = self._volume(here, moving, moving & axes)
                if volume > before:
                    seconds += (volume - before) / speed
                    before = volume
        if here.pending or here.becoming:
            return seconds
        # The part that two shards have in common has at most the shorter length
        # of each dim. 8 x 8, S(0) -> S(1) over 2 ranks: a rank needs 4 x 8 elements, of which it
        # has 4 x 4.
        common = self.space.itemsize
        for old, new in zip(here.dims, self.space.wanted, strict=True):
            common *= min(old.longest, new.longest)
        # 64 / 2 - 4 * 4 = 16 elements
        lacking = self.whole / links.ranks(self.space.goal.used) - common
        return max(seconds, links.seconds(leaving, 0) + lacking / self._fastest)

    def _volume(self, here: State, moving: int, level: int) -> float:
        """Return a lower bound on the average bytes that a rank receives over axes of a level.

        These axes divide the mesh into islands, and the other axes are faster. 4 islands of 2
        ranks, 8 rows, S(0) over the islands -> R: an island has 2 rows and needs 8; 6 come to its 2
        ranks, 3 rows to each.

        To add up p values on different islands and leave the result on q of them, every element has
        to come p - 1 times to be added and q - 1 times to be held. P -> R over 4 ranks: 3 + 3
        times, 6 / 4 of it to each rank.
        """
        ranks = self.space.links.ranks
        wanted = self.space.goal.used
        # axes that still become partial are on one island with their sum
        between = level & ~here.becoming
        if here.pending:
            values = ranks(here.pending & level)
            holders = ranks(between & ~wanted)
            # on 4: 1/4 * (4 + 4 - 2)
            return self.whole / ranks(moving) * (values + holders - 2) if values > 1 else 0.0
        parts = ranks(here.used & ~wanted & between)
        island = self.whole / ranks(wanted & between)
        # 4 islands of 2: (8 - 8 / 4) / 2 = 3 rows
        return (island - island / parts) / ranks(moving & ~between)
