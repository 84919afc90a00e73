"""Collectives that are under way beside computation: a sequence of its own, of turns as large as what is sent.

A channel's turns are small and completed one after the other. What is sent in the background is large, so its slots are
few, and it is long under way, so gathers and reductions have a lane each: a reduction is not waited for when the next
gather starts. A turn may overwrite a slot when all ranks have read what was there, which they say by a second word.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _torch
from ..errors import CollectiveError
from .peers import LINE, Peers
from .recorder import record

FREE = -1
"""What the steps of a collective yield to wait for a slot that may be written, instead of a request that they show."""

Steps = Iterator[int]


class Lane:
    """One sequence of background collectives of a group, seen by one rank.

    Attributes:
        rank, size: in the group.
        peers: the ranks.
        slot_bytes: what one rank can show in one turn.
    """

    def __init__(self, peers: Peers, first_word: int, slots: Tensor) -> None:
        self.peers = peers
        self._slots = slots
        self.rank: int = peers.rank
        self.size: int = peers.size
        self._depth = slots.shape[0]
        self.slot_bytes: int = slots.shape[2]
        # Words of a rank's line: the turns that it has shown, those that it has read, the requests of two turns.
        self._lines = [first_word + LINE * rank for rank in range(self.size)]
        self._turn = 0
        self._open: Running | None = None

    def start(self, steps: Steps) -> Running:
        """A collective, its first turn shown; the one that was open before is completed."""
        if self._open is not None:
            self._open.wait()
        self.peers.check()
        self._open = Running(self, steps)
        return self._open

    def slots(self, dtype: torch.dtype) -> Tensor:
        """All ranks' slots of the turn that starts now, (size, elements); the own one may be written."""
        return self._slots[(self._turn + 1) % self._depth].view(dtype)

    def show(self, request: int) -> None:
        """Show the own slot, and what this rank is doing."""
        record(self.peers.name, request)
        self._turn += 1
        words, line = self.peers.words, self._lines[self.rank]
        words[line + 2 + (self._turn & 1)] = request
        words[line] = self._turn

    def has_read(self) -> None:
        """Say that this rank has read all turns that it has shown."""
        self.peers.words[self._lines[self.rank] + 1] = self._turn

    def is_ready(self, awaited: int) -> bool:
        """Whether `wait` would not."""
        word, turn = self._awaited(awaited)
        return all(self.peers.words[line + word] >= turn for line in self._lines)

    def wait(self, awaited: int) -> None:
        """Until a slot is free, or all ranks have shown the turn; then see that all do the same."""
        words, (word, turn) = self.peers.words, self._awaited(awaited)
        for rank, line in enumerate(self._lines):
            if rank != self.rank:
                self.peers.wait(line + word, turn, rank)
        if awaited == FREE:
            return
        requests = [words[line + 2 + (turn & 1)] for line in self._lines]
        if any(request != awaited for request in requests):
            raise self.peers.differ(self._lines, requests)

    def _awaited(self, awaited: int) -> tuple[int, int]:
        """Which word of all ranks has to be at least what."""
        return (1, self._turn + 1 - self._depth) if awaited == FREE else (0, self._turn)

    def close(self) -> None:
        """The open collective is complete."""
        self._open = None


class Running:
    """A collective under way. It stands where c10d's Work does.

    Its steps yield `FREE` before they write a slot, and a request when they have; what follows reads the slots.
    """

    __slots__ = ("_awaited", "_lane", "_steps")

    def __init__(self, lane: Lane, steps: Steps) -> None:
        self._lane, self._steps = lane, steps
        self._awaited: int | None = FREE
        next(steps)
        while self._awaited == FREE:
            self._advance(FREE)

    def wait(self) -> None:
        """Until the collective is complete."""
        while self._awaited is not None:
            self._advance(self._awaited)

    def is_completed(self) -> bool:
        """Whether `wait` would not block. What can be done without waiting is done."""
        while self._awaited is not None and self._lane.is_ready(self._awaited):
            self._advance(self._awaited)
        return self._awaited is None

    def _advance(self, awaited: int) -> None:
        lane, self._awaited = self._lane, None  # so it stays if a step raises
        try:
            lane.wait(awaited)
            following = _torch.on_plain_kernels(next, self._steps, None)
        except BaseException as error:
            if not isinstance(error, CollectiveError):
                lane.peers.fail(f"it broke off a collective in shared memory: {error!r}", [lane.rank])
            raise
        if awaited != FREE:
            lane.has_read()
        if following is None:
            lane.close()
        elif following != FREE:
            lane.show(following)
        self._awaited = following
