"""The cheapest way between two specs: A* over the moves of `moves`.

Ties are broken by the number of moves, then by memory, then by the order in which moves are
generated, so every rank finds the same plan.  Where axes differ in speed the number of states may
explode; after `MOST_EXPANDED` of them the best plan so far is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain, count
from typing import NamedTuple

from ..errors import RedistributeError
from .bounds import Bounds
from .moves import finishes, presliced, reductions
from .relay import early, gathers, relays
from .space import Dims, Move, Space

__all__ = ["MOST_EXPANDED", "Route", "routes"]

MOST_EXPANDED = 48  # states; a few are enough on a mesh whose axes are equally fast

# (bound, moves so far, peak, ticket, seconds so far, cuts or None at the goal, axes to reduce, moves)
Node = tuple[float, int, int, int, float, "Dims | None", tuple[int, ...], tuple[Move, ...]]


class Route(NamedTuple):
    """A way through the search space.

    Attributes:
        seconds: expected time.
        moves: in order.
        peak: bytes at the worst moment, the source box included.
    """

    seconds: float
    moves: tuple[Move, ...]
    peak: int


def routes(space: Space, memory_limit: int | None = None, wanted: int = 1) -> list[Route]:
    """The `wanted` cheapest routes that stay within `memory_limit` bytes, cheapest first.

    Raises:
        RedistributeError: if no route stays within the limit.
    """
    search = _Search(space, memory_limit)
    found = search.run(wanted)
    if not found:
        least = min(_Search(space, None).run(8), key=lambda route: route.peak)
        raise RedistributeError(
            f"no redistribution stays within memory_limit={memory_limit} bytes: the leanest plan found needs "
            f"{least.peak} (source box {space.box(space.start)}, destination box {space.box(space.goal)})"
        )
    return found


class _Search:
    def __init__(self, space: Space, memory_limit: int | None) -> None:
        self.space = space
        self.limit = memory_limit
        self.source = space.box(space.start)
        self.heap: list[Node] = []
        self.ticket = count()
        self.detours = space.bulky or not space.links.uniform
        self.one = True
        self.incumbent = float("inf")
        self.reached: dict[tuple[Dims, tuple[int, ...]], float] = {}
        self.bounds = Bounds(space)

    def run(self, wanted: int) -> list[Route]:
        """Routes in order of cost."""
        space = self.space
        found: list[Route] = []
        self.one = wanted == 1
        self.detours |= not self.one
        starts = presliced(space, space.start) if space.pending else [(space.start, ())]
        for begin, lead in starts:
            self.push(sum(move.seconds for move in lead), begin, space.pending, lead)
        expanded = 0
        while self.heap and len(found) < wanted:
            _, _, _, _, seconds, dims, pending, moves = heappop(self.heap)
            if dims is None:
                if all(moves != route.moves for route in found):
                    found.append(Route(seconds, moves, self.peak(moves)))
                continue
            if expanded == MOST_EXPANDED or (self.one and seconds > self.reached[dims, pending]):
                continue
            expanded += 1
            for more in self.edges(dims, pending):
                last = more[-1]
                self.push(seconds + sum(move.seconds for move in more), last.dims, last.pending, (*moves, *more))
        return found

    def edges(self, dims: Dims, pending: tuple[int, ...]) -> Iterator[tuple[Move, ...]]:
        """Chains of moves that lead out of a state, short of the goal."""
        if pending:
            reduced = ((move,) for move in reductions(self.space, dims, pending))
            return chain(reduced, early(self.space, dims, pending))
        return chain(relays(self.space, dims), () if self.one else gathers(self.space, dims))

    def push(self, seconds: float, dims: Dims, pending: tuple[int, ...], path: tuple[Move, ...]) -> None:
        """Offer a state; out of one without reductions also the goal, which is at most one collective away."""
        bound = seconds + (self.bounds.reducing(pending) if pending else self.bounds.moving(dims))
        if self.one and not self.promising(bound, seconds, dims, pending):
            return
        if pending:
            self.put(bound, seconds, dims, pending, path)
            return
        for more in finishes(self.space, dims):
            total = seconds + sum(move.seconds for move in more)
            self.put(total, total, None, (), (*path, *more))
        if self.detours:
            self.put(bound, seconds, dims, (), path)

    def promising(self, bound: float, seconds: float, dims: Dims, pending: tuple[int, ...]) -> bool:
        """Whether a state may lead to something better than what is known; with a memory limit no path dominates."""
        if self.limit is not None:
            self.reached[dims, pending] = float("inf")
            return True
        if bound > self.incumbent or self.reached.get((dims, pending), float("inf")) <= seconds:
            return False
        self.reached[dims, pending] = seconds
        return True

    def put(
        self, bound: float, seconds: float, dims: Dims | None, pending: tuple[int, ...], path: tuple[Move, ...]
    ) -> None:
        """Queue a node unless its path needs too much memory."""
        peak = self.peak(path)
        if self.limit is None or peak <= self.limit:
            heappush(self.heap, (bound, len(path), peak, next(self.ticket), seconds, dims, pending, path))
            if dims is None:
                self.incumbent = min(self.incumbent, seconds)

    def peak(self, moves: tuple[Move, ...]) -> int:
        """Bytes at the worst moment: the caller holds the source box throughout, once while it is the input."""
        if not moves:
            return self.source
        return max([moves[0].peak] + [move.peak + self.source for move in moves[1:]])
