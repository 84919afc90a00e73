"""What a step costs: seconds = latency + received bytes / bandwidth, and the memory it needs.

Bytes are those of the busiest rank.  A collective over several axes runs at the pace of its
slowest axis.  Copies on the device (packing blocks, gathering along an inner dim) are counted
too, at `COPY_SPEEDUP` times the fastest link, so that among equals the plan that copies less wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf

COPY_SPEEDUP = 10.0  # device memory against the fastest link: about 4.8 TB/s against 450 GB/s on an H200


@dataclass(frozen=True, eq=False)
class Links:
    """What the search needs to know about a mesh; `links_of` gives one object for each, hashed by identity.

    A group over several axes is given as a mask with one bit for each: see `mask_of`.
    """

    sizes: tuple[int, ...]  # ranks along each axis
    latency: tuple[float, ...]  # seconds that one collective over the axis takes at least
    bandwidth: tuple[float, ...]  # bytes per second that a rank can receive over the axis

    def ranks(self, axes: int) -> int:
        """Number of ranks of a group over `axes`."""
        return self._groups[axes][0]

    def seconds(self, axes: int, received: float) -> float:
        """Time of one collective over `axes` in which the busiest rank receives so many bytes."""
        _, latency, bandwidth = self._groups[axes]
        return latency + received / bandwidth

    @cached_property
    def _groups(self) -> list[tuple[int, float, float]]:
        """Ranks, latency and bandwidth of the group over every set of axes: entry 5 is that over axes 0 and 2."""
        groups = [(1, 0.0, inf)]  # mesh (2, 4): of no axis 1 rank, then 2, then 4 and 8
        for size, late, speed in zip(self.sizes, self.latency, self.bandwidth, strict=True):
            groups += [(size * n, max(late, start), min(speed, rate)) for n, start, rate in groups]
        return groups

    def copy(self, copied: float) -> float:
        """Time of copying so many bytes on the device; 0.0 if that is less than a hundredth of a collective's start.

        Below that, of two ways with equal collectives the direct one is taken, which moves the fewest bytes.
        """
        bandwidth, negligible = self._copying
        seconds = copied / bandwidth
        return seconds if seconds > negligible else 0.0

    @cached_property
    def _copying(self) -> tuple[float, float]:
        return COPY_SPEEDUP * max(self.bandwidth, default=1.0), min(self.latency, default=0.0) / 100


def mask_of(axes: Iterable[int]) -> int:
    """A set of axes as bits.

    Example:
        >>> mask_of((0, 2))
        5
    """
    mask = 0
    for axis in axes:
        mask |= 1 << axis
    return mask


@lru_cache(maxsize=1024)
def axes_of(mask: int) -> tuple[int, ...]:
    """The axes of a mask, ascending.

    Example:
        >>> axes_of(5)
        (0, 2)
    """
    return tuple([axis for axis in range(mask.bit_length()) if mask >> axis & 1])


def sent_among(ranks: int, copies: int, before: int, received: int) -> int:
    """Bytes of the busiest rank if an exchange stays among the `ranks` that hold different parts.

    Each replica along the other axes then serves itself, so a rank may have to send all it has to all who want it:
    `before` bytes, to as many `copies` as ranks want the same part.  A rank lacks `received` bytes.
    """
    return max(received, min(before * copies, (ranks - 1) * received))  # 4 ranks, 2 * 16 asked for, 8 lacked: 24
