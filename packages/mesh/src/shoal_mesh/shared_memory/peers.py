"""The ranks of a group: one waits for words that others write, and raises if one has ended or given up."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from .. import _torch
from .._torch import ProcessGroup
from ..errors import CollectiveError
from .request import describe

__all__ = ["BROKEN", "LINE", "Peers"]

LINE = 8  # words of 8 bytes to a cache line, so that ranks do not write into one another's

BROKEN = 1 << 62  # what a rank that has given up writes: more than any word becomes
_YIELDS = 1000  # times that a waiting rank offers its core before it sleeps, about half a millisecond
_CHECK_SECONDS = 0.02  # how often a sleeping rank looks whether the others are alive


class Peers:
    """The ranks of a group, as one of them waits for the words that they write.

    Attributes:
        rank, size: in the group.
        ranks: the global ranks, in the order of the group.
        words: what they share, as numbers.
    """

    def __init__(self, group: ProcessGroup, pids: Sequence[int], words: memoryview, own: Sequence[int]) -> None:
        self.rank, self.size, self.words = group.rank(), group.size(), words
        self.ranks = sorted(_torch.group_ranks(group), key=_torch.group_ranks(group).__getitem__)
        self._group, self._pids, self._own = weakref.ref(group), pids, own
        self._failure = ""

    def check(self) -> None:
        """Raise what an earlier call has failed with."""
        if self._failure:
            raise CollectiveError(self._failure)

    def fail(self, text: str) -> CollectiveError:
        """The error that this and every later call raises, here and on the other ranks."""
        self._failure = self._failure or text
        for word in self._own:
            self.words[word] = BROKEN
        return CollectiveError(self._failure)

    def wait(self, word: int, value: int, rank: int) -> None:
        """Until a word of a rank of the group is at least a value.

        Raises:
            CollectiveError: the rank has ended or given up, the timeout is over, or the group is destroyed.
        """
        words = self.words
        for _ in range(_YIELDS):
            if words[word] >= value:
                break
            os.sched_yield()
        else:
            self._sleep(word, value, rank)
        if words[word] == BROKEN:
            raise self.fail(f"{self._name(rank)} has given up a collective in shared memory: see its error")

    def _sleep(self, word: int, value: int, rank: int) -> None:
        """Wait in steps that grow with the time waited, to 1 ms; now and then see whether the rank is still there."""
        start = checked = time.monotonic()
        me = f"rank {self.ranks[self.rank]}"
        while self.words[word] < value:
            now = time.monotonic()
            time.sleep(min(1e-3, 5e-5 + (now - start) / 16))
            if now - checked < _CHECK_SECONDS:
                continue
            checked, group = now, self._group()
            if group is None or not _torch.is_live(group):
                raise self.fail("the process group was destroyed while one of its collectives waited")
            if not _is_alive(self._pids[rank]) and self.words[word] < value:
                raise self.fail(f"{self._name(rank)} has ended while {me} waited for it in a collective")
            timeout = _torch.timeout_of(group)  # now: it may be set after the first steps, which are slow
            if now - start > timeout:
                raise self.fail(
                    f"{me} waited {timeout:.0f} s, the timeout of the process group, for {self._name(rank)} in a "
                    "collective: ranks start the same ones in one order, with one async_op"
                )

    def differing(self, requests: Sequence[int]) -> str:
        """What to say when ranks request different things."""
        text = ", ".join(f"rank {rank}: {describe(other)}" for rank, other in zip(self.ranks, requests, strict=True))
        return f"ranks started different collectives on one communicator: {text}"

    def _name(self, rank: int) -> str:
        return f"rank {self.ranks[rank]} (process {self._pids[rank]})"


def _is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
