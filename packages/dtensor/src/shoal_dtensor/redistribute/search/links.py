"""Links of a mesh, and sets of its axes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import inf

# device memory against the fastest link: about 4.8 TB/s against 450 GB/s on an H200
COPY_SPEEDUP = 10.0


class Links:
    """What the search needs to know about a mesh; a group over several axes is a mask, see `mask_of`."""

    def __init__(
        self, sizes: tuple[int, ...], latency: tuple[float, ...], bandwidth: tuple[float, ...]
    ) -> None:
        self.sizes = sizes  # ranks along each axis
        # seconds that one collective over the axis takes at least
        self.latency = latency
        # bytes per second that a rank can receive over the axis
        self.bandwidth = bandwidth
        self._copy_bandwidth = COPY_SPEEDUP * max(bandwidth, default=1.0)
        self._negligible = min(latency, default=0.0) / 100
        # Ranks, latency and bandwidth of the group over every set of axes: entry 5 is that over
        # axes 0 and 2. mesh (2, 4): of no axis 1 rank, then 2, then 4 and 8
        self._groups = [(1, 0.0, inf)]
        for size, late, speed in zip(sizes, latency, bandwidth, strict=True):
            self._groups += [
                (size * n, max(late, start), min(speed, rate)) for n, start, rate in self._groups
            ]

    def ranks(self, axes: int) -> int:
        """Number of ranks of a group over `axes`."""
        return self._groups[axes][0]

    def seconds(self, axes: int, received: float) -> float:
        """Time of one collective over `axes` in which the busiest rank receives so many bytes."""
        _, latency, bandwidth = self._groups[axes]
        return latency + received / bandwidth

    def copy(self, copied: float) -> float:
        """Time of copying so many bytes on the device; 0.0 if that is less than a hundredth of a collective's start."""
        # below, of two ways with equal collectives the direct one is taken
        seconds = copied / self._copy_bandwidth
        return seconds if seconds > self._negligible else 0.0


def mask_of(axes: Iterable[int]) -> int:
    """A set of axes as bits: axes 0 and 2 are 0b101."""
    return sum([1 << axis for axis in axes])


@lru_cache(maxsize=1024)
def axes_of(mask: int) -> tuple[int, ...]:
    """The axes of a mask, ascending: of 0b101 they are (0, 2)."""
    return tuple([axis for axis in range(mask.bit_length()) if mask >> axis & 1])
