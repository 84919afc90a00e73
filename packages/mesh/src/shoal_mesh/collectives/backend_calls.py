"""The seven backend calls that collectives consist of: straight on the process group, functional while compiling.

Between CPU ranks of one host they go through shared memory instead, where the group would use gloo. The answer to
whether they do is the same on all ranks: it depends on the group, the dtype and reduction, and for what goes on in the
`background` on the size.

Blocks follow one another along dim 0 in index order of the communicator; inputs of equal blocks may have any strides,
others are contiguous. Each function returns the result and the work to wait for (None when there is nothing to wait
for). `background` says that the caller goes on before it waits: what takes several turns in shared memory is then left
to the backend, whose threads do it. A dtype that a backend cannot send is sent as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .._torch import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ProcessGroup,
    ReduceScatterOptions,
    Work,
    functional,
    is_compiling,
    is_exporting,
)
from ..groups.group_calls import call_of
from ..groups.process_groups import Comm
from ..shared_memory import exchange
from ..shared_memory.backend_work import BackendWork
from ..shared_memory.channel import SLOT_BYTES, Channel, Turn, channel_of
from ..shared_memory.lane import Lane
from ..shared_memory.recorder import record
from ..shared_memory.request import DTYPES, OPS, announcement
from .graph_dependences import NAMESPACE, distinct, in_its_pass
from .huge_pages import in_huge_pages
from .wire import PLAIN, REDUCE, in_memory

__all__ = [
    "ONE_SHOT_BYTES",
    "ONE_SHOT_RANKS",
    "all_gather",
    "all_reduce_",
    "all_to_all",
    "all_to_all_exact",
    "all_to_all_v",
    "background_lane",
    "blocks_in_index_order",
    "broadcast_",
    "channel_over",
    "group_to_index",
    "in_index_order",
    "is_one_shot",
    "one_shot_exchange",
    "reduce_scatter",
]

_DTYPES = frozenset(DTYPES)
Started = tuple[Tensor, Work | Turn | BackendWork | None]
_ALL_GATHER = AllgatherOptions()
_ALL_TO_ALL = AllToAllOptions()
_EVEN: list[int] = []  # c10d: no list of sizes means equal blocks

# Up to here one all-to-all of the unsharded tensor is faster than gloo's ring: 4 ranks, 64 KiB, a third of the time.
ONE_SHOT_RANKS, ONE_SHOT_BYTES = 8, 1 << 16


def _all_reduce_options(op: str) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = REDUCE[op]  # type: ignore[assignment]  # the stub wants the class around the enum
    return options


def _reduce_scatter_options(op: str) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp = REDUCE[op]  # type: ignore[assignment]  # the stub wants the class around the enum
    return options


_ALL_REDUCE = {op: _all_reduce_options(op) for op in REDUCE}
_REDUCE_SCATTER = {op: _reduce_scatter_options(op) for op in REDUCE}


@cache
def _from(root: int) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = root
    return options


def _channel(tensor: Tensor, comm: Comm, turn_bytes: int = 0) -> Channel | None:
    """The shared memory to use; none for messages of more than `turn_bytes`, if given."""
    if not comm.on_gloo or not tensor.is_cpu or type(tensor) is not Tensor:
        return None
    if turn_bytes and tensor.nbytes > turn_bytes:
        return None
    return channel_over(comm)


def channel_over(comm: Comm) -> Channel | None:
    """The shared memory of a group of gloo."""
    group, channel = comm.group, comm.kept  # in this order: the group of a new world has no channel yet
    if type(channel) is tuple:
        channel = comm.kept = channel_of(group)
    return channel  # type: ignore[no-any-return]  # layers below do not know its type


def background_lane(tensors: Sequence[Tensor], comm: Comm, name: str, op: str = "") -> Lane | None:
    """The lane of shared memory for what goes on in the background and is packed; None where the backend does it."""
    first = tensors[0]
    if comm.size == 1 or is_compiling() or first.dtype not in _DTYPES or op not in OPS:
        return None
    if not all(type(tensor) is Tensor and tensor.is_cpu for tensor in tensors):
        return None
    channel = _channel(first, comm)
    return None if channel is None else channel.lanes[name]


def _gather(group: ProcessGroup, out: Tensor, source: Tensor) -> Work:
    return call_of(group, "all_gather")(group, out, source, _ALL_GATHER)


def _exchange(group: ProcessGroup, out: Tensor, source: Tensor, receive: list[int], send: list[int]) -> Work:
    return call_of(group, "all_to_all")(group, out, source, receive, send, _ALL_TO_ALL)


def _on_backend(work: Work, comm: Comm, tensor: Tensor) -> Work | BackendWork:
    """The work of a call of the backend, watched where it is gloo's.

    Only that on CPU tensors: that on meta tensors, on which transforms run operators too, never says it is complete.
    """
    if not comm.on_gloo or not tensor.is_cpu:
        return work
    return BackendWork(work, comm.group, comm.kept or None)


def _announce(comm: Comm, tensor: Tensor, kind: str, count: int, op: str = "", root: int = 0) -> None:
    """Before a call of gloo between ranks of one host: see that no rank has started another.

    Raises:
        PeerError: one has.
    """
    record(comm.name, (kind, tensor.dtype, count, op, root))
    if comm.on_gloo and tensor.is_cpu:
        channel = channel_over(comm)
        if channel is not None:
            channel.peers.announce(announcement(kind, tensor.dtype, count, op, root))


def _in_graph(name: str, operand: Tensor, comm: Comm, *arguments: object) -> Tensor:
    """What compiled code calls, and waits for, since the other ranks do: of this package where that is faster.

    Exported programs run where there is none.  Of a group written in Python C++ has no backend, and calls methods of it
    that it may not have.
    """
    here = (comm.in_python or (comm.on_gloo and operand.is_cpu)) and not is_exporting()
    collective = getattr(getattr(torch.ops, NAMESPACE) if here else functional, name)
    return functional.wait_tensor(in_its_pass(collective, distinct(operand), *arguments, comm.name))  # type: ignore[no-any-return]  # operators have no types


def all_reduce_(tensor: Tensor, comm: Comm, op: str, background: bool = False) -> Started:
    """Reduce in place; while compiling the result is another tensor, so use what is returned."""
    if is_compiling():
        return _in_graph("all_reduce", tensor, comm, op), None
    channel = _reducing_channel(tensor, comm, op, SLOT_BYTES if background else 0)
    if channel is not None:
        return tensor, exchange.all_reduce_(channel, tensor, op, background)
    _announce(comm, tensor, "all_reduce", tensor.numel(), op)
    return tensor, _on_backend(comm.group.allreduce([tensor], _ALL_REDUCE[op]), comm, tensor)


def _reducing_channel(tensor: Tensor, comm: Comm, op: str, turn_bytes: int) -> Channel | None:
    """`_channel`, where it can take the reduction."""
    return _channel(tensor, comm, turn_bytes) if tensor.dtype in _DTYPES and op in OPS else None


def is_one_shot(tensor: Tensor, comm: Comm, op: str) -> bool:
    """Whether an all-reduce is fastest when every rank sends its tensor to each other rank and adds up on arrival.

    gloo's ring takes 2 (size - 1) turns, each of which waits for another process; one all-to-all waits once. The answer
    is the same on all ranks: it depends on nothing that differs between them.
    """
    return (
        op == "sum"
        and 2 < comm.size <= ONE_SHOT_RANKS
        and comm.on_gloo
        and not is_compiling()  # before the size, which a compiler may know as a symbol only
        and 0 < tensor.nbytes <= ONE_SHOT_BYTES
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and _reducing_channel(tensor, comm, op, 0) is None
    )


def one_shot_exchange(tensor: Tensor, comm: Comm) -> Started:
    """(...) -> (size, ...): all ranks' tensors, in the same order everywhere, so sums over them agree bit by bit."""
    return all_to_all(tensor.expand(comm.size, *tensor.shape).contiguous(), comm)


def all_gather(tensor: Tensor, comm: Comm, background: bool = False) -> Started:
    """(m, ...) -> (size * m, ...), in the order of the group."""
    if is_compiling():
        return _in_graph("all_gather_into_tensor", tensor.contiguous(), comm, comm.size), None
    tensor = in_memory(tensor)
    shape = tensor.shape
    out = in_huge_pages(tensor.new_empty((comm.size * shape[0], *shape[1:])))
    channel = _channel(tensor, comm, SLOT_BYTES if background else 0)
    if channel is not None:
        return out, exchange.all_gather(channel, _movable(tensor), _movable(out))
    _announce(comm, tensor, "all_gather", tensor.numel())
    if tensor.dtype in PLAIN:
        return out, _on_backend(_gather(comm.group, out, tensor), comm, tensor)
    return out, _on_backend(_gather(comm.group, _as_bytes(out), _as_bytes(tensor)), comm, tensor)


def reduce_scatter(tensor: Tensor, comm: Comm, op: str, background: bool = False) -> Started:
    """(size * m, ...) -> (m, ...)."""
    if comm.order is not None:
        tensor = _in_group_order(tensor, comm)
    if is_compiling():
        return _in_graph("reduce_scatter_tensor", tensor.contiguous(), comm, op, comm.size), None
    tensor = in_memory(tensor)
    shape = tensor.shape
    out = in_huge_pages(tensor.new_empty((shape[0] // comm.size, *shape[1:])))
    channel = _reducing_channel(tensor, comm, op, SLOT_BYTES if background else 0)
    if channel is not None:
        return out, exchange.reduce_scatter(channel, tensor, out, op)
    _announce(comm, tensor, "reduce_scatter", tensor.numel(), op)
    group = comm.group
    work = call_of(group, "reduce_scatter")(group, out, tensor, _REDUCE_SCATTER[op])
    # gloo's is never completed before it is waited for, so it cannot be watched.
    return out, BackendWork(work, group, None) if comm.on_gloo else work


def all_to_all(tensor: Tensor, comm: Comm, background: bool = False) -> Started:
    """(size * m, ...) -> (size * m, ...): block j goes to rank j, block i comes from rank i of the group."""
    if comm.order is not None:
        tensor = _in_group_order(tensor, comm)
    if is_compiling():
        sizes = [tensor.shape[0] // comm.size] * comm.size
        return _in_graph("all_to_all_single", tensor.contiguous(), comm, sizes, sizes), None
    tensor = in_memory(tensor)
    out = in_huge_pages(torch.empty_like(tensor))
    channel = _channel(tensor, comm, SLOT_BYTES if background else 0)
    if channel is not None:
        return out, exchange.all_to_all(channel, _movable(tensor), _movable(out))
    _announce(comm, tensor, "all_to_all", tensor.numel())
    sent, into = (tensor, out) if tensor.dtype in PLAIN else (_as_bytes(tensor), _as_bytes(out))
    return out, _on_backend(_exchange(comm.group, into, sent, _EVEN, _EVEN), comm, tensor)


def all_to_all_v(flat: Tensor, comm: Comm, send: list[int], receive: list[int], background: bool = False) -> Started:
    """1-D blocks of `send[j]` elements for rank j -> `receive[i]` elements from rank i, in the order of the group."""
    if comm.order is not None:
        blocks = torch.split(flat, send)
        flat = torch.cat([blocks[index] for index in group_to_index(comm)])
        send = [send[index] for index in group_to_index(comm)]
        receive = [receive[index] for index in group_to_index(comm)]
    return all_to_all_exact(flat, comm, send, receive, background=background)


def all_to_all_exact(
    flat: Tensor,
    comm: Comm,
    send: list[int],
    receive: list[int],
    out: Tensor | None = None,
    *,
    background: bool = False,
) -> Started:
    """`all_to_all_v` with blocks and counts in the order of the group; writes into `out` when there is one."""
    if is_compiling():
        return _in_graph("all_to_all_single", flat, comm, receive, send), None
    if out is None:
        out = in_huge_pages(flat.new_empty((sum(receive),)))
    channel = (
        None if background else _channel(flat, comm)
    )  # how long it takes, no rank knows before it has met the others
    if channel is not None:  # as bytes: a rank without any element may not know the dtype
        width = flat.element_size()
        counts = [n * width for n in send], [n * width for n in receive]
        exchange.all_to_all_v(channel, _as_bytes(flat), *counts, _as_bytes(out))
        return out, None
    _announce(comm, flat, "all_to_all_v", 0)
    if not flat.numel() and "fake" in comm.backend:  # torch's fills what arrives with what is sent, 2.11's with nothing
        flat, send = out.zero_(), receive
    if flat.dtype in PLAIN:
        return out, _on_backend(_exchange(comm.group, out, flat, receive, send), comm, flat)
    width = flat.element_size()
    counts = [n * width for n in receive], [n * width for n in send]
    work = _exchange(comm.group, _as_bytes(out), _as_bytes(flat), *counts)
    return out, _on_backend(work, comm, flat)


def broadcast_(tensor: Tensor, comm: Comm, source: int, background: bool = False) -> Started:
    """Overwrite with the tensor of one rank; while compiling the result is another tensor."""
    root = source if comm.order is None else comm.order[source]
    if is_compiling():
        return _in_graph("broadcast", tensor, comm, root), None
    channel = _channel(tensor, comm, SLOT_BYTES if background else 0)
    if channel is not None:
        return tensor, exchange.broadcast_(channel, _movable(tensor), root)
    _announce(comm, tensor, "broadcast", tensor.numel(), "", root)
    sent = tensor if tensor.dtype in PLAIN else _as_bytes(tensor)
    return tensor, _on_backend(comm.group.broadcast([sent], _from(root)), comm, tensor)


def _movable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes where its dtype is none that shared memory names."""
    return tensor if tensor.dtype in _DTYPES else _as_bytes(tensor)


def _as_bytes(tensor: Tensor) -> Tensor:
    """A flat view of a contiguous tensor as bytes.

    `view(-1)` would keep the stride of a dim of one element, whatever it is: shape (1, 1) and strides (7, 3) give
    stride 3, which cannot be viewed as bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def group_to_index(comm: Comm) -> list[int]:
    """Rank in the group -> index along the communicator, the inverse of `comm.order`."""
    indices = range(comm.size)
    return list(indices) if comm.order is None else sorted(indices, key=comm.order.__getitem__)


def in_index_order(gathered: Tensor, comm: Comm) -> Tensor:
    """Equal blocks along dim 0, from the order of the group to that of the communicator."""
    if comm.order is None or not gathered.numel():
        return gathered
    blocks = gathered.reshape(comm.size, -1, *gathered.shape[1:])
    return blocks[list(comm.order)].flatten(0, 1)


def _in_group_order(tensor: Tensor, comm: Comm) -> Tensor:
    """Equal blocks along dim 0, from the order of the communicator to that of the group."""
    if not tensor.numel():
        return tensor
    return tensor.reshape(comm.size, -1, *tensor.shape[1:])[group_to_index(comm)].flatten(0, 1)


def blocks_in_index_order(flat: Tensor, comm: Comm, receive: Sequence[int]) -> list[Tensor]:
    """The blocks that `all_to_all_v` returned, `receive[i]` elements each, in index order of the communicator."""
    if comm.order is None:
        return list(torch.split(flat, list(receive)))
    blocks = torch.split(flat, [receive[index] for index in group_to_index(comm)])
    return [blocks[position] for position in comm.order]
