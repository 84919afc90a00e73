"""Collectives of gloo that watch the other ranks while they wait, so that errors name a culprit.

gloo reports that a connection has failed, but not which rank is at fault. A `BackendWork` looks at
the other ranks while it waits for gloo. If gloo fails, it inspects the processes of this machine,
and all ranks report their last collective in the store of the default group (`_roll_call`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from .. import _torch
from .._torch import ProcessGroup, Store, Work
from ..argument_types import name_ranks
from ..errors import PeerError
from .peers import ABANDONED, Peers, different_collectives, wait_until, watch_members
from .processes import ProcessState, machine, processes_of, state_of
from .recorder import dump, last_of_backend

# A process may still look alive for this many seconds after its connections have ended.
_DEATH_SECONDS = 0.5
# seconds that the other ranks have to report the same failure
_ROLL_CALL_SECONDS = 3.0

T = TypeVar("T")


def drain(timeout: float) -> None:
    """Wait until no thread of gloo needs the interpreter's lock, so that groups can be freed.

    Without the wait, freeing a group may be a deadlock:

    1. The group waits for its threads, and this rank holds the interpreter's lock meanwhile.
    2. A thread of the group has ended a collective, and frees its tensors. It waits for the lock.

    An abandoned collective ends when other ranks release their groups, or when gloo times out.

    Args:
        timeout: the seconds after which gloo times out. They are also the longest wait.
    """
    deadline = time.monotonic() + timeout
    while not all(work.is_completed() for work in ABANDONED):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    ABANDONED.clear()
    # Collectives that were not abandoned have ended, too, but their tensors may still be in use by
    # threads of gloo. They are freed within microseconds.
    time.sleep(0.05)


class BackendWork:
    """The work of a collective of gloo, with the interface of c10d's Work.

    `wait` raises a PeerError if a rank has ended, has given up or runs another collective, or if
    the timeout is over. It watches the `peers` meanwhile, and notifies them of a failure.

    Args:
        work: the work of gloo.
        group: its group.
        peers: the ranks of this machine that make the same call; None if they are not watched.
        part_of: the name of a larger group that consists of several groups such as this one, or "".
            Example: 4 ranks on 2 hosts exchange by the groups of ranks (0, 2) and (1, 3). If one of
            the two groups fails, all 4 ranks raise the same error.
    """

    __slots__ = ("_call", "_group", "_part_of", "_peers", "_work")

    def __init__(
        self, work: Work, group: ProcessGroup, peers: Peers | None, part_of: str = ""
    ) -> None:
        self._work = work
        self._group = group
        self._peers = peers
        self._part_of = part_of
        # the number under which this rank has announced the call of the backend
        self._call = 0 if peers is None else peers.calls

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        peers = self._peers
        if peers is not None:
            try:
                # The argument, the seconds waited so far, does not matter.
                wait_until(self._work.is_completed, lambda _: peers.check_others(self._call))
            except PeerError:
                ABANDONED.append(self._work)
                raise
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _explain(self._group, str(error), peers, self._part_of) from error


def wait_for_members(work: Work, group: ProcessGroup, text: str) -> None:
    """Wait for a call that all members of a group make before they can notify each other.

    The arguments are those of `watch_members`.

    Raises:
        PeerError: the call has failed, or `watch_members` raises.
    """
    watch_members(work, group, text)
    BackendWork(work, group, None).wait()


def _explain(group: ProcessGroup, message: str, peers: Peers | None, part_of: str) -> PeerError:
    """Return the error for a message of gloo; it names the ranks at fault."""
    # `[file.cc:123] message. This is typically ...`
    reason = message.partition("] ")[2].partition(". This is typically")[0] or message
    if not _torch.is_live(group):
        return PeerError(
            f"the process group was destroyed while one of its collectives waited: {reason}"
        )
    ranks = _torch.ranks_in_order(group)
    own_rank = ranks[group.rank()]
    text, culprits = _diagnose(group, ranks, own_rank)
    error = f"a collective of gloo failed on rank {own_rank}: {text} ({reason})"
    if part_of:
        error, culprits = first_failure(part_of, error, culprits)
    if peers is None:
        # Without peers, this rank cannot observe the collectives of other ranks.
        hint = dump(own_rank, error, culprits, seen={})
        return PeerError(error + hint, culprits)
    return peers.fail(error, culprits)


def first_failure(name: str, text: str, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the first failure of a group that the store has, and the ranks at fault.

    The ranks of the group `name` see different failures. If the store has no failure of the group,
    this one becomes the first.
    """
    own_failure = json.dumps([text, ranks])
    key = f"shoal_failed/{name}"
    # The store writes `own_failure` if the key has no value, and returns the value that the key has
    # then. It returns nothing if it is out of reach.
    first = _ask_store(lambda store: store.compare_set(key, "", own_failure), seconds=0)
    text, ranks = json.loads(first or own_failure)
    return text, tuple(ranks)


def _diagnose(group: ProcessGroup, ranks: list[int], own_rank: int) -> tuple[str, tuple[int, ...]]:
    """Describe the failure of a group of ranks; return also the ranks at fault.

    Both are given as far as this rank can know.
    """
    lost = _wait_for_lost_ranks(group, ranks)
    if lost:
        return _diagnose_loss(group, ranks, own_rank, lost)
    started = _roll_call(group, ranks, own_rank, _ROLL_CALL_SECONDS)
    if started is None:
        text = "the store of the default group does not answer, so its process or host (rank 0?) "
        return text + "may be gone", ()
    silent = tuple(rank for rank in ranks if rank not in started)
    if silent:
        verbs = "has not reported it: it is"
        if len(silent) > 1:
            verbs = "have not reported it: they are"
        return f"{name_ranks(silent)} {verbs} elsewhere, stuck or out of reach", silent
    if len(set(started.values())) > 1:
        return different_collectives(started)
    return (
        "all ranks have reported it and their last collective is the same: a rank has left out a "
        "collective, or the network is slow",
        (),
    )


def _diagnose_loss(
    group: ProcessGroup, ranks: list[int], own_rank: int, lost: dict[int, LostRank]
) -> tuple[str, tuple[int, ...]]:
    """Describe the failure of a group that has lost ranks; return also the ranks at fault."""
    text = ", ".join(f"rank {rank} {lost_rank}" for rank, lost_rank in lost.items())
    # gloo may abort a process that receives the data of a different collective. So if all lost
    # ranks have ended, the cause may be different collectives of the remaining ranks.
    if all(lost_rank.state is ProcessState.ENDED for lost_rank in lost.values()):
        others = [rank for rank in ranks if rank not in lost]
        started = _roll_call(group, others, own_rank, _DEATH_SECONDS)
        if started and len(set(started.values())) > 1:
            difference, _ = different_collectives(started)
            text = f"{text}; {difference}"
    # If one rank has ended and another one has returned, the latter most likely failed because of
    # the former, sooner than this rank.
    culprits = []
    for rank, lost_rank in lost.items():
        if lost_rank.state is not ProcessState.RETURNED:
            culprits.append(rank)
    # If all lost ranks have returned, all of them are at fault.
    return text, tuple(culprits or lost)


def _wait_for_lost_ranks(group: ProcessGroup, ranks: list[int]) -> dict[int, LostRank]:
    """Return the states of lost ranks; the end of a process may show up a moment later."""
    deadline = time.monotonic() + _DEATH_SECONDS
    lost = lost_ranks(group, ranks)
    while not lost and time.monotonic() < deadline:
        time.sleep(0.02)
        lost = lost_ranks(group, ranks)
    return lost


class LostRank(NamedTuple):
    """A rank that does not run any more: its process, and the state of the process."""

    pid: int
    state: ProcessState

    def __str__(self) -> str:
        if self.state is ProcessState.STOPPED:
            return f"(process {self.pid}) is stopped (SIGSTOP)"
        return f"(process {self.pid}) has {self.state}"


def lost_ranks(group: ProcessGroup, ranks: list[int]) -> dict[int, LostRank]:
    """Return the ranks that, as far as this machine shows, have ended, returned or are stopped."""
    own_machine = machine()
    if not own_machine:
        return {}
    lost = {}
    # `processes_of` is empty before the first collective of the group.
    for rank, (machine_of_rank, pid) in zip(ranks, processes_of(group), strict=False):
        if machine_of_rank != own_machine:
            continue
        state = state_of(pid)
        if state is not ProcessState.RUNNING:
            lost[rank] = LostRank(pid, state)
    return lost


def _roll_call(
    group: ProcessGroup, ranks: list[int], own_rank: int, seconds: float
) -> dict[int, str] | None:
    """Return the last collectives of the ranks that report a failure of the group.

    Each rank that sees the failure writes its last collective to the store, and waits at most
    `seconds` for the reports of the other ranks. Returns None if the store does not answer.
    """

    def collect_reports(store: Store) -> dict[int, str]:
        name = group.group_name
        keys = {rank: f"shoal_failed/{name}/{rank}" for rank in ranks}
        store.set(keys[own_rank], last_of_backend(name))
        deadline = time.monotonic() + seconds
        while not store.check([*keys.values()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        reported = {rank: key for rank, key in keys.items() if store.check([key])}
        return {rank: store.get(key).decode() for rank, key in reported.items()}

    return _ask_store(collect_reports, seconds)


def _ask_store(ask: Callable[[Store], T], seconds: float) -> T | None:
    """Call a function with the store of the default group, and return its result.

    Returns None if the store does not answer in time: `seconds` and one more.
    """
    answer: list[T] = []

    def append_answer() -> None:
        # RuntimeError: the store is gone
        with suppress(RuntimeError):
            answer.append(ask(_torch.default_store()))

    # in a thread, because a store that is out of reach blocks for minutes
    thread = threading.Thread(target=append_answer, daemon=True)
    thread.start()
    thread.join(seconds + 1)
    return answer[0] if answer else None
