"""`stragglers` finds the rank that the others wait for, and the collectives where they wait."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..events import Event, observing
from ..groups.world import all_gather_objects, require_world
from ..notebook_html import html_table
from ..watch.processes import machine
from .lockstep import line_of_program

# Gathers at the beginning of the block. All ranks leave a gather at about the same moment, which
# relates the clocks of their hosts.
_GATHERS = 5


@dataclass(slots=True)
class Call:
    """One collective, as one rank ran it. Times are in seconds from the beginning of the block.

    Attributes:
        what: a description: `all_reduce sum float32 (3,) along tp, for step 3 (train.py:80)`.
        group: the name of the communicator. The n-th call of a group is the same collective on all
            ranks of the group.
        nbytes: the bytes that this rank put in.
        started: the time at which this rank entered the collective.
        blocked: the intervals in which this rank could do nothing else; several for a collective
            that was started with `async_op`.
        rank: the rank of the call.
        computed: the seconds since the rank was last blocked.
        waited: the part of `blocked` in which a rank was missing.
        moved: the rest of `blocked`.
        others: the seconds that the other ranks computed before the collective, on average; set for
            the call of the last rank.
        held_up: the seconds that the other ranks waited for this call, on average, because its rank
            computed for longer.
    """

    what: str
    group: str
    nbytes: int
    started: float
    blocked: list[tuple[float, float]]
    rank: int
    computed: float = 0.0
    waited: float = 0.0
    moved: float = 0.0
    others: float = 0.0
    held_up: float = 0.0


@dataclass(slots=True)
class RankTimes:
    """The seconds of one rank.

    Attributes:
        computed: outside of collectives.
        waited: in collectives that a rank had not entered yet.
        moved: in collectives that all ranks had entered.
        nbytes: the bytes that the rank put into collectives.
        held_up: the seconds that the other ranks waited for this one, on average.
    """

    computed: float = 0.0
    waited: float = 0.0
    moved: float = 0.0
    nbytes: int = 0
    held_up: float = 0.0


@dataclass(slots=True, repr=False)
class StragglerTable:
    """The times of all ranks, filled when the block of `stragglers` ends; the same on all ranks.

    A rank holds the others up in a collective that it enters last, by as much as it has computed
    for longer than they did since their last collectives. A rank that is late because it waited for
    another one is not at fault.

    Attributes:
        calls: the calls of all ranks, by rank and time.
        seconds: from the beginning to the end of the slowest rank.
        ranks: the times of every rank.
        held_up: the calls for which the others waited, because the rank had computed for longer;
            the longest first.
    """

    calls: list[Call] = field(default_factory=list)
    seconds: float = 0.0
    ranks: list[RankTimes] = field(default_factory=list)
    held_up: list[Call] = field(default_factory=list)

    def fill(self, calls: Sequence[Sequence[Call]], seconds: Sequence[float]) -> None:
        """Fill the table.

        Args:
            calls: the calls of every rank.
            seconds: the time at which every rank ended.
        """
        collectives: defaultdict[tuple[str, int], list[Call]] = defaultdict(list)
        for calls_of_rank in calls:
            _set_computed(calls_of_rank)
            counts: Counter[str] = Counter()
            for call in calls_of_rank:
                collectives[call.group, counts[call.group]].append(call)
                counts[call.group] += 1
        for calls_of_collective in collectives.values():
            _set_waits(calls_of_collective)
        self.calls = [call for calls_of_rank in calls for call in calls_of_rank]
        self.seconds = max(seconds)
        held_up = [call for call in self.calls if call.held_up > 0]
        self.held_up = sorted(held_up, key=lambda call: -call.held_up)
        for calls_of_rank, end in zip(calls, seconds, strict=True):
            times = RankTimes()
            for call in calls_of_rank:
                times.waited += call.waited
                times.moved += call.moved
                times.nbytes += call.nbytes
                times.held_up += call.held_up
            times.computed = end - times.waited - times.moved
            self.ranks.append(times)

    @property
    def straggler(self) -> int | None:
        """The rank that the others waited for longest; None if no rank held the others up."""
        held_up = [times.held_up for times in self.ranks]
        longest = max(held_up, default=0.0)
        return held_up.index(longest) if longest > 0 else None

    def __repr__(self) -> str:
        """Return a report: a line per rank, and the collectives that the straggler held up."""
        lines = [
            self._heading(),
            "rank   computed ms   waited ms    moved ms          bytes   held others up ms",
        ]
        for rank, times in enumerate(self.ranks):
            computed = f"{_ms(times.computed):>14}"
            waited = f"{_ms(times.waited):>12}"
            moved = f"{_ms(times.moved):>12}"
            held_up = f"{_ms(times.held_up):>20}"
            lines.append(f"{rank:4d}{computed}{waited}{moved}{times.nbytes:15,d}{held_up}")
        return "\n".join([*lines, *self._describe_straggler()])

    def _repr_html_(self) -> str:
        """Return the report as a table for notebooks."""
        header = ("rank", "computed ms", "waited ms", "moved ms", "bytes", "held others up ms")
        rows = []
        for rank, times in enumerate(self.ranks):
            spent = [_ms(times.computed), _ms(times.waited), _ms(times.moved)]
            rows.append([rank, *spent, f"{times.nbytes:,}", _ms(times.held_up)])
        caption = "\n".join([self._heading(), *self._describe_straggler()])
        return html_table(rows, header=header, caption=caption)

    def _heading(self) -> str:
        counts = f"{len(self.ranks)} ranks, {len(self.calls)} collectives in all"
        return f"{counts}, {_ms(self.seconds)} ms"

    def _describe_straggler(self) -> list[str]:
        if self.straggler is None:
            return ["no rank held the others up"]
        waited = _ms(self.ranks[self.straggler].held_up)
        lines = [
            f"straggler: rank {self.straggler}; the others waited {waited} ms for it, most before"
        ]
        calls = [call for call in self.held_up if call.rank == self.straggler]
        for call in calls[:3]:
            computed = f"it computed {_ms(call.computed)} ms, they {_ms(call.others)}"
            lines.append(f"  {_ms(call.held_up)} ms  {call.what}: {computed}")
        return lines


@contextmanager
def stragglers() -> Iterator[StragglerTable]:
    """Find the rank that the others wait for inside the block.

    All ranks of the world enter and leave the block. It costs a few microseconds for each
    collective, and gathers the records of all ranks when the block ends. Collectives of shoal are
    recorded; collectives of other libraries count as computation. On accelerators the host waits
    for the device before and after each collective, so nothing overlaps inside the block and the
    times are measured on the device. The clocks of several hosts are related by barriers, up to
    about the latency of one barrier. For a picture over time use `torch.profiler` inside of
    `annotate_collectives`.

    Yields:
        The table, which is filled when the block ends.

    Raises:
        NoGroupError: if there is no default process group.

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
    world = require_world()
    table = StragglerTable()
    departures = []
    for _ in range(_GATHERS):
        all_gather_objects(world, None)
        departures.append(time.perf_counter())
    clocks = all_gather_objects(world, Clock(machine(), departures))
    zero = _beginning(clocks, world.rank())
    recorded: list[Call] = []

    def begin(event: Event) -> None:
        recorded.append(_begin_call(event, world.rank()))

    with observing(begin, _end_call):
        yield table
    for call in recorded:
        call.started -= zero
        call.blocked = [(start - zero, end - zero) for start, end in call.blocked]
    rows = all_gather_objects(world, (recorded, time.perf_counter() - zero))
    table.fill([calls for calls, _ in rows], [end for _, end in rows])


class Clock(NamedTuple):
    """The clock of a rank: its machine (0 if unknown), and its times at the end of each gather."""

    machine: int
    departures: Sequence[float]


def _beginning(clocks: Sequence[Clock], rank: int) -> float:
    """Return the time, by the clock of a rank, at which the first rank left the last gather."""
    first = clocks[0]
    # the seconds by which the clock of each rank is ahead of the clock of rank 0
    ahead = [_seconds_ahead(clock, first) for clock in clocks]
    lasts = [clock.departures[-1] for clock in clocks]
    return ahead[rank] + min(last - offset for last, offset in zip(lasts, ahead, strict=True))


def _seconds_ahead(clock: Clock, reference: Clock) -> float:
    """Return the median difference of two clocks; ranks of one machine have the same clock."""
    if clock.machine and clock.machine == reference.machine:
        return 0.0
    pairs = zip(clock.departures, reference.departures, strict=True)
    differences = sorted(departure - other for departure, other in pairs)
    return differences[_GATHERS // 2]


def _set_computed(calls_of_rank: Sequence[Call]) -> None:
    """Set the seconds that a rank computed before each of its calls, since it was last blocked."""
    intervals = deque(sorted(span for call in calls_of_rank for span in call.blocked))
    free_since = 0.0
    for call in calls_of_rank:
        while intervals and intervals[0][0] < call.started:
            _, end = intervals.popleft()
            free_since = max(free_since, end)
        call.computed = max(call.started - free_since, 0.0)


def _set_waits(calls: list[Call]) -> None:
    """Set how long each rank waited in a collective, and how long the last rank held up others."""
    complete = max(call.started for call in calls)
    for call in calls:
        call.waited = 0.0
        blocked = 0.0
        for begin, end in call.blocked:
            blocked += end - begin
            call.waited += max(min(end, complete) - begin, 0.0)
        call.moved = blocked - call.waited
    *others, last = sorted(calls, key=lambda call: call.started)
    if others:
        last.others = sum(call.computed for call in others) / len(others)
        waited = sum(call.waited for call in others) / len(others)
        last.held_up = max(min(waited, last.computed - last.others), 0.0)


def _begin_call(event: Event, rank: int) -> Call:
    """Record a collective that is about to start, once all earlier work of this rank is done."""
    _finish_device(event)
    event.started = time.perf_counter()
    return Call(
        _describe(event),
        event.comm.name,
        event.nbytes,
        event.started,
        blocked=event.waits,
        rank=rank,
    )


def _describe(event: Event) -> str:
    """Describe a collective: `all_reduce sum float32 (3,) along tp, for step 3 (train.py:80)`."""
    words = [event.op, event.reduce_op]
    if event.tensors:
        words.append(str(event.tensors[0].dtype).removeprefix("torch."))
    words += [str(tuple(tensor.shape)) for tensor in event.tensors]
    collective = " ".join(filter(None, words))
    axes = "x".join(event.comm.axes)
    text = f"{collective} along {axes}"
    if event.purpose:
        text += f", for {event.purpose}"
    line = line_of_program()
    return f"{text} ({line})" if line else text


def _end_call(event: Event) -> None:
    """Record the time in which this rank was blocked in a collective."""
    _finish_device(event)
    event.waits.append((event.started, time.perf_counter()))


def _finish_device(event: Event) -> None:
    """Wait until an accelerator has finished its work; the CPU always has."""
    devices = {tensor.device.type for tensor in event.tensors}
    if devices - {"cpu", "meta"}:
        torch.accelerator.synchronize()


def _ms(seconds: float) -> str:
    """Return seconds as milliseconds with two digits."""
    return f"{seconds * 1e3:.2f}"
