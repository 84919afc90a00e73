"""The transport of a group of gloo with several ranks on each of several hosts: bytes pass the network once a host.

A large collective is one of the ranks of each host, in shared memory, and one of the ranks that have the same number on
their hosts, in gloo, each of which carries a part of the message:

    all-reduce        reduce-scatter inside, all-reduce between, all-gather inside
    reduce-scatter    reduce-scatter inside for each host, all-to-all between and a sum
    all-gather        all-gather between, all-gather inside for each host
    broadcast         broadcast inside the source's host, broadcast between, all-gather inside the others

Small ones take less time in one step, and those in the background do not wait for a first one: gloo has them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._torch import on_plain_kernels
from ..errors import PeerError
from ..groups.process_groups import Comm, comm_for
from ..shared_memory.backend_work import first_failure
from ..shared_memory.channel import all_have, channel_of
from ..shared_memory.exchange import SharedMemoryTransport, is_carried, reduce_rows
from ..shared_memory.recorder import CARRIED_DTYPES, record
from ..transport import Handle, Pending, Transport
from .c10d_transport import C10dTransport

LEAST_BYTES = 1 << 18  # of a rank's input: on two hosts of two ranks gloo alone is faster with 64 KiB
_WINDOW_BYTES = 1 << 20  # of a rank's part: the network has one while memory has the next, 16 MiB 146 ms instead of 170


class AcrossHosts(C10dTransport):
    """The transport of a communicator, of whose ranks each host has `per_host` that follow one another.

    The groups that it combines are made at the first large message.
    """

    __slots__ = ("_connected", "_host", "_own", "_parts", "_per_host", "_plain", "_ranks")

    def __init__(self, comm: Comm, per_host: int) -> None:
        super().__init__(comm, None)
        self._plain, self._ranks, self._per_host = C10dTransport(comm, None), sorted(comm.line), per_host
        self._host, self._own = divmod(comm.group.rank(), per_host)
        self._connected = False
        self._parts: tuple[Transport, ...] = ()  # inside the host and between hosts; none where memory is not shared

    def carrier(self, tensor: Tensor, op: str, background: bool, uneven: bool) -> Transport:
        is_large = tensor.dtype in CARRIED_DTYPES and tensor.nbytes >= LEAST_BYTES
        if background or uneven or not is_large or not is_carried(tensor, op):
            return self._plain
        if not self._connected:
            self._connect()
        return self if self._parts else self._plain

    def _connect(self) -> None:
        """Make the groups inside the hosts and between them, and agree with all ranks that they share memory."""
        first = self._host * self._per_host
        inside = comm_for("inside_host", self._ranks[first : first + self._per_host], "gloo")
        between = comm_for("between_hosts", self._ranks[self._own :: self._per_host], "gloo")
        channel = channel_of(inside.group)
        if on_plain_kernels(all_have, channel, self._group) and channel is not None:
            own = SharedMemoryTransport(channel, C10dTransport(inside, channel))
            self._parts = own, C10dTransport(between, channel, self._name)
        self._connected = True

    def _run(self, steps: Callable[..., None], kind: str, tensor: Tensor, *what: object) -> Handle:
        """All steps, unseen by modes, as one collective. What fails inside a host, its partners on others repeat.

        The steps get the transports inside the host and between hosts, and the number of hosts; the recorder the kind,
        the dtype and size of this rank's tensor, the reduction and the source.
        """
        record(self._name, (kind, tensor.dtype, tensor.numel(), *what))
        try:
            on_plain_kernels(steps, *self._parts, len(self._ranks) // self._per_host)
        except PeerError as error:
            first_failure(self._name, str(error), error.ranks)
            raise
        return Pending(tensor, None)

    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> Handle:
        def steps(inside: Transport, between: Transport, _: int) -> None:
            # 2 ranks a host, windows of 4 elements, abcd efgh: the first rank carries ab and ef, the second cd and gh.
            whole = self._padded(tensor)
            own = whole.new_empty(whole.numel() // self._per_host)
            length, works = _WINDOW_BYTES // tensor.element_size(), []
            windows = [*zip(torch.split(whole, length * self._per_host), torch.split(own, length), strict=True)]
            for window, part in windows:
                inside.reduce_scatter(window, part, op).wait()
                works.append(between.all_reduce_(part, op, False))
            for (window, part), work in zip(windows, works, strict=True):
                work.wait()
                inside.all_gather(part, window).wait()
            _copy_back(tensor, whole)

        return self._run(steps, "all_reduce", tensor, op, 0)

    def all_gather(self, tensor: Tensor, out: Tensor) -> Handle:
        def steps(inside: Transport, between: Transport, hosts: int) -> None:
            rows = tensor.new_empty(hosts, tensor.numel())  # of the ranks with this one's number on each host
            between.all_gather(tensor.view(-1), rows.view(-1)).wait()
            for row, of_host in zip(rows, out.view(hosts, -1), strict=True):
                inside.all_gather(row, of_host).wait()

        return self._run(steps, "all_gather", tensor, "", 0)

    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> Handle:
        def steps(inside: Transport, between: Transport, hosts: int) -> None:
            rows = out.new_empty(hosts, out.numel())  # for the ranks with this one's number: sums of this host's ranks
            for row, of_host in zip(rows, tensor.view(hosts, -1), strict=True):
                inside.reduce_scatter(of_host, row, op).wait()
            terms = torch.empty_like(rows)
            between.all_to_all(rows.view(-1), terms.view(-1)).wait()  # gloo's reduce-scatter cannot be watched
            reduce_rows(terms, op, out.view(-1))

        return self._run(steps, "reduce_scatter", tensor, op, 0)

    def broadcast_(self, tensor: Tensor, root: int) -> Handle:
        host, own = divmod(root, self._per_host)

        def steps(inside: Transport, between: Transport, _: int) -> None:
            if self._host == host:
                inside.broadcast_(tensor, own).wait()
            whole = self._padded(tensor)
            part = whole.view(self._per_host, -1)[self._own]
            between.broadcast_(part, host).wait()
            if self._host != host:
                inside.all_gather(part, whole).wait()
                _copy_back(tensor, whole)

        return self._run(steps, "broadcast", tensor, "", root)

    def _padded(self, tensor: Tensor) -> Tensor:
        """All elements in one dim, of a length that the ranks of a host divide: a view where it is."""
        flat = tensor.view(-1)
        more = -flat.numel() % self._per_host
        return torch.cat([flat, flat.new_zeros(more)]) if more else flat


def _copy_back(tensor: Tensor, padded: Tensor) -> None:
    if padded.numel() != tensor.numel():
        tensor.view(-1).copy_(padded[: tensor.numel()])
