"""Processes of ranks: their machines, and their states (running, stopped, ended or returned).

A rank of a pool has returned when it has finished its job. Its process still runs and waits for the
next job, but it does not take part in further collectives of the finished job.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import weakref
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import torch.distributed as dist

from .._torch import ProcessGroup

# the option PR_SET_NAME of prctl
_SET_NAME = 15
# Declared mutable state: machine and process id of the ranks of each group, in its order. An entry
# is dropped with its group.
_PROCESSES: weakref.WeakKeyDictionary[ProcessGroup, tuple[tuple[int, int], ...]] = (
    weakref.WeakKeyDictionary()
)


def note_processes(group: ProcessGroup, processes: tuple[tuple[int, int], ...]) -> None:
    """Store (machine, process id) of the ranks of a group, in its order."""
    _PROCESSES[group] = processes


def processes_of(group: ProcessGroup) -> tuple[tuple[int, int], ...]:
    """Return (machine, process id) of the ranks of a group, in its order.

    Returns () before the group's first collective on CPU tensors, in which the ranks exchange these
    numbers.
    """
    return _PROCESSES.get(group, ())


def machine() -> int:
    """Return a number that two processes share if one sees the other in /proc.

    Returns 0 if there is no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        # the number of the namespace in which process ids count
        pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
    digest = hashlib.sha256(f"{boot}{pid_namespace}".encode()).digest()
    # 1 to 2**56: a positive int64
    return int.from_bytes(digest[:7], "little") + 1


# --- declared mutable state of a rank of a pool
# the number of the job that this process runs
_job = 0
# the process ids of the job's ranks, by rank
_pids_of_job: tuple[int, ...] = ()


def name_process(job: int, *, returned: bool) -> None:
    """Set the name of a pool rank's process (Linux).

    Other ranks read the name in /proc, see `state_of`. It is "returned 7" when the rank has
    returned from job 7, and "python" while the rank runs a job.
    """
    global _job  # noqa: PLW0603  # a process has one name, and one job
    _job = job
    if sys.platform == "linux":
        name = f"returned {job}" if returned else "python"
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode())


def note_job(pids: tuple[int, ...]) -> None:
    """Store the process ids of the ranks of the job that this process runs, by rank."""
    global _pids_of_job  # noqa: PLW0603  # a process has one job
    _pids_of_job = pids


def returned_ranks(ranks: Sequence[int]) -> list[int]:
    """Return those of some global ranks that have returned from the job of this process.

    Returns [] outside of pools. It also returns [] if the program has made a new world, whose ranks
    may have other numbers than those of the job.
    """
    pids = _pids_of_job
    is_world_of_job = dist.is_initialized() and dist.get_world_size() == len(pids)
    if not is_world_of_job or pids[dist.get_rank()] != os.getpid():
        return []
    return [rank for rank in ranks if state_of(pids[rank]) is ProcessState.RETURNED]


class ProcessState(StrEnum):
    """State of the process of a rank.

    A process is stopped by a signal. A process that has ended and is not yet reaped counts as
    ended. A rank of a pool has returned if it has returned from the job that this rank runs.
    """

    RUNNING = "running"
    STOPPED = "stopped"
    ENDED = "ended"
    RETURNED = "returned"


def state_of(pid: int) -> ProcessState:
    """Return the state of a process of this machine."""
    try:
        # "1234 (returned 7) S 1 ...": process id, name, state
        head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return ProcessState.ENDED
    _, returned, job = head.partition("(returned ")
    # A rank that has already returned from a later job has also returned from this one.
    if returned and int(job) >= _job:
        return ProcessState.RETURNED
    state = rest.split()[0]
    # a zombie, or dead
    if state in "ZX":
        return ProcessState.ENDED
    return ProcessState.STOPPED if state == "T" else ProcessState.RUNNING
