"""The shared memory of a group: streams of rounds, and the ranks; mapped by all of them, or by none.

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
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from .. import _torch
from .._torch import AllgatherOptions, AllreduceOptions, ProcessGroup, ReduceOp, on_plain_kernels
from .peers import Peers, head_bytes
from .stream import Stream

SLOT_BYTES = 1 << 20  # of one rank in one round in the foreground; two per rank. Larger messages take several rounds.
_ALL_SLOTS_BYTES = 1 << 26  # of a group with many ranks
# For what goes on in the background: slots per rank, and bytes of each. They are large, so there is one, and long
# under way, so gathers and reductions have a stream each: no reduction is waited for when the next gather starts.
BACKGROUND = {"gathers": (1, 1 << 24), "reductions": (1, 1 << 24)}
OPT_OUT = "SHOAL_SHARED_MEMORY"  # "0" on any rank keeps every group that it is in with its backend
# Flags are stored after data without a fence, which is right where stores become visible in program order (TSO).
_ORDERED = {"x86_64", "AMD64"}
# Declared mutable state: an entry goes with its group.
_PROCESSES: weakref.WeakKeyDictionary[ProcessGroup, tuple[tuple[int, int], ...]] = weakref.WeakKeyDictionary()


class Channel:
    """The shared memory of a group, seen by one rank: streams by name, that of the foreground has small rounds."""

    def __init__(self, group: ProcessGroup, segment: mmap.mmap, slots: Mapping[str, tuple[int, int]]) -> None:
        size, head = group.size(), head_bytes(group.size(), len(slots))
        pids = [pid for _, pid in processes_of(group)]
        self.peers: Peers = Peers(group, pids, memoryview(segment)[:head], len(slots))
        self.background: dict[str, Stream] = {}
        data = torch.frombuffer(segment, dtype=torch.uint8, offset=head)
        for i, (name, (depth, slot_bytes)) in enumerate(slots.items()):
            own = depth * size * slot_bytes  # 2 slots of 1 MiB for 4 ranks: 8 MiB of data
            self.background[name] = Stream(self.peers, i, data[:own].view(depth, size, slot_bytes))
            data = data[own:]
        self.foreground: Stream = self.background.pop("foreground")


# Declared mutable state: an entry goes with its group. None: the group keeps its backend.
_CHANNELS: weakref.WeakKeyDictionary[ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()


def channel_of(group: ProcessGroup) -> Channel | None:
    """The channel of a group of gloo, made at its first collective; None on all ranks where it keeps its backend."""
    try:
        return _CHANNELS[group]
    except KeyError:
        size = group.size()
        slots = {  # by name: (depth, bytes); in the foreground of 4 ranks (2, 1 MiB), of 48 ranks (2, 699008)
            name: (depth, min(most, _ALL_SLOTS_BYTES // (size * depth)) // 64 * 64)
            for name, (depth, most) in {"foreground": (2, SLOT_BYTES), **BACKGROUND}.items()
        }
        per_rank = sum(depth * slot_bytes for depth, slot_bytes in slots.values())
        segment = on_plain_kernels(map_segment, group, head_bytes(size, len(slots)) + size * per_rank)
        channel = _CHANNELS[group] = None if segment is None else on_plain_kernels(Channel, group, segment, slots)
        return channel


def give_up(reason: str) -> None:
    """Have the ranks that wait for this one, or come to, raise at once, and say what it did, not at their timeout."""
    for channel in list(_CHANNELS.values()):
        if channel is not None:
            peers = channel.peers
            own = peers.ranks[peers.rank]
            peers.fail(f"rank {own} {reason}", [own])


def map_segment(group: ProcessGroup, nbytes: int) -> mmap.mmap | None:
    """Memory shared by all ranks of the group, zeroed; None on all ranks if any cannot have it.

    Two small collectives of the group, unseen by modes: every rank calls this at the same point of its sequence of
    collectives. Pages that nobody touches cost nothing.
    """
    token = secrets.randbits(62)
    # A number that two ranks have in common where one can see the other's memory; 0 where nobody can see it.
    host = 0 if platform.machine() not in _ORDERED or os.environ.get(OPT_OUT) == "0" else machine()
    own = _create(nbytes, token) if group.rank() == 0 else -1
    try:
        facts = torch.tensor([host, os.getpid(), own, token, machine()])
        of_all = torch.empty(group.size(), len(facts), dtype=facts.dtype)
        group._allgather_base(of_all.view(-1), facts, AllgatherOptions()).wait()
        hosts, pids, files, tokens, machines = of_all.t().tolist()
        _PROCESSES[group] = tuple(zip(machines, pids, strict=True))
        memory = None
        if hosts[0] and len(set(hosts)) == 1 and files[0] >= 0:
            path = f"/proc/{pids[0]}/fd/{files[0]}"
            memory = _map(path, nbytes, tokens[0])
        return memory if all_have(memory, group) else None
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


def all_have(this: object, group: ProcessGroup) -> bool:
    """Whether no rank of the group has None here."""
    have = torch.tensor([int(this is not None)])
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.MIN  # type: ignore[assignment]  # the stub wants the class around the enum
    group.allreduce([have], options).wait()
    return bool(have.item())


def processes_of(group: ProcessGroup) -> tuple[tuple[int, int], ...]:
    """(machine, process id) of the ranks of a group, in its order; () before its first collective on CPU tensors."""
    return _PROCESSES.get(group, ())


def ranks_per_host(group: ProcessGroup) -> int:
    """How many ranks each of several hosts has, which follow one another in a group; 0 if that is not so, or one."""
    machines = [machine for machine, _ in processes_of(group)]
    count = machines.count(machines[0]) if machines and all(machines) else 0  # hosts a a b b: 2
    if not 1 < count < len(machines) or machines != [m for m in dict.fromkeys(machines) for _ in range(count)]:
        return 0
    positions = [*_torch.group_ranks(group).items()]
    return count if sorted(positions) == positions else 0


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
