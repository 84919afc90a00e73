"""The shared memory of a group: streams of rounds, mapped by all ranks or by none.

The first rank makes an anonymous file (memfd), which the others open by way of /proc. It has no
name in any folder, so nothing is left behind however its owner ends. A random token shows whether
all ranks have mapped the same memory. The ranks agree on the outcome: either all ranks of the group
use the memory, or none of them does.

In a round of a stream each rank writes its own slot, raises its flag, waits for the flags of the
others and reads their slots:

    rank 0:  write slot[0] | flag 7 | wait for 7, 7, 7 | read | write slot[1] | flag 8 | ...

With its flag a rank publishes its collective (`request`), and ranks with different collectives
raise instead of reading wrong data. In a second word it publishes the rounds that it has read, and
a slot is written again when all ranks have read it. With two slots per rank no rank waits for that:
if all flags of round t are raised, all ranks have read round t - 1. A stream with one slot per rank
takes half the memory, and waits.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._torch import AllgatherOptions, AllreduceOptions, ProcessGroup, ReduceOp, on_plain_kernels
from ..errors import PeerError
from ..watch.deadlocks import Watcher, board_of_process, note_addresses
from ..watch.peers import BROKEN, Peers, head_bytes, minority, watch_members
from ..watch.processes import machine, note_processes, processes_of
from ..watch.recorder import record
from .rounds import WAIT_FOR_SLOT, ReceiveError, Steps

# The bytes of a slot of the foreground, which has two slots per rank. Larger messages take several
# rounds.
SLOT_BYTES = 1 << 20
# the description of the collectives in which ranks agree on shared memory
_FIRST_COLLECTIVE = "the first collective of a group"
# the most bytes of all slots of a stream; with many ranks, slots are smaller
_ALL_SLOTS_BYTES = 1 << 26


class StreamSlots(NamedTuple):
    """The slots that each rank has in a stream.

    Attributes:
        depth: number of slots of a rank, two or one.
        slot_bytes: bytes of a slot.
    """

    depth: int
    slot_bytes: int


# A stream of the background has one slot per rank, because the slots are large. Its collectives are
# in flight for long, so gathers and reductions have a stream each: the next gather does not wait
# for a reduction.
BACKGROUND = {"gathers": StreamSlots(1, 1 << 24), "reductions": StreamSlots(1, 1 << 24)}
# an environment variable; if it is "0" on a rank, all groups with this rank use their backend
OPT_OUT = "SHOAL_SHARED_MEMORY"
# Flags are stored after data without a fence, which is right where stores become visible in program
# order (TSO).
_ORDERED = {"x86_64", "AMD64"}
# The most views of its slots that a stream keeps. They are kept because making one takes longer
# than copying 1 KiB.
_MOST_VIEWS = 1024


class Stream:
    """One sequence of rounds of a group, seen by one rank."""

    def __init__(self, peers: Peers, number: int, slots: Tensor) -> None:
        self.peers = peers
        self.rank: int = peers.rank
        self.size: int = peers.size
        # slots of a rank, two or one
        self.depth: int = slots.shape[0]
        self.slot_bytes: int = slots.shape[2]
        # the collective that has been started last, until it is complete
        self.open: StepwiseWork | None = None
        # (depth, size, bytes)
        self._slots = slots
        # by rank: the index of the first word of its line (`Peers`)
        self.lines = peers.lines[number]
        self._others = [(line, rank) for rank, line in enumerate(self.lines) if rank != peers.rank]
        # the round that was shown last
        self.round: int = 0
        # the index of the slot that was used last, 0 or 1
        self._slot = 0
        # (dtype, count, ways) -> for each slot the two tensors that `slots` returns
        self._views: dict[tuple[torch.dtype, int, int], list[tuple[Tensor, Tensor]]] = {}
        # for the next collective: the number of this rank, and the list for those of all ranks
        self._compared: tuple[int, list[int]] | None = None

    def start(self, steps: Steps) -> StepwiseWork:
        """Start a collective and show its first round; complete the one that was open before."""
        if self.open is not None:
            self.open.complete()
        self.peers.check()
        if self.depth == 1:
            self.wait(WAIT_FOR_SLOT)
        if self._compared is not None:
            steps = self._compare_first(steps, *self._compared)
            self._compared = None
        slot = self._slot
        try:
            first = _torch.on_plain_kernels(next, steps)
        except BaseException:
            # Nothing has been shown, so the stream is as it was before the call.
            self._slot = slot
            raise
        work = StepwiseWork(self, steps)
        self.open = work
        work.show(first)
        return work

    @contextmanager
    def comparing(self, number: int) -> Iterator[list[int]]:
        """Compare a number of each rank in the first round of the collective of the block.

        It is for the foreground. If the numbers differ, the collective ends after this round on all
        ranks, and its result is not written.

        Args:
            number: the number of this rank, below 2**63.

        Yields:
            A list, to which the collective adds the numbers of all ranks in the order of the group.
        """
        numbers: list[int] = []
        self._compared = (number, numbers)
        try:
            yield numbers
        finally:
            self._compared = None

    def _compare_first(self, steps: Steps, number: int, numbers: list[int]) -> Steps:
        """Publish a number in the first round; take the other steps if all ranks have the same."""
        first = next(steps)
        published = self.peers.published
        # for the next round, which `yield` shows
        published[self.round + 1 & 1][self.rank][-1] = number
        yield first
        numbers += [words[-1] for words in published[self.round & 1]]
        if len({*numbers}) == 1:
            yield from steps

    def slots(self, dtype: torch.dtype, count: int, ways: int = 1) -> tuple[Tensor, Tensor]:
        """Return the memory that this rank reads and writes: `count` elements of a slot.

        The first tensor has the next slot of every rank, to read once all ranks have shown the
        round. With several `ways` each slot is divided into so many equal blocks, and the first
        tensor has only the blocks with this rank's number: (size, count // ways). The second tensor
        is the slot of this rank, (count,), free to be written.
        """
        views = self._views.get((dtype, count, ways))
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            block = count // ways
            first = block * self.rank if ways > 1 else 0
            views = []
            for slots in self._slots.view(dtype):
                read = slots[:, first : first + block]
                written = slots[self.rank, :count]
                views.append((read, written))
            self._views[dtype, count, ways] = views
        self._slot = (self._slot + 1) % self.depth
        return views[self._slot]

    def show(self, request: int) -> None:
        """Publish the request of the next round, then the round, whose slot has been written."""
        record(self.peers.name, request)
        self.round += 1
        words = self.peers.words
        line = self.lines[self.rank]
        words[line + 2 + (self.round & 1)] = request
        words[line] = self.round

    def is_ready(self, awaited: int) -> bool:
        """Return whether `wait` would not block."""
        # of a line: word 0 is the round that was shown last, word 1 the round that was read last
        word = 0
        least = self.round
        if awaited == WAIT_FOR_SLOT:
            word = 1
            least = self.round + 1 - self.depth
        words = self.peers.words
        return all(words[line + word] >= least for line, _ in self._others)

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
        # words 2 and 3 of a line: the requests of even and odd rounds
        parity = 2 + (shown & 1)
        for line in self.lines:
            if words[line + parity] != awaited:
                requests = [words[line_of_rank + parity] for line_of_rank in self.lines]
                raise self.peers.differ(self.lines, requests)


class StepwiseWork:
    """A collective in flight, with the interface of c10d's Work."""

    __slots__ = ("_awaited", "_error", "_steps", "_stream")

    def __init__(self, stream: Stream, steps: Steps) -> None:
        self._stream = stream
        self._steps = steps
        # The number that the last step has yielded: a request, or WAIT_FOR_SLOT. None before the
        # first step and when the collective is complete.
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
        # the collective counts as complete if a step raises
        self._awaited = None
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
            # an interrupt of the program is raised unchanged
            raise
        self.show(following)

    def show(self, request: int | None) -> None:
        """Publish the progress that the last step has made.

        After a request, the round that the step has written is shown. After WAIT_FOR_SLOT, or None
        at the end, this rank has read all rounds so far.
        """
        stream = self._stream
        if request is None or request == WAIT_FOR_SLOT:
            stream.peers.words[stream.lines[stream.rank] + 1] = stream.round
        else:
            stream.show(request)
        if request is None:
            stream.open = None
        self._awaited = request


class Channel:
    """The shared memory of a group, seen by one rank: a foreground stream, and background streams.

    Collectives that the caller waits for at once use the foreground, which has small slots.
    """

    def __init__(
        self, group: ProcessGroup, segment: mmap.mmap, slots: Mapping[str, StreamSlots]
    ) -> None:
        size = group.size()
        head = head_bytes(size, len(slots))
        pids = [pid for _, pid in processes_of(group)]
        self.peers: Peers = Peers(group, pids, memoryview(segment)[:head], len(slots))
        self.background: dict[str, Stream] = {}
        data = torch.frombuffer(segment, dtype=torch.uint8, offset=head)
        for number, (name, (depth, slot_bytes)) in enumerate(slots.items()):
            # 2 slots of 1 MiB for 4 ranks: 8 MiB of data
            stream_bytes = depth * size * slot_bytes
            slots_of_stream = data[:stream_bytes].view(depth, size, slot_bytes)
            self.background[name] = Stream(self.peers, number, slots_of_stream)
            data = data[stream_bytes:]
        self.foreground: Stream = self.background.pop("foreground")


# Declared mutable state: the channel of each group; None if the group uses its backend. An entry is
# dropped with its group.
_CHANNELS: weakref.WeakKeyDictionary[ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()


def channel_of(group: ProcessGroup) -> Channel | None:
    """Return the channel of a group of gloo; it is made at the group's first collective.

    Returns None on all ranks if the group uses its backend.
    """
    try:
        return _CHANNELS[group]
    except KeyError:
        channel = _make_channel(group)
        _CHANNELS[group] = channel
        if channel is not None and _WATCHING.get(os.getpid()) is None:
            watcher = Watcher(_close_all)
            _WATCHING[os.getpid()] = watcher
            watcher.start()
        return channel


def _make_channel(group: ProcessGroup) -> Channel | None:
    """Map memory and make the channel of a group; None on all ranks if a rank cannot."""
    size = group.size()
    # in the foreground of 4 ranks 2 slots of 1 MiB, of 48 ranks 2 slots of 699008 bytes
    slots: dict[str, StreamSlots] = {}
    largest = {"foreground": StreamSlots(2, SLOT_BYTES), **BACKGROUND}
    for name, (depth, most_bytes) in largest.items():
        slot_bytes = min(most_bytes, _ALL_SLOTS_BYTES // (size * depth))
        slots[name] = StreamSlots(depth, slot_bytes // 64 * 64)
    bytes_per_rank = sum(depth * slot_bytes for depth, slot_bytes in slots.values())
    nbytes = head_bytes(size, len(slots)) + size * bytes_per_rank
    segment = on_plain_kernels(map_segment, group, nbytes)
    return None if segment is None else on_plain_kernels(Channel, group, segment, slots)


# Declared mutable state: the thread that looks for deadlocks, by process id, because a forked
# process does not have the thread of its parent.
_WATCHING: dict[int, Watcher] = {}


def _close_all(text: str, waits: Mapping[int, str]) -> None:
    """Fail all channels of this process because of a deadlock.

    `waits` has the collective in which each rank of the deadlock waits, by rank.
    """
    for channel in list(_CHANNELS.values()):
        if channel is not None:
            channel.peers.fail(text, minority(waits))


def give_up(reason: str, groups: Sequence[ProcessGroup] | None = None) -> None:
    """Have ranks that wait for this rank, now or later, raise at once instead of at their timeout.

    Their errors repeat the reason of this rank. By default they are the ranks of all groups.
    """
    for group, channel in list(_CHANNELS.items()):
        is_given = groups is None or group in groups
        if channel is not None and is_given:
            peers = channel.peers
            own_rank = peers.ranks[peers.rank]
            peers.fail(f"rank {own_rank} {reason}", [own_rank])


def map_segment(group: ProcessGroup, nbytes: int) -> mmap.mmap | None:
    """Map zeroed memory shared by all ranks of the group; None on all ranks if any rank fails.

    It runs two small collectives of the group's backend, so every rank has to call it at the same
    point of its sequence of collectives. Pages that no rank has touched take no memory.
    """
    token = secrets.randbits(62)
    can_share = platform.machine() in _ORDERED and os.environ.get(OPT_OUT) != "0"
    # a number that two ranks share if one can map the other's memory; 0 if this rank cannot share
    host = machine() if can_share else 0
    own_file = _create(nbytes, token) if group.rank() == 0 else -1
    own_facts = [host, os.getpid(), own_file, token, machine(), board_of_process()]
    try:
        facts = torch.tensor(own_facts, device="cpu")
        of_all = torch.empty(group.size(), len(facts), dtype=facts.dtype, device="cpu")
        work = group._allgather_base(of_all.view(-1), facts, AllgatherOptions())
        watch_members(work, group, _FIRST_COLLECTIVE)
        work.wait()
        hosts, pids, files, tokens, machines, boards = of_all.t().tolist()
        note_processes(group, tuple(zip(machines, pids, strict=True)))
        memory = None
        is_one_host = hosts[0] and len(set(hosts)) == 1
        if is_one_host and files[0] >= 0:
            path = f"/proc/{pids[0]}/fd/{files[0]}"
            memory = _map(path, nbytes, tokens[0])
            note_addresses(_torch.ranks_in_order(group), pids, boards)
        return memory if all_have(memory, group) else None
    finally:
        if own_file >= 0:
            os.close(own_file)


def _create(nbytes: int, token: int) -> int:
    """Create an anonymous file of a size that begins with the token; return -1 if that fails."""
    try:
        file = os.memfd_create("shoal_mesh")
        os.ftruncate(file, nbytes)
        os.pwrite(file, token.to_bytes(8, sys.byteorder), 0)
    except (AttributeError, OSError):
        # the system or sandbox lacks memfd, or there is no memory: the group uses its backend
        return -1
    return file


def _map(path: str, nbytes: int, token: int) -> mmap.mmap | None:
    """Map the file if it can be opened and has the token."""
    try:
        with open(path, "r+b", buffering=0) as file:
            memory = mmap.mmap(file.fileno(), nbytes)
    except (OSError, ValueError):
        # OSError: the file is another user's, or in another view of /proc. ValueError: it is
        # another file, which is shorter.
        return None
    return memory if memory[:8] == token.to_bytes(8, sys.byteorder) else None


def all_have(value: object, group: ProcessGroup) -> bool:
    """Return whether no rank of the group passes None."""
    has_value = torch.tensor([int(value is not None)], device="cpu")
    options: Any = AllreduceOptions()
    options.reduceOp = ReduceOp.MIN
    work = group.allreduce([has_value], options)
    watch_members(work, group, _FIRST_COLLECTIVE)
    work.wait()
    return bool(has_value.item())


def ranks_per_host(group: ProcessGroup) -> int:
    """Return the number of consecutive ranks of a group on each of its hosts.

    Returns 0 if hosts have different numbers of ranks, if the ranks of a host are not consecutive,
    if each host has one rank, or if there is one host.
    """
    machines = [machine for machine, _ in processes_of(group)]
    if not machines or not all(machines):
        return 0
    # hosts a a b b: 2
    count = machines.count(machines[0])
    if not 1 < count < len(machines):
        return 0
    consecutive = [machine for machine in dict.fromkeys(machines) for _ in range(count)]
    if machines != consecutive:
        return 0
    positions = [*_torch.group_ranks(group).items()]
    return count if sorted(positions) == positions else 0
