"""The order of ranks along mesh axes: ranks with the fastest links are along the last axis.

The next fastest links are along the axis before it. `measured_costs` measures the time of a message
between any two ranks of the world, and `order_by_costs` groups the ranks by these times.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, combinations, permutations, product
from math import prod
from typing import NamedTuple

import torch

from .._torch import ProcessGroup
from ..groups.world import all_gather_objects
from ..watch.backend_work import BackendWork

# Size of the measured message.
_BYTES = 1 << 20
# Round trips of which the fastest counts; the first one also connects.
_REPEATS = 4
# The links inside one host, or between the same two hosts, count as equal if the time of the
# slowest one is less than this many times the time of the fastest one.
_NOISE = 2.0
# Another order replaces rank order only if an axis takes less than this share of its time in rank
# order.
_WORTHWHILE = 0.9
# the most rounds of exchanges of units between groups (`_group_nearest`)
_ROUNDS = 10

# Costs[a][b]: seconds of a message from rank a to rank b.
Costs = Sequence[Sequence[float]]
# Ranks that have been grouped along the inner axes, in row-major order over these axes.
Unit = tuple[int, ...]


class RankOrder(NamedTuple):
    """The order in which a mesh lists its ranks, and the time that it saves.

    Attributes:
        ranks: the global ranks in row-major order of the mesh.
        before: for every axis, the seconds of an all-gather of 1 MiB per rank along the slowest
            line of the axis, if the ranks are in rank order.
        after: the same, if they are in the order of `ranks`.
    """

    ranks: tuple[int, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    def __str__(self) -> str:
        """Return a report with a line per axis."""
        ranks = ", ".join(map(str, self.ranks))
        lines = [f"ranks {ranks}; all-gather of 1 MiB a rank, in rank order and in this one"]
        for axis, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            lines.append(f"  axis {axis}: {before * 1e3:.3f} ms -> {after * 1e3:.3f} ms")
        return "\n".join(lines)


def order_by_costs(shape: Sequence[int], costs: Costs) -> RankOrder:
    """Return the order of ranks for a mesh shape; rank order unless another is clearly better.

    Args:
        shape: the shape of the mesh, whose ranks are 0, 1, 2, ...
        costs: the seconds of a message of 1 MiB between any two ranks; symmetric.

    Example:
        Ranks 0 and 2 share a host, and ranks 1 and 3:

        >>> near, far = 0.001, 0.009
        >>> print(order_by_costs((2, 2), [[near, far] * 2, [far, near] * 2] * 2))
        ranks 0, 2, 1, 3; all-gather of 1 MiB a rank, in rank order and in this one
          axis 0: 1.000 ms -> 9.000 ms
          axis 1: 9.000 ms -> 1.000 ms
    """
    rank_order = tuple(range(prod(shape)))
    units: list[Unit] = [(rank,) for rank in rank_order]
    for size in reversed(shape):
        units = _group_nearest(units, size, costs)
    # one unit with all ranks is left
    (grouped,) = units
    before = _seconds_by_axis(shape, rank_order, costs)
    after = _seconds_by_axis(shape, grouped, costs)
    # The last axis is compared first, because the most bytes are sent along it. The next axis
    # decides if neither order is clearly better.
    for old, new in zip(reversed(before), reversed(after), strict=True):
        if new < _WORTHWHILE * old:
            return RankOrder(grouped, before, after)
        if old < _WORTHWHILE * new:
            break
    return RankOrder(rank_order, before, before)


def _seconds_by_axis(shape: Sequence[int], ranks: Unit, costs: Costs) -> tuple[float, ...]:
    """Return for every axis the seconds of an all-gather along its slowest line.

    In an all-gather every rank of a line sends to the next rank, size - 1 times: 3 ranks with links
    of at most 9 ms take 18 ms.
    """
    seconds = []
    for axis, size in enumerate(shape):
        # Shape (2, 3): axis 0 has steps of 3 and the lines 0 3, 1 4, 2 5, which start at 0, 1 and
        # 2. Axis 1 has steps of 1, and lines that start at 0 and 3.
        step = prod(shape[axis + 1 :])
        starts = [i for i in range(len(ranks)) if i // step % size == 0]
        slowest = 0.0
        for start in starts:
            line = [(ranks[start + k * step],) for k in range(size)]
            slowest = max(slowest, _slowest_link(line, costs))
        seconds.append((size - 1) * slowest)
    return tuple(seconds)


def _slowest_link(units: Sequence[Unit], costs: Costs) -> float:
    """Return the cost of the slowest link between any two of some units."""
    distances = [_distance(one, other, costs) for one, other in combinations(units, 2)]
    return max(distances, default=0.0)


def _distance(one: Unit, other: Unit, costs: Costs) -> float:
    """Return the cost of the slowest link between two units that an axis joins rank by rank."""
    return max(costs[a][b] for a, b in zip(one, other, strict=True))


def _group_nearest(units: list[Unit], size: int, costs: Costs) -> list[Unit]:
    """Join units in groups of `size`.

    The first unit that is left begins a group, and the nearest ones join it. Then groups exchange
    units while that makes their slowest links faster.
    """
    groups: list[list[Unit]] = []
    remaining = list(units)
    while remaining:
        group = [remaining.pop(0)]
        while len(group) < size:
            nearest = _nearest_unit(remaining, group, costs)
            remaining.remove(nearest)
            group.append(nearest)
        groups.append(group)
    for _ in range(_ROUNDS):
        exchanges = [_exchange_units(a, b, costs) for a, b in combinations(groups, 2)]
        if not any(exchanges):
            break
    return sorted(tuple(chain.from_iterable(sorted(group))) for group in groups)


def _nearest_unit(candidates: Sequence[Unit], group: Sequence[Unit], costs: Costs) -> Unit:
    """Return the candidate whose slowest link to a group is the fastest.

    Among equal candidates it is the one with the lowest ranks.
    """

    def key(unit: Unit) -> tuple[float, Unit]:
        return max(_distance(unit, other, costs) for other in group), unit

    return min(candidates, key=key)


def _exchange_units(one: list[Unit], other: list[Unit], costs: Costs) -> bool:
    """Exchange two units between groups if that makes their slowest links faster.

    Returns whether it did.
    """
    before = _slowest_link(one, costs) + _slowest_link(other, costs)
    for i, j in product(range(len(one)), range(len(other))):
        one[i], other[j] = other[j], one[i]
        if _slowest_link(one, costs) + _slowest_link(other, costs) < before:
            return True
        one[i], other[j] = other[j], one[i]
    return False


def measured_costs(world: ProcessGroup, device: torch.device) -> list[list[float]]:
    """Measure the seconds of a message of 1 MiB between any two ranks; all ranks call it.

    Every rank exchanges messages with every other rank once, in as many rounds as there are ranks.
    Nearly all ranks are busy in every round, which takes a few milliseconds.

    Returns:
        The same symmetric costs on all ranks.
    """
    size = world.size()
    own_rank = world.rank()
    seconds = [0.0] * size
    message = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    for turn in range(size):
        # 5 ranks, turn 1: ranks 0 and 1 exchange, ranks 2 and 4 too, and rank 3 has no partner.
        other = (turn - own_rank) % size
        if other != own_rank:
            seconds[other] = _message_seconds(world, message, other)
    rows = all_gather_objects(world, (socket.gethostname(), seconds))
    hosts = [host for host, _ in rows]
    measured = [seconds_of_rank for _, seconds_of_rank in rows]
    costs = [[0.0] * size for _ in range(size)]
    for a, b in product(range(size), repeat=2):
        # Ranks a and b measured 1.0 and 1.2 ms: the cost is 1.2 ms.
        costs[a][b] = max(measured[a][b], measured[b][a])
    return smooth_costs(costs, hosts)


def _message_seconds(world: ProcessGroup, message: torch.Tensor, other: int) -> float:
    """Measure one way of a round trip to another rank, which calls this too."""

    def round_trip() -> None:
        is_first = world.rank() < other
        for sends in (is_first, not is_first):
            exchange = world.send if sends else world.recv
            work = exchange([message], other, 0)
            BackendWork(work, world, None).wait()

    return fastest(round_trip, _REPEATS, message.device) / 2


def fastest(run: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the seconds of the fastest of several runs, each until the device is done."""
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def smooth_costs(costs: list[list[float]], hosts: list[str]) -> list[list[float]]:
    """Replace costs by their median if they differ by noise only.

    Links inside one host are compared with each other, and links between the same two hosts.

    Example:
        >>> smooth_costs([[0, 1.0, 9.0], [1.2, 0, 10.0], [9.0, 10.0, 0]], ["a", "a", "b"])
        [[0, 1.1, 9.5], [1.1, 0, 9.5], [9.5, 9.5, 0]]
    """
    # Imported here: it imports fractions and decimals, a tenth of the time of `import shoal_mesh`.
    import statistics

    pairs_by_hosts: defaultdict[frozenset[str], list[tuple[int, int]]] = defaultdict(list)
    for a, b in permutations(range(len(hosts)), 2):
        pairs_by_hosts[frozenset((hosts[a], hosts[b]))].append((a, b))
    result = [list(row) for row in costs]
    for pairs in pairs_by_hosts.values():
        seconds = [costs[a][b] for a, b in pairs]
        if max(seconds) < _NOISE * min(seconds):
            median = statistics.median(seconds)
            for a, b in pairs:
                result[a][b] = median
    return result
