"""Links of a mesh, and sets of its axes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import inf

# device memory against the fastest link: about 4.8 TB/s against 450 GB/s on an H200
COPY_SPEEDUP = 10.0


class Links:
    """The links of a mesh in the form that the search uses; for masks of axes, see `mask_of`."""

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
        for size, axis_latency, axis_bandwidth in zip(sizes, latency, bandwidth, strict=True):
            for ranks, start, rate in [*self._groups]:
                slowest = (max(axis_latency, start), min(axis_bandwidth, rate))
                self._groups.append((size * ranks, *slowest))

    def ranks(self, axes: int) -> int:
        """Return the number of ranks of a group over `axes`."""
        return self._groups[axes][0]

    def seconds(self, axes: int, received: float) -> float:
        """Return the time of a collective over `axes` in which ranks get up to `received` bytes."""
        _, latency, bandwidth = self._groups[axes]
        return latency + received / bandwidth

    def copy(self, copied: float) -> float:
        """Return the time of copying so many bytes on the device.

        Return 0.0 if it is less than a hundredth of the latency of a collective.
        """
        # below, of two ways with equal collectives the direct one is taken
        seconds = copied / self._copy_bandwidth
        return seconds if seconds > self._negligible else 0.0


def mask_of(axes: Iterable[int]) -> int:
    """Return a set of axes as bits: axes 0 and 2 are 0b101."""
    return sum([1 << axis for axis in axes])


@lru_cache(maxsize=1024)
def axes_of(mask: int) -> tuple[int, ...]:
    """Return the axes of a mask, ascending: (0, 2) for 0b101."""
    return tuple([axis for axis in range(mask.bit_length()) if mask >> axis & 1])
