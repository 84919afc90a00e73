"""Ranks of a job that wait in a collective for ranks that have returned, found by their stacks.

A collective in shared memory detects by itself that a rank has returned. The first collective of a
group, and collectives that a program starts by `torch.distributed`, wait in C++ until the timeout
of the process group. The parent therefore looks at the stacks of the ranks that have not returned.
If all of them are in the same collectives in two looks, and transfer nothing, they wait in vain.
"""

from __future__ import annotations

import re
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

# Seconds between the first looks. Each interval is longer than the last one by this factor, up to
# the longest interval.
_SECONDS = 2.0
_LONGEST = 30.0
_LONGER = 1.5
# ranks that have read and written more bytes than this since the last look are transferring data
_BYTES_OF_TRANSFER = 1 << 20
# files of the innermost frame of a thread that waits in a collective
_COLLECTIVES = re.compile(
    r"torch/distributed/distributed_c10d\.py"
    r"|shoal_mesh/(shared_memory/channel|watch/backend_work)\.py"
    r"|shoal_mesh/watch/peers\.py.* in watch_members"
)
_LOOP = re.compile(r"shoal_mesh/watch/peers\.py.* in wait_until")
_MEMBERS = re.compile(r"shoal_mesh/watch/peers\.py.* in watch_members")
_FILE = re.compile(r'File "([^"]+)"')
_INSTALLED = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen"})


class VainWaits:
    """A check, repeated from time to time, whether ranks wait in vain for ranks that have returned.

    Args:
        stacks: returns, by rank, the stacks of all threads of ranks, as faulthandler writes them.
    """

    def __init__(self, stacks: Callable[[tuple[int, ...]], Mapping[int, str]]) -> None:
        self._stacks = stacks
        self._seconds = _SECONDS
        self._next = time.monotonic() + _SECONDS
        # the innermost calls of the ranks and the bytes they had transferred, at the last look
        self._seen: tuple[tuple[str, ...], int] | None = None

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
        before = self._seen
        self._seen = (calls, transferred)
        if before is None or not all(map(_COLLECTIVES.search, calls)):
            return False
        return before[0] == calls and transferred - before[1] < _BYTES_OF_TRANSFER


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
    return calls[1] if is_in_loop else next(iter(calls), "")


def _is_installed(path: str) -> bool:
    return path.startswith(_INSTALLED) or "shoal_mesh/" in path


def _bytes_of(pid: int) -> int:
    """Return how many bytes a process has read and written."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/io").read_text().split()
        return int(fields[1]) + int(fields[3])
    return 0
