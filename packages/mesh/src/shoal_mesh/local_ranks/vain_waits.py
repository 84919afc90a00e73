"""Ranks of a job that wait in a collective for ranks that have returned, found by their stacks.

A collective in shared memory detects by itself that a rank has returned. The first collective of a
group, and collectives that a program starts by `torch.distributed`, wait in C++ until the timeout
of the process group. The parent therefore looks at the stacks of the ranks that have not returned.
If all of them are in the same collectives in two looks, and transfer nothing, they wait in vain.

Torch's own parallelism (pipeline stages, DistributedDataParallel, DTensors) and programs that call
`work.wait()` are in C++ too, but in other functions, which may compute for long. They count as
waiting only if they also use no processor time, and wait for none, between the looks.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Seconds between the first looks. Each interval is longer than the last one by this factor, up to
# the longest interval.
_SECONDS = 2.0
_LONGEST = 30.0
_LONGER = 1.5
# ranks that have read and written more bytes than this since the last look are transferring data
_BYTES_OF_TRANSFER = 1 << 20
# Ranks that have worked for more than this share of the time since the last look are computing.
# Work is processor time, and the time for which the main threads have waited for a processor.
_SHARE_OF_WORK = 0.1
# files of the innermost frame of a thread that waits in a collective
_COLLECTIVES = re.compile(
    r"torch/distributed/distributed_c10d\.py"
    r"|shoal_mesh/(shared_memory/channel|watch/backend_work)\.py"
    r"|shoal_mesh/watch/peers\.py.* in watch_members"
)
# Calls of torch that wait in C++ for other ranks, or compute. Checkpoints wait for disks.
_PERHAPS_WAITING = re.compile(r"torch/distributed/(?!checkpoint/)| in _engine_run_backward$")
# files between a function of torch and the operator that it calls
_CALLS_OF_OPERATORS = re.compile(r"torch/(_ops|_library/\w+)\.py")
_WAIT = re.compile(r"\bwait\(")
_LOOP = re.compile(r"shoal_mesh/watch/peers\.py.* in wait_until")
_MEMBERS = re.compile(r"shoal_mesh/watch/peers\.py.* in watch_members")
_FILE = re.compile(r'File "([^"]+)"')
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_INSTALLED = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen"})


class _Look(NamedTuple):
    """A look of the parent at the ranks that have not returned.

    Attributes:
        calls: the innermost call of each rank.
        transferred: the bytes that the ranks have read and written.
        worked: the seconds for which the ranks have worked; None if they are unknown.
        time: the time of the look.
    """

    calls: tuple[str, ...]
    transferred: int
    worked: float | None
    time: float

    def waits_since(self, before: _Look) -> bool:
        """Return whether all ranks have waited in the same calls since an earlier look."""
        if self.calls != before.calls or self.transferred - before.transferred > _BYTES_OF_TRANSFER:
            return False
        if all(map(_COLLECTIVES.search, self.calls)):
            return True
        if self.worked is None or before.worked is None:
            return False
        share = (self.worked - before.worked) / (self.time - before.time)
        return share < _SHARE_OF_WORK and all(map(_may_wait, self.calls))


class VainWaits:
    """A check, repeated from time to time, whether ranks wait in vain for ranks that have returned.

    Args:
        stacks: returns, by rank, the stacks of all threads of ranks, as faulthandler writes them.
    """

    def __init__(self, stacks: Callable[[tuple[int, ...]], Mapping[int, str]]) -> None:
        self._stacks = stacks
        self._seconds = _SECONDS
        self._next = time.monotonic() + _SECONDS
        self._seen: _Look | None = None

    def seconds_to_next(self) -> float:
        """Return how long the parent may wait for answers before it calls `are_seen`."""
        return max(0.0, self._next - time.monotonic())

    def are_seen(self, pids: Mapping[int, int]) -> bool:
        """Return whether all ranks wait in the collectives in which they were at the last look.

        Args:
            pids: the processes of the ranks that have not returned, by rank.
        """
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._seconds
        self._seconds = min(self._seconds * _LONGER, _LONGEST)
        calls = tuple(map(_innermost_call, self._stacks(tuple(pids)).values()))
        transferred = sum(map(_bytes_of, pids.values()))
        look = _Look(calls, transferred, _seconds_of_work(pids.values()), time.monotonic())
        before = self._seen
        self._seen = look
        return before is not None and look.waits_since(before)


def _may_wait(call: str) -> bool:
    """Return whether a call may wait in C++ for other ranks."""
    if _PERHAPS_WAITING.search(call):
        return True
    place = _PLACE.search(call)
    # `work.wait()` of a program has no frame of its own
    return place is not None and bool(_WAIT.search(linecache.getline(place[1], int(place[2]))))


def _innermost_call(dump: str) -> str:
    """Return the innermost call of the main thread, which is the last thread in a dump.

    Returns '' if another thread runs a program.
    """
    *others, main = re.split(r"(?:Current thread|Thread) 0x.*\n", dump)
    for thread in others:
        if any(not _is_installed(path) for path in _FILE.findall(thread)):
            return ""
    calls = [line.strip() for line in main.splitlines() if "File " in line]
    # `watch_members` is at a fixed line while the loop of `wait_until`, which it calls, turns.
    is_in_loop = len(calls) > 1 and _LOOP.search(calls[0]) and _MEMBERS.search(calls[1])
    if is_in_loop:
        return calls[1]
    return next((call for call in calls if not _CALLS_OF_OPERATORS.search(call)), "")


def _is_installed(path: str) -> bool:
    return path.startswith(_INSTALLED) or "shoal_mesh/" in path


def _seconds_of_work(pids: Iterable[int]) -> float | None:
    """Return for how long processes have computed, or their main threads waited to compute."""
    ticks = 0
    nanoseconds = 0
    try:
        for pid in pids:
            # the fields behind the name; two are the time in user mode and in the kernel
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            # time on a processor, time in the queue for one, number of slices
            nanoseconds += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") + nanoseconds / 1e9


def _bytes_of(pid: int) -> int:
    """Return how many bytes a process has read and written."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/io").read_text().split()
        return int(fields[1]) + int(fields[3])
    return 0
