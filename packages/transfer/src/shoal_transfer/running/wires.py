"""Wires: how messages of a transfer get from one rank to another.

`LocalWire` is for a single process, `GroupWire` for ranks of one world, and `JointWire` for two
worlds that share a process group. `FolderWire` in `folder_wire` needs no process group.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_mesh import Comm, all_to_all_blocks
from shoal_mesh.internal import comm_for

from ..manifest.records import Manifest


class Roster(NamedTuple):
    """The members of a transfer, numbered from 0: ranks of the source, then of the target.

    In one world a rank of both sides is one member.

    Attributes:
        source: the member of each rank of the source.
        target: the member of each rank of the target.
        size: number of members.

    Example:
        >>> source = Manifest({}, {0: "a", 1: "a"}, "trainer")
        >>> Roster.of(source, Manifest({}, {0: "b"}, "server")).target
        {0: 2}
    """

    source: dict[int, int]
    target: dict[int, int]
    size: int

    @classmethod
    def of(cls, source: Manifest, target: Manifest) -> Roster:
        """Return the members of a transfer between the ranks of two manifests."""
        if source.world == target.world:
            ranks = sorted({*source.hosts, *target.hosts})
            members = {rank: number for number, rank in enumerate(ranks)}
            return cls(members, members, len(ranks))
        senders = {rank: number for number, rank in enumerate(sorted(source.hosts))}
        first = len(senders)
        receivers = {rank: first + number for number, rank in enumerate(sorted(target.hosts))}
        return cls(senders, receivers, first + len(receivers))


class Wire(Protocol):
    """The link between the members of a transfer.

    Attributes:
        member: number of this process among the members.
        size: number of members.

    Example:
        >>> wire: Wire = LocalWire()
        >>> wire.member, wire.size
        (0, 1)
    """

    member: int
    size: int

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Send one flat tensor to each member, and fill one flat tensor from each member.

        All members call this in the same order. Tensors without elements are not sent.

        Args:
            sends: 1-D, one per member.
            receives: 1-D, one per member, of the sizes and dtype that the members send.
        """

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every member, by number; all members call this."""


class LocalWire:
    """The wire of a transfer inside one process, which sends nothing.

    Example:
        >>> LocalWire().gather(3)
        [3]
    """

    member = 0
    size = 1

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Copy from this process to itself."""
        receives[0].copy_(sends[0])

    def gather(self, value: Any) -> list[Any]:
        """Return the only value."""
        return [value]


class GroupWire:
    """Messages over c10d, between ranks of one world.

    Args:
        ranks: global ranks of the members, in the order of their numbers.

    Example:
        >>> from shoal_mesh import launch
        >>> launch(lambda: GroupWire(range(2)).gather(dist.get_rank()), 2)[0]
        [0, 1]
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        # a separate group, so that a transfer in the background does not wait for other collectives
        self.comm: Comm = comm_for("transfer", list(ranks))
        self.member = self.comm.rank
        self.size = self.comm.size

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Exchange by one all-to-all."""
        blocks = [[one] if one.numel() else [] for one in sends]
        places = [[one] if one.numel() else [] for one in receives]
        all_to_all_blocks(blocks, self.comm, places)

    def gather(self, value: Any) -> list[Any]:
        """Gather pickled values."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.comm.group)
        return values


class JointWire:
    """Messages over a process group that joins two worlds, member by member.

    The two worlds have process groups of their own; this group was made from a store that both
    know, for example by `dist.ProcessGroupGloo(store, member, size)`. Members are numbered as by
    `Roster.of`: ranks of the source first.

    Args:
        group: a process group of c10d, or one of its backends, over all members in the order of
            their numbers.
        device: device of the messages of `gather`: "cuda" for a group that cannot send CPU tensors.

    Example:
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> JointWire(group).gather("value")
        ['value']
    """

    def __init__(self, group: Any, device: torch.device | str = "cpu") -> None:
        self.group = group
        self._device = device
        self.member = group.rank()
        self.size = group.size()

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Exchange by one message per pair of members."""
        receives[self.member].copy_(sends[self.member])
        works = []
        for distance in range(1, self.size):
            to = (self.member + distance) % self.size
            if sends[to].numel():
                works.append(self.group.send([sends[to]], to, 0))
            of = (self.member - distance) % self.size
            if receives[of].numel():
                works.append(self.group.recv([receives[of]], of, 0))
        for work in works:
            work.wait()

    def gather(self, value: Any) -> list[Any]:
        """Gather pickled values: their sizes, then their bytes."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        data = data.to(self._device)
        own_size = torch.tensor([data.numel()], device=self._device)
        sizes = [torch.zeros_like(own_size) for _ in range(self.size)]
        self.exchange([own_size] * self.size, sizes)
        received = [data.new_empty(int(size)) for size in sizes]
        self.exchange([data] * self.size, received)
        return [pickle.loads(one.cpu().numpy().tobytes()) for one in received]
