"""Which ranks an axis joins: those with the fastest links along the last axis, then along the one before it.

How long a message takes between any two ranks of the world is measured.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations, permutations, product
from math import prod
from typing import NamedTuple

import torch

from .._torch import ProcessGroup
from ..groups.world import all_gather_objects
from ..shared_memory.backend_work import BackendWork

_BYTES = 1 << 20
# there and back, the first of them connects; the fastest counts
_REPEATS = 4
# links between two hosts, or inside of one, that differ by less are alike
_NOISE = 2.0
# of the cost in rank order: an order that gains less is not worth the surprise
_GAIN = 0.9
# of exchanges between groups, after which the order is taken as it is
_ROUNDS = 10

Costs = Sequence[Sequence[float]]
# ranks that stay together, row-major over the inner axes
Unit = tuple[int, ...]


class RankOrder(NamedTuple):
    """Ranks in the order in which a mesh lists them, and what that gains."""

    ranks: tuple[int, ...]  # row-major
    # for every axis the seconds of an all-gather of 1 MiB a rank along its slowest line, in rank
    # order
    before: tuple[float, ...]
    after: tuple[float, ...]  # the same in this order

    def __str__(self) -> str:
        """A line per axis."""
        lines = [
            f"ranks {', '.join(map(str, self.ranks))}; all-gather of 1 MiB a rank, in rank order "
            "and in this one"
        ]
        for axis, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            lines.append(f"  axis {axis}: {before * 1e3:.3f} ms -> {after * 1e3:.3f} ms")
        return "\n".join(lines)


def order_by_costs(shape: Sequence[int], costs: Costs) -> RankOrder:
    """The order of the first ranks for a mesh of a shape; rank order where no other is clearly better.

    Costs are the seconds of a message of 1 MiB between any two ranks, symmetric.

    Example:
        Ranks 0 and 2 share a host, and ranks 1 and 3:

        >>> print(order_by_costs((2, 2), [[0.001 if (a - b) % 2 == 0 else 0.009 for b in range(4)] for a in range(4)]))
        ranks 0, 2, 1, 3; all-gather of 1 MiB a rank, in rank order and in this one
          axis 0: 1.000 ms -> 9.000 ms
          axis 1: 9.000 ms -> 1.000 ms
    """
    in_order = tuple(range(prod(shape)))
    units: list[Unit] = [(rank,) for rank in in_order]
    for size in reversed(shape):
        units = _grouped(units, size, costs)
    before = _by_axis(shape, in_order, costs)
    after = _by_axis(shape, units[0], costs)
    # The last axis comes first: what is sent most, for every layer, is sent along it.
    for b, a in zip(reversed(before), reversed(after), strict=True):
        if min(a, b) < _GAIN * max(a, b):
            return (
                RankOrder(units[0], before, after) if b > a else RankOrder(in_order, before, before)
            )
    return RankOrder(in_order, before, before)


def _by_axis(shape: Sequence[int], ranks: Unit, costs: Costs) -> tuple[float, ...]:
    """For every axis the seconds of its slowest line: all of its ranks send to the next one, size - 1 times."""
    seconds = []
    for axis, size in enumerate(shape):
        # shape (2, 3), axis 0: steps of 3, lines 0 3, 1 4, 2 5 from starts 0, 1, 2
        step = prod(shape[axis + 1 :])
        # (2, 3), axis 1: step 1, 0 and 3
        starts = [i for i in range(len(ranks)) if i // step % size == 0]
        lines = [[(ranks[i + k * step],) for k in range(size)] for i in starts]
        # 3 ranks, at most 9 ms: 18 ms
        seconds.append((size - 1) * max(_slowest(line, costs) for line in lines))
    return tuple(seconds)


def _slowest(line: Sequence[Unit], costs: Costs) -> float:
    return max((_distance(a, b, costs) for a, b in combinations(line, 2)), default=0.0)


def _distance(one: Unit, other: Unit, costs: Costs) -> float:
    """Between units that an axis joins: rank by rank."""
    return max(costs[a][b] for a, b in zip(one, other, strict=True))


def _grouped(units: list[Unit], size: int, costs: Costs) -> list[Unit]:
    """Groups of so many units: each begun by the first that is left, joined by the nearest, then improved."""
    groups = list[list[Unit]]()
    left = list(units)
    while left:
        group = [left.pop(0)]
        while len(group) < size:
            nearest = min(
                left, key=lambda unit: (max(_distance(unit, other, costs) for other in group), unit)
            )
            left.remove(nearest)
            group.append(nearest)
        groups.append(group)
    for _ in range(_ROUNDS):
        if not sum(_exchanged(a, b, costs) for a, b in combinations(groups, 2)):
            break
    return sorted(tuple(rank for unit in sorted(group) for rank in unit) for group in groups)


def _exchanged(one: list[Unit], other: list[Unit], costs: Costs) -> bool:
    """Whether an exchange of two units between groups made their slowest links faster together; it is done then."""
    now = _slowest(one, costs) + _slowest(other, costs)
    for i, j in product(range(len(one)), range(len(other))):
        one[i], other[j] = other[j], one[i]
        if _slowest(one, costs) + _slowest(other, costs) < now:
            return True
        one[i], other[j] = other[j], one[i]
    return False


def measured_costs(world: ProcessGroup, device: torch.device) -> list[list[float]]:
    """Seconds that a message of 1 MiB takes between any two ranks; the same on all of them, which all call this.

    Every rank meets every other one once, and nearly all are busy at any time: n rounds of a few
    milliseconds.
    """
    size = world.size()
    rank = world.rank()
    own = [0.0] * size
    message = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    for turn in range(size):
        # 5 ranks, turn 1: 0 meets 1, 2 meets 4, and 3 nobody
        other = (turn - rank) % size
        if other != rank:
            own[other] = _seconds(world, message, other)
    rows = all_gather_objects(world, (socket.gethostname(), own))
    # 1.0 and 1.2 ms: 1.2
    costs = [[max(rows[a][1][b], rows[b][1][a]) for b in range(size)] for a in range(size)]
    return smoothed(costs, [host for host, _ in rows])


def _seconds(world: ProcessGroup, message: torch.Tensor, other: int) -> float:
    def there_and_back() -> None:
        for sends in (world.rank() < other, world.rank() > other):
            work = world.send([message], other, 0) if sends else world.recv([message], other, 0)
            BackendWork(work, world, None).wait()

    return fastest(there_and_back, _REPEATS, message.device) / 2


def fastest(run: Callable[[], object], times: int, device: torch.device) -> float:
    """Seconds of the fastest of several runs, each until the device is done."""
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def smoothed(costs: list[list[float]], hosts: list[str]) -> list[list[float]]:
    """The costs, without noise: where all links between two hosts, or inside of one, are about alike, their median.

    Example:
        >>> smoothed([[0, 1.0, 9.0], [1.2, 0, 10.0], [9.0, 10.0, 0]], ["a", "a", "b"])
        [[0, 1.1, 9.5], [1.1, 0, 9.5], [9.5, 9.5, 0]]
    """
    # with fractions and decimals a tenth of the import of shoal_mesh
    import statistics

    kinds: defaultdict[frozenset[str], list[tuple[int, int]]] = defaultdict(list)
    for a, b in permutations(range(len(hosts)), 2):
        kinds[frozenset((hosts[a], hosts[b]))].append((a, b))
    result = [list(row) for row in costs]
    for pairs in kinds.values():
        seconds = [costs[a][b] for a, b in pairs]
        if max(seconds) < _NOISE * min(seconds):
            for a, b in pairs:
                result[a][b] = statistics.median(seconds)
    return result
