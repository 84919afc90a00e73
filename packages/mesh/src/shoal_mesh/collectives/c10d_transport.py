"""The transports that call process groups: gloo, NCCL, the fake backend, or a group in Python.

A dtype that a backend cannot send is sent as bytes. If gloo connects several hosts with several
ranks on each, a large collective runs in two kinds of steps (`AcrossHosts`): between the ranks of
each host, in shared memory, and between the ranks with the same number on their hosts, in gloo.
Each rank carries a part of the message between hosts, so bytes cross the network once per host.
Small collectives are faster in one step, and collectives in the background do not wait for a first
step: both use gloo alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._torch import ReduceOp, Work, call_of, on_plain_kernels
from ..errors import PeerError
from ..groups.process_groups import Comm, comm_for
from ..shared_memory.channel import Channel, all_have, channel_of
from ..shared_memory.exchange import SharedMemoryTransport, is_carried
from ..shared_memory.row_reductions import reduce_rows
from ..transport import Handle, Pending, Transport, as_bytes, split_divisor
from ..watch.backend_work import BackendWork, first_failure
from ..watch.recorder import CARRIED_DTYPES, OPS, record, refuse_recorded

REDUCE = {op: getattr(ReduceOp, op.upper()) for op in OPS if op}
# the dtypes that every backend sends and reduces
PLAIN = CARRIED_DTYPES | {torch.bool}
# Least bytes of a rank's input with which the ranks of several hosts share work: between two hosts
# of two ranks, gloo alone is faster with 64 KiB.
LEAST_BYTES = 1 << 18
# Bytes of a window of a rank's part: the network carries one window while memory carries the next.
# This takes 146 ms instead of 170 ms for 16 MiB.
_WINDOW_BYTES = 1 << 20
# Reductions that NCCL does not have: ranks exchange the values, and reduce them on arrival.
_ON_BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


def _with(options: Any, field: str, value: object) -> Any:
    """Return an option object of c10d with a field set."""
    setattr(options, field, value)
    return options


_ALL_GATHER = _torch.AllgatherOptions()
_ALL_TO_ALL = _torch.AllToAllOptions()
_ALL_REDUCE = {
    op: _with(_torch.AllreduceOptions(), "reduceOp", reduce_op) for op, reduce_op in REDUCE.items()
}
_REDUCE_SCATTER = {
    op: _with(_torch.ReduceScatterOptions(), "reduceOp", reduce_op)
    for op, reduce_op in REDUCE.items()
}
_FROM = cache(lambda root: _with(_torch.BroadcastOptions(), "rootRank", root))
# c10d: no list of sizes means equal blocks
_EVEN: list[int] = []


class C10dTransport(Transport):
    """The transport by the backend of a group.

    While a rank waits for gloo on CPU tensors, it also watches the other ranks (`BackendWork`). It
    does not on meta tensors, because gloo never completes their work. The watched ranks are those
    of the `channel`: the ranks of the group, or the ranks of one host that make the same calls,
    each in another group that is `part_of` the named larger group (`AcrossHosts`).
    """

    __slots__ = (
        "_backends",
        "_channel",
        "_fake",
        "_gloo",
        "_group",
        "_in_python",
        "_kind",
        "_name",
        "_part_of",
        "_size",
    )

    def __init__(self, comm: Comm, channel: Channel | None, part_of: str = "") -> None:
        self._group = comm.group
        self._name = comm.name
        self._channel = channel
        self._part_of = part_of
        self._gloo = comm.on_gloo
        self._fake = "fake" in comm.backend
        self._in_python = comm.in_python
        self._backends = comm.backend
        self._size = comm.size
        self._kind: Any = type(comm.group)

    def _call_backend(
        self,
        tensor: Tensor,
        kind: str,
        call: Callable[..., Work],
        *arguments: object,
        op: str = "",
        root: int = 0,
    ) -> Work:
        """Record a call of the backend, and make it.

        For gloo between ranks of one host, raise PeerError if a rank has started another call.
        """
        count = tensor.numel()
        # a tensor while torch.jit.trace records
        if type(count) is not int:
            refuse_recorded(count)
        # the blocks of an all_to_all_v differ between ranks
        count = 0 if kind == "all_to_all_v" else count
        record(self._name, (kind, tensor.dtype, count, op, root))
        if self._channel is None or not tensor.is_cpu:
            return call(self._group, *arguments)
        peers = self._channel.peers
        peers.announce(kind, tensor.dtype, count, op, root=root)
        try:
            return call(self._group, *arguments)
        except Exception:
            # the backend has refused the call, so nothing was sent
            peers.retract()
            raise

    def _watch_ranks(self, work: Work, tensor: Tensor) -> Handle:
        """Return the handle of a work; for gloo, one that watches the other ranks in its wait."""
        if not self._gloo or not tensor.is_cpu:
            return work
        peers = None if self._channel is None else self._channel.peers
        return BackendWork(work, self._group, peers, self._part_of)

    def _moves_only(self, tensor: Tensor) -> bool:
        """Return whether the tensor's backend has no reductions on bits.

        Among the backends for devices, gloo alone has them.
        """
        return not tensor.is_cpu and f"{tensor.device.type}:gloo" not in self._backends

    def _reduce_on_arrival(
        self, move: Callable[[Tensor, Tensor], Handle], sent: Tensor, out: Tensor, op: str
    ) -> Handle:
        """Send by `move`, which brings a row of every rank; reduce the rows, (size, n), into `out`.

        `out` has n elements.
        """
        rows = out.new_empty(self._size, out.numel())
        work = move(sent.view(-1), rows.view(-1))

        def reduce_arrived(rows: Tensor) -> None:
            if op == "avg":
                reduce_rows(rows, op, out.view(-1))
                return
            total = reduce(_ON_BITS[op], rows.unbind())
            out.copy_(total.view(out.shape))

        return Pending(rows, work, reduce_arrived)

    def _sums_here(self, tensor: Tensor) -> bool:
        """Return whether ranks exchange the terms of an average, and sum them without the backend.

        They do so on CPUs, where the exchange sends as many bytes as a reduction.
        """
        return tensor.is_cpu and not self._fake and not self._in_python

    def _average_(self, tensor: Tensor) -> Handle:
        """Average in place, complete on return.

        Each rank averages one part of all tensors, and gathers all parts.
        """
        flat = tensor.view(-1)
        count = flat.numel()
        part = -(-count // self._size)
        # 10 elements of 4 ranks: parts of 3, of which the last one has two zeros
        padding = flat.new_zeros(part * self._size - count)
        padded = torch.cat([flat, padding])
        own_part = flat.new_empty(part)
        self.reduce_scatter(padded, own_part, "avg").wait()
        self.all_gather(own_part, padded).wait()
        flat.copy_(padded[:count])
        return Pending(tensor, None)

    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> Handle:
        if op in _ON_BITS and self._moves_only(tensor):
            return self._reduce_on_arrival(self.all_gather, tensor, tensor, op)
        if op == "avg":
            # In the background, gloo's threads can run one collective, but not start the second one
            # of `_average_` after it.
            needs_one_call = background and self._gloo
            if self._sums_here(tensor) and not needs_one_call:
                return self._average_(tensor)
            before, after = split_divisor(tensor.dtype, self._size)
            terms = tensor if before == 1 else tensor.mul_(before)
            work = self.all_reduce_(terms, "sum", background)
            return Pending(tensor, work, lambda total: total.mul_(after))
        call = self._kind.allreduce
        work = self._call_backend(tensor, "all_reduce", call, [tensor], _ALL_REDUCE[op], op=op)
        return self._watch_ranks(work, tensor)

    def all_gather(self, tensor: Tensor, out: Tensor) -> Handle:
        sent = tensor
        target = out
        if tensor.dtype not in PLAIN:
            sent = as_bytes(tensor)
            target = as_bytes(out)
        call = call_of(self._kind, "all_gather")
        work = self._call_backend(tensor, "all_gather", call, target, sent, _ALL_GATHER)
        return self._watch_ranks(work, tensor)

    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> Handle:
        if op in _ON_BITS and self._moves_only(tensor):
            return self._reduce_on_arrival(self.all_to_all, tensor, out, op)
        if op == "avg" and self._sums_here(tensor):
            return self._reduce_on_arrival(self.all_to_all, tensor, out, op)
        if op == "avg":
            before, after = split_divisor(tensor.dtype, self._size)
            terms = tensor if before == 1 else tensor * before
            work = self.reduce_scatter(terms, out, "sum")
            return Pending(out, work, lambda total: total.mul_(after))
        call = call_of(self._kind, "reduce_scatter")
        options = _REDUCE_SCATTER[op]
        work = self._call_backend(tensor, "reduce_scatter", call, out, tensor, options, op=op)
        if not self._gloo or not tensor.is_cpu:
            return work
        # gloo completes a reduce-scatter only in `wait`, so no peers can be watched meanwhile
        return BackendWork(work, self._group, None)

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Handle:
        return self._start_exchange("all_to_all", tensor, out, _EVEN, receive=_EVEN)

    def all_to_all_v(
        self, flat: Tensor, out: Tensor, send: list[int], receive: list[int]
    ) -> Handle:
        # torch's fake backend copies the input to the output, and in 2.11 it writes nothing. If
        # there is no input, the output is set to zero here.
        if not flat.numel() and self._fake:
            flat = out.zero_()
            send = receive
        return self._start_exchange("all_to_all_v", flat, out, send, receive=receive)

    def _start_exchange(
        self, kind: str, tensor: Tensor, out: Tensor, send: list[int], *, receive: list[int]
    ) -> Handle:
        sent = tensor
        target = out
        if tensor.dtype not in PLAIN:
            width = tensor.element_size()
            sent = as_bytes(tensor)
            target = as_bytes(out)
            send = [count * width for count in send]
            receive = [count * width for count in receive]
        call = call_of(self._kind, "all_to_all")
        work = self._call_backend(tensor, kind, call, target, sent, receive, send, _ALL_TO_ALL)
        return self._watch_ranks(work, tensor)

    def broadcast_(self, tensor: Tensor, root: int) -> Handle:
        sent = tensor if tensor.dtype in PLAIN else as_bytes(tensor)
        call = self._kind.broadcast
        work = self._call_backend(tensor, "broadcast", call, [sent], _FROM(root), root=root)
        return self._watch_ranks(work, tensor)


class AcrossHosts(C10dTransport):
    """The transport of a communicator with `per_host` consecutive ranks on each host.

    Large messages take steps inside of hosts, by shared memory, and between hosts, by the backend.
    An all-reduce of the tensors abcd of 2 ranks on each of 2 hosts:

                       host 0               host 1
                       rank 0    rank 1     rank 2    rank 3
        inside         ab        cd         ab        cd        reduce-scatter: sums of the host
        between        ab        cd         ab        cd        all-reduce: ranks 0, 2 and 1, 3
        inside         abcd      abcd       abcd      abcd      all-gather
    """

    __slots__ = ("_host", "_index_in_host", "_parts", "_per_host", "_plain", "_ranks")

    def __init__(self, comm: Comm, per_host: int) -> None:
        super().__init__(comm, None)
        self._plain = C10dTransport(comm, None)
        self._ranks = sorted(comm.line)
        self._per_host = per_host
        self._host, self._index_in_host = divmod(comm.group.rank(), per_host)
        # The transports inside the host and between hosts. () if the ranks of a host cannot share
        # memory; None before the first large message.
        self._parts: tuple[Transport, ...] | None = None

    def carrier(self, tensor: Tensor, op: str, background: bool, uneven: bool) -> Transport:
        if background or uneven or tensor.nbytes < LEAST_BYTES:
            return self._plain
        if tensor.dtype not in CARRIED_DTYPES or not is_carried(tensor, op):
            return self._plain
        if self._parts is None:
            self._parts = self._connect()
        return self if self._parts else self._plain

    def _connect(self) -> tuple[Transport, ...]:
        """Make the groups and the transports inside the host and between hosts.

        Returns () on all ranks unless the ranks of every host share memory.
        """
        first = self._host * self._per_host
        inside = comm_for("inside_host", self._ranks[first : first + self._per_host], "gloo")
        between = comm_for(
            "between_hosts", self._ranks[self._index_in_host :: self._per_host], "gloo"
        )
        channel = channel_of(inside.group)
        everyone_has = on_plain_kernels(all_have, channel, self._group)
        if channel is None or not everyone_has:
            return ()
        shared = SharedMemoryTransport(channel, C10dTransport(inside, channel))
        return shared, C10dTransport(between, channel, self._name)

    def _run_steps(
        self, steps: Callable[..., None], kind: str, tensor: Tensor, *, op: str = "", root: int = 0
    ) -> Handle:
        """Run all steps as one collective, unseen by modes.

        The partners of a rank on other hosts repeat an error that occurs inside its host.
        """
        record(self._name, (kind, tensor.dtype, tensor.numel(), op, root))
        host_count = len(self._ranks) // self._per_host
        try:
            on_plain_kernels(steps, *(self._parts or ()), host_count)
        except PeerError as error:
            first_failure(self._name, str(error), error.ranks)
            raise
        return Pending(tensor, None)

    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> Handle:
        def steps(inside: Transport, between: Transport, _: int) -> None:
            # 2 ranks a host, windows of 4 elements, abcd efgh: the first rank carries ab and ef,
            # the second cd and gh.
            whole = self._pad_to_ranks(tensor)
            own_parts = whole.new_empty(whole.numel() // self._per_host)
            length = _WINDOW_BYTES // tensor.element_size()
            windows = torch.split(whole, length * self._per_host)
            parts = torch.split(own_parts, length)
            works = []
            for window, part in zip(windows, parts, strict=True):
                inside.reduce_scatter(window, part, op).wait()
                works.append(between.all_reduce_(part, op, False))
            for window, part, work in zip(windows, parts, works, strict=True):
                work.wait()
                inside.all_gather(part, window).wait()
            _copy_back(tensor, whole)

        return self._run_steps(steps, "all_reduce", tensor, op=op)

    def all_gather(self, tensor: Tensor, out: Tensor) -> Handle:
        def steps(inside: Transport, between: Transport, hosts: int) -> None:
            # one row of each host, from the rank that has the number of this rank there
            rows = tensor.new_empty(hosts, tensor.numel())
            between.all_gather(tensor.view(-1), rows.view(-1)).wait()
            for row, host_block in zip(rows, out.view(hosts, -1), strict=True):
                inside.all_gather(row, host_block).wait()

        return self._run_steps(steps, "all_gather", tensor)

    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> Handle:
        def steps(inside: Transport, between: Transport, hosts: int) -> None:
            # one row for each host: the sum over this host's ranks, for the rank that has the
            # number of this rank there
            rows = out.new_empty(hosts, out.numel())
            for row, host_block in zip(rows, tensor.view(hosts, -1), strict=True):
                inside.reduce_scatter(host_block, row, op).wait()
            terms = torch.empty_like(rows)
            # gloo's reduce-scatter cannot be watched
            between.all_to_all(rows.view(-1), terms.view(-1)).wait()
            reduce_rows(terms, op, out.view(-1))

        return self._run_steps(steps, "reduce_scatter", tensor, op=op)

    def broadcast_(self, tensor: Tensor, root: int) -> Handle:
        host, root_inside = divmod(root, self._per_host)

        def steps(inside: Transport, between: Transport, _: int) -> None:
            if self._host == host:
                inside.broadcast_(tensor, root_inside).wait()
            whole = self._pad_to_ranks(tensor)
            part = whole.view(self._per_host, -1)[self._index_in_host]
            between.broadcast_(part, host).wait()
            if self._host != host:
                inside.all_gather(part, whole).wait()
                _copy_back(tensor, whole)

        return self._run_steps(steps, "broadcast", tensor, root=root)

    def _pad_to_ranks(self, tensor: Tensor) -> Tensor:
        """Return all elements in one dim, of a length that the ranks of a host divide.

        The result is a view if the tensor has such a length.
        """
        flat = tensor.view(-1)
        missing = -flat.numel() % self._per_host
        if not missing:
            return flat
        return torch.cat([flat, flat.new_zeros(missing)])


def _copy_back(tensor: Tensor, padded: Tensor) -> None:
    """Copy elements to the tensor from a padded copy of it; a view needs no copy."""
    if padded.numel() != tensor.numel():
        tensor.view(-1).copy_(padded[: tensor.numel()])
