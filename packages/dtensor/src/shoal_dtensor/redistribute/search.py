"""The cheapest way between two specs: A* over the states of `states`, guided by `bounds`.

A state is left aside only if every way through it provably takes as long as one that is known, so
what is found is the cheapest there is among the states looked at: all of them up to three mesh axes.
(If one collective is enough and the tensor is small or uneven, cutting replicated axes in another way
beforehand might save a little more.)  Where
axes differ in speed the search may stop early, after `MOST_PRICED` prices, with the best way so far;
it starts with the ways that settle one speed or one axis after the other, so it is never worse than
those, and it says how much faster any way could be at best.

Of ways that take equally long the first found is taken, direct ones first, so every rank finds the
same plan.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf
from typing import NamedTuple

from ..errors import RedistributeError
from .bounds import Bounds
from .moves import all_reduce, finishes, last_shardings, reduce_scatter, transition
from .prices import Prices, State, mask_of
from .space import Dims, Move, Space
from .states import States

__all__ = ["MOST_PRICED", "Route", "routes"]

MOST_PRICED = 500  # moves priced before the search settles for what it has; about 5 us each
_ALIKE = 1 - 1e-9  # a way must be faster by more than rounding errors to be preferred

Pending = tuple[int, ...]
Trail = tuple["Trail | None", State]  # a state, and where it was reached from


class Route(NamedTuple):
    """A way through the search space.

    Attributes:
        seconds: expected time.
        moves: in order.
        peak: bytes at the worst moment, the source box included.
        floor: seconds that any way takes at least, as far as the search has proven.
    """

    seconds: float
    moves: tuple[Move, ...]
    peak: int
    floor: float


class _Node(NamedTuple):
    """A state that may be worth leaving; ordered by its bound.

    Attributes:
        bound: seconds of any way through it with at least one more collective before the last.
        ticket: order of arrival.
        seconds: until here.
        speed: bandwidth of the collective that led here between two shardings, 0 if something else did.
        trail: how it was reached.
    """

    bound: float
    ticket: int
    seconds: float
    speed: float
    trail: Trail


def routes(space: Space, memory_limit: int | None = None, wanted: int = 1) -> list[Route]:
    """The cheapest routes that stay within `memory_limit` bytes, cheapest first: `wanted` of them if there are so many.

    The first is the cheapest of all; the others are the cheapest that the search came across.

    Raises:
        RedistributeError: if no route stays within the limit.
    """
    found = _Search(space, memory_limit, wanted).run()
    if not found:
        least = min(_Search(space, None, 32).run(), key=lambda route: route.peak)
        raise RedistributeError(
            f"no redistribution stays within memory_limit={memory_limit} bytes: the leanest plan found needs "
            f"{least.peak} (source box {space.box(space.start)}, destination box {space.box(space.goal)})"
        )
    return found


class _Search:
    def __init__(self, space: Space, memory_limit: int | None, wanted: int) -> None:
        self.space = space
        self.limit = memory_limit
        self.wanted = wanted
        self.source = space.box(space.start)
        self.prices = Prices(space)
        self.states = States(space)
        self.bounds = Bounds(self.prices, self.states.moving)
        self.heap: list[_Node] = []
        self.ticket = count()
        self.priced = 0
        self.found: list[tuple[float, int, Trail, int]] = []  # seconds, order, trail, which of its finishes
        self.worst = inf  # what a way has to beat
        self.floor = 0.0
        self.goal = self.prices.state(space.goal, ())
        self.pending = mask_of(3 * a for a in space.pending)
        self.near: dict[Pending, list[State]] = {}

    def run(self) -> list[Route]:
        """Routes in order of cost."""
        self.offer(0.0, self.prices.state(self.space.start, self.space.pending), 0.0, None)
        if not self.space.links.uniform and self.heap:
            for stops in self.states.stepwise():
                self.follow(stops)
        while self.heap and self.priced < MOST_PRICED:
            node = heappop(self.heap)
            if node.bound >= self.worst:
                self.heap.clear()
            elif node.seconds <= node.trail[1].reached:
                self.expand(node)
        self.floor = min([node.bound for node in self.heap], default=self.worst)
        found = dict.fromkeys(self.route(trail, finish) for _, _, trail, finish in sorted(self.found, key=_order))
        return list(found)[: self.wanted]

    def follow(self, stops: list[tuple[Dims, Pending]]) -> None:
        """Offer the states of a way one after the other."""
        trail: Trail = (None, self.prices.state(self.space.start, self.space.pending))
        seconds = 0.0
        for dims, pending in stops:
            here, after = trail[1], self.prices.state(dims, pending)
            if after is here:
                continue
            if pending == here.pending:
                seconds += self.prices.between(here, after)[0]
            else:
                seconds += self.prices.all_reduced(here) if dims == here.dims else self.prices.scattered(here, after)
            if self.bounded(after).least + seconds < self.worst:
                self.offer(seconds, after, 0.0, trail)
            trail = (trail, after)

    def expand(self, node: _Node) -> None:
        """Offer all states that one step leads to."""
        _, _, seconds, speed, trail = node
        came, here = trail
        if here.pending:
            self.reduce(seconds, trail)
        detours, mask = self.space.bulky or self.wanted > 1, mask_of([3 * a for a in here.pending])
        # What is cut away in the end had better be cut away before anything moves, unless a later cut lies outside it.
        slices = came is None or bool(here.pending or self.space.becoming)
        floor = seconds if slices else seconds + self.bounds.floor
        between, pending = self.prices.between, here.pending
        straight = self.space.links.uniform and not pending and self.wanted == 1
        for after in self.candidates(pending):
            if floor + after.least >= self.worst:
                break
            if after.reached <= seconds or after is here or self.passed(after, mask) >= self.worst:
                continue
            self.priced += 1
            took, axes = between(here, after, mask)
            if seconds + took + after.least >= self.worst or (straight and not self.on_the_way(trail, after)):
                continue
            if not axes and not slices:
                continue
            pace = self.prices.speed(axes) if axes and not pending else 0.0
            if pace and pace == speed and not detours:
                continue  # in one go it takes no longer
            self.offer(seconds + took, after, pace, trail)

    def on_the_way(self, trail: Trail, after: State) -> bool:
        """Whether a state costs no bytes on the way to the goal: among equal axes, copying less must not mean that.

        Bytes are those of the average rank: what the busiest one receives may hide that others receive more.
        """
        missing, goal = self.space.average_missing, self.goal.dims
        stops = [goal, after.dims]
        came: Trail | None = trail
        while came is not None and not came[1].pending:
            stops.append(came[1].dims)
            came = came[0]
        total = sum(missing(b, a) for a, b in pairwise(stops))
        return total <= missing(stops[-1], goal) * (1 + 1e-9)

    def reduce(self, seconds: float, trail: Trail) -> None:
        """Offer what reductions lead to.

        An all-reduce is the last reduction of a plan and takes all axes that are left: two in a row could leave
        replicas that differ in the last bit, as each group may add in its own order.
        """
        here = trail[1]
        done = self.bounded(self.prices.state(here.dims, ()))
        self.offer(seconds + self.prices.all_reduced(here), done, 0.0, trail)
        for dims, left in self.states.scattered(here.dims, here.pending):
            after = self.bounded(self.prices.state(dims, left))
            if seconds + self.bounds.floor + after.least < self.worst:
                self.priced += 1
                self.offer(seconds + self.prices.scattered(here, after), after, 0.0, trail)

    def candidates(self, pending: Pending) -> list[State]:
        """States with these axes to reduce, those first that are nearest to the goal."""
        found = self.near.get(pending)
        if found is None:
            states = [self.bounded(self.prices.state(dims, pending)) for dims in self.states.between(pending)]
            found = self.near[pending] = sorted([s for s in states if s.least < self.worst], key=_by_least)
        return found

    def bounded(self, state: State) -> State:
        """The state, its bounds known."""
        if state.least < 0:
            self.bounds.ahead(state, mask_of([3 * a for a in state.pending]))
        return state

    def passed(self, state: State, pending: int) -> float:
        """Seconds of any way through a state, at least."""
        if state.through < 0:
            self.bounds.through(state, pending, self.pending & ~pending)
        return state.through

    def offer(self, seconds: float, state: State, speed: float, came: Trail | None) -> None:
        """Take note of a way to a state; out of one without reductions also of the direct way to the goal."""
        if state.reached <= seconds:
            return
        trail: Trail = (came, state)
        if self.limit is not None and self.peak(self.moves(trail)) > self.limit:
            return
        state.reached = seconds
        least = self.bounded(state).least
        if not state.pending:
            least = state.more if self.wanted == 1 else least
            for finish, took in enumerate(self.finishing(state)):
                if seconds + took < self.worst * _ALIKE:
                    self.note(seconds + took, trail, finish)
        if seconds + least < self.worst:
            heappush(self.heap, _Node(seconds + least, next(self.ticket), seconds, speed, trail))

    def finishing(self, state: State) -> list[float]:
        """Seconds of the direct ways to the goal."""
        if not self.bounds.closing:
            self.priced += 1
            return [self.prices.between(state, self.goal)[0]]
        found = []
        for dims, local in last_shardings(self.space, state.dims):
            self.priced += 1
            found.append(self.prices.between(state, self.prices.state(dims, ()))[0] + local * self.bounds.closing)
        return found

    def note(self, seconds: float, trail: Trail, finish: int) -> None:
        """Remember a whole way, unless it takes too much memory."""
        if self.limit is not None and self.route(trail, finish).peak > self.limit:
            return
        self.found.append((seconds, next(self.ticket), trail, finish))
        self.found.sort(key=_order)
        kept = 1 if self.wanted == 1 else 8 * self.wanted  # several may be made of the same moves
        del self.found[kept:]
        if len(self.found) == kept:
            self.worst = self.found[-1][0]

    def route(self, trail: Trail, finish: int) -> Route:
        """The moves of a whole way."""
        moves = (*self.moves(trail), *list(finishes(self.space, trail[1].dims))[finish])
        seconds = sum(move.seconds for move in moves)
        return Route(seconds, moves, self.peak(moves), min(seconds, self.floor))

    def moves(self, trail: Trail) -> tuple[Move, ...]:
        """The moves that lead along a trail."""
        came, after = trail
        if came is None:
            return ()
        space, before = self.space, came[1]
        if after.pending == before.pending:
            return *self.moves(came), *transition(space, before.dims, after.dims, after.pending)
        if after.dims == before.dims:
            return *self.moves(came), all_reduce(space, before.dims, before.pending)
        return *self.moves(came), reduce_scatter(space, before.dims, after.dims, before.pending, after.pending)

    def peak(self, moves: tuple[Move, ...]) -> int:
        """Bytes at the worst moment: the caller holds the source box throughout, once while it is the input."""
        if not moves:
            return self.source
        return max([moves[0].peak] + [move.peak + self.source for move in moves[1:]])


def _order(way: tuple[float, int, Trail, int]) -> tuple[float, int]:
    return way[:2]


def _by_least(state: State) -> float:
    return state.least
