"""What any plan takes at least: the bounds that guide the search.  They never overestimate.

For each speed, the axes that are no faster divide the mesh into islands.  What an island lacks has
to come to it through collectives over those axes: what its goal has and its boxes have not, on
average over the islands; and to reduce p values that lie on different islands and leave the result
on q of them, every element has to come at least (p - 1) + (q - 1) times.  From these volumes, one
for each speed, follows the time, once for every set of speeds at which collectives may run: each
starts once, and bytes go at the fastest of these speeds that their islands allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from math import inf, prod

from .prices import Prices, State, mask_of
from .pricing import Links

__all__ = ["Bounds"]

# latency, that of all but the slowest start, the last speed that must need nothing (-1: none), and for each term
# (index of a volume, seconds per byte)
Way = tuple[float, float, int, tuple[tuple[int, float], ...]]


class Bounds:
    """Lower bounds, in seconds, for the states of a space; axes are bits of a mask.

    Attributes:
        closing: seconds of the local steps after the last collective.
        floor: seconds of the fastest start.
    """

    __slots__ = (
        "_becoming", "_fewest", "_goal", "_islands", "_more", "_prices", "_sizes", "_slowest_start", "_start",
        "_wanted", "_whole", "closing", "floor", "space",
    )  # fmt: skip

    def __init__(self, prices: Prices, moving: tuple[int, ...]) -> None:
        self.space = space = prices.space
        self._prices = prices
        links = space.links
        self._sizes = _products(links.sizes)
        # Axes that become partial hold the goal together, so for them islands are joined.
        self._becoming = mask_of(3 * a for a in space.becoming)
        self._islands = [
            (level, level & ~self._becoming, self._sizes[level & ~self._becoming]) for level in _levels(links, moving)
        ]
        self._whole = space.itemsize * prod(space.shape) / self._sizes[mask_of(3 * a for a in moving)]
        self._fewest, self._more = _ways(links, moving, space.bulky)
        self._slowest_start = _longest(links.latency)
        self._start, self._goal = prices.state(space.start, space.pending), prices.state(space.goal, ())
        wanted = self._goal.used
        self._wanted = [self._whole * n / self._sizes[joined & wanted] for _, joined, n in self._islands]
        self.floor = min((links.latency[a] for a in moving), default=0.0)
        self.closing = links.copy(space.box(space.goal)) if space.becoming or space.scaled else 0.0

    def ahead(self, state: State, pending: int) -> None:
        """Fill in a state's bounds: volumes and seconds from there to the goal."""
        goal = self._goal
        wanted, gathered, away = goal.used, state.used & ~goal.used, []
        leaving = gathered
        for a, b in zip(state.masks, goal.masks, strict=True):
            moved = a & ~b & wanted
            if moved:
                leaving |= moved
                away.append(moved)
        even = goal.even and state.even
        volumes = self._volumes(gathered, away if even else (), self._wanted)
        if pending:
            self._reducing(volumes, pending, wanted, 0)
        elif even and volumes and not self._becoming:
            volumes[-1] = max(volumes[-1], self._missing(state))
        latency = self._slowest_start[leaving & ~self._becoming | pending]
        state.volumes, state.latency = volumes, latency
        more = _cheapest(self._more, volumes, latency) + self.closing
        state.more = state.least = more
        if not latency and not (volumes and volumes[-1]):
            state.least = self.closing
        else:
            state.least = min(more, _cheapest(self._fewest, volumes, latency) + self.closing)

    def through(self, state: State, pending: int, reduced: int) -> None:
        """Fill in the seconds from the start to the goal through a state, on the way to which axes are reduced."""
        start, wanted = self._start, state.used
        away = []
        if start.even and state.even:
            away = [m for a, b in zip(start.masks, state.masks, strict=True) if (m := a & ~b & wanted)]
        share, sizes = self._whole, self._sizes
        whole = [share * islands / sizes[joined & wanted] for _, joined, islands in self._islands]
        volumes = self._volumes(start.used & ~wanted, away, whole)
        if reduced:
            self._reducing(volumes, reduced, wanted, pending)
        volumes = [a + b for a, b in zip(volumes, state.volumes, strict=True)]
        more = _cheapest(self._more, volumes, state.latency)
        if volumes and volumes[-1]:
            more = min(more, _cheapest(self._fewest, volumes, state.latency))
        state.through = max(state.least, more + self.closing) if volumes and volumes[-1] else state.least

    def _volumes(self, gathered: int, away: Sequence[int], wanted: list[float]) -> list[float]:
        """For every speed, bytes that a rank receives at least at that speed or slower, between two shardings.

        Args:
            gathered: axes that cut before and not after.
            away: for each dim the axes that cut it before and another one after.
            wanted: for every speed, bytes of an island after, for each of its ranks.
        """
        sizes = self._sizes
        volumes, most = [], 0.0
        for (_, joined, _), whole in zip(self._islands, wanted, strict=True):
            ways = sizes[gathered & joined]
            if away:
                ways *= max([sizes[moved & joined] for moved in away])
            if ways > 1:
                lacking = whole - whole / ways
                if lacking > most:
                    most = lacking
            volumes.append(most)
        return volumes

    def _reducing(self, volumes: list[float], reduced: int, wanted: int, left: int) -> None:
        """Raise volumes to what reducing some axes takes."""
        sizes, most = self._sizes, 0.0
        for i, (level, _, _) in enumerate(self._islands):
            values = sizes[reduced & level]
            if values > 1:
                holders = sizes[level & ~(wanted | left | self._becoming)]
                most = max(most, self._whole * sizes[left] * (values + holders - 2))
            volumes[i] = max(volumes[i], most)

    def _missing(self, state: State) -> float:
        """Bytes that the rank with the least in common has to receive."""
        share = 1.0
        for dim, (cut, goal) in enumerate(zip(state.cuts, self._goal.cuts, strict=True)):
            if cut != goal:
                share *= self._prices.pair(dim, state, self._goal)[2]
        return self._goal.box - int(self._goal.box * share)


def _cheapest(ways: list[Way], volumes: list[float], latency: float) -> float:
    """Seconds of the cheapest way, one collective of which starts no faster than in `latency`."""
    best = inf
    for start, others, quiet, terms in ways:
        if quiet >= 0 and volumes[quiet]:
            continue
        seconds = max(start, others + latency)
        for index, per_byte in terms:
            seconds += volumes[index] * per_byte
        if seconds < best:
            best = seconds
    return best


@lru_cache(maxsize=256)
def _longest(latency: tuple[float, ...]) -> list[float]:
    """For every set of axes the largest latency."""
    found = [0.0]
    for one in latency:
        found += [max(one, other) for other in found]
    return found


@lru_cache(maxsize=256)
def _products(sizes: tuple[int, ...]) -> list[int]:
    """For every set of axes the number of ranks along them."""
    found = [1]
    for size in sizes:
        found += [size * ranks for ranks in found]
    return found


@lru_cache(maxsize=1024)
def _levels(links: Links, moving: tuple[int, ...]) -> list[int]:
    """The axes that are no faster than each speed, slowest first."""
    speeds = sorted({links.bandwidth[a] for a in moving})
    return [mask_of(3 * a for a in moving if links.bandwidth[a] <= speed) for speed in speeds]


@lru_cache(maxsize=1024)
def _ways(links: Links, moving: tuple[int, ...], bulky: bool) -> tuple[list[Way], list[Way]]:
    """Sets of speeds to run collectives at: one collective, and more than one.

    Several at one speed are never better than one, except that a large tensor may be copied less.
    """
    speeds = sorted({links.bandwidth[a] for a in moving})
    starts = [min(links.latency[a] for a in moving if links.bandwidth[a] == speed) for speed in speeds]
    one: list[Way] = []
    more: list[Way] = []
    for count in range(1, len(speeds) + 1):
        for chosen in combinations(range(len(speeds)), count):
            latency = sum(starts[i] for i in chosen)
            others = latency - max(starts[i] for i in chosen)
            terms = []
            for i, nxt in zip(chosen, (*chosen[1:], None), strict=True):
                faster = 0.0 if nxt is None else 1 / speeds[nxt]
                terms.append((len(speeds) - 1 if nxt is None else nxt - 1, 1 / speeds[i] - faster))
            way = latency, others, chosen[0] - 1, tuple(terms)
            (one if count == 1 else more).append(way)
            if count == 1 and bulky:
                more.append((2 * latency, latency, *way[2:]))
    return one, more
