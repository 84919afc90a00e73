"""Waits of one rank for the other ranks of its group, by words in the memory that they share.

A word is an unsigned integer of 8 bytes. Each rank counts its progress in words of its own, which
the other ranks only read. `Peers.wait` waits until a word of another rank has reached a value, and
raises if that cannot happen: the other rank has ended, has given up, or runs another collective.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

import torch

from .. import _torch
from .._torch import ProcessGroup, Work
from ..argument_types import name_ranks
from ..errors import LockstepError, PeerError
from .deadlocks import WAITS, addresses, note_wait
from .processes import ProcessState, returned_ranks, state_of
from .recorder import current_purpose, describe, dump, last_of_backend, request

# words of 8 bytes in a cache line; two ranks never write to one line
LINE = 8
# The value that a rank writes to its words when it gives up. It is larger than any other value, so
# it ends all waits for the rank.
BROKEN = 1 << 62
# space in a rank's page for the reason why it has given up, which the other ranks repeat
REASON_BYTES = 1 << 12
# the number of its last backend calls that a rank's page holds
ANNOUNCED = 16
# times that a waiting rank offers its core before it sleeps, about half a millisecond
_YIELDS = 1000
# seconds between two looks of a sleeping rank at the other ranks
_CHECK_SECONDS = 0.02
# What a rank has sent before it returned arrives within this many seconds.
_ARRIVAL_SECONDS = 3.0
# A rank that is stopped in so many looks in a row counts as lost, whatever the timeout. These are
# about 6 s.
_STOPPED_CHECKS = 250
# Declared mutable state: works of gloo for which a rank has stopped waiting before they were
# complete. `backend_work.drain` waits for them.
ABANDONED: list[Work] = []


def head_bytes(size: int, streams: int) -> int:
    """Return the bytes of the shared memory before the slots, which hold the data.

    They are a line for a token, and a page for each rank (`Peers`).
    """
    head = 8 * (LINE + size * _page_words(size, streams))
    # torch's large tensors begin 64 bytes into a page of memory. Copies in either direction are
    # slow if the target begins a little behind the source in its page, so slots begin half a page
    # from there. A head of 9152 bytes takes 3 pages and 2112 bytes: 14400.
    return -(-head // 4096) * 4096 + 2112


def _page_words(size: int, streams: int) -> int:
    """Return the number of words in a rank's page."""
    # For even and for odd rounds, in whole lines. 2 ranks: 5 words each, together two lines.
    published = -(-2 * _published_words(size) // LINE) * LINE
    # 2 ranks, 3 streams: 32 + 16 + 16 + 512 words
    return LINE * (streams + 1) + ANNOUNCED + published + REASON_BYTES // 8


def _published_words(size: int) -> int:
    """Return how many numbers a rank publishes in a round.

    They are the bytes that it sends to each rank, the sum of these, a number for the dtype, and a
    number that the caller compares (`Stream.comparing`).
    """
    return size + 3


class Peers:
    """The pages of all ranks of a group, as one rank writes its own page and reads the others.

    A stream is a sequence of collectives in rounds. In each round a rank shows data in its slot,
    and reads the slots of the other ranks. A page consists of:

    - for each stream a line: the rounds that the rank has shown, the rounds that it has read, and
      its requests (numbers of collectives) in the last even and the last odd round;
    - a line with the number of its backend calls, then the requests of its last backend calls;
    - the numbers that the rank publishes in even rounds, then those of odd rounds;
    - the reason why the rank has given up.
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
        # by stream and rank: the index of the first word of a line
        self.lines: list[list[int]] = []
        for stream in range(streams):
            self.lines.append([page + LINE * stream for page in pages])
        # by rank: the index of the word with the number of backend calls
        self._announced = [page + LINE * streams for page in pages]
        # By parity of the round and by rank: the numbers that the rank publishes in a round of the
        # first stream.
        self.published: list[list[memoryview]] = []
        first_words = [line + LINE + ANNOUNCED for line in self._announced]
        count = _published_words(self.size)
        for start in (0, count):
            self.published.append([self.words[first + start :][:count] for first in first_words])
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
        """Give up the group: return the error that this and every later call on this rank raises.

        Args:
            text: the message of the error on this rank.
            ranks: the global ranks at fault, which may be in other groups.
            reason: the part of the message that the other ranks repeat; the text by default.
            kind: the class of the error. The other ranks raise a LockstepError with the same
                message.
        """
        if self._failure is None:
            hint = dump(self.ranks[self.rank], text, ranks, self._last_rounds())
            self._failure = kind(text + hint, tuple(ranks))
            self._publish_failure(reason or text, ranks, is_final=kind is LockstepError)
        return type(self._failure)(str(self._failure), self._failure.ranks)

    def _publish_failure(self, reason: str, ranks: Sequence[int], *, is_final: bool) -> None:
        """Write why this rank gives up, then the words that end the waits of the other ranks.

        The other ranks raise a final reason as it is, and embed any other reason in a text.
        """
        data = json.dumps([reason, list(ranks), is_final]).encode()
        # the first two bytes are the length
        if len(data) > REASON_BYTES - 2:
            # a character may take 6 bytes in JSON, such as \u00e9
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
        """Close the group on all ranks because this rank failed after it had shared its part."""
        own_rank = self.ranks[self.rank]
        return self.fail(
            f"rank {own_rank} failed in a collective in shared memory after it had shared its part "
            f"({error!r}), so the group is closed on all ranks: restart_world() begins another",
            [own_rank],
        )

    def _last_rounds(self) -> dict[int, str]:
        """Return the last round of each rank in the first stream, by its global number."""
        seen = {}
        for rank, line in zip(self.ranks, self.lines[0], strict=True):
            last = self.words[line]
            seen[rank] = "before its first round, or given up"
            if 0 < last < BROKEN:
                number = self.words[line + 2 + (last & 1)]
                seen[rank] = f"round {last} of group {self.name}: {describe(number)}"
        return seen

    def error_of(self, rank: int) -> PeerError:
        """Return the error of this rank for a rank of the group that has given up.

        The error has the reason of the other rank.
        """
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
        so that the backend of the earlier one does not get unexpected data. The earlier one raises
        while it waits for its backend (`check_others`).
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
        """Raise if another rank has announced a different call under the number of the last call.

        Call 20 is compared with the ranks that have announced 20 to 35 calls: the word of a call is
        overwritten after `ANNOUNCED` further calls.
        """
        requests = {}
        position = LINE + self._calls % ANNOUNCED
        for rank, line in enumerate(self._announced):
            if 0 <= self.words[line] - self._calls < ANNOUNCED:
                requests[rank] = self.words[line + position]
        if len(set(requests.values())) > 1:
            raise self._differ(requests)

    def _ranks_behind(self, word: int, value: int, rank: int) -> list[int]:
        """Return the global ranks whose word has not reached a value, or that have given up.

        `word` is the index of the word in the page of `rank`.
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
        """Describe the collective and the group in which this rank waits."""
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

        `call` is the number of the backend call that this rank waits for.
        """
        self.check()
        words = self.words
        if any(words[line] < call for line in self._announced):
            note_wait(
                lambda: f"{last_of_backend(self.name)} (group {self.name}, by its backend)",
                lambda: addresses(self._ranks_without_call(call)),
            )
        self._check_given_up()
        for rank in range(self.size):
            # A rank that has started the collective may return before this rank has completed it.
            is_late = words[self._announced[rank]] < self._calls
            if is_late and state_of(self._pids[rank]) is ProcessState.RETURNED:
                raise self.fail(
                    f"{self._name(rank)} has returned, and others wait for it in a collective",
                    [self.ranks[rank]],
                )
        self._check_calls()

    def _check_given_up(self) -> None:
        """Raise the error of another rank if one has given up the group."""
        for rank, line in enumerate(self.lines[0]):
            if rank != self.rank and self.words[line] == BROKEN:
                raise self.error_of(rank)

    def wait(self, word: int, value: int, rank: int, awaited: int | None = None) -> None:
        """Wait until a word of a rank is at least a value; raise PeerError if that cannot happen.

        Args:
            word: the index of the word.
            value: the least value.
            rank: the rank in the group that writes the word.
            awaited: the request that both ranks run; None if this rank waits until the other rank
                has read its slot.
        """
        words = self.words
        # looks in a row at which the rank was stopped
        stopped = 0

        def look(waited: float) -> None:
            nonlocal stopped
            # another thread may have closed the group
            self.check()
            # Without this look, two ranks that wait for each other wait on after a third rank has
            # given up and left: to the watcher of waits, the third rank does not wait.
            self._check_given_up()
            if words[word] < value:
                note_wait(
                    lambda: self._describe_wait(awaited),
                    lambda: addresses(self._ranks_behind(word, value, rank)),
                )
            group = self._group()
            state = state_of(self._pids[rank])
            # Looks are counted, and not seconds: if the whole job was stopped and continues, no
            # rank has waited meanwhile.
            stopped = stopped + 1 if state is ProcessState.STOPPED else 0
            if group is None or not _torch.is_live(group):
                text = "the process group was destroyed while one of its collectives waited"
                raise self.fail(text, [self.ranks[self.rank]])
            if words[word] >= value:
                return
            # read in every look: a program may set it after its first steps, which are slow
            timeout = _torch.timeout_of(group)
            own_name = f"rank {self.ranks[self.rank]}"
            name = self._name(rank)
            culprits = [self.ranks[rank]]
            if state in (ProcessState.ENDED, ProcessState.RETURNED):
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
            raise self.error_of(rank)

    def differ(self, lines: Sequence[int], requests: Sequence[int]) -> PeerError:
        """Return the error for ranks with different requests.

        If one of them has given up, the error has its reason.
        """
        for rank, line in enumerate(lines):
            if rank != self.rank and self.words[line] == BROKEN:
                return self.error_of(rank)
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

    `look` is called with the seconds waited so far, once in `every` seconds. It raises if the wait
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
            # 50 us at first, 1 ms after 15 ms
            time.sleep(min(1e-3, 5e-5 + (now - start) / 16))
            if now - looked > every:
                looked = now
                look(now - start)
    finally:
        WAITS.pop(threading.get_ident(), None)


def watch_members(work: Work, group: ProcessGroup, text: str) -> None:
    """Watch the members of a group until a call that all of them make is complete or has failed.

    Args:
        work: the work of the call.
        group: the group; only the members of a group of torch's gloo are watched.
        text: the description of the call, the same on all ranks.

    Raises:
        PeerError: ranks wait for each other in different collectives, or a member has returned from
            the job of a pool.
    """
    if not _torch.is_on_gloo(group):
        return
    ranks = _torch.ranks_in_order(group)
    others = [rank for rank in ranks if rank != ranks[group.rank()]]
    call = f"{text} of group {group.group_name}"
    # the seconds waited when a member was first seen to have returned
    first_seen = inf

    def look(waited: float) -> None:
        """Note the wait; raise if it is in vain."""
        nonlocal first_seen
        # a deadlock is found by the watcher thread
        wait = note_wait(lambda: text, lambda: addresses(others), call)
        if wait.failure:
            ABANDONED.append(work)
            raise PeerError(wait.failure, tuple(ranks))
        returned = returned_ranks(others)
        if not returned:
            return
        first_seen = min(first_seen, waited)
        if waited - first_seen > _ARRIVAL_SECONDS:
            ABANDONED.append(work)
            verb = "has" if len(returned) == 1 else "have"
            raise PeerError(
                f"{name_ranks(returned)} {verb} returned, and others wait in {text}: all ranks of "
                "a group must make its collectives",
                tuple(returned),
            )

    wait_until(work.is_completed, look)


def different_collectives(texts: Mapping[int, str]) -> tuple[str, tuple[int, ...]]:
    """Describe global ranks that have started different collectives; return also the culprits."""
    collectives = ", ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    text = f"ranks started different collectives on one communicator: {collectives}"
    return text + _hint_at_sizes(texts.values()), minority(texts)


# the count in `describe`: "all_reduce sum of 6 x float32"
_SIZE = re.compile(r" of \d+ x ")


def _hint_at_sizes(texts: Iterable[str]) -> str:
    """Return a hint for ranks that have started one collective with different sizes."""
    without_sizes = {_SIZE.sub(" of n x ", text) for text in texts}
    if len(without_sizes) > 1:
        return ""
    return (
        "; blocks of different sizes need the forms that take sizes (ending in _v). If the blocks "
        "are uneven shards of a DTensor, make it by DTensor.from_local(..., run_check=True), or "
        "with the global shape=(...) if the shards are split as torch.chunk does"
    )


def minority(values: Mapping[int, object]) -> tuple[int, ...]:
    """Return the keys whose value differs from the value of more than half of all keys."""
    counts = Counter(values.values())
    common, times = counts.most_common(1)[0]
    has_majority = times * 2 > len(values)
    if not has_majority:
        return ()
    return tuple(key for key, value in values.items() if value != common)
