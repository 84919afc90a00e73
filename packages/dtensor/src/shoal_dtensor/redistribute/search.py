"""The cheapest way between two specs: A* over the moves of `moves`.

The bound never overestimates: to reduce p values and leave the result on q ranks, every element
is received at least (p - 1) + (q - 1) times, and at least one collective has to start.  Ties are
broken by the number of moves, then by memory, then by the order in which moves are generated,
so every rank finds the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain, count
from math import prod
from typing import NamedTuple

from ..errors import RedistributeError
from .moves import finishes, presliced, reductions
from .relay import gathers, relays
from .space import Dims, Move, Space

__all__ = ["Route", "routes"]

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
        self.closed: set[tuple[Dims, tuple[int, ...]]] = set()
        links = space.links
        self.least_latency = min(links.latency, default=0.0)
        self.best_bandwidth = max(links.bandwidth, default=1.0)
        holders = space.ranks // prod(links.sizes[t // 3] for tokens in space.goal for t in tokens)
        self.holders = max(1, holders // max(1, prod(links.sizes[a] for a in space.becoming)))
        self.elements = space.itemsize * prod(space.shape)

    def run(self, wanted: int) -> list[Route]:
        """Routes in order of cost."""
        space = self.space
        found: list[Route] = []
        self.detours |= wanted > 1
        starts = presliced(space, space.start) if space.pending else [(space.start, ())]
        for begin, lead in starts:
            self.push(sum(move.seconds for move in lead), begin, space.pending, lead)
        while self.heap and len(found) < wanted:
            _, _, _, _, seconds, dims, pending, moves = heappop(self.heap)
            if dims is None:
                if all(moves != route.moves for route in found):
                    found.append(Route(seconds, moves, self.peak(moves)))
                continue
            if wanted == 1:
                if (dims, pending) in self.closed:
                    continue
                self.closed.add((dims, pending))
            for more in self.edges(dims, pending, all_kinds=wanted > 1):
                last = more[-1]
                self.push(seconds + sum(move.seconds for move in more), last.dims, last.pending, (*moves, *more))
        return found

    def edges(self, dims: Dims, pending: tuple[int, ...], *, all_kinds: bool) -> Iterator[tuple[Move, ...]]:
        """Chains of moves that lead out of a state, short of the goal."""
        if pending:
            return ((move,) for move in reductions(self.space, dims, pending))
        return chain(relays(self.space, dims), gathers(self.space, dims) if all_kinds else ())

    def push(self, seconds: float, dims: Dims, pending: tuple[int, ...], path: tuple[Move, ...]) -> None:
        """Offer a state; out of one without reductions also the goal, which is at most one collective away."""
        if pending:
            self.put(seconds + self.bound(pending), seconds, dims, pending, path)
            return
        for more in finishes(self.space, dims):
            total = seconds + sum(move.seconds for move in more)
            self.put(total, total, None, (), (*path, *more))
        if self.detours:
            self.put(seconds + self.remaining(dims), seconds, dims, (), path)

    def put(
        self, bound: float, seconds: float, dims: Dims | None, pending: tuple[int, ...], path: tuple[Move, ...]
    ) -> None:
        """Queue a node unless its path needs too much memory."""
        peak = self.peak(path)
        if self.limit is None or peak <= self.limit:
            heappush(self.heap, (bound, len(path), peak, next(self.ticket), seconds, dims, pending, path))

    def remaining(self, dims: Dims) -> float:
        """Seconds that a sharding needs at least: what its worst rank lacks has to come over some link."""
        space = self.space
        if space.becoming or not space.even(dims, range(len(dims))) or not space.even(space.goal, range(len(dims))):
            return self.least_latency
        return self.least_latency + space.missing(dims, space.goal) / self.best_bandwidth

    def bound(self, pending: tuple[int, ...]) -> float:
        """Seconds that a state with these axes to reduce needs at least."""
        transfers = self.space.links.group(pending) - 1 + self.holders - 1
        received = self.elements * transfers / self.space.ranks
        return self.least_latency + received / self.best_bandwidth

    def peak(self, moves: tuple[Move, ...]) -> int:
        """Bytes at the worst moment: the caller holds the source box throughout, once while it is the input."""
        if not moves:
            return self.source
        return max([moves[0].peak] + [move.peak + self.source for move in moves[1:]])
