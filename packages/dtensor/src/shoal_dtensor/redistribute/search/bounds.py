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
from typing import TYPE_CHECKING

from ..step_cost import total
from .tokens import mask_of

if TYPE_CHECKING:
    from ..step_cost import Links
    from .costs import Costs, State


# latency, that of all but the slowest start, the last speed that must need nothing (-1: none), and for each term
# (index of a volume, seconds per byte)
Way = tuple[float, float, int, tuple[tuple[int, float], ...]]


class Bounds:
    """Lower bounds, in seconds, for the states of a space that are converted, or are not; axes are bits of a mask.

    Attributes:
        closing: seconds of the local steps that make values partial as in the destination, at least.
        floor: seconds of the fastest collective start.
    """

    __slots__ = (
        "_becoming", "_fewest", "_goal", "_islands", "_known", "_more", "_per_rank", "_sizes", "_slowest_start",
        "_start", "_wanted", "closing", "floor",
    )  # fmt: skip

    def __init__(self, costs: Costs, converted: bool) -> None:
        space = costs.space
        links, becoming = space.links, space.becoming
        self._sizes = _products(links.sizes)
        # Axes that are partial already hold tensors of their own.  Those that still become partial hold the goal
        # together, so for them islands are joined.
        moving = tuple(a for a in space.moving if a not in becoming) if converted else space.moving
        self._becoming = 0 if converted else mask_of(3 * a for a in becoming)
        self._islands = [
            (level, level & ~self._becoming, self._sizes[level & ~self._becoming]) for level in _levels(links, moving)
        ]
        everything = space.itemsize * prod(space.shape)
        self._per_rank = everything / self._sizes[mask_of(3 * a for a in moving)]
        self._fewest, self._more = _ways(links, moving)
        self._known: dict[tuple[int, Sequence[int], int, int, int], tuple[list[float], float, float, float]] = {}
        self._slowest_start = _longest(links.latency)
        self._start = costs.state(space.start, space.pending, not space.conversions)
        self._goal = costs.state(space.goal, (), True)
        wanted = self._goal.used
        self._wanted = [self._per_rank * n / self._sizes[joined & wanted] for _, joined, n in self._islands]
        self.floor: float = min((links.latency[a] for a in moving), default=0.0)
        finest = everything / self._sizes[mask_of(3 * a for a in space.moving if a not in becoming)]
        self.closing: float = 0.0 if converted else space.conversions * links.copy(finest)

    def ahead(self, state: State) -> None:
        """Fill in a state's bounds: volumes and seconds from there to the goal."""
        goal, pending = self._goal, state.waiting
        even = goal.even and state.even
        away = state.away if even else ()
        # of the axes that have to take part in a collective, those that can become partial instead may not have to
        leaving = state.leaving & ~self._becoming | pending
        missing = goal.box - int(goal.box * state.held) if even and not pending and not self._becoming else 0
        key = state.used & ~goal.used, away, leaving, pending, missing
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._ahead(*key)
        state.volumes, state.latency, state.more, state.least = known

    def _ahead(
        self, gathered: int, away: Sequence[int], leaving: int, pending: int, missing: int
    ) -> tuple[list[float], float, float, float]:
        """Volumes, seconds of the slowest start, and the bounds for two collectives and for any number."""
        volumes = self._volumes(gathered, away, self._wanted)
        if pending:
            self._reducing(volumes, pending, self._goal.used, 0)
        elif missing and volumes:
            volumes[-1] = max(volumes[-1], missing)
        latency = self._slowest_start[leaving]
        more = _cheapest(self._more, volumes, latency) + self.closing
        if not latency and not (volumes and volumes[-1]):
            return volumes, latency, more, self.closing
        return volumes, latency, more, min(more, _cheapest(self._fewest, volumes, latency) + self.closing)

    def through(self, state: State) -> None:
        """Fill in the seconds from the start to the goal through a state, on the way to which axes are reduced."""
        start, wanted, pending = self._start, state.used, state.waiting
        if pending & ~start.waiting:  # axes that were made partial brought nothing with them
            state.through = state.least
            return
        reduced = start.waiting & ~pending
        away = []
        if start.even and state.even:
            away = [m for a, b in zip(start.masks, state.masks, strict=True) if (m := a & ~b & wanted)]
        sizes = self._sizes
        whole = [self._per_rank * islands / sizes[joined & wanted] for _, joined, islands in self._islands]
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
            gathered: axes that shard a dim before and none after.
            away: for each dim the axes that shard it before and another one after.
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
                most = max(most, self._per_rank * sizes[left] * (values + holders - 2))
            volumes[i] = max(volumes[i], most)


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
    longest = [0.0]
    for one in latency:
        longest += [max(one, other) for other in longest]
    return longest


@lru_cache(maxsize=256)
def _products(sizes: tuple[int, ...]) -> list[int]:
    """For every set of axes the number of ranks along them."""
    products = [1]
    for size in sizes:
        products += [size * ranks for ranks in products]
    return products


@lru_cache(maxsize=1024)
def _levels(links: Links, moving: tuple[int, ...]) -> list[int]:
    """The axes that are no faster than each speed, slowest first."""
    speeds = sorted({links.bandwidth[a] for a in moving})
    return [mask_of(3 * a for a in moving if links.bandwidth[a] <= speed) for speed in speeds]


@lru_cache(maxsize=1024)
def _ways(links: Links, moving: tuple[int, ...]) -> tuple[list[Way], list[Way]]:
    """Sets of speeds to run collectives at: for at least one collective, and for at least two.

    Two at one speed start twice, which may still be better than one: less may have to be copied.
    """
    speeds = sorted({links.bandwidth[a] for a in moving})
    starts = [min(links.latency[a] for a in moving if links.bandwidth[a] == speed) for speed in speeds]
    one: list[Way] = []
    more: list[Way] = []
    for count in range(1, len(speeds) + 1):
        for chosen in combinations(range(len(speeds)), count):
            latency = total(starts[i] for i in chosen)
            others = latency - max(starts[i] for i in chosen)
            terms = []
            for i, nxt in zip(chosen, (*chosen[1:], None), strict=True):
                faster = 0.0 if nxt is None else 1 / speeds[nxt]
                terms.append((len(speeds) - 1 if nxt is None else nxt - 1, 1 / speeds[i] - faster))
            way = latency, others, chosen[0] - 1, tuple(terms)
            (one if count == 1 else more).append(way)
            if count == 1:
                more.append((2 * latency, latency, *way[2:]))
    return one, more
