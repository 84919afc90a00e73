"""What a step costs: seconds = latency + received bytes / bandwidth, and the memory it needs.

Bytes are those of the busiest rank.  A collective over several axes runs at the pace of its
slowest axis.  Copies on the device (packing blocks, gathering along an inner dim) are counted
too, at `COPY_SPEEDUP` times the fastest link, so that among equals the plan that copies less wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add

from shoal_mesh.internal import cached_property, dataclass

COPY_SPEEDUP = 10.0  # device memory against the fastest link: about 4.8 TB/s against 450 GB/s on an H200


@dataclass(frozen=True, eq=False)
class Links:
    """What the search needs to know about a mesh: of equal ones `links_of` gives one object, hashed by identity.

    Attributes:
        sizes: ranks along each axis.
        latency: seconds that one collective over the axis takes at least.
        bandwidth: bytes per second that a rank can receive over the axis.
    """

    sizes: tuple[int, ...]
    latency: tuple[float, ...]
    bandwidth: tuple[float, ...]

    @property
    def uniform(self) -> bool:
        """Whether no axis is faster than another."""
        return len(set(self.bandwidth)) <= 1 and len(set(self.latency)) <= 1

    def group(self, axes: tuple[int, ...]) -> int:
        """Number of ranks of a group over `axes`."""
        ranks = 1
        for axis in axes:
            ranks *= self.sizes[axis]
        return ranks

    def seconds(self, axes: tuple[int, ...], received: float) -> float:
        """Time of one collective over `axes` in which the busiest rank receives so many bytes."""
        latency, bandwidth = self.latency, self.bandwidth
        if len(axes) == 1:
            return latency[axes[0]] + received / bandwidth[axes[0]]
        return max([latency[a] for a in axes]) + received / min([bandwidth[a] for a in axes])

    def copy(self, copied: float) -> float:
        """Time of copying so many bytes on the device; 0.0 if that is less than a hundredth of a collective's start.

        Below that, of two ways with equal collectives the direct one is taken, which moves the fewest bytes.
        """
        seconds = copied / self._copy_bandwidth
        return seconds if seconds > self._negligible else 0.0

    @cached_property
    def _copy_bandwidth(self) -> float:
        return COPY_SPEEDUP * max(self.bandwidth, default=1.0)

    @cached_property
    def _negligible(self) -> float:
        return min(self.latency, default=0.0) / 100


def sent_among(ranks: int, copies: int, before: int, received: int) -> int:
    """Bytes of the busiest rank if an exchange stays among the `ranks` that hold different parts.

    Each replica along the other axes then serves itself, so a rank may have to send all it has to all who want it.

    Args:
        ranks: size of the group.
        copies: how many ranks of it want the same part.
        before: bytes that a rank holds.
        received: bytes that a rank lacks.
    """
    return max(received, min(before * copies, (ranks - 1) * received))


def total(seconds: Iterable[float]) -> float:
    """Their sum in order, as every Python adds it up.

    From Python 3.12 on, `sum` makes up for what rounding loses: among plans that take equally long, another one would
    be the cheapest there.
    """
    return reduce(add, seconds, 0.0)
