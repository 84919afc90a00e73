"""The transport that calls a process group: gloo, NCCL, the fake backend, or a group written in Python.

A dtype that a backend cannot send is sent as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._torch import AllgatherOptions, AllreduceOptions, AllToAllOptions, BroadcastOptions, ReduceScatterOptions, Work
from ..groups.group_calls import call_of
from ..groups.process_groups import Comm
from ..shared_memory.backend_work import BackendWork
from ..shared_memory.channel import Channel
from ..shared_memory.recorder import record
from ..transport import Handle, Pending, Transport, as_bytes
from .reductions import PLAIN, REDUCE

Options = TypeVar("Options", AllreduceOptions, ReduceScatterOptions)
_ALL_GATHER, _ALL_TO_ALL = AllgatherOptions(), AllToAllOptions()
_EVEN: list[int] = []  # c10d: no list of sizes means equal blocks
# Reductions that NCCL has not: values are moved, and reduced on arrival.
_ON_BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


def _by_op(kind: type[Options]) -> dict[str, Options]:
    options = {op: kind() for op in REDUCE}
    for op, each in options.items():
        each.reduceOp = REDUCE[op]  # type: ignore[assignment]  # the stub wants the class around the enum
    return options


_ALL_REDUCE, _REDUCE_SCATTER = _by_op(AllreduceOptions), _by_op(ReduceScatterOptions)


@cache
def _from(root: int) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = root
    return options


class C10dTransport(Transport):
    """The backend of a group. gloo's work is watched on CPU tensors alone: that on meta tensors is never complete.

    The channel is that of its ranks; or of those of one host, which make the same calls, each of a group of its own
    that is `part_of` one of that name.
    """

    __slots__ = ("_backends", "_channel", "_fake", "_gloo", "_group", "_kind", "_name", "_part_of", "_size")

    def __init__(self, comm: Comm, channel: Channel | None, part_of: str = "") -> None:
        self._group, self._name, self._channel, self._part_of = comm.group, comm.name, channel, part_of
        self._gloo, self._fake = comm.on_gloo, "fake" in comm.backend
        self._backends, self._size = comm.backend, comm.size
        self._kind: Any = type(comm.group)

    def _announce(self, tensor: Tensor, kind: str, count: int, op: str = "", root: int = 0) -> None:
        """Before a call: record it; of gloo between ranks of one host PeerError if a rank has started another."""
        record(self._name, (kind, tensor.dtype, count, op, root))
        if self._channel is not None and tensor.is_cpu:
            self._channel.peers.announce(kind, tensor.dtype, count, op, root)

    def _watched(self, work: Work, tensor: Tensor) -> Handle:
        watched = self._gloo and tensor.is_cpu
        return BackendWork(work, self._group, self._channel, self._part_of) if watched else work

    def _moves_only(self, tensor: Tensor) -> bool:
        """Whether the tensor's backend has no reductions on bits: of those for devices, gloo alone has them."""
        return not tensor.is_cpu and f"{tensor.device.type}:gloo" not in self._backends

    def _reduced_on_arrival(
        self, move: Callable[[Tensor, Tensor], Handle], sent: Tensor, out: Tensor, op: str
    ) -> Handle:
        """The ranks' rows, (size, n), once they have come by `move`, reduced into the target, (n,)."""
        rows = out.new_empty(self._size, out.numel())
        work = move(sent.view(-1), rows.view(-1))
        return Pending(rows, work, lambda rows: out.copy_(reduce(_ON_BITS[op], rows.unbind()).view(out.shape)))

    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> Handle:
        if op in _ON_BITS and self._moves_only(tensor):
            return self._reduced_on_arrival(self.all_gather, tensor, tensor, op)
        self._announce(tensor, "all_reduce", tensor.numel(), op)
        return self._watched(self._group.allreduce([tensor], _ALL_REDUCE[op]), tensor)

    def all_gather(self, tensor: Tensor, out: Tensor) -> Handle:
        self._announce(tensor, "all_gather", tensor.numel())
        sent, into = (tensor, out) if tensor.dtype in PLAIN else (as_bytes(tensor), as_bytes(out))
        return self._watched(call_of(self._kind, "all_gather")(self._group, into, sent, _ALL_GATHER), tensor)

    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> Handle:
        if op in _ON_BITS and self._moves_only(tensor):
            return self._reduced_on_arrival(self.all_to_all, tensor, out, op)
        self._announce(tensor, "reduce_scatter", tensor.numel(), op)
        work = call_of(self._kind, "reduce_scatter")(self._group, out, tensor, _REDUCE_SCATTER[op])
        # gloo's is never completed before it is waited for, so it cannot be watched.
        return BackendWork(work, self._group, None) if self._gloo and tensor.is_cpu else work

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Handle:
        self._announce(tensor, "all_to_all", tensor.numel())
        return self._exchange(tensor, out, _EVEN, _EVEN)

    def all_to_all_v(self, flat: Tensor, out: Tensor, send: list[int], receive: list[int]) -> Handle:
        self._announce(flat, "all_to_all_v", 0)
        if not flat.numel() and self._fake:  # torch's fills what arrives with what is sent, 2.11's with nothing
            flat, send = out.zero_(), receive
        return self._exchange(flat, out, send, receive)

    def _exchange(self, tensor: Tensor, out: Tensor, send: list[int], receive: list[int]) -> Handle:
        sent, into = tensor, out
        if tensor.dtype not in PLAIN:
            width, sent, into = tensor.element_size(), as_bytes(tensor), as_bytes(out)
            send, receive = [n * width for n in send], [n * width for n in receive]
        work = call_of(self._kind, "all_to_all")(self._group, into, sent, receive, send, _ALL_TO_ALL)
        return self._watched(work, tensor)

    def broadcast_(self, tensor: Tensor, root: int) -> Handle:
        self._announce(tensor, "broadcast", tensor.numel(), "", root)
        sent = tensor if tensor.dtype in PLAIN else as_bytes(tensor)
        return self._watched(self._group.broadcast([sent], _from(root)), tensor)
