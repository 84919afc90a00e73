"""What the ranks did in a traced step, side by side: who computed, who waited for whom, and where; no communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import field
from os import PathLike

from ..values import dataclass
from .chrome_trace import Span, write_spans


@dataclass(slots=True)
class Call:
    """One collective, as one rank ran it. Times are in seconds from the beginning of the trace.

    Attributes:
        op: name of the functional collective.
        axes: mesh axes it ran along.
        group: name of the communicator; the n-th call of a group is one collective on all its ranks.
        shapes, dtype, nbytes, reduce_op: what this rank put in, and how it is reduced.
        purpose: what the program says that it is for.
        line: of the program, `train.py:80`.
        backward: whether it ran in the backward pass.
        started: when this rank came.
        blocked: when this rank could do nothing else: from and to; several times if it was started with `async_op`.
        rank: whose call it is.
        waited: seconds of `blocked` in which not all ranks had come.
        moved: the other seconds of `blocked`.
    """

    op: str
    axes: tuple[str, ...]
    group: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    nbytes: int
    reduce_op: str
    purpose: str
    line: str
    backward: bool
    started: float
    blocked: list[tuple[float, float]]
    rank: int = 0
    waited: float = 0.0
    moved: float = 0.0

    def __str__(self) -> str:
        """Which collective it is: `all_reduce sum float32 (3,) along tp, for step 3 (train.py:80)`."""
        shapes = " ".join(map(str, self.shapes))
        words = " ".join(word for word in (self.op, self.reduce_op, self.dtype, shapes) if word)
        purpose, line = f", for {self.purpose}" if self.purpose else "", f" ({self.line})" if self.line else ""
        return f"{words} along {'x'.join(self.axes)}{purpose}{line}"


@dataclass(slots=True)
class RankTimes:
    """The seconds of one rank.

    Attributes:
        computed: outside of collectives.
        waited: in collectives to which not all ranks had come.
        moved: in collectives to which all ranks had come.
        nbytes: that the rank put into collectives.
        held_up: seconds that the other ranks waited for this one, on average over them.
    """

    computed: float = 0.0
    waited: float = 0.0
    moved: float = 0.0
    nbytes: int = 0
    held_up: float = 0.0


@dataclass(frozen=True, slots=True)
class HeldUp:
    """One collective to which a rank came last, after computing for longer than the others.

    Attributes:
        call: of the rank that came last.
        seconds: that the others waited for it, on average over them.
        computed: seconds that it computed since its last collective.
        others: the same of the others, on average over them.
    """

    call: Call
    seconds: float
    computed: float
    others: float


@dataclass(slots=True)
class Timeline:
    """The collectives of all ranks over time: filled when the block of `trace` ends, the same on all ranks.

    A rank holds the others up in a collective to which it comes last, by as much as it has computed for longer than
    they did since their last collectives: a rank that is late because it waited for another one is not at fault.

    Attributes:
        calls: of all ranks, by rank and time.
        seconds: from the beginning to the end of the slowest rank.
        ranks: the times of every rank.
        held_up: where ranks waited for one that computed for longer, the longest first.
    """

    calls: list[Call] = field(default_factory=list)
    seconds: float = 0.0
    ranks: list[RankTimes] = field(default_factory=list)
    held_up: list[HeldUp] = field(default_factory=list)

    def fill(self, calls: Sequence[Sequence[Call]], seconds: Sequence[float]) -> None:
        """Take the calls of every rank, and the time at which each came to its end."""
        for rank, own in enumerate(calls):
            for call in own:
                call.rank = rank
        self.calls = [call for own in calls for call in own]
        self.seconds, self.ranks = max(seconds), [RankTimes() for _ in seconds]
        computed = [_computed(own) for own in calls]
        for together in _collectives(calls):
            self._settle(together, [computed[call.rank][index] for index, call in together])
        for call in self.calls:
            times = self.ranks[call.rank]
            times.waited, times.moved = times.waited + call.waited, times.moved + call.moved
            times.nbytes += call.nbytes
        for times, end in zip(self.ranks, seconds, strict=True):
            times.computed = end - times.waited - times.moved
        self.held_up.sort(key=lambda held: -held.seconds)

    def _settle(self, together: list[tuple[int, Call]], computed: list[float]) -> None:
        """One collective of some ranks: who waited in it how long, and for whom."""
        calls = [call for _, call in together]
        complete = max(call.started for call in calls)
        for call in calls:
            call.waited = sum(max(min(end, complete) - begin, 0.0) for begin, end in call.blocked)
            call.moved = sum(end - begin for begin, end in call.blocked) - call.waited
        last = max(range(len(calls)), key=lambda i: calls[i].started)
        others = [i for i in range(len(calls)) if i != last]
        if not others:
            return
        usual = sum(computed[i] for i in others) / len(others)
        waited = sum(calls[i].waited for i in others) / len(others)
        seconds = min(waited, computed[last] - usual)
        if seconds > 0:
            self.ranks[calls[last].rank].held_up += seconds
            self.held_up.append(HeldUp(calls[last], seconds, computed[last], usual))

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
        held = self.ranks[self.straggler].held_up
        lines.append(f"straggler: rank {self.straggler}; the others waited {held * 1e3:.2f} ms for it, most before")
        for place in [place for place in self.held_up if place.call.rank == self.straggler][:3]:
            times_of = f"it computed {place.computed * 1e3:.2f} ms, they {place.others * 1e3:.2f}"
            lines.append(f"  {place.seconds * 1e3:.2f} ms  {place.call}: {times_of}")
        return "\n".join(lines)

    def write_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write a file for Perfetto or chrome://tracing: a process per rank, a row per mesh axes.

        What a rank waited for others and what it moved are two spans, with purpose, bytes and line of the program.

        Raises:
            MeshTypeError: `path` is no string or path.
        """
        write_spans(path, (span for call in self.calls for span in _spans(call)))


def _collectives(calls: Sequence[Sequence[Call]]) -> Iterator[list[tuple[int, Call]]]:
    """The calls that are one collective, each with its index on its rank."""
    together: defaultdict[tuple[str, int], list[tuple[int, Call]]] = defaultdict(list)
    for own in calls:
        counts: defaultdict[str, int] = defaultdict(int)
        for index, call in enumerate(own):
            together[call.group, counts[call.group]].append((index, call))
            counts[call.group] += 1
    yield from together.values()


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


def _spans(call: Call) -> Iterator[Span]:
    """What is drawn of a call: waiting, then moving, each time that the rank was blocked."""
    facts = {"purpose": call.purpose, "bytes": call.nbytes, "shapes": [*call.shapes], "dtype": call.dtype}
    facts |= {"line": call.line, "group": call.group, "waited ms": call.waited * 1e3, "moved ms": call.moved * 1e3}
    name, waiting = f"{call.op} {call.reduce_op}".rstrip(), call.waited
    process, row = f"rank {call.rank}", "x".join(call.axes)
    for begin, end in call.blocked:
        waited = min(waiting, end - begin)
        waiting -= waited
        if waited > 0:
            yield Span(f"wait: {name}", "wait", process, row, begin, waited, facts)
        yield Span(
            name, "backward" if call.backward else "forward", process, row, begin + waited, end - begin - waited, facts
        )
