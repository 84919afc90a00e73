"""The shared memory of a group: streams of rounds, and the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import accumulate

import torch

from .._torch import ProcessGroup
from .peers import ANNOUNCED, LINE, REASON_BYTES, Peers
from .segment import Segment, map_segment
from .stream import Stream

SLOT_BYTES = 1 << 20  # of one rank in one round in the foreground; two per rank. Larger messages take several rounds.
_ALL_SLOTS_BYTES = 1 << 26  # of a group with many ranks
# For what goes on in the background: slots per rank, and bytes of each. It is large, so its slots are few, and long
# under way, so gathers and reductions have a stream each: no reduction is waited for when the next gather starts.
BACKGROUND = {"gathers": (2, 1 << 23), "reductions": (1, 1 << 24)}


class Channel:
    """The shared memory of a group, seen by one rank.

    Attributes:
        peers: the ranks.
        foreground: the stream of small rounds, which are completed one after the other.
        background: streams by name.
    """

    def __init__(self, group: ProcessGroup, segment: Segment, slots: Mapping[str, tuple[int, int]]) -> None:
        size, memory = group.size(), memoryview(segment.memory)
        _, flags, notes, announced, reasons, head = accumulate(_head_words(size, len(slots)), initial=0)
        words = memory[: head * 8].cast("Q")
        own = [flags + LINE * (size * i + group.rank()) + word for i in range(len(slots)) for word in (0, 1)]
        self.peers: Peers = Peers(group, segment.pids, words, own, memory[reasons * 8 : head * 8], announced)
        data, streams = torch.frombuffer(segment.memory, dtype=torch.uint8, offset=head * 8), []
        for i, (depth, slot_bytes) in enumerate(slots.values()):
            first, width = notes + 2 * size * _note_words(size) * i, _note_words(size)
            by_parity = [[first + (parity * size + rank) * width for rank in range(size)] for parity in (0, 1)]
            own_slots, data = data[: depth * size * slot_bytes], data[depth * size * slot_bytes :]
            of_ranks = [flags + LINE * (size * i + rank) for rank in range(size)]
            streams.append(Stream(self.peers, of_ranks, by_parity, own_slots.view(depth, size, slot_bytes)))
        self.foreground: Stream = streams[0]
        self.background: dict[str, Stream] = dict(zip(list(slots)[1:], streams[1:], strict=True))
        stream = weakref.ref(streams[0])  # no cycle: a group that is dropped gives its memory back at once
        self.peers.last_seen = lambda: {} if (seen := stream()) is None else seen.last_seen()


def _note_words(size: int) -> int:
    """Words of what one rank says in one round: a request and `1 + size` numbers."""
    return -(-(2 + size) // LINE) * LINE


def _head_words(size: int, streams: int) -> list[int]:
    """Words in front of the slots: of the token, flags, notes, announcements and reasons."""
    notes = 2 * _note_words(size)
    return [
        LINE,
        *(size * n for n in (LINE * streams, notes * streams, LINE + ANNOUNCED, REASON_BYTES // 8)),
    ]


# The one mutable state of this folder: an entry goes with its group. None: the group keeps its backend.
_CHANNELS: weakref.WeakKeyDictionary[ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()


def channel_of(group: ProcessGroup) -> Channel | None:
    """The channel of a group of gloo, made at its first collective; None on all ranks where it keeps its backend."""
    try:
        return _CHANNELS[group]
    except KeyError:
        size = group.size()
        slots = {
            name: (depth, min(most, _ALL_SLOTS_BYTES // (size * depth)) // 64 * 64)
            for name, (depth, most) in {"foreground": (2, SLOT_BYTES), **BACKGROUND}.items()
        }
        per_rank = sum(depth * slot_bytes for depth, slot_bytes in slots.values())
        segment = map_segment(group, sum(_head_words(size, len(slots))) * 8 + size * per_rank)
        channel = _CHANNELS[group] = None if segment is None else Channel(group, segment, slots)
        return channel


def give_up(reason: str) -> None:
    """Have the ranks that wait for this one, or come to, raise at once and not at their timeout.

    Args:
        reason: what this rank did, for them to repeat.
    """
    for channel in list(_CHANNELS.values()):
        if channel is not None:
            peers = channel.peers
            peers.fail(f"rank {peers.ranks[peers.rank]} {reason}", [peers.rank])
