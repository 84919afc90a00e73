"""What any way to the goal takes at least: the bound that guides the search.  It never overestimates."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ..step_cost import axes_of, mask_of

if TYPE_CHECKING:
    from .space import Space, State


class Bound:
    """Seconds from a state to the goal, at least: the slowest start, and what has to come over links of each speed.

    Attributes:
        start: seconds of the fastest start of a collective.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.whole = space.itemsize * prod(space.shape)
        axes, links = axes_of(space.large), space.links
        self.start: float = min([links.latency[a] for a in axes], default=0.0)
        # The axes that are no faster than each speed.  Axis 0 slow, axis 1 fast: (0b01, slow), (0b11, fast)
        speeds = sorted({links.bandwidth[a] for a in axes})
        self._levels = [(mask_of([a for a in axes if links.bandwidth[a] <= speed]), speed) for speed in speeds]
        self._known: dict[State, float] = {}

    def __call__(self, here: State) -> float:
        """Seconds from a state to the goal, at least."""
        seconds = self._known.get(here)
        if seconds is None:
            seconds = self._known[here] = self._ahead(here)
        return seconds

    def copies(self, here: State) -> float:
        """Seconds of the local steps that make values partial as in the destination, at least."""
        if here.made:
            return 0.0
        links, space = self.space.links, self.space
        finest = self.whole / links.ranks(space.moving(here) & ~here.becoming)
        return (bool(here.becoming) + bool(here.scaled)) * links.copy(finest)

    def _ahead(self, here: State) -> float:
        links = self.space.links
        leaving = here.pending | here.leaving & ~here.becoming
        seconds = links.seconds(leaving, 0) + self.copies(here)
        if leaving:
            # 10 bytes over slow links, 30 in all: 10 of them at the slow speed, the other 20 at the fast one
            moving, before = self.space.moving(here), 0.0
            for axes, speed in self._levels:
                volume = self._volume(here, moving, moving & axes)
                if volume > before:
                    seconds += (volume - before) / speed
                    before = volume
        return seconds

    def _volume(self, here: State, moving: int, level: int) -> float:
        """Bytes that a rank receives at least, on average, through collectives over axes of a level.

        These axes divide the mesh into islands, over the others all is fast.  4 islands of 2 ranks, 8 rows, S(0) over
        the islands -> R: an island has 2 rows and needs 8; 6 come to its 2 ranks, 3 rows to each.

        To add up p values that lie on different islands and leave the result on q of them, every element has to come
        p - 1 times to be added and q - 1 times to be held.  P -> R over 4 ranks: 3 + 3 times, 6 / 4 of it to each rank.
        """
        ranks, wanted = self.space.links.ranks, self.space.goal.used
        between = level & ~here.becoming  # what still becomes partial is one island with all that it adds up to
        if here.pending:
            values, holders = ranks(here.pending & level), ranks(between & ~wanted)
            return self.whole / ranks(moving) * (values + holders - 2) if values > 1 else 0.0
        parts = ranks(here.used & ~wanted & between)
        island = self.whole / ranks(wanted & between)
        return (island - island / parts) / ranks(moving & ~between)
