"""The lower bound on the remaining cost by which the search prunes and orders states."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING

from .links import axes_of, mask_of

if TYPE_CHECKING:
    from .space import Space, State


class Bound:
    """Admissible lower bound on the seconds from a state to the goal.

    It is never above the true remaining cost. It accounts for the slowest latency and for the bytes
    received over links of each speed.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        # bytes of the whole tensor: 192 for (8, 6) of float32
        self.whole = space.itemsize * prod(sharded.longest for sharded in space.whole)
        axes = axes_of(space.multi_rank_axes)
        links = space.links
        # seconds that any collective takes at least
        self.least_latency: float = min([links.latency[a] for a in axes], default=0.0)
        # For each speed, slowest first, the axes that are not faster. Example: axis 0 slow, axis 1
        # fast: [(0b01, slow), (0b11, fast)].
        speeds = sorted({links.bandwidth[a] for a in axes})
        self._levels: list[tuple[int, float]] = []
        for speed in speeds:
            slow_axes = [axis for axis in axes if links.bandwidth[axis] <= speed]
            self._levels.append((mask_of(slow_axes), speed))
        self._fastest = speeds[-1] if speeds else inf

    def seconds(self, state: State) -> float:
        """Return a lower bound on the seconds from a state to the goal."""
        links = self.space.links
        moving = self.space.movable_axes(state)
        leaving = state.to_reduce | state.must_leave & ~state.to_make_partial
        seconds = links.seconds(leaving, 0)
        # Local steps make values partial as in the destination. Each copies the finest shard at
        # least.
        if not state.partials_done:
            finest = self.whole / links.ranks(moving & ~state.to_make_partial)
            local_steps = bool(state.to_make_partial) + bool(state.to_rescale)
            seconds += local_steps * links.copy(finest)
        if leaving:
            # Example: of 30 bytes, 10 must come over slow links. These 10 bytes are counted at the
            # slow speed, the other 20 at the fast speed.
            counted = 0.0
            for axes, speed in self._levels:
                volume = self._volume(state, moving, moving & axes)
                if volume > counted:
                    seconds += (volume - counted) / speed
                    counted = volume
        if state.to_reduce or state.to_make_partial:
            return seconds
        # The part that two shards have in common has at most the shorter length
        # of each dim. 8 x 8, S(0) -> S(1) over 2 ranks: a rank needs 4 x 8 elements, of which it
        # has 4 x 4.
        common = self.space.itemsize
        for old, new in zip(state.dims, self.space.wanted, strict=True):
            common *= min(old.longest, new.longest)
        # In the example: 64 / 2 - 4 * 4 = 16 elements.
        lacking = self.whole / links.ranks(self.space.goal.sharding_axes) - common
        in_one_collective = links.seconds(leaving, 0) + lacking / self._fastest
        return max(seconds, in_one_collective)

    def _volume(self, state: State, moving: int, level: int) -> float:
        """Return a lower bound on the average bytes that a rank receives over axes of a level.

        The axes of the level divide the mesh into islands. The other axes, inside an island, are
        faster.

        Gathering, for example 8 rows from S(0) over 4 islands of 2 ranks to R: an island has 2 rows
        and needs 8. It receives 6 rows, which are 3 rows for each of its 2 ranks.

        Reducing: to add up p terms on different islands and leave the result on q of them, every
        element is received p - 1 times to be added (`reduce_copies`) and q - 1 times to be held
        (`spread_copies`). For example P -> R over 4 ranks: every element is received 3 + 3 times,
        so each rank receives 6 / 4 of the elements.
        """
        ranks = self.space.links.ranks
        wanted = self.space.goal.sharding_axes
        # Making values partial needs no communication, so these axes do not divide islands.
        between = level & ~state.to_make_partial
        if state.to_reduce:
            reduce_copies = ranks(state.to_reduce & level) - 1
            spread_copies = ranks(between & ~wanted) - 1
            if not reduce_copies:
                return 0.0
            # In the example: 1/4 * (3 + 3) of the elements.
            return self.whole / ranks(moving) * (reduce_copies + spread_copies)
        shards = ranks(state.sharding_axes & ~wanted & between)
        island = self.whole / ranks(wanted & between)
        # In the example: (8 - 8 / 4) / 2 = 3 rows.
        lacking = island - island / shards
        return lacking / ranks(moving & ~between)
