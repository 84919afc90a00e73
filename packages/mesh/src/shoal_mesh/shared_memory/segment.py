"""Memory that all ranks of a group map, or the common answer that there is none.

The first rank makes an anonymous file (memfd), which the others open by way of /proc. It has no name in any folder, so
nothing is left behind however its owner ends. Whether everybody has mapped the same memory is verified by a random
token, and agreed upon: either all ranks of the group use it or none does.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import secrets
import sys
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from .._torch import AllgatherOptions, AllreduceOptions, ProcessGroup, ReduceOp, plain_kernels
from ..values import dataclass

OPT_OUT = "SHOAL_SHARED_MEMORY"  # "0" on any rank keeps every group that it is in with its backend
# Flags are stored after data without a fence, which is right where stores become visible in program order (TSO).
_ORDERED = {"x86_64", "AMD64"}
# Declared mutable state: an entry goes with its group.
_PROCESSES: WeakKeyDictionary[ProcessGroup, tuple[tuple[int, int], ...]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The shared memory of a group.

    Attributes:
        memory: mapped by every rank.
        pids: process of each rank, in the order of the group.
    """

    memory: mmap.mmap
    pids: tuple[int, ...]


@plain_kernels
def map_segment(group: ProcessGroup, nbytes: int) -> Segment | None:
    """Memory shared by all ranks of the group, zeroed; None on all ranks if any cannot have it.

    Two small collectives of the group, unseen by modes: every rank calls this at the same point of its sequence of
    collectives.

    Args:
        group: of CPU ranks, on one host or several.
        nbytes: size of the memory; pages that nobody touches cost nothing.
    """
    token = secrets.randbits(62)
    own = _create(nbytes, token) if group.rank() == 0 else -1
    try:
        facts = torch.tensor([_host(), os.getpid(), own, token, machine()])
        of_all = torch.empty(group.size(), len(facts), dtype=facts.dtype)
        group._allgather_base(of_all.view(-1), facts, AllgatherOptions()).wait()
        hosts, pids, files, tokens, machines = of_all.t().tolist()
        _PROCESSES[group] = tuple(zip(machines, pids, strict=True))
        memory = None
        if hosts[0] and len(set(hosts)) == 1 and files[0] >= 0:
            path = f"/proc/{pids[0]}/fd/{files[0]}"
            memory = _map(path, nbytes, tokens[0])
        return Segment(memory, tuple(pids)) if _all_have(memory, group) and memory is not None else None
    finally:
        if own >= 0:
            os.close(own)


def _create(nbytes: int, token: int) -> int:
    """An anonymous file of that size with the token in front, or -1."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        file = os.memfd_create("shoal_mesh")
        os.ftruncate(file, nbytes)
        os.pwrite(file, token.to_bytes(8, sys.byteorder), 0)
    except OSError:  # a sandbox without it, or no memory: the group keeps its backend
        return -1
    return file


def _map(path: str, nbytes: int, token: int) -> mmap.mmap | None:
    """The file mapped, if it can be opened and is the one meant."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # another user's process, or another view of /proc
        return None
    try:
        memory = mmap.mmap(file, nbytes)
    except (OSError, ValueError):  # ValueError: another file, and shorter
        return None
    finally:
        os.close(file)
    return memory if memory[:8] == token.to_bytes(8, sys.byteorder) else None


def _all_have(memory: mmap.mmap | None, group: ProcessGroup) -> bool:
    have = torch.tensor([int(memory is not None)])
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.MIN  # type: ignore[assignment]  # the stub wants the class around the enum
    group.allreduce([have], options).wait()
    return bool(have.item())


def processes_of(group: ProcessGroup) -> tuple[tuple[int, int], ...]:
    """(machine, process id) of the ranks of a group, in its order; () before its first collective on CPU tensors."""
    return _PROCESSES.get(group, ())


def _host() -> int:
    """A number that two ranks have in common where one can see the other's memory; 0 where nobody can see it."""
    if platform.machine() not in _ORDERED or os.environ.get(OPT_OUT) == "0":
        return 0
    return machine()


def machine() -> int:
    """A number that two processes have in common where one sees the other in /proc; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
    return int.from_bytes(hashlib.sha256(f"{boot}{processes}".encode()).digest()[:7], "little") + 1
