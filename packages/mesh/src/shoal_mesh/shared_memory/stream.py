"""A stream of rounds, in each of which every rank of a group shows the others one slot of memory.

In a round each rank writes its own slot, raises its flag, waits for the flags of the others and reads their slots.

    rank 0:  write slot[0] | flag 7 | wait for 7, 7, 7 | read | write slot[1] | flag 8 | ...

With its flag a rank publishes what it is doing (`request`), and ranks that do different things raise instead of reading
nonsense. By a second word it says which rounds it has read, and a slot is written again when all have read it. With two
slots nobody waits for that: who has seen all flags of round t knows that all have read round t - 1. A stream with one
slot takes half the memory, and waits.

A collective is a generator of steps. It writes its slot and yields its request; what follows reads the slots:

    def all_gather(stream, tensor, out):
        slots, own = stream.slots(tensor.dtype, tensor.numel())
        own.copy_(tensor)
        yield request("all_gather", tensor.dtype, tensor.numel())
        out.copy_(slots)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _torch
from ..errors import CollectiveError
from .peers import BROKEN, Peers
from .recorder import record

FREE = -1
"""What steps yield, instead of a request, to wait for their next slot to be free; the first one is when they begin."""

Steps = Iterator[int]
_MOST_VIEWS = 1024  # of slots, by dtype, length and blocks, kept because making them takes longer than copying 1 KiB


class Stream:
    """One sequence of rounds of a group, seen by one rank."""

    def __init__(self, peers: Peers, number: int, slots: Tensor) -> None:
        self.peers = peers
        self.rank: int = peers.rank
        self.size: int = peers.size
        self.depth: int = slots.shape[0]  # slots of a rank, two or one
        self.slot_bytes: int = slots.shape[2]
        self.open: Underway | None = None  # the collective that has been started last, until it is complete
        self._slots = slots  # (depth, size, bytes)
        self.lines = peers.lines[number]
        self._others = [(line, rank) for rank, line in enumerate(self.lines) if rank != peers.rank]
        self.round: int = 0  # that was shown last
        self._slot = 0
        self._views: dict[tuple[torch.dtype, int, int], list[tuple[Tensor, Tensor]]] = {}

    def start(self, steps: Steps) -> Underway:
        """A collective, its first round shown; the one that was open before is completed."""
        if self.open is not None:
            self.open.wait()
        self.peers.check()
        if self.depth == 1:
            self.wait(FREE)
        self.open = work = Underway(self, steps)
        work.advance()
        return work

    def slots(self, dtype: torch.dtype, count: int, ways: int = 1) -> tuple[Tensor, Tensor]:
        """What this rank reads and writes of the first `count` elements of the next slot of every rank.

        It reads once the round has been met, of as many equal blocks as there are `ways` the one with its number:
        (size, count // ways). The own slot, (count,), is free to be written.
        """
        views = self._views.get((dtype, count, ways))
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            block = count // ways
            first = block * (self.rank if ways > 1 else 0)
            views = self._views[dtype, count, ways] = [
                (slots[:, first : first + block], slots[self.rank, :count]) for slots in self._slots.view(dtype)
            ]
        self._slot = (self._slot + 1) % self.depth
        return views[self._slot]

    def show(self, request: int) -> None:
        """Show the own slot, and what this rank is doing."""
        record(self.peers.name, request)
        self.round += 1
        words, line = self.peers.words, self.lines[self.rank]
        words[line + 2 + (self.round & 1)] = request
        words[line] = self.round

    def is_ready(self, awaited: int) -> bool:
        """Whether `wait` would not."""
        word, least = (1, self.round + 1 - self.depth) if awaited == FREE else (0, self.round)
        return all(self.peers.words[line + word] >= least for line, _ in self._others)

    def wait(self, awaited: int) -> None:
        """Until the next slot is free, or all ranks have shown the round; then see that all do the same."""
        if awaited == FREE:
            for line, rank in self._others:
                self.peers.wait(line + 1, self.round + 1 - self.depth, rank)
            return
        words, shown = self.peers.words, self.round
        for line, rank in self._others:
            if not shown <= words[line] < BROKEN:
                self.peers.wait(line, shown, rank)
        request = 2 + (shown & 1)
        for line in self.lines:
            if words[line + request] != awaited:
                raise self.peers.differ(self.lines, [words[each + request] for each in self.lines])


class Underway:
    """A collective under way, with the interface of c10d's Work."""

    __slots__ = ("_awaited", "_steps", "_stream")

    def __init__(self, stream: Stream, steps: Steps) -> None:
        self._stream, self._steps = stream, steps
        self._awaited: int | None = None  # a request, or FREE; None before the first and when it is complete

    def wait(self) -> None:
        while self._awaited is not None:
            self.advance()

    def is_completed(self) -> bool:
        """Whether `wait` would not block. What can be done without waiting is done."""
        while self._awaited is not None and self._stream.is_ready(self._awaited):
            self.advance()
        return self._awaited is None

    def advance(self) -> None:
        """Wait for what the last step has yielded, and take the next one."""
        stream, awaited = self._stream, self._awaited
        self._awaited = None  # so it stays if a step raises
        try:
            if awaited is not None:
                stream.wait(awaited)
            following = _torch.on_plain_kernels(next, self._steps, None)
        except BaseException as error:
            if not isinstance(error, CollectiveError):
                own = stream.peers.ranks[stream.rank]
                stream.peers.fail(f"it broke off a collective in shared memory: {error!r}", [own])
            raise
        if following is None or following == FREE:
            stream.peers.words[stream.lines[stream.rank] + 1] = stream.round  # it has read all that it has shown
        else:
            stream.show(following)
        if following is None:
            stream.open = None
        self._awaited = following
