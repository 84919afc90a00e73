"""A sequence of turns in which every rank of a group shows the others one buffer.

In a turn each rank writes its own slot, raises its flag, waits for the flags of the others and reads their slots.

    rank 0:  write slot[0] | flag 7 | wait for 7, 7, 7 | read | write slot'[0] | flag 8 | ...

Slots are double. Who starts turn t + 2 has seen all flags at t + 1, which a rank raises only after it has read turn t,
so turn t + 2 may overwrite what turn t wrote, and no second barrier is needed. With its flag a rank publishes what it
is doing (`request`), and ranks that do different things raise instead of reading nonsense.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .. import _torch
from .._torch import ProcessGroup
from ..errors import CollectiveError
from .request import describe
from .segment import Segment, map_segment

__all__ = ["SLOT_BYTES", "Channel", "Turn", "channel_of"]

SLOT_BYTES = 1 << 20  # of one rank in one turn; two per rank. Larger messages take several turns.
_ALL_SLOTS_BYTES = 1 << 26  # of a group with many ranks
_LINE = 8  # words of 8 bytes to a cache line, so that ranks do not write into one another's
_YIELDS = 1000  # times that a waiting rank offers its core before it sleeps, about half a millisecond
_CHECK_SECONDS = 0.02  # how often a sleeping rank looks whether the others are alive
_BROKEN = 1 << 62
_MOST_VIEWS = 1024  # of slots, by dtype and length, kept because making them takes longer than copying 1 KiB


class Channel:
    """The shared memory of a group, seen by one rank.

    Attributes:
        rank, size: in the group.
        slot_bytes: what one rank can show in one turn.
    """

    def __init__(self, group: ProcessGroup, segment: Segment, slot_bytes: int) -> None:
        self.rank, self.size, self.slot_bytes = group.rank(), group.size(), slot_bytes
        self._group = weakref.ref(group)
        self._ranks = sorted(_torch.group_ranks(group), key=_torch.group_ranks(group).__getitem__)
        self._pids = segment.pids
        self._timeout = _torch.timeout_of(group)
        head, width = _head_words(self.size), _note_words(self.size)
        self._words = memoryview(segment.memory)[: head * 8].cast("Q")
        self._flags = [_LINE * (1 + rank) for rank in range(self.size)]
        self._peers = [flag for rank, flag in enumerate(self._flags) if rank != self.rank]
        first = _LINE * (1 + self.size)
        self._notes = [[first + (parity * self.size + r) * width for r in range(self.size)] for parity in (0, 1)]
        data = torch.frombuffer(segment.memory, dtype=torch.uint8, offset=head * 8)
        self._slots = data.view(2, self.size, slot_bytes)
        self._views: dict[tuple[torch.dtype, int], list[tuple[Tensor, Tensor]]] = {}
        self._turn = 0
        self._open: Turn | None = None
        self._failure = ""

    def begin(self, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` elements of all slots of the turn that starts now, (size, count), and of the own, (count,).

        The own one is free to be written; the others are to be read once the turn has been met.
        """
        if self._open is not None:
            self._open.wait()
        if self._failure:
            raise CollectiveError(self._failure)
        views = self._views.get((dtype, count))
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            both = self._slots.view(dtype)[:, :, :count]
            views = self._views[dtype, count] = [(slots, slots[self.rank]) for slots in both]
        return views[self._turn + 1 & 1]

    def publish(self, request: int, read: Callable[[], object], notes: Sequence[int] = ()) -> Turn:
        """Show the own slot.

        Args:
            request: what this rank is doing, equal on all ranks.
            read: called once all slots can be read.
            notes: up to 1 + size numbers for the others (`noted`).
        """
        self._turn += 1
        words, own = self._words, self._notes[self._turn & 1][self.rank]
        words[own] = request
        for i, number in enumerate(notes, own + 1):
            words[i] = number
        words[self._flags[self.rank]] = self._turn
        self._open = Turn(self, request, read)
        return self._open

    def noted(self, rank: int, index: int) -> int:
        """A number that the rank has published in the turn that is being read."""
        return self._words[self._notes[self._turn & 1][rank] + 1 + index]

    def meet(self, request: int) -> None:
        """Wait until all ranks have published the turn, and see that all do the same."""
        words, turn = self._words, self._turn
        for flag in self._peers:
            if not turn <= words[flag] <= turn + 1:  # a rank may be one turn ahead; far ahead is _BROKEN
                self._wait(flag, turn)
        for note in self._notes[turn & 1]:
            if words[note] != request:
                self._refuse(request)

    def has_met(self) -> bool:
        """Whether `meet` would not wait."""
        return all(self._words[flag] >= self._turn for flag in self._peers)

    def close_turn(self) -> None:
        """The open turn has been read."""
        self._open = None

    def fail(self, text: str) -> CollectiveError:
        """The error that this and every later call on the channel raises, here and on the other ranks."""
        self._failure = self._failure or text
        self._words[self._flags[self.rank]] = _BROKEN
        self._open = None
        return CollectiveError(self._failure)

    def _wait(self, flag: int, turn: int) -> None:
        words = self._words
        for _ in range(_YIELDS):
            if words[flag] >= turn:
                break
            os.sched_yield()
        else:
            self._sleep(flag, turn)
        if words[flag] == _BROKEN:
            raise self.fail(f"{self._name(flag)} has given up a collective in shared memory: see its error")

    def _sleep(self, flag: int, turn: int) -> None:
        """Wait in steps that grow with the time waited, to 1 ms; now and then see whether the rank is still there."""
        start = checked = time.monotonic()
        while self._words[flag] < turn:
            now = time.monotonic()
            time.sleep(min(1e-3, 5e-5 + (now - start) / 16))
            if now - checked < _CHECK_SECONDS:
                continue
            checked, group = now, self._group()
            if group is None or not _torch.is_live(group):
                raise self.fail("the process group was destroyed while one of its collectives waited")
            if not _is_alive(self._pids[self._flags.index(flag)]) and self._words[flag] < turn:
                raise self.fail(f"{self._name(flag)} has ended while {self._me()} waited for it in a collective")
            if now - start > self._timeout:
                raise self.fail(
                    f"{self._me()} waited {self._timeout:.0f} s, the timeout of the process group, for "
                    f"{self._name(flag)} in a collective: ranks start the same ones in one order, with one async_op"
                )

    def _refuse(self, request: int) -> None:
        others = [self._words[note] for note in self._notes[self._turn & 1]]
        if any(self._words[flag] == _BROKEN for flag in self._peers):
            raise self.fail("another rank has given up a collective in shared memory: see its error")
        text = ", ".join(f"rank {rank}: {describe(other)}" for rank, other in zip(self._ranks, others, strict=True))
        raise self.fail(f"ranks started different collectives on one communicator: {text}")

    def _name(self, flag: int) -> str:
        index = self._flags.index(flag)
        return f"rank {self._ranks[index]} (process {self._pids[index]})"

    def _me(self) -> str:
        return f"rank {self._ranks[self.rank]}"


class Turn:
    """A published turn; `wait` reads it. It stands where c10d's Work does."""

    __slots__ = ("_channel", "_read", "_request")

    def __init__(self, channel: Channel, request: int, read: Callable[[], object]) -> None:
        self._channel: Channel | None = channel
        self._request, self._read = request, read

    def wait(self) -> None:
        """Until the others have published theirs, and read it."""
        channel = self._channel
        if channel is None:
            return
        self._channel = None
        try:
            channel.meet(self._request)
            _torch.on_plain_kernels(self._read)
        except BaseException as error:
            if not isinstance(error, CollectiveError):
                channel.fail(f"a collective in shared memory was broken off: {error!r}")
            raise
        channel.close_turn()

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self._channel is None or self._channel.has_met()


def _note_words(size: int) -> int:
    """Words of the notes of one rank in one turn: a request and `1 + size` numbers."""
    return -(-(2 + size) // _LINE) * _LINE


def _head_words(size: int) -> int:
    """Words in front of the slots: the segment's token and the flags, a line each, and the notes of two turns."""
    return _LINE * (1 + size) + 2 * size * _note_words(size)


def _is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# The one mutable state of this folder: an entry goes with its group. None: the group keeps its backend.
_CHANNELS: weakref.WeakKeyDictionary[ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()


def channel_of(group: ProcessGroup) -> Channel | None:
    """The channel of a group of gloo, made at its first collective; None on all ranks where it keeps its backend."""
    try:
        return _CHANNELS[group]
    except KeyError:
        size = group.size()
        slot_bytes = min(SLOT_BYTES, _ALL_SLOTS_BYTES // size) // 64 * 64
        segment = map_segment(group, _head_words(size) * 8 + 2 * size * slot_bytes)
        channel = _CHANNELS[group] = None if segment is None else Channel(group, segment, slot_bytes)
        return channel
