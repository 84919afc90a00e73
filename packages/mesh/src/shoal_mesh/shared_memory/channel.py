"""A sequence of turns in which every rank of a group shows the others one buffer.

In a turn each rank writes its own slot, raises its flag, waits for the flags of the others and reads their slots.

    rank 0:  write slot[0] | flag 7 | wait for 7, 7, 7 | read | write slot'[0] | flag 8 | ...

Slots are double. Who starts turn t + 2 has seen all flags at t + 1, which a rank raises only after it has read turn t,
so turn t + 2 may overwrite what turn t wrote, and no second barrier is needed. With its flag a rank publishes what it
is doing (`request`), and ranks that do different things raise instead of reading nonsense.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .. import _torch
from .._torch import ProcessGroup
from ..errors import CollectiveError, PeerError
from .lane import Lane
from .notices import NOTICE_WORDS, Notices
from .peers import ANNOUNCED, BROKEN, LINE, REASON_BYTES, Peers
from .recorder import record
from .request import describe
from .segment import Segment, map_segment

SLOT_BYTES = 1 << 20  # of one rank in one turn; two per rank. Larger messages take several turns.
_ALL_SLOTS_BYTES = 1 << 26  # of a group with many ranks
# Beside the channel, for what goes on in the background: slots per rank, and bytes of each (see `lane`).
LANES = {"gathers": (2, 1 << 23), "reductions": (1, 1 << 24)}
_MOST_VIEWS = 1024  # of slots, by dtype, length and blocks, kept because making them takes longer than copying 1 KiB


class Channel:
    """The shared memory of a group, seen by one rank.

    Attributes:
        rank, size: in the group.
        slot_bytes: what one rank can show in one turn.
        peers: the ranks.
        lanes: for what goes on in the background.
        notices: what ranks in lockstep say that they are about to do.
    """

    def __init__(
        self, group: ProcessGroup, segment: Segment, slot_bytes: int, lanes: Mapping[str, tuple[int, int]]
    ) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.slot_bytes = slot_bytes
        head, width = _head_words(self.size), _note_words(self.size)
        self._words = memoryview(segment.memory)[: head * 8].cast("Q")
        self._flags = [LINE * (1 + rank) for rank in range(self.size)]
        self._others = [(flag, rank) for rank, flag in enumerate(self._flags) if rank != self.rank]
        first = LINE * (1 + self.size)
        self._notes = [[first + (parity * self.size + r) * width for r in range(self.size)] for parity in (0, 1)]
        data = torch.frombuffer(segment.memory, dtype=torch.uint8, offset=head * 8)
        self._slots = data[: 2 * self.size * slot_bytes].view(2, self.size, slot_bytes)
        word, at = first + 2 * self.size * width, self._slots.numel()
        starts = [word + LINE * self.size * i for i in range(len(lanes))]
        own = [start + LINE * self.rank + i for start in starts for i in (0, 1)]
        announced = first + 2 * self.size * width + len(lanes) * LINE * self.size
        reasons = memoryview(segment.memory)[(head - self.size * REASON_BYTES // 8) * 8 : head * 8]
        self.peers: Peers = Peers(group, segment.pids, self._words, (self._flags[self.rank], *own), reasons, announced)
        self.notices: Notices = Notices(
            self.peers, announced + (ANNOUNCED + LINE) * self.size, memoryview(segment.memory)
        )
        self.lanes: dict[str, Lane] = {}
        for start, (name, (depth, size)) in zip(starts, lanes.items(), strict=True):
            end = at + depth * self.size * size
            self.lanes[name], at = Lane(self.peers, start, data[at:end].view(depth, self.size, size)), end
        self._views: dict[tuple[torch.dtype, int, int], list[tuple[Tensor, Tensor]]] = {}
        self._turn, self._name = 0, _torch.group_name(group)
        this = weakref.ref(self)  # no cycle: a group that is dropped gives its memory back at once
        self.peers.last_seen = lambda: {} if (channel := this()) is None else channel._last_seen()
        self._open: Turn | None = None

    def begin(self, dtype: torch.dtype, count: int, ways: int = 1) -> tuple[Tensor, Tensor]:
        """What this rank reads and writes of the first `count` elements of all slots of the turn that starts now.

        Args:
            dtype: of the elements.
            count: how many.
            ways: into how many equal blocks they are divided, of which this rank reads the one with its number.

        Returns:
            That block of all slots, (size, count // ways), to be read once the turn has been met; and the own slot,
            (count,), free to be written.
        """
        if self._open is not None:
            self._open.wait()
        self.peers.check()
        views = self._views.get((dtype, count, ways))
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            block = count // ways
            first = block * (self.rank if ways > 1 else 0)
            both = self._slots.view(dtype)
            views = self._views[dtype, count, ways] = [
                (slots[:, first : first + block], slots[self.rank, :count]) for slots in both
            ]
        return views[self._turn + 1 & 1]

    def publish(self, request: int, read: Callable[[], object], notes: Sequence[int] = ()) -> Turn:
        """Show the own slot.

        Args:
            request: what this rank is doing, equal on all ranks.
            read: called once all slots can be read.
            notes: up to 1 + size numbers for the others (`noted`).
        """
        record(self._name, request)
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
        for flag, rank in self._others:
            if not turn <= words[flag] <= turn + 1:  # a rank may be one turn ahead; far ahead is BROKEN
                self.peers.wait(flag, turn, rank)
        for note in self._notes[turn & 1]:
            if words[note] != request:
                self._open = None
                raise self.peers.differ(self._flags, [words[note] for note in self._notes[turn & 1]])

    def has_met(self) -> bool:
        """Whether `meet` would not wait."""
        return all(self._words[flag] >= self._turn for flag, _ in self._others)

    def _last_seen(self) -> dict[int, str]:
        """The last turn of each rank, by its number in the group."""
        seen = {}
        for rank, flag in enumerate(self._flags):
            turn = self._words[flag]
            what = describe(self._words[self._notes[turn & 1][rank]]) if 0 < turn < BROKEN else ""
            seen[rank] = f"turn {turn} of group {self._name}: {what}" if what else "before its first turn, or given up"
        return seen

    def fail(self, text: str, ranks: Sequence[int] = ()) -> PeerError:
        """The error that this and every later call on the shared memory raises, here and on the other ranks."""
        self._open = None
        return self.peers.fail(text, ranks)


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
                channel.fail(f"it broke off a collective in shared memory: {error!r}", [channel.rank])
            raise
        channel._open = None

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self._channel is None or self._channel.has_met()


def _note_words(size: int) -> int:
    """Words of the notes of one rank in one turn: a request and `1 + size` numbers."""
    return -(-(2 + size) // LINE) * LINE


def _head_words(size: int) -> int:
    """Words in front of the slots: lines of the token and the flags, notes, lanes, announcements, notices, reasons."""
    of_rank = 2 * _note_words(size) + len(LANES) * LINE + LINE + ANNOUNCED + NOTICE_WORDS + REASON_BYTES // 8
    return LINE * (1 + size) + of_rank * size


# The one mutable state of this folder: an entry goes with its group. None: the group keeps its backend.
_CHANNELS: weakref.WeakKeyDictionary[ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()


def channel_of(group: ProcessGroup) -> Channel | None:
    """The channel of a group of gloo, made at its first collective; None on all ranks where it keeps its backend."""
    try:
        return _CHANNELS[group]
    except KeyError:
        size = group.size()
        slot_bytes = min(SLOT_BYTES, _ALL_SLOTS_BYTES // size) // 64 * 64
        lanes = {
            name: (depth, min(most, _ALL_SLOTS_BYTES // (depth * size)) // 64 * 64)
            for name, (depth, most) in LANES.items()
        }
        per_rank = 2 * slot_bytes + sum(depth * one for depth, one in lanes.values())
        segment = map_segment(group, _head_words(size) * 8 + size * per_rank)
        channel = _CHANNELS[group] = None if segment is None else Channel(group, segment, slot_bytes, lanes)
        return channel


def give_up(reason: str) -> None:
    """Have the ranks that wait for this one, or come to, raise at once and not at their timeout.

    Args:
        reason: what this rank did, for them to repeat.
    """
    for channel in list(_CHANNELS.values()):
        if channel is not None:
            channel.fail(f"rank {channel.peers.ranks[channel.rank]} {reason}", [channel.rank])
