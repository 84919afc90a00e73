"""The ranks of a group: one waits for words of the others, and raises if one ends or gives up."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from .. import _torch
from .._torch import ProcessGroup
from ..errors import LockstepError, PeerError
from .deadlocks import WAITS, addresses, note_wait
from .processes import state_of
from .recorder import current_purpose, describe, dump, last_of_backend, request

# words of 8 bytes to a cache line, so that ranks do not write into one another's
LINE = 8
# written by a rank that has given up: larger than any other word
BROKEN = 1 << 62
# of each rank: why it has given up, for the others to repeat
REASON_BYTES = 1 << 12
# of each rank's last calls of the backend
ANNOUNCED = 16
# times that a waiting rank offers its core before it sleeps, about half a millisecond
_YIELDS = 1000
# from one look of a sleeping rank at the others to the next
_CHECK_SECONDS = 0.02
# about 6 s: so often a rank is seen stopped before it counts as lost, whatever the timeout
_STOPPED_CHECKS = 250


def head_bytes(size: int, streams: int) -> int:
    """Return the bytes before the slots.

    They are a line for a token, and a page for each rank (`Peers`).
    """
    head = 8 * (LINE + size * _page_words(size, streams))
    # torch's large tensors begin 64 bytes into a page of memory. Copies in either direction are
    # slow if the target begins a little behind the source in its page, so slots begin half a page
    # from there: 9152 bytes end at 14400.
    return -(-head // 4096) * 4096 + 2112


def _page_words(size: int, streams: int) -> int:
    """Return the words of a rank's page."""
    # of 2 ranks 8 words: a line
    published = -(-2 * _said_words(size) // LINE) * LINE
    # 2 ranks, 3 streams: 32 + 16 + 8 + 512
    return LINE * (streams + 1) + ANNOUNCED + published + REASON_BYTES // 8


def _said_words(size: int) -> int:
    """Return how many numbers a rank publishes in a round.

    They are the bytes for each rank and in all, and a number of the dtype.
    """
    return size + 2


class Peers:
    """The ranks of a group, as one of them waits for the words that they write.

    Every rank writes its own page: for each stream a line with the rounds that it has shown, the
    rounds that it has read, and its requests in even and odd rounds; then a line with the number of
    its backend calls, and the last of these calls; then the numbers that it publishes in even and
    odd rounds; then the reason for which it has given up.
    """

    def __init__(
        self, group: ProcessGroup, pids: Sequence[int], memory: memoryview, streams: int
    ) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.words: memoryview = memory.cast("Q")
        # global ranks
        self.ranks: list[int] = _torch.ranks_in_order(group)
        self.name: str = group.group_name
        self._group = weakref.ref(group)
        self._pids = pids
        page_words = _page_words(self.size, streams)
        pages = [LINE + rank * page_words for rank in range(self.size)]
        # by stream and rank
        self.lines: list[list[int]] = []
        for stream in range(streams):
            self.lines.append([page + LINE * stream for page in pages])
        self._announced = [page + LINE * streams for page in pages]
        # By parity of the round and rank: the numbers that it publishes in a round of the first
        # stream.
        published = [call + LINE + ANNOUNCED for call in self._announced]
        count = _said_words(self.size)
        self.said: list[list[memoryview]] = []
        for start in (0, count):
            self.said.append([self.words[first + start :][:count] for first in published])
        page_ends = [8 * (page + page_words) for page in pages]
        self._reasons = [memory[end - REASON_BYTES :] for end in page_ends]
        self._calls = 0
        self._failure: PeerError | None = None

    def check(self) -> None:
        """Raise the error with which an earlier call has failed."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure), self._failure.ranks)

    def fail(
        self,
        text: str,
        ranks: Sequence[int] = (),
        reason: str = "",
        kind: type[PeerError] = PeerError,
    ) -> PeerError:
        """Return the error that this and every later call raises, here and on the other ranks.

        The other ranks repeat the reason, though not always the text, and raise a LockstepError
        unchanged. The global ranks at fault may be in other groups.
        """
        if self._failure is None:
            hint = dump(self.ranks[self.rank], text, ranks, self._seen())
            self._failure = kind(text + hint, tuple(ranks))
            self._publish_failure(reason or text, ranks, is_final=kind is LockstepError)
        return type(self._failure)(str(self._failure), self._failure.ranks)

    def _publish_failure(self, reason: str, ranks: Sequence[int], *, is_final: bool) -> None:
        """Write why this rank gives up, then the words that end the waits of the other ranks.

        They raise a final reason unchanged.
        """
        data = json.dumps([reason, list(ranks), is_final]).encode()
        if len(data) > REASON_BYTES - 2:
            beginning = reason[: REASON_BYTES // 8] + " ..."
            data = json.dumps([beginning, list(ranks)[:32], is_final]).encode()
        page = self._reasons[self.rank]
        page[2 : 2 + len(data)] = data
        page[:2] = len(data).to_bytes(2, "little")
        for lines in self.lines:
            line = lines[self.rank]
            self.words[line] = BROKEN
            self.words[line + 1] = BROKEN

    def close(self, error: BaseException) -> PeerError:
        """Close the group on all ranks because this one has failed after it had shared its part."""
        own_rank = self.ranks[self.rank]
        return self.fail(
            f"rank {own_rank} failed in a collective in shared memory after it had shared its part "
            f"({error!r}), so the group is closed on all ranks: restart_world() begins another",
            [own_rank],
        )

    def _seen(self) -> dict[int, str]:
        """Return the last round of each rank in the first stream, by its global number."""
        seen = {}
        for rank, line in zip(self.ranks, self.lines[0], strict=True):
            last = self.words[line]
            seen[rank] = "before its first round, or given up"
            if 0 < last < BROKEN:
                number = self.words[line + 2 + (last & 1)]
                seen[rank] = f"round {last} of group {self.name}: {describe(number)}"
        return seen

    def heard(self, rank: int) -> PeerError:
        """Return the error for a rank of the group that has given up, with its reason."""
        page = self._reasons[rank]
        length = int.from_bytes(page[:2], "little")
        reason = "see its error"
        ranks = [self.ranks[rank]]
        is_final = False
        if length:
            reason, ranks, is_final = json.loads(bytes(page[2 : 2 + length]))
        if is_final:
            return self.fail(reason, ranks, kind=LockstepError)
        text = f"{self._name(rank)} has given up a collective in shared memory: {reason}"
        return self.fail(text, ranks, reason)

    def announce(self, kind: str, dtype: torch.dtype, count: int, op: str, root: int) -> None:
        """Publish the next call of the backend, and compare it with the calls of other ranks.

        No rank blocks here. If two ranks differ, the later one raises before it calls the backend,
        so that the backend of the earlier one does not get unexpected data. The earlier one is
        notified while it waits (`check_others`).
        """
        self.check()
        self._calls += 1
        line = self._announced[self.rank]
        words = self.words
        words[line + LINE + self._calls % ANNOUNCED] = request(kind, dtype, count, op, root=root)
        words[line] = self._calls
        self._check_calls()

    def retract(self) -> None:
        """Withdraw the last call that was announced.

        The backend has refused it, so nothing was sent.
        """
        self._calls -= 1
        self.words[self._announced[self.rank]] = self._calls

    def _check_calls(self) -> None:
        """Raise if a rank has announced another call than this rank has."""
        # calls of the ranks that have reached this call, and whose word for it is not overwritten
        requests = {}
        position = LINE + self._calls % ANNOUNCED
        for rank, line in enumerate(self._announced):
            if 0 <= self.words[line] - self._calls < ANNOUNCED:
                requests[rank] = self.words[line + position]
        if len(set(requests.values())) > 1:
            raise self._differ(requests)

    def _ranks_behind(self, word: int, value: int, rank: int) -> list[int]:
        """Return the global ranks whose word has not reached a value, or that have given up.

        `word` is the index of the word of `rank`.
        """
        page_words = _page_words(self.size, len(self.lines))
        behind = []
        for other, global_rank in enumerate(self.ranks):
            reached = self.words[word + (other - rank) * page_words]
            if other != self.rank and not value <= reached < BROKEN:
                behind.append(global_rank)
        return behind

    def _ranks_without_call(self, call: int) -> list[int]:
        """Return the global ranks that have not announced a call of the backend."""
        return [
            global_rank
            for global_rank, announced in zip(self.ranks, self._announced, strict=True)
            if self.words[announced] < call
        ]

    def _describe_wait(self, awaited: int | None) -> str:
        """Describe the collective and the group in which this rank waits, and the ranks awaited."""
        text = "memory to be read" if awaited is None else describe(awaited)
        purpose = current_purpose()
        if purpose:
            text += f" for {purpose}"
        return f"{text} (group {self.name})"

    @property
    def calls(self) -> int:
        """The number of backend calls that this rank has announced."""
        return self._calls

    def check_others(self, call: int = 0) -> None:
        """Raise if a rank has given up, or differs, while this rank waits for its backend.

        `call` is the number of the backend call that it waits for.
        """
        self.check()
        words = self.words
        if any(words[line] < call for line in self._announced):
            note_wait(
                lambda: f"{last_of_backend(self.name)} (group {self.name}, by its backend)",
                lambda: addresses(self._ranks_without_call(call)),
            )
        for rank, line in enumerate(self.lines[0]):
            if rank != self.rank and words[line] == BROKEN:
                raise self.heard(rank)
            # A rank that has started the collective may return before it is complete.
            is_late = words[self._announced[rank]] < self._calls
            if is_late and state_of(self._pids[rank]) == "returned":
                raise self.fail(
                    f"{self._name(rank)} has returned, and others wait for it in a collective",
                    [self.ranks[rank]],
                )
        self._check_calls()

    def wait(self, word: int, value: int, rank: int, awaited: int | None = None) -> None:
        """Wait until a word of a rank is at least a value; raise PeerError if that cannot happen.

        The request `awaited` is the one that both ranks run.
        """
        words = self.words
        stopped = 0

        def look(waited: float) -> None:
            nonlocal stopped
            # another thread may have closed the group
            self.check()
            if words[word] < value:
                note_wait(
                    lambda: self._describe_wait(awaited),
                    lambda: addresses(self._ranks_behind(word, value, rank)),
                )
            group = self._group()
            state = state_of(self._pids[rank])
            # Counted, not timed: a job that is stopped as a whole and goes on has not waited for a
            # rank.
            stopped = stopped + 1 if state == "stopped" else 0
            if group is None or not _torch.is_live(group):
                text = "the process group was destroyed while one of its collectives waited"
                raise self.fail(text, [self.ranks[self.rank]])
            if words[word] >= value:
                return
            # now: it may be set after the first steps, which are slow
            timeout = _torch.timeout_of(group)
            own_name = f"rank {self.ranks[self.rank]}"
            name = self._name(rank)
            culprits = [self.ranks[rank]]
            if state in ("ended", "returned"):
                text = f"{name} has {state} while {own_name} waited for it in a collective"
                raise self.fail(text, culprits)
            if words[self._announced[rank]] > self._calls:
                raise self.fail(
                    f"{name} started another collective than the one in which {own_name} waits "
                    "for it",
                    culprits,
                )
            is_over = waited > timeout
            if is_over or stopped > _STOPPED_CHECKS:
                limit = f", the timeout of the process group, for {name}" if is_over else ""
                hint = (
                    ": all ranks must start the same collectives in the same order, with the same "
                    "async_op"
                )
                if stopped:
                    hint = f", and {name} is stopped (SIGSTOP)"
                seconds = min(waited, timeout)
                text = f"{own_name} waited {seconds:.0f} s{limit} in a collective{hint}"
                raise self.fail(text, culprits)

        wait_until(lambda: words[word] >= value, look)
        if words[word] == BROKEN:
            raise self.heard(rank)

    def differ(self, lines: Sequence[int], requests: Sequence[int]) -> PeerError:
        """Return the error for ranks with different requests.

        If one of them has given up, the error has its reason.
        """
        for rank, line in enumerate(lines):
            if rank != self.rank and self.words[line] == BROKEN:
                return self.heard(rank)
        return self._differ(dict(enumerate(requests)))

    def _differ(self, requests: Mapping[int, int]) -> PeerError:
        collectives = {self.ranks[rank]: describe(number) for rank, number in requests.items()}
        text, culprits = different_collectives(collectives)
        return self.fail(text, culprits)

    def _name(self, rank: int) -> str:
        return f"rank {self.ranks[rank]} (process {self._pids[rank]})"


def wait_until(
    done: Callable[[], bool], look: Callable[[float], None], every: float = _CHECK_SECONDS
) -> None:
    """Wait until `done()`; first yield the core, then sleep in growing steps of at most 1 ms.

    `look` is called with the seconds waited, once `every` so many seconds, and raises if the wait
    is in vain.
    """
    for _ in range(_YIELDS):
        if done():
            return
        os.sched_yield()
    start = time.monotonic()
    looked = start
    try:
        while not done():
            now = time.monotonic()
            time.sleep(min(1e-3, 5e-5 + (now - start) / 16))
            if now - looked > every:
                looked = now
                look(now - start)
    finally:
        WAITS.pop(threading.get_ident(), None)


def different_collectives(texts: Mapping[int, str]) -> tuple[str, tuple[int, ...]]:
    """Describe global ranks that have started different collectives; return also the culprits."""
    collectives = ", ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    text = f"ranks started different collectives on one communicator: {collectives}"
    return text + _hint_at_sizes(texts.values()), minority(texts)


_SIZE = re.compile(r" of \d+ x ")


def _hint_at_sizes(texts: Iterable[str]) -> str:
    """Return a hint for ranks that have started one collective with different sizes."""
    without_sizes = {_SIZE.sub(" of n x ", text) for text in texts}
    if len(without_sizes) > 1:
        return ""
    return (
        "; blocks of different sizes need the forms that take sizes (ending in _v), uneven shards "
        "DTensor.from_local(..., shape=...) or run_check=True"
    )


def minority(values: Mapping[int, object]) -> tuple[int, ...]:
    """Return the keys whose value differs from the value of more than half of all keys."""
    counts = Counter(values.values())
    common, times = counts.most_common(1)[0]
    if times * 2 <= len(values):
        return ()
    return tuple(key for key, value in values.items() if value != common)
