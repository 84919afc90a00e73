"""The cheapest way between two specs: A* over the states of `states`, guided by `bounds`.

A state is left aside only if every way through it provably takes as long as one that is known.  So where the search
looks at all states (`States.complete`: up to three mesh axes of a tensor of four dims) and ends by itself, no sequence
of these edges takes less in the cost model.  After `MOST_PRICED` prices it stops with the best way so far, and
`Route.floor` is how fast any way could be at best.  It starts with the ways that settle one speed or one axis after the
other, so it is never worse than those.

Of ways that take equally long the first one is taken, direct ones first, so every rank gets the same plan.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from ...errors import RedistributeError
from ..step_cost import total
from .bounds import Bounds
from .costs import Costs, State
from .edges import Edge, edges_between
from .space import Space, spaces
from .states import States
from .tokens import Dims, mask_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...layout.spec import Spec
    from ..step_cost import Links


# Edges priced, about 4 us each, before the search settles: half of them on meshes of more than three axes, a quarter
# where it looks at some states only.
MOST_PRICED = 1200
_ALIKE = 1 - 1e-9  # a way must be faster by more than rounding errors to be preferred

Pending = tuple[int, ...]
Trail = tuple["Trail | None", State]  # a state, and where it was reached from


class Route(NamedTuple):
    """A way through the search space.

    Attributes:
        seconds: expected time.
        edges: in order.
        peak: bytes at the worst moment, the source box included.
        floor: seconds that any way takes at least; `seconds` if none is faster.
        remade: see `Space`.
    """

    seconds: float
    edges: tuple[Edge, ...]
    peak: int
    floor: float
    remade: tuple[int, ...] = ()


class _Node(NamedTuple):
    """A state that may be worth leaving; ordered by its bound.

    Attributes:
        bound: seconds of any way through it that is not known yet, at least.
        ticket: order of arrival.
        seconds: until here.
        trail: how it was reached.
    """

    bound: float
    ticket: int
    seconds: float
    trail: Trail


def routes(src: Spec, dst: Spec, links: Links, memory_limit: int | None = None, wanted: int = 1) -> list[Route]:
    """The cheapest routes that stay within `memory_limit` bytes, cheapest first: `wanted` of them if there are so many.

    The first is the cheapest of all; the others are the cheapest that the search came across.

    Raises:
        RedistributeError: if no route stays within the limit.
    """
    within: list[Route] = []
    floor = inf
    left = MOST_PRICED if sum(n > 1 for n in links.sizes) <= 3 else MOST_PRICED // 2
    for space in spaces(src, dst, links):
        search = _Search(space, memory_limit, wanted, left)
        search.worst = within[-1].seconds if len(within) == wanted else inf
        within = sorted([*within, *search.run()], key=_seconds)[:wanted]
        floor, left = min(floor, search.floor), left - search.priced
    if not within:
        space = Space(src, dst, links)
        least = min(_Search(space, None, 32).run(), key=lambda route: route.peak)
        raise RedistributeError(
            f"no redistribution stays within memory_limit={memory_limit} bytes: the leanest plan found needs "
            f"{least.peak} (source box {space.box(space.start)}, destination box {space.box(space.goal)})"
        )
    return [route._replace(floor=min(floor, route.seconds)) for route in within]


class _Search:
    def __init__(self, space: Space, memory_limit: int | None, wanted: int, most: int = MOST_PRICED) -> None:
        self.space = space
        self.limit = memory_limit
        self.wanted = wanted
        self.costs = Costs(space)
        self.most = most
        converted = Bounds(self.costs, True)
        self.bounds = (Bounds(self.costs, False) if space.conversions else converted, converted)
        moving = mask_of(3 * a for a in space.moving)
        self.free = moving, moving & ~mask_of(3 * a for a in space.becoming)  # axes that shard before and after
        self.heap: list[_Node] = []
        self.ticket = count()
        self.priced = 0
        self.known: list[tuple[float, int, Trail]] = []  # whole ways: seconds, order, trail
        self.worst = inf  # what a way has to beat
        self.floor = 0.0
        self.start = self.costs.state(space.start, space.pending, not space.conversions)
        self.goal = self.costs.state(space.goal, (), True)
        self.near: dict[tuple[Pending, bool], list[State]] = {}

    def direct(self) -> Route | None:
        """The way of one hop, where no way is faster than that: most redistributions along one mesh axis."""
        space, start, goal = self.space, self.start, self.goal
        if space.conversions or space.remade:
            return None
        if start.pending and start.dims != goal.dims:
            nested = _finer(start.dims, goal.dims)
            if not (nested and goal.even and goal.used & ~start.used == start.waiting):
                return None
        edges = tuple(edges_between(self.costs, start, goal))
        seconds = total(edge.seconds for edge in edges)
        least = self.bounded(start).least
        if len(edges) == 1 and edges[0].kind == "Slice":  # other ways end with this slice, or take a collective
            least = max(least, self.bounds[True].floor)
        if least < seconds * _ALIKE:
            return None
        return Route(seconds, edges, self.peak(edges), seconds)

    def run(self) -> list[Route]:
        """Routes in order of cost."""
        direct = self.direct() if self.wanted == 1 and self.limit is None else None
        if direct is not None:
            self.floor = direct.seconds
            return [direct]
        self.states = States(self.space)
        if not self.states.complete:
            self.most = min(self.most, MOST_PRICED // 4)
        self.offer(0.0, self.start, None)
        if self.heap and not (self.states.complete and self.space.links.uniform):
            for stops in self.states.stepwise():
                self.follow(stops)
        while self.heap and self.priced < self.most:
            node = heappop(self.heap)
            if node.bound >= self.worst * _ALIKE:
                self.heap.clear()
            elif node.seconds <= node.trail[1].reached:
                self.expand(node.seconds, node.trail)
        self.floor = self.start.least
        if self.states.complete:
            self.floor = max(self.floor, min([node.bound for node in self.heap], default=self.worst))
        ways = dict.fromkeys(self.route(trail) for _, _, trail in sorted(self.known, key=_order))
        return list(ways)[: self.wanted]

    def follow(self, stops: list[tuple[Dims, Pending]]) -> None:
        """Offer the states of a way one after the other."""
        trail: Trail = (None, self.start)
        seconds = 0.0
        for dims, pending in stops:
            here, after = trail[1], self.costs.state(dims, pending, self.start.converted)
            if after is here:
                continue
            if pending == here.pending:
                seconds += self.costs.reshard(here, after).seconds
            else:
                reduced = self.costs.all_reduce(here) if dims == here.dims else self.costs.reduce_scatter(here, after)
                seconds += reduced[0]
            if self.bounded(after).least + seconds < self.worst:
                self.offer(seconds, after, trail)
            trail = (trail, after)

    def expand(self, seconds: float, trail: Trail) -> None:
        """Offer all states that one hop leads to."""
        here = trail[1]
        if here.pending:
            self.reduce(seconds, trail)
        slices = bool(self.idle(here)) and not _is_slice(trail[0], here)  # who slices twice may as well slice once
        for after in self.within_reach(seconds, here, slices):
            if not here.placed & ~after.placed and _finer(here.dims, after.dims):
                took = self.costs.slice(after) if slices else inf
            else:
                self.priced += 1
                took = self.costs.reshard(here, after)[0]
            if seconds + took + after.least < self.worst:
                self.offer(seconds + took, after, trail)

    def within_reach(self, seconds: float, here: State, slices: bool) -> Iterator[State]:
        """States to which one hop may be worth it, those first that are nearest to the goal."""
        placed, closing, known = here.placed, self.bounds[here.converted].closing, self.costs.departures
        for after in self.candidates(here):
            so_far = seconds + after.least
            if so_far >= self.worst or self.priced >= self.most:
                return
            # A collective to where it takes another one makes two, which may take too long.
            twice = after.least > closing and seconds + here.more >= self.worst
            if twice and not slices:
                return
            leaving = placed & ~after.placed
            if leaving:
                start, per_byte = known.get(leaving) or self.costs.departure(leaving)
                if twice or so_far + start + per_byte * after.box >= self.worst:
                    continue
            if after.reached > seconds and after is not here and self.passed(after) < self.worst:
                yield after

    def reduce(self, seconds: float, trail: Trail) -> None:
        """Offer what reductions lead to.

        An all-reduce is the last reduction of a plan and takes all axes that are left: two in a row could leave
        replicas that differ in the last bit, as each group may add in its own order.
        """
        here = trail[1]
        done = self.costs.state(here.dims, (), here.converted)
        self.offer(seconds + self.costs.all_reduce(here)[0], done, trail)
        if self.start.least >= self.worst * _ALIKE:  # no way is faster than the one that is known
            return
        for after in self.costs.joined(here):
            self.offer(seconds + self.costs.join(after), after, trail)
        latency, waiting = self.costs.latency, here.waiting
        for dims, left in self.states.scattered(here.dims, here.pending):
            after = self.bounded(self.costs.state(dims, left, here.converted))
            if seconds + latency[waiting & ~after.waiting] + after.least < self.worst:
                self.priced += 1
                self.offer(seconds + self.costs.reduce_scatter(here, after)[0], after, trail)

    def candidates(self, here: State) -> list[State]:
        """States with the same axes to reduce, those first that are nearest to the goal."""
        key = here.pending, here.converted
        near = self.near.get(key)
        if near is None:
            busy = (*here.pending, *self.space.becoming) if here.converted else here.pending
            states = [self.bounded(self.costs.state(dims, *key)) for dims in self.states.without(busy)]
            near = self.near[key] = sorted([s for s in states if s.least < self.worst], key=_by_least)
        return near

    def bounded(self, state: State) -> State:
        """The state, its bounds known."""
        if state.least < 0:
            self.bounds[state.converted].ahead(state)
        return state

    def idle(self, state: State) -> int:
        """The axes that may still shard a dim, as bits."""
        return self.free[state.converted] & ~(state.used | state.waiting)

    def passed(self, state: State) -> float:
        """Seconds of any way through a state, at least."""
        if state.converted is not self.start.converted:
            return state.least
        if state.through < 0:
            self.bounds[state.converted].through(state)
        return state.through

    def offer(self, seconds: float, state: State, came: Trail | None) -> None:
        """Take note of a way to a state, of its conversion and, with nothing to reduce, of the way to the goal."""
        if state.reached <= seconds or seconds + self.bounded(state).least >= self.worst:
            return
        trail: Trail = (came, state)
        if self.limit is not None and self.peak(self.edges(trail)) > self.limit:
            return
        state.reached = seconds
        bound = seconds + state.least
        if not state.pending and state.converted:
            self.priced += 1
            self.note(seconds + self.costs.reshard(state, self.goal)[0], (trail, self.goal))
            # It takes two collectives to go on, unless something else can be sliced before the one.  Where not all
            # states are looked at, ways of one collective are not varied.
            bound = seconds + (state.least if self.states.complete and self.idle(state) else state.more)
        if not state.converted:
            after = self.costs.conversion(state)
            if after is not None:
                self.offer(seconds + self.costs.convert(after), after, trail)
        if bound < self.worst:
            heappush(self.heap, _Node(bound, next(self.ticket), seconds, trail))

    def note(self, seconds: float, trail: Trail) -> None:
        """Remember a whole way if it is among the best, unless it takes too much memory."""
        if seconds >= self.worst * _ALIKE:
            return
        if self.limit is not None and self.route(trail).peak > self.limit:
            return
        self.known.append((seconds, next(self.ticket), trail))
        self.known.sort(key=_order)
        kept = 1 if self.wanted == 1 else 8 * self.wanted  # several may be made of the same edges
        del self.known[kept:]
        if len(self.known) == kept:
            self.worst = self.known[-1][0]

    def route(self, trail: Trail) -> Route:
        """The edges of a whole way."""
        edges = self.edges(trail)
        seconds = total(edge.seconds for edge in edges)
        return Route(seconds, edges, self.peak(edges), min(seconds, self.floor), self.space.remade)

    def edges(self, trail: Trail) -> tuple[Edge, ...]:
        """The edges that lead along a trail."""
        states: list[State] = []
        here: Trail | None = trail
        while here is not None:
            states.append(here[1])
            here = here[0]
        hops = pairwise(reversed(states))
        return tuple([edge for before, after in hops for edge in edges_between(self.costs, before, after)])

    def peak(self, edges: tuple[Edge, ...]) -> int:
        """Bytes at the worst moment: the caller holds the source box throughout, once while it is the input."""
        if not edges:
            return self.start.box
        return max([edges[0].peak] + [edge.peak + self.start.box for edge in edges[1:]])


def _is_slice(came: Trail | None, here: State) -> bool:
    """Whether the last hop of a trail only sliced."""
    if came is None:
        return False
    before = came[1]
    alike = before.pending == here.pending and before.converted == here.converted
    return alike and _finer(before.dims, here.dims)


def _finer(old: Dims, new: Dims) -> bool:
    """Whether all shards of `new` are parts of those of `old`."""
    return all(b[: len(a)] == a for a, b in zip(old, new, strict=True))


def _seconds(route: Route) -> float:
    return route.seconds


def _order(way: tuple[float, int, Trail]) -> tuple[float, int]:
    return way[:2]


def _by_least(state: State) -> float:
    return state.least
