"""stragglers: which rank the others wait for in a step, and in which collectives."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..events import Event, observing
from ..groups.world import all_gather_objects, require_world
from ..shared_memory.channel import machine
from .lockstep import line_of_program

# at the beginning: ranks leave each at about the same moment, which relates the clocks of hosts
_MEETINGS = 5


@dataclass(slots=True)
class Call:
    """One collective, as one rank ran it. Times are in seconds from the beginning of the block."""

    # which one: `all_reduce sum float32 (3,) along tp, for step 3 (train.py:80)`
    what: str
    # name of the communicator; the n-th call of a group is one collective on all its ranks
    group: str
    nbytes: int  # bytes that this rank put in
    started: float  # when this rank came
    # when this rank could do nothing else: from and to; several times if it was started with
    # `async_op`
    blocked: list[tuple[float, float]]
    rank: int  # whose call it is
    # seconds since the rank was last blocked
    computed: float = 0.0
    # seconds of `blocked` in which not all ranks had come
    waited: float = 0.0
    moved: float = 0.0  # the other seconds of `blocked`
    # seconds that the other ranks computed before it, on average; of the call that came last
    others: float = 0.0
    # seconds that they waited for this call, on average, because its rank computed for longer
    held_up: float = 0.0


@dataclass(slots=True)
class RankTimes:
    """The seconds of one rank."""

    computed: float = 0.0  # outside of collectives
    # in collectives to which not all ranks had come
    waited: float = 0.0
    # in collectives to which all ranks had come
    moved: float = 0.0
    # bytes that the rank put into collectives
    nbytes: int = 0
    # seconds that the other ranks waited for this one, on average over them
    held_up: float = 0.0


@dataclass(slots=True)
class StragglerTable:
    """Who computed, who waited, and for whom: filled when the block of `stragglers` ends, the same on all ranks.

    A rank holds the others up in a collective to which it comes last, by as much as it has computed
    for longer than they did since their last collectives: a rank that is late because it waited for
    another one is not at fault.
    """

    calls: list[Call] = field(default_factory=list)  # of all ranks, by rank and time
    # from the beginning to the end of the slowest rank
    seconds: float = 0.0
    ranks: list[RankTimes] = field(default_factory=list)  # the times of every rank
    # calls for which the others waited because the rank had computed for longer, the longest first
    held_up: list[Call] = field(default_factory=list)

    def fill(self, calls: Sequence[Sequence[Call]], seconds: Sequence[float]) -> None:
        """Take the calls of every rank, and the time at which each came to its end."""
        collectives: defaultdict[tuple[str, int], list[Call]] = defaultdict(list)
        for own in calls:
            counts: Counter[str] = Counter()
            spans = deque(sorted(span for call in own for span in call.blocked))
            free = 0.0
            for call in own:
                while spans and spans[0][0] < call.started:
                    free = max(free, spans.popleft()[1])
                call.computed = max(call.started - free, 0.0)
                collectives[call.group, counts[call.group]].append(call)
                counts[call.group] += 1
        for together in collectives.values():
            _settle(together)
        self.calls = [call for own in calls for call in own]
        self.seconds = max(seconds)
        self.held_up = sorted(
            (call for call in self.calls if call.held_up > 0), key=lambda call: -call.held_up
        )
        for own, end in zip(calls, seconds, strict=True):
            waited = sum(call.waited for call in own)
            moved = sum(call.moved for call in own)
            nbytes = sum(call.nbytes for call in own)
            held_up = sum(call.held_up for call in own)
            self.ranks.append(
                RankTimes(end - waited - moved, waited, moved, nbytes, held_up=held_up)
            )

    @property
    def straggler(self) -> int | None:
        """The rank for which the others waited longest; None if nobody waited for one that computed for longer."""
        rank = max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].held_up, default=None)
        return rank if rank is not None and self.ranks[rank].held_up > 0 else None

    def __str__(self) -> str:
        """A line per rank, and who held the others up where."""
        lines = [
            f"{len(self.ranks)} ranks, {len(self.calls)} collectives in all, "
            f"{self.seconds * 1e3:.2f} ms"
        ]
        lines.append(
            "rank   computed ms   waited ms    moved ms          bytes   held others up ms"
        )
        for rank, times in enumerate(self.ranks):
            seconds = (
                f"{times.computed * 1e3:14.2f}{times.waited * 1e3:12.2f}{times.moved * 1e3:12.2f}"
            )
            lines.append(f"{rank:4d}{seconds}{times.nbytes:15,d}{times.held_up * 1e3:20.2f}")
        if self.straggler is None:
            return "\n".join([*lines, "no rank held the others up"])
        waited = self.ranks[self.straggler].held_up * 1e3
        lines.append(
            f"straggler: rank {self.straggler}; the others waited {waited:.2f} ms for it, most "
            "before"
        )
        for call in [call for call in self.held_up if call.rank == self.straggler][:3]:
            times_of = f"it computed {call.computed * 1e3:.2f} ms, they {call.others * 1e3:.2f}"
            lines.append(f"  {call.held_up * 1e3:.2f} ms  {call.what}: {times_of}")
        return "\n".join(lines)


@contextmanager
def stragglers() -> Iterator[StragglerTable]:
    """Find the rank for which the others wait inside the block; entered and left by all ranks of the world.

    It costs a few microseconds a collective, and gathers what all ranks have recorded when the
    block ends. Collectives of shoal are recorded, those of others count as computation. On
    accelerators the host waits for the device before and after each collective, so nothing overlaps
    inside the block and times are those of the device. Ranks of several hosts relate their clocks
    by barriers: to about the latency of one. For a picture over time use `torch.profiler` inside of
    `annotate_collectives`.

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
    world = require_world()
    table = StragglerTable()
    left = []
    for _ in range(_MEETINGS):
        all_gather_objects(world, None)
        left.append(time.perf_counter())
    zero = _beginning(all_gather_objects(world, (machine(), left)), world.rank())
    recorded: list[Call] = []
    with observing(lambda event: recorded.append(_begun(event, world.rank())), _note_end):
        yield table
    for call in recorded:
        call.started, call.blocked = (
            call.started - zero,
            [(start - zero, end - zero) for start, end in call.blocked],
        )
    rows = all_gather_objects(world, (recorded, time.perf_counter() - zero))
    table.fill([calls for calls, _ in rows], [end for _, end in rows])


def _beginning(clocks: Sequence[tuple[int, Sequence[float]]], rank: int) -> float:
    """When the first rank left the last meeting, by the clock of a rank; one machine has one clock."""
    here, first = clocks[0]
    # by how many seconds the clock of every rank is ahead of that of rank 0: the median
    ahead = [
        0.0
        if where == here and here
        else sorted(a - b for a, b in zip(own, first, strict=True))[_MEETINGS // 2]
        for where, own in clocks
    ]
    return ahead[rank] + min(own[-1] - extra for (_, own), extra in zip(clocks, ahead, strict=True))


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


def _begun(event: Event, rank: int) -> Call:
    """What is about to start, when all of this rank's work before it is done."""
    dtype = str(event.tensors[0].dtype).removeprefix("torch.") if event.tensors else ""
    words = [
        event.op,
        event.reduce_op,
        dtype,
        *(str(tuple(tensor.shape)) for tensor in event.tensors),
    ]
    purpose = event.purpose and f", for {event.purpose}"
    line = line_of_program()
    what = f"{' '.join(filter(None, words))} along {'x'.join(event.comm.axes)}{purpose}{line and f' ({line})'}"
    _finish_device(event)
    event.started = time.perf_counter()
    return Call(what, event.comm.name, event.nbytes, event.started, blocked=event.waits, rank=rank)


def _note_end(event: Event) -> None:
    _finish_device(event)
    event.waits.append((event.started, time.perf_counter()))


def _finish_device(event: Event) -> None:
    """Until the device has done what it was given; the CPU has."""
    if any(tensor.device.type not in {"cpu", "meta"} for tensor in event.tensors):
        torch.accelerator.synchronize()
