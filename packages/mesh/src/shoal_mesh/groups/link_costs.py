"""How long a message takes between any two ranks of the world, measured, and which of them share a host."""

from __future__ import annotations

import socket
import time
from collections import defaultdict

import torch

from .._torch import ProcessGroup
from ..shared_memory.backend_work import BackendWork
from .world import all_gather_objects

_BYTES = 1 << 20
_REPEATS = 4  # there and back, the first of them connects; the fastest counts
_NOISE = 2.0  # links between two hosts, or inside of one, that differ by less are alike


def measured_costs(world: ProcessGroup, device: torch.device) -> list[list[float]]:
    """Seconds that a message of 1 MiB takes between any two ranks; the same on all of them, which all call this.

    Every rank meets every other one once, and all are busy at any time: n - 1 rounds of a few milliseconds.
    """
    size, rank = world.size(), world.rank()
    own, message = [0.0] * size, torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    seats = size + size % 2
    for turn in range(seats - 1):
        other = _opponent(rank, turn, seats)
        if other < size:
            own[other] = _seconds(world, message, other)
    rows = all_gather_objects(world, (socket.gethostname(), own))
    costs = [[max(rows[a][1][b], rows[b][1][a]) for b in range(size)] for a in range(size)]
    return smoothed(costs, [host for host, _ in rows])


def _opponent(rank: int, turn: int, seats: int) -> int:
    """Whom a rank meets: one rank stays seated, the others move on by a seat every turn."""
    last = seats - 1
    if rank == last:
        return turn * (seats // 2) % last
    other = (turn - rank) % last
    return last if other == rank else other


def _seconds(world: ProcessGroup, message: torch.Tensor, other: int) -> float:
    first, best = world.rank() < other, float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        for sends in (first, not first):
            work = world.send([message], other, 0) if sends else world.recv([message], other, 0)
            BackendWork(work, world, None).wait()
        if message.device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, (time.perf_counter() - begin) / 2)
    return best


def smoothed(costs: list[list[float]], hosts: list[str]) -> list[list[float]]:
    """The costs, without noise: where all links between two hosts, or inside of one, are about alike, their median.

    Example:
        >>> smoothed([[0, 1.0, 9.0], [1.2, 0, 10.0], [9.0, 10.0, 0]], ["a", "a", "b"])
        [[0, 1.1, 9.5], [1.1, 0, 9.5], [9.5, 9.5, 0]]
    """
    import statistics  # with fractions and decimals a tenth of the import of shoal_mesh

    kinds: defaultdict[frozenset[str], list[tuple[int, int]]] = defaultdict(list)
    for a, here in enumerate(hosts):
        for b, there in enumerate(hosts):
            if a != b:
                kinds[frozenset((here, there))].append((a, b))
    result = [list(row) for row in costs]
    for pairs in kinds.values():
        seconds = [costs[a][b] for a, b in pairs]
        if max(seconds) < _NOISE * min(seconds):
            for a, b in pairs:
                result[a][b] = statistics.median(seconds)
    return result
