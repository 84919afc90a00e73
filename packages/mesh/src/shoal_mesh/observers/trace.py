"""trace: a timeline of the collectives of a step on every rank, merged over ranks, which shows the straggler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from .._torch import ProcessGroup, in_backward
from ..events import Event, observe, unobserve
from ..groups.world import all_gather_objects, require_world
from ..shared_memory.segment import machine
from .fingerprints import line_of_program
from .timeline import Call, Timeline

_MEETINGS = 5  # at the beginning: ranks leave each at about the same moment, which relates the clocks of hosts


@contextmanager
def trace() -> Iterator[Timeline]:
    """Record when every rank comes to each collective inside the block; entered and left by all ranks of the world.

    It costs a few microseconds a collective, and gathers what all ranks have recorded when the block ends. Collectives
    of shoal are recorded, those of others count as computation. On accelerators the host waits for the device before
    and after each collective, so nothing overlaps in a traced step and times are those of the device. Ranks of several
    hosts relate their clocks by barriers: to about the latency of one.

    Raises:
        NoGroupError: there is no default process group.

    Example:
        >>> def example() -> tuple[int | None, list[int]]:
        ...     comm = comm_over((0, 1))
        ...     with trace() as timeline, purpose("sum of losses"):
        ...         for step in range(3):
        ...             time.sleep(0.01 * dist.get_rank())  # work that one rank has more of
        ...             all_reduce(torch.ones(8), comm)
        ...     return timeline.straggler, [times.nbytes for times in timeline.ranks]
        >>> launch(example, 2)[0]
        (1, [96, 96])
    """
    world, timeline = require_world(), Timeline()
    left = _meet(world)
    recorder = _Recorder()
    observe(recorder)
    try:
        yield timeline
    finally:
        unobserve(recorder)
    end = time.perf_counter()
    rows = all_gather_objects(world, (machine(), left, end, recorder.calls))
    ahead = _ahead([(where, clocks) for where, clocks, _, _ in rows])
    begin = min(clocks[-1] - extra for (_, clocks, _, _), extra in zip(rows, ahead, strict=True))
    calls = [_shifted(own, extra + begin) for (_, _, _, own), extra in zip(rows, ahead, strict=True)]
    timeline.fill(calls, [at - extra - begin for (_, _, at, _), extra in zip(rows, ahead, strict=True)])


def _meet(world: ProcessGroup) -> list[float]:
    """When this rank left each of some meetings of all ranks."""
    left = []
    for _ in range(_MEETINGS):
        all_gather_objects(world, None)
        left.append(time.perf_counter())
    return left


def _ahead(clocks: list[tuple[int, list[float]]]) -> list[float]:
    """By how many seconds the clock of every rank is ahead of that of rank 0; one machine has one clock."""
    import statistics  # with fractions and decimals a tenth of the import of shoal_mesh

    here, first = clocks[0]
    return [
        0.0
        if where == here and here
        else statistics.median(mine - other for mine, other in zip(own, first, strict=True))
        for where, own in clocks
    ]


def _shifted(calls: list[Call], begin: float) -> list[Call]:
    """Calls whose times count from a moment of their rank's clock."""
    return [
        replace(
            call, started=call.started - begin, blocked=[(start - begin, end - begin) for start, end in call.blocked]
        )
        for call in calls
    ]


class _Recorder:
    """The observer of one block on one rank.

    Attributes:
        calls: by this rank's clock.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def before(self, event: Event) -> None:
        """Note what is about to start, and when all of this rank's work before it was done."""
        tensors = event.tensors
        call = Call(
            op=event.op,
            axes=event.comm.axes,
            group=event.comm.name,
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            nbytes=event.nbytes,
            reduce_op=event.reduce_op,
            purpose=event.purpose,
            line=line_of_program(),
            backward=in_backward(),
            started=0.0,
            blocked=event.waits,
        )
        self.calls.append(call)
        _finish_device(event)
        event.started = call.started = time.perf_counter()

    def after(self, event: Event) -> None:
        """Note when it has returned."""
        _finish_device(event)
        event.waits.append((event.started, time.perf_counter()))


def _finish_device(event: Event) -> None:
    """Until the device has done what it was given; the CPU has."""
    if any(tensor.device.type not in {"cpu", "meta"} for tensor in event.tensors):
        torch.accelerator.synchronize()
