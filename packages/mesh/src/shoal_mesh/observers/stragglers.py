"""stragglers: which rank the others wait for in a step, and in which collectives."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ..events import Event, observing
from ..groups.world import all_gather_objects, require_world
from ..shared_memory.channel import machine
from .lockstep import line_of_program

_MEETINGS = 5  # at the beginning: ranks leave each at about the same moment, which relates the clocks of hosts


@dataclass(slots=True)
class Call:
    """One collective, as one rank ran it. Times are in seconds from the beginning of the block."""

    what: str  # which one: `all_reduce sum float32 (3,) along tp, for step 3 (train.py:80)`
    group: str  # name of the communicator; the n-th call of a group is one collective on all its ranks
    nbytes: int  # bytes that this rank put in
    started: float  # when this rank came
    # when this rank could do nothing else: from and to; several times if it was started with `async_op`
    blocked: list[tuple[float, float]]
    rank: int = 0  # whose call it is
    computed: float = 0.0  # seconds since the rank was last blocked
    waited: float = 0.0  # seconds of `blocked` in which not all ranks had come
    moved: float = 0.0  # the other seconds of `blocked`
    others: float = 0.0  # seconds that the other ranks computed before it, on average; of the call that came last
    held_up: float = 0.0  # seconds that they waited for this call, on average, because its rank computed for longer


@dataclass(slots=True)
class RankTimes:
    """The seconds of one rank."""

    computed: float = 0.0  # outside of collectives
    waited: float = 0.0  # in collectives to which not all ranks had come
    moved: float = 0.0  # in collectives to which all ranks had come
    nbytes: int = 0  # bytes that the rank put into collectives
    held_up: float = 0.0  # seconds that the other ranks waited for this one, on average over them


@dataclass(slots=True)
class StragglerTable:
    """Who computed, who waited, and for whom: filled when the block of `stragglers` ends, the same on all ranks.

    A rank holds the others up in a collective to which it comes last, by as much as it has computed for longer than
    they did since their last collectives: a rank that is late because it waited for another one is not at fault.
    """

    calls: list[Call] = field(default_factory=list)  # of all ranks, by rank and time
    seconds: float = 0.0  # from the beginning to the end of the slowest rank
    ranks: list[RankTimes] = field(default_factory=list)  # the times of every rank
    # calls for which the others waited because the rank had computed for longer, the longest first
    held_up: list[Call] = field(default_factory=list)

    def fill(self, calls: Sequence[Sequence[Call]], seconds: Sequence[float]) -> None:
        """Take the calls of every rank, and the time at which each came to its end."""
        self.calls = [call for own in calls for call in own]
        self.seconds, self.ranks = max(seconds), [RankTimes() for _ in seconds]
        collectives: defaultdict[tuple[str, int], list[Call]] = defaultdict(list)
        for own in calls:
            counts: defaultdict[str, int] = defaultdict(int)
            for call, computed in zip(own, _computed(own), strict=True):
                call.computed = computed
                collectives[call.group, counts[call.group]].append(call)
                counts[call.group] += 1
        for together in collectives.values():
            _settle(together)
        for call in self.calls:
            times = self.ranks[call.rank]
            times.waited, times.moved = times.waited + call.waited, times.moved + call.moved
            times.nbytes, times.held_up = times.nbytes + call.nbytes, times.held_up + call.held_up
        for times, end in zip(self.ranks, seconds, strict=True):
            times.computed = end - times.waited - times.moved
        self.held_up = sorted((call for call in self.calls if call.held_up > 0), key=lambda call: -call.held_up)

    @property
    def straggler(self) -> int | None:
        """The rank for which the others waited longest; None if nobody waited for one that computed for longer."""
        rank = max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].held_up, default=None)
        return rank if rank is not None and self.ranks[rank].held_up > 0 else None

    def __str__(self) -> str:
        """A line per rank, and who held the others up where."""
        lines = [f"{len(self.ranks)} ranks, {len(self.calls)} collectives in all, {self.seconds * 1e3:.2f} ms"]
        lines.append("rank   computed ms   waited ms    moved ms          bytes   held others up ms")
        for rank, times in enumerate(self.ranks):
            computed, waited, moved = times.computed * 1e3, times.waited * 1e3, times.moved * 1e3
            lines.append(
                f"{rank:4d}{computed:14.2f}{waited:12.2f}{moved:12.2f}{times.nbytes:15,d}{times.held_up * 1e3:20.2f}"
            )
        if self.straggler is None:
            return "\n".join([*lines, "no rank held the others up"])
        seconds = self.ranks[self.straggler].held_up
        lines.append(f"straggler: rank {self.straggler}; the others waited {seconds * 1e3:.2f} ms for it, most before")
        for call in [call for call in self.held_up if call.rank == self.straggler][:3]:
            times_of = f"it computed {call.computed * 1e3:.2f} ms, they {call.others * 1e3:.2f}"
            lines.append(f"  {call.held_up * 1e3:.2f} ms  {call.what}: {times_of}")
        return "\n".join(lines)


@contextmanager
def stragglers() -> Iterator[StragglerTable]:
    """Find the rank for which the others wait inside the block; entered and left by all ranks of the world.

    It costs a few microseconds a collective, and gathers what all ranks have recorded when the block ends. Collectives
    of shoal are recorded, those of others count as computation. On accelerators the host waits for the device before
    and after each collective, so nothing overlaps inside the block and times are those of the device. Ranks of several
    hosts relate their clocks by barriers: to about the latency of one. For a picture over time use `torch.profiler`
    inside of `annotate_collectives`.

    Raises:
        NoGroupError: there is no default process group.

    Example:
        >>> def example() -> tuple[int | None, list[int]]:
        ...     comm = comm_over((0, 1))
        ...     with stragglers() as table, purpose("sum of losses"):
        ...         for step in range(3):
        ...             time.sleep(0.01 * dist.get_rank())  # work that one rank has more of
        ...             all_reduce(torch.ones(8), comm)
        ...     return table.straggler, [times.nbytes for times in table.ranks]
        >>> launch(example, 2)[0]
        (1, [96, 96])
    """
    world, table = require_world(), StragglerTable()
    left = []
    for _ in range(_MEETINGS):
        all_gather_objects(world, None)
        left.append(time.perf_counter())
    recorded: list[Call] = []  # by this rank's clock
    with observing(lambda event: recorded.append(_begun(event)), _note_end):
        yield table
    rows = all_gather_objects(world, (machine(), left, time.perf_counter(), recorded))
    ahead = _ahead([(where, clocks) for where, clocks, _, _ in rows])
    begin = min(clocks[-1] - extra for (_, clocks, _, _), extra in zip(rows, ahead, strict=True))
    zeros = [extra + begin for extra in ahead]  # the beginning by each rank's clock
    calls = [[_of_rank(rank, call, zeros[rank]) for call in own] for rank, (_, _, _, own) in enumerate(rows)]
    table.fill(calls, [end - zero for (_, _, end, _), zero in zip(rows, zeros, strict=True)])


def _ahead(clocks: list[tuple[int, list[float]]]) -> list[float]:
    """By how many seconds the clock of every rank is ahead of that of rank 0; one machine has one clock."""
    here, first = clocks[0]
    return [
        0.0 if where == here and here else sorted(a - b for a, b in zip(own, first, strict=True))[_MEETINGS // 2]
        for where, own in clocks
    ]


def _of_rank(rank: int, call: Call, zero: float) -> Call:
    """The call of a rank, its times counted from a moment of that rank's clock."""
    blocked = [(start - zero, end - zero) for start, end in call.blocked]
    return replace(call, rank=rank, started=call.started - zero, blocked=blocked)


def _settle(together: list[Call]) -> None:
    """Who waited how long in one collective, and for whom; `together` are all ranks' calls."""
    complete = max(call.started for call in together)
    for call in together:
        call.waited = sum(max(min(end, complete) - begin, 0.0) for begin, end in call.blocked)
        call.moved = sum(end - begin for begin, end in call.blocked) - call.waited
    *others, last = sorted(together, key=lambda call: call.started)
    if others:
        last.others = sum(call.computed for call in others) / len(others)
        waited = sum(call.waited for call in others) / len(others)
        last.held_up = max(min(waited, last.computed - last.others), 0.0)


def _computed(own: Sequence[Call]) -> list[float]:
    """For every call of a rank the seconds since the rank was last blocked."""
    spans = sorted(span for call in own for span in call.blocked)
    seconds, free, at = [], 0.0, 0
    for call in own:
        while at < len(spans) and spans[at][0] < call.started:
            free = max(free, spans[at][1])
            at += 1
        seconds.append(max(call.started - free, 0.0))
    return seconds


def _begun(event: Event) -> Call:
    """What is about to start, when all of this rank's work before it is done."""
    dtype = str(event.tensors[0].dtype).removeprefix("torch.") if event.tensors else ""
    words = [event.op, event.reduce_op, dtype, *(str(tuple(tensor.shape)) for tensor in event.tensors)]
    purpose, line = event.purpose and f", for {event.purpose}", line_of_program()
    what = f"{' '.join(filter(None, words))} along {'x'.join(event.comm.axes)}{purpose}{line and f' ({line})'}"
    _finish_device(event)
    event.started = time.perf_counter()
    return Call(what, event.comm.name, event.nbytes, event.started, event.waits)


def _note_end(event: Event) -> None:
    _finish_device(event)
    event.waits.append((event.started, time.perf_counter()))


def _finish_device(event: Event) -> None:
    """Until the device has done what it was given; the CPU has."""
    if any(tensor.device.type not in {"cpu", "meta"} for tensor in event.tensors):
        torch.accelerator.synchronize()
