"""What any plan takes at least: the bounds that guide the search.  They never overestimate.

To reduce p values and leave the result on q ranks, every element is received at least (p - 1) +
(q - 1) times.  What a rank lacks, it has to receive.  At least one collective has to start.  And
what the ranks behind one coordinate of the slowest axes together lack has to come over those.
"""

from __future__ import annotations

from math import prod

from .space import Dims, Space

__all__ = ["Bounds"]


class Bounds:
    """Lower bounds, in seconds, for the states of a space."""

    __slots__ = ("_all_dims", "_even_goal", "_goal_islands", "_holders", "_island", "_slow", "_slow_holders", "space")

    def __init__(self, space: Space) -> None:
        self.space = space
        links = space.links
        slowest = min(links.bandwidth, default=1.0)
        kept = {a for a, p in enumerate(space.placements[0]) if p.is_partial() and a not in space.pending}
        moving = [a for a, n in enumerate(links.sizes) if n > 1 and a not in kept]
        self._slow = frozenset(a for a in moving if links.bandwidth[a] == slowest and not links.uniform)
        cut = {t // 3 for tokens in space.goal for t in tokens} | set(space.becoming)
        self._holders = prod(links.sizes[a] for a in moving if a not in cut)
        self._slow_holders = prod(links.sizes[a] for a in self._slow if a not in cut)
        self._island = max(1, space.ranks // prod(links.sizes[a] for a in self._slow))
        self._all_dims = range(len(space.goal))
        self._even_goal = space.even(space.goal, self._all_dims) and not space.becoming
        self._goal_islands = self._islands(space.goal)

    def reducing(self, pending: tuple[int, ...]) -> float:
        """For a state with these axes to reduce."""
        space, links = self.space, self.space.links
        share = space.itemsize * prod(space.shape) / space.ranks
        seconds = share * (links.group(pending) + self._holders - 2) / max(links.bandwidth)
        values = links.group(tuple(a for a in pending if a in self._slow))
        if values > 1:
            seconds = max(seconds, share * (values + self._slow_holders - 2) / min(links.bandwidth))
        return min(links.latency) + seconds

    def moving(self, dims: Dims) -> float:
        """For a sharding on the way to another."""
        space, links = self.space, self.space.links
        if dims == space.goal or not links.sizes:
            return 0.0
        if not self._even_goal or not space.even(dims, self._all_dims):
            return 0.0
        missing = space.missing(dims, space.goal)
        if not missing:
            return 0.0
        seconds = missing / max(links.bandwidth)
        if self._slow:
            lacking = space.missing(self._islands(dims), self._goal_islands) / self._island
            seconds = max(seconds, lacking / min(links.bandwidth))
        return min(links.latency) + seconds

    def _islands(self, dims: Dims) -> Dims:
        """What the ranks behind one coordinate of the slowest axes hold together."""
        return tuple(tuple(t // 3 * 3 for t in tokens if t // 3 in self._slow) for tokens in dims)
