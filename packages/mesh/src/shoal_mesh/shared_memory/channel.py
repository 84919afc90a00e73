"""The shared memory of a group: streams of rounds, mapped by all ranks or by none.

The first rank makes an anonymous file (memfd), which the others open by way of /proc. It has no
name in any folder, so nothing is left behind however its owner ends. A random token shows whether
all ranks have mapped the same memory. The ranks agree on the outcome: either all ranks of the group
use the memory, or none of them does.

In a round of a stream each rank writes its own slot, raises its flag, waits for the flags of the
others and reads their slots:

    rank 0:  write slot[0] | flag 7 | wait for 7, 7, 7 | read | write slot[1] | flag 8 | ...

With its flag a rank publishes its collective (`request`), and ranks with different collectives
raise instead of reading nonsense. In a second word it publishes the rounds that it has read, and a
slot is written again when all ranks have read it. With two slots no rank waits for that: if all
flags of round t are raised, all ranks have read round t - 1. A stream with one slot takes half the
memory, and waits.

A collective is a generator of steps: it writes its slot and yields its request; the code after the
`yield` reads the slots.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import sys
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from .. import _torch
from .._torch import AllgatherOptions, AllreduceOptions, ProcessGroup, ReduceOp, on_plain_kernels
from ..errors import PeerError
from ..watch.deadlocks import Watcher, board_of_process, note_addresses
from ..watch.peers import BROKEN, Peers, head_bytes, minority
from ..watch.processes import machine, note_processes, processes_of
from ..watch.recorder import record
from .rounds import WAIT_FOR_SLOT, ReceiveError, Steps

# of one rank in one round in the foreground; two per rank. Larger messages take several rounds.
SLOT_BYTES = 1 << 20
_ALL_SLOTS_BYTES = 1 << 26  # of a group with many ranks
# Streams of the background: slots per rank, and bytes of each. Slots are large, so a stream has
# one. Collectives are long under way, so gathers and reductions have a stream each: the next gather
# need not wait for a reduction.
BACKGROUND = {"gathers": (1, 1 << 24), "reductions": (1, 1 << 24)}
# "0" on any rank keeps every group that it is in with its backend
OPT_OUT = "SHOAL_SHARED_MEMORY"
# Flags are stored after data without a fence, which is right where stores become visible in program
# order (TSO).
_ORDERED = {"x86_64", "AMD64"}
# of slots, by dtype, length and blocks, kept because making them takes longer than copying 1 KiB
_MOST_VIEWS = 1024


class Stream:
    """One sequence of rounds of a group, seen by one rank."""

    def __init__(self, peers: Peers, number: int, slots: Tensor) -> None:
        self.peers = peers
        self.rank: int = peers.rank
        self.size: int = peers.size
        self.depth: int = slots.shape[0]  # slots of a rank, two or one
        self.slot_bytes: int = slots.shape[2]
        # the collective that has been started last, until it is complete
        self.open: Underway | None = None
        self._slots = slots  # (depth, size, bytes)
        self.lines = peers.lines[number]
        self._others = [(line, rank) for rank, line in enumerate(self.lines) if rank != peers.rank]
        self.round: int = 0  # that was shown last
        self._slot = 0
        self._views: dict[tuple[torch.dtype, int, int], list[tuple[Tensor, Tensor]]] = {}

    def start(self, steps: Steps) -> Underway:
        """Start a collective and show its first round; complete the one that was open before."""
        if self.open is not None:
            self.open.complete()
        self.peers.check()
        if self.depth == 1:
            self.wait(WAIT_FOR_SLOT)
        slot = self._slot
        try:
            first = _torch.on_plain_kernels(next, steps)
        except BaseException:
            # Nothing has been shown, so this rank goes on as if it had not been called.
            self._slot = slot
            raise
        work = Underway(self, steps)
        self.open = work
        work.show(first)
        return work

    def slots(self, dtype: torch.dtype, count: int, ways: int = 1) -> tuple[Tensor, Tensor]:
        """Return the memory that this rank reads and writes: `count` elements of a slot.

        The first tensor has the next slot of every rank, to read once all ranks have shown the
        round. If there are several `ways`, it has the block with this rank's number of as many
        equal blocks: (size, count // ways). The second tensor is the own slot, (count,), free to be
        written.
        """
        views = self._views.get((dtype, count, ways))
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            block = count // ways
            first = block * (self.rank if ways > 1 else 0)
            views = [
                (slots[:, first : first + block], slots[self.rank, :count])
                for slots in self._slots.view(dtype)
            ]
            self._views[dtype, count, ways] = views
        self._slot = (self._slot + 1) % self.depth
        return views[self._slot]

    def show(self, request: int) -> None:
        record(self.peers.name, request)
        self.round += 1
        words = self.peers.words
        line = self.lines[self.rank]
        words[line + 2 + (self.round & 1)] = request
        words[line] = self.round

    def is_ready(self, awaited: int) -> bool:
        word, least = (
            (1, self.round + 1 - self.depth) if awaited == WAIT_FOR_SLOT else (0, self.round)
        )
        return all(self.peers.words[line + word] >= least for line, _ in self._others)

    def wait(self, awaited: int) -> None:
        """Wait until the next slot is free, or until all ranks have shown the round.

        Then check that all ranks run the same collective.
        """
        if awaited == WAIT_FOR_SLOT:
            for line, rank in self._others:
                self.peers.wait(line + 1, self.round + 1 - self.depth, rank)
            return
        words = self.peers.words
        shown = self.round
        for line, rank in self._others:
            if not shown <= words[line] < BROKEN:
                self.peers.wait(line, shown, rank, awaited)
        request = 2 + (shown & 1)
        for line in self.lines:
            if words[line + request] != awaited:
                raise self.peers.differ(self.lines, [words[each + request] for each in self.lines])


class Underway:
    """A collective under way, with the interface of c10d's Work."""

    __slots__ = ("_awaited", "_error", "_steps", "_stream")

    def __init__(self, stream: Stream, steps: Steps) -> None:
        self._stream = stream
        self._steps = steps
        # a request, or WAIT_FOR_SLOT; None before the first and when it is complete
        self._awaited: int | None = None
        # the error of the receiver of the result
        self._error: Exception | None = None

    def wait(self) -> None:
        self.complete()
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        """Take all steps; `wait` raises the error that the receiver of the result raises."""
        while self._awaited is not None:
            self.advance()

    def is_completed(self) -> bool:
        """Return whether `wait` would not block.

        Steps that need no wait are taken.
        """
        while self._awaited is not None and self._stream.is_ready(self._awaited):
            self.advance()
        return self._awaited is None

    def advance(self) -> None:
        """Wait for the request that the last step has yielded, and take the next step.

        Raises:
            PeerError: this step failed, on this rank or on another; the group is closed.
        """
        stream = self._stream
        awaited = self._awaited
        self._awaited = None  # so it stays if a step raises
        try:
            if awaited is not None:
                stream.wait(awaited)
            following = _torch.on_plain_kernels(next, self._steps, None)
        except ReceiveError as error:
            self._error = error.cause
            stream.peers.close(error.cause)
            return
        except PeerError:
            # the group is closed already
            raise
        except BaseException as error:
            closed = stream.peers.close(error)
            if isinstance(error, Exception):
                raise closed from error
            # an interrupt stays one
            raise
        self.show(following)

    def show(self, request: int | None) -> None:
        """Show the round that the last step filled, or (WAIT_FOR_SLOT, None) if all rounds were read."""
        stream = self._stream
        if request is None or request == WAIT_FOR_SLOT:
            stream.peers.words[stream.lines[stream.rank] + 1] = stream.round
        else:
            stream.show(request)
        if request is None:
            stream.open = None
        self._awaited = request


class Channel:
    """The shared memory of a group, seen by one rank: streams by name.

    The stream of the foreground has small rounds.
    """

    def __init__(
        self, group: ProcessGroup, segment: mmap.mmap, slots: Mapping[str, tuple[int, int]]
    ) -> None:
        size = group.size()
        head = head_bytes(group.size(), len(slots))
        pids = [pid for _, pid in processes_of(group)]
        self.peers: Peers = Peers(group, pids, memoryview(segment)[:head], len(slots))
        self.background: dict[str, Stream] = {}
        data = torch.frombuffer(segment, dtype=torch.uint8, offset=head)
        for i, (name, (depth, slot_bytes)) in enumerate(slots.items()):
            # 2 slots of 1 MiB for 4 ranks: 8 MiB of data
            own = depth * size * slot_bytes
            self.background[name] = Stream(self.peers, i, data[:own].view(depth, size, slot_bytes))
            data = data[own:]
        self.foreground: Stream = self.background.pop("foreground")


# Declared mutable state: an entry goes with its group. None: the group keeps its backend.
_CHANNELS: weakref.WeakKeyDictionary[ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()


def channel_of(group: ProcessGroup) -> Channel | None:
    """Return the channel of a group of gloo, made at its first collective.

    Returns None on all ranks if the group keeps its backend.
    """
    try:
        return _CHANNELS[group]
    except KeyError:
        size = group.size()
        # by name: (depth, bytes); in the foreground of 4 ranks (2, 1 MiB), of 48 ranks (2, 699008)
        slots = {
            name: (depth, min(most, _ALL_SLOTS_BYTES // (size * depth)) // 64 * 64)
            for name, (depth, most) in {"foreground": (2, SLOT_BYTES), **BACKGROUND}.items()
        }
        per_rank = sum(depth * slot_bytes for depth, slot_bytes in slots.values())
        segment = on_plain_kernels(
            map_segment, group, head_bytes(size, len(slots)) + size * per_rank
        )
        channel = None if segment is None else on_plain_kernels(Channel, group, segment, slots)
        _CHANNELS[group] = channel
        if channel is not None and _WATCHING.get(os.getpid()) is None:
            watcher = Watcher(_close_all)
            _WATCHING[os.getpid()] = watcher
            watcher.start()
        return channel


# Declared mutable state: the thread of this process that looks for deadlocks; a fork has no threads.
_WATCHING: dict[int, Watcher] = {}


def _close_all(text: str, waits: Mapping[int, str]) -> None:
    """Fail all channels of this process because of a deadlock.

    The collectives in which its ranks wait are given by rank.
    """
    for channel in list(_CHANNELS.values()):
        if channel is not None:
            channel.peers.fail(text, minority(waits))


def give_up(reason: str) -> None:
    """Have the ranks that wait for this rank, or will, raise at once instead of at their timeout.

    Their errors repeat the reason of this rank.
    """
    for channel in list(_CHANNELS.values()):
        if channel is not None:
            peers = channel.peers
            own = peers.ranks[peers.rank]
            peers.fail(f"rank {own} {reason}", [own])


def map_segment(group: ProcessGroup, nbytes: int) -> mmap.mmap | None:
    """Map zeroed memory shared by all ranks of the group; None on all ranks if any rank fails.

    It runs two small collectives of the group, unseen by modes: every rank calls this at the same
    point of its sequence of collectives. Untouched pages cost nothing.
    """
    token = secrets.randbits(62)
    # A number that two ranks share if one can map the other's memory; 0 if no rank can.
    host = 0 if platform.machine() not in _ORDERED or os.environ.get(OPT_OUT) == "0" else machine()
    own = _create(nbytes, token) if group.rank() == 0 else -1
    try:
        facts = torch.tensor(
            [host, os.getpid(), own, token, machine(), board_of_process()], device="cpu"
        )
        of_all = torch.empty(group.size(), len(facts), dtype=facts.dtype, device="cpu")
        group._allgather_base(of_all.view(-1), facts, AllgatherOptions()).wait()
        hosts, pids, files, tokens, machines, boards = of_all.t().tolist()
        note_processes(group, tuple(zip(machines, pids, strict=True)))
        memory = None
        if hosts[0] and len(set(hosts)) == 1 and files[0] >= 0:
            path = f"/proc/{pids[0]}/fd/{files[0]}"
            memory = _map(path, nbytes, tokens[0])
            note_addresses(_torch.ranks_in_order(group), pids, boards)
        return memory if all_have(memory, group) else None
    finally:
        if own >= 0:
            os.close(own)


def _create(nbytes: int, token: int) -> int:
    """Create an anonymous file of a size that begins with the token; return -1 if that fails."""
    try:
        file = os.memfd_create("shoal_mesh")
        os.ftruncate(file, nbytes)
        os.pwrite(file, token.to_bytes(8, sys.byteorder), 0)
    except (AttributeError, OSError):
        # another system, a sandbox without it, or no memory: the group keeps its backend
        return -1
    return file


def _map(path: str, nbytes: int, token: int) -> mmap.mmap | None:
    """Map the file if it can be opened and has the token."""
    try:
        with open(path, "r+b", buffering=0) as file:
            memory = mmap.mmap(file.fileno(), nbytes)
    except (OSError, ValueError):
        # of another user, in another view of /proc; ValueError: another file, and shorter
        return None
    return memory if memory[:8] == token.to_bytes(8, sys.byteorder) else None


def all_have(this: object, group: ProcessGroup) -> bool:
    """Return whether no rank of the group passes None."""
    have = torch.tensor([int(this is not None)], device="cpu")
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.MIN  # type: ignore[assignment]  # the stub wants the class around the enum
    group.allreduce([have], options).wait()
    return bool(have.item())


def ranks_per_host(group: ProcessGroup) -> int:
    """Return how many consecutive ranks of a group each of several hosts has.

    Returns 0 if the hosts differ in this, or if there is one host.
    """
    machines = [machine for machine, _ in processes_of(group)]
    count = machines.count(machines[0]) if machines and all(machines) else 0  # hosts a a b b: 2
    if not 1 < count < len(machines) or machines != [
        m for m in dict.fromkeys(machines) for _ in range(count)
    ]:
        return 0
    positions = [*_torch.group_ranks(group).items()]
    return count if sorted(positions) == positions else 0
