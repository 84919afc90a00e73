"""Speed of communication along the axes of a mesh, and sets of axes as bit masks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import inf

# Bandwidth of device memory relative to the fastest link. On an H200 these are about 4.8 TB/s and
# 450 GB/s.
COPY_SPEEDUP = 10.0


class Links:
    """The size, latency and bandwidth of the groups of ranks along every set of mesh axes.

    Sets of axes are bit masks (see `mask_of`).
    """

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
        # Ranks, latency and bandwidth of a group over a set of axes, at the position of its mask:
        # entry 5 is for axes 0 and 2. On a mesh of (2, 4) the entries have 1, 2, 4 and 8 ranks.
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
        # Paths that differ only in negligible copies cost the same, and the search then prefers the
        # direct path.
        seconds = copied / self._copy_bandwidth
        return seconds if seconds > self._negligible else 0.0


def mask_of(axes: Iterable[int]) -> int:
    """Return a set of axes as bits: axes 0 and 2 are 0b101."""
    return sum([1 << axis for axis in axes])


@lru_cache(maxsize=1024)
def axes_of(mask: int) -> tuple[int, ...]:
    """Return the axes of a mask, ascending: (0, 2) for 0b101."""
    return tuple([axis for axis in range(mask.bit_length()) if has_axis(mask, axis)])


def has_axis(mask: int, axis: int) -> bool:
    """Tell whether an axis is in the set: 2 is in 0b101, 1 is not."""
    return bool(mask >> axis & 1)
