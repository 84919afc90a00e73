"""Detection of ranks that wait for each other in different collectives, over all channels.

Every process has a board: a file in memory that other processes of the host read by way of /proc.
A thread of every process, the `Watcher`, looks at the other threads twice a second. If all threads
that run the program wait in collectives, it writes on the board which processes they wait for. Then
it reads the boards of these processes, the boards of the processes that they wait for, and so on.
If all processes that it reaches wait, none of them can continue, and all channels of this process
fail. A process that computes, sends, sleeps or is stopped counts as not waiting, so a slow rank
does not raise an alarm.

    rank 0 waits for rank 1 in an all-reduce, rank 1 for rank 0 in an all-gather: a deadlock
    rank 0 waits for rank 1 in an all-reduce, rank 1 reads a file: rank 0 waits on
"""

from __future__ import annotations

import json
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import _torch
from .._torch import ProcessGroup

# seconds from one look of the watcher to the next
_SECONDS = 0.5
# looks of every process at unchanged waits before they count as a deadlock
_LOOKS = 4
# size of a board; a state that does not fit is not written
_BOARD_BYTES = 1 << 14
# A process that has read and written more bytes than this since the last look is transferring data.
_BYTES_OF_TRANSFER = 1 << 20
# the file with the collectives of torch.distributed
_OF_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
# Folders of installed code. A thread that runs only such code serves the program, as the threads of
# pools, monitors and notebooks do.
_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
_LOG = logging.getLogger("shoal.deadlocks")


class Address(NamedTuple):
    """The location of a process's board."""

    # global rank, process id, and the number of the open file in that process
    rank: int
    pid: int
    file: int


class Wait:
    """A wait of one thread in a collective, from the first look of the thread at the other ranks.

    Attributes:
        serial: a number that no other wait of this process has.
        text: the description of the collective.
        awaited: returns the boards of the processes that the thread waits for.
        call: the name of a call that all members of a group make, or "". Members that are in one
            call do not wait for each other: the call may be about to end.
        failure: the text about the deadlock that this wait is a part of; empty if there is none.
        looks: how often the thread has looked and found that it must still wait.
    """

    __slots__ = ("awaited", "call", "failure", "looks", "serial", "text")

    def __init__(self, text: str, awaited: Callable[[], Sequence[Address]], call: str) -> None:
        self.serial: int = next(_SERIALS)
        self.text: str = text
        self.awaited: Callable[[], Sequence[Address]] = awaited
        self.call: str = call
        self.failure: str = ""
        self.looks: int = 0


# --- declared mutable state of this process
# thread -> its wait
WAITS: dict[int, Wait] = {}
# global rank -> the location of its board
_ADDRESSES: dict[int, Address] = {}
_SERIALS = count()
# process id -> the number of the open file of the board; only this process has an entry
_BOARD: dict[int, int] = {}


def note_wait(
    text: Callable[[], str], awaited: Callable[[], Sequence[Address]], call: str = ""
) -> Wait:
    """Record that this thread still waits; `wait_until` removes the record when the wait ends."""
    thread = threading.get_ident()
    wait = WAITS.get(thread)
    if wait is None:
        wait = Wait(text(), awaited, call)
        WAITS[thread] = wait
    wait.looks += 1
    return wait


def board_of_process() -> int:
    """Return the number of the open file of this process's board; -1 if there is none."""
    pid = os.getpid()
    if pid not in _BOARD:
        # a forked process has the entry of its parent
        _BOARD.clear()
        try:
            _BOARD[pid] = os.memfd_create("shoal_board")
        except (AttributeError, OSError):
            _BOARD[pid] = -1
    return _BOARD[pid]


def note_addresses(ranks: Sequence[int], pids: Sequence[int], files: Sequence[int]) -> None:
    """Remember the boards of global ranks of this host."""
    for rank, pid, file in zip(ranks, pids, files, strict=True):
        if file >= 0:
            _ADDRESSES[rank] = Address(rank, pid, file)


def addresses(ranks: Sequence[int]) -> list[Address]:
    """Return the boards of global ranks.

    An unknown board has an address that cannot be read, so its rank counts as not waiting.
    """
    return [_ADDRESSES.get(rank, Address(rank, 0, -1)) for rank in ranks]


class Watcher(threading.Thread):
    """The thread that looks for deadlocks.

    Args:
        fail: called for a deadlock, with a text about it and with the collective in which each of
            its ranks waits, by rank.
    """

    def __init__(self, fail: Callable[[str, Mapping[int, str]], object]) -> None:
        super().__init__(name="shoal deadlocks", daemon=True)
        self._fail = fail
        # number of the present look
        self._beat = 0
        # bytes that this process had read and written at the last look
        self._transferred = 0
        # serials of waits -> their `looks` at the last look
        self._looks: dict[int, int] = {}
        # `_places_of_waits` at the last look
        self._places: tuple[int, ...] = ()
        # whether the board says that this process waits
        self._was_blocked = False
        # By process: the serials of its waits, and its beat when this watcher first saw them. As
        # long as all serials stay the same, `_unchanged` is the number of looks that every process
        # has made since then.
        self._seen_serials: dict[int, list[Any]] = {}
        self._first_beats: dict[int, int] = {}
        self._unchanged = 0

    def run(self) -> None:
        """Look until the process ends."""
        while True:
            time.sleep(_SECONDS)
            # an error of the watcher must not end the program
            with suppress(Exception):
                self.look()

    def look(self) -> None:
        """Write on the board where this process waits, and fail if it is part of a deadlock."""
        state = self._state()
        if not state["waits"]:
            if self._was_blocked:
                _write(state)
            self._was_blocked = False
            self._seen_serials = {}
            self._unchanged = 0
            return
        self._was_blocked = True
        _write(state)
        states = processes_that_wait(os.getpid(), state, _read)
        self._compare(states)
        if states and self._unchanged >= _LOOKS:
            text, waits = describe_deadlock(states)
            self._unchanged = 0
            if not WAITS:
                # this process waits in a call of torch, which cannot be made to raise
                _LOG.error(text)
            for wait in list(WAITS.values()):
                wait.failure = text
            self._fail(text, waits)

    def _compare(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Count how often all processes have looked at the same waits, and found them unchanged."""
        serials = {}
        beats = {}
        for pid, state in states.items():
            serials[pid] = [wait["serial"] for wait in state["waits"]]
            beats[pid] = state["beat"]
        if not states or serials != self._seen_serials:
            self._seen_serials = serials
            self._first_beats = beats
            self._unchanged = 0
            return
        self._unchanged = min(beat - self._first_beats[pid] for pid, beat in beats.items())

    def _state(self) -> dict[str, Any]:
        """Return the content of the board for this look."""
        waits = self._waits()
        self._beat += 1
        rank = dist.get_rank() if dist.is_initialized() else -1
        return {"rank": rank, "beat": self._beat, "waits": waits}

    def _waits(self) -> list[dict[str, Any]]:
        """Return the waits of all threads that run the program; [] if one of them does not wait."""
        places = _places_of_waits()
        last_places = self._places
        self._places = places
        if not places or places != last_places:
            # The waits are new. A frame that is read keeps the objects of its function alive, so
            # frames are read only for waits that last from one look to the next.
            return []
        waits: list[dict[str, Any]] = []
        looks: dict[int, int] = {}
        for thread, frame in sys._current_frames().items():
            if thread == threading.get_ident():
                continue
            wait = WAITS.get(thread)
            facts = _wait_of_torch(frame) if wait is None else _facts_of(wait)
            if facts is None and _is_of_program(frame):
                return []
            if facts is None:
                continue
            if not facts["awaits"]:
                # all ranks have reached the collective of this thread
                return []
            if wait is not None:
                looks[wait.serial] = wait.looks
            waits.append(facts)
        last_looks = self._looks
        self._looks = looks
        # a thread that has not looked since the last look may have left its wait
        has_idle_thread = any(last_looks.get(serial) == times for serial, times in looks.items())
        if self._has_transferred() or has_idle_thread:
            return []
        return waits

    def _has_transferred(self) -> bool:
        """Return whether this process has sent or received a lot since the last call."""
        # "rchar: 300 wchar: 70 ...": 300 bytes read, 70 written
        words = Path("/proc/self/io").read_text().split()
        transferred = int(words[1]) + int(words[3])
        before = self._transferred
        self._transferred = transferred
        return transferred - before > _BYTES_OF_TRANSFER


_MAIN = threading.main_thread().ident or 0


def _places_of_waits() -> tuple[int, ...]:
    """Return numbers that are constant while threads wait in the same collectives.

    Returns () if no thread of this process waits.
    """
    numbers = [wait.serial for wait in list(WAITS.values())]
    frame = sys._current_frames().get(_MAIN)
    if frame is not None and frame.f_code.co_filename.endswith(_OF_C10D):
        # the main thread is in a collective of torch: the instruction at which it is
        numbers += [id(frame), frame.f_lasti]
    return tuple(numbers)


def _facts_of(wait: Wait) -> dict[str, Any]:
    """Return a wait in the form in which it is written on the board."""
    awaited = [*wait.awaited()]
    return {"serial": wait.serial, "text": wait.text, "awaits": awaited, "call": wait.call}


def _wait_of_torch(frame: FrameType | None) -> dict[str, Any] | None:
    """Return the wait of a thread that is inside of a collective of torch.distributed.

    Such a collective waits for all members.
    """
    if frame is None or not frame.f_code.co_filename.endswith(_OF_C10D):
        return None
    group = frame.f_locals.get("group") or _torch.default_group()
    if not isinstance(group, ProcessGroup) or not _torch.is_live(group):
        return None
    name = f"torch.distributed.{frame.f_code.co_name}"
    ranks = _torch.ranks_in_order(group)
    others = [rank for rank in ranks if rank != dist.get_rank()]
    # The next call may have a frame at the same address, but the group counts its collectives.
    serial = f"{id(frame)} {frame.f_lasti} {_torch.sequence_of(group)}"
    call = f"{name} of group {group.group_name}"
    return {"serial": serial, "text": name, "awaits": addresses(others), "call": call}


def _is_of_program(frame: FrameType | None) -> bool:
    """Return whether a thread runs code of the program, of torch or of shoal.

    Threads that run only other installed code do not count.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("torch.", "shoal_")):
            return True
        if not path.startswith(_INSTALLED):
            return True
        frame = frame.f_back
    return False


# --- boards ---------------------------------------------------------------------------------------


def _write(state: Mapping[str, Any]) -> None:
    """Write a state on the board of this process."""
    file = board_of_process()
    data = json.dumps(state).encode()
    if file >= 0 and len(data) < _BOARD_BYTES:
        # A process that reads the board during this write finds invalid JSON (`_read`), and reads
        # it again in its next look.
        os.pwrite(file, data.ljust(_BOARD_BYTES), 0)


def _read(address: Address) -> Mapping[str, Any] | None:
    """Return the state of another process; None if it cannot be read, or is being written."""
    if address.file < 0:
        return None
    with (
        suppress(OSError, ValueError),
        open(f"/proc/{address.pid}/fd/{address.file}", "rb") as file,
    ):
        state = json.loads(file.read(_BOARD_BYTES))
        return state if isinstance(state, dict) else None
    return None


def processes_that_wait(
    pid: int, state: Mapping[str, Any], read: Callable[[Address], Mapping[str, Any] | None]
) -> dict[int, Mapping[str, Any]]:
    """Return the states of all processes that a process waits for, directly or indirectly.

    Returns {} if one of them does not wait.
    """
    states = {pid: state}
    pending = [state]
    while pending:
        for wait in pending.pop()["waits"]:
            awaits_other_call = False
            for fields in wait["awaits"]:
                address = Address(*fields)
                other = states.get(address.pid) or read(address)
                if other is None or not other["waits"]:
                    return {}
                calls_of_other = [wait_of_other["call"] for wait_of_other in other["waits"]]
                if wait["call"] and wait["call"] in calls_of_other:
                    # both processes are in the same call of torch, which may be about to end
                    continue
                awaits_other_call = True
                if address.pid not in states:
                    states[address.pid] = other
                    pending.append(other)
            if not awaits_other_call:
                return {}
    return states


def describe_deadlock(states: Mapping[int, Mapping[str, Any]]) -> tuple[str, dict[int, str]]:
    """Return the text about a deadlock, and by rank the collective in which the rank waits."""
    texts: dict[int, str] = {}
    for state in sorted(states.values(), key=lambda state: int(state["rank"])):
        texts[state["rank"]] = ", ".join(wait["text"] for wait in state["waits"])
    waits = "; ".join(f"rank {rank} waits in {text}" for rank, text in texts.items())
    text = (
        f"ranks wait for each other in different collectives, so no rank can continue: {waits}. "
        "All ranks must start the same collectives in the same order: look for a call that only "
        "some ranks make (shoal_mesh.lockstep names its line)"
    )
    return text, texts
