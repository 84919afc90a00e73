"""The seven calls that everything is made of: straight on the process group, or functional while compiling.

Inputs are contiguous and blocks lie along dim 0, in index order of the communicator; each returns the result and the
work to wait for (None when there is nothing to wait for). A dtype that a backend cannot send travels as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ._torch import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    Work,
    distinct,
    functional,
    is_compiling,
)
from .carriers import PLAIN, REDUCE
from .groups import Comm

__all__ = [
    "all_gather",
    "all_reduce_",
    "all_to_all",
    "all_to_all_v",
    "broadcast_",
    "exchange",
    "in_one_exchange",
    "reduce_scatter",
]

Started = tuple[Tensor, Work | None]
_ALL_GATHER = AllgatherOptions()
_ALL_TO_ALL = AllToAllOptions()
_WHOLE: list[int] = []

# Up to here one exchange of whole tensors beats gloo's ring (measured: four ranks, 64 KiB, a third of the time).
EXCHANGE_RANKS, EXCHANGE_BYTES = 8, 1 << 16


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


def all_reduce_(tensor: Tensor, comm: Comm, op: str) -> Started:
    """Reduce in place; while compiling the result is another tensor, so use what is returned."""
    if is_compiling():
        return functional.wait_tensor(functional.all_reduce(distinct(tensor), op, comm.name)), None
    return tensor, comm.group.allreduce([tensor], _ALL_REDUCE[op])


def in_one_exchange(tensor: Tensor, comm: Comm, op: str) -> bool:
    """Whether an all-reduce is best done by sending everybody the whole tensor and adding up on arrival.

    gloo's ring takes 2 (size - 1) turns, each of which waits for another process; a small tensor is sooner exchanged
    in one. The answer is the same on every rank: it depends on what all of them share.
    """
    return (
        op == "sum"
        and 2 < comm.size <= EXCHANGE_RANKS
        and 0 < tensor.nbytes <= EXCHANGE_BYTES
        and tensor.device.type == "cpu"
        and "gloo" in comm.backend
        and tensor.is_floating_point()
        and not is_compiling()
    )


def exchange(tensor: Tensor, comm: Comm) -> Started:
    """The ranks' tensors, stacked; every rank has them in the same order, so sums over them agree bit by bit."""
    return all_to_all(tensor.expand(comm.size, *tensor.shape).contiguous(), comm)


def all_gather(tensor: Tensor, comm: Comm) -> Started:
    """(m, ...) -> (size * m, ...)."""
    if is_compiling():
        return functional.wait_tensor(functional.all_gather_into_tensor(distinct(tensor), comm.size, comm.name)), None
    shape = tensor.shape
    out = tensor.new_empty((comm.size * shape[0], *shape[1:]))
    if tensor.dtype in PLAIN:
        return out, comm.group._allgather_base(out, tensor, _ALL_GATHER)
    return out, comm.group._allgather_base(as_bytes(out), as_bytes(tensor), _ALL_GATHER)


def reduce_scatter(tensor: Tensor, comm: Comm, op: str) -> Started:
    """(size * m, ...) -> (m, ...)."""
    if comm.order is not None:
        tensor = to_group(tensor, comm)
    if is_compiling():
        out = functional.reduce_scatter_tensor(distinct(tensor), op, comm.size, comm.name)
        return functional.wait_tensor(out), None
    shape = tensor.shape
    out = tensor.new_empty((shape[0] // comm.size, *shape[1:]))
    return out, comm.group._reduce_scatter_base(out, tensor, _REDUCE_SCATTER[op])


def all_to_all(tensor: Tensor, comm: Comm) -> Started:
    """(size * m, ...) -> (size * m, ...): block j goes to rank j, block i comes from rank i."""
    if comm.order is not None:
        tensor = to_group(tensor, comm)
    if is_compiling():
        sizes = [tensor.shape[0] // comm.size] * comm.size
        return functional.wait_tensor(functional.all_to_all_single(distinct(tensor), sizes, sizes, comm.name)), None
    out = torch.empty_like(tensor)
    if tensor.dtype in PLAIN:
        return out, comm.group.alltoall_base(out, tensor, _WHOLE, _WHOLE, _ALL_TO_ALL)
    return out, comm.group.alltoall_base(as_bytes(out), as_bytes(tensor), _WHOLE, _WHOLE, _ALL_TO_ALL)


def all_to_all_v(flat: Tensor, comm: Comm, send: list[int], receive: list[int]) -> Started:
    """1-D blocks of exact element counts."""
    if comm.order is not None:
        flat = torch.cat(
            [block for _, block in sorted(zip(comm.order, torch.split(flat, send), strict=True), key=lambda p: p[0])]
        )
        send, receive = _in_group_order(send, comm.order), _in_group_order(receive, comm.order)
    if is_compiling():
        return functional.wait_tensor(functional.all_to_all_single(distinct(flat), receive, send, comm.name)), None
    out = flat.new_empty((sum(receive),))
    if flat.dtype in PLAIN:
        return out, comm.group.alltoall_base(out, flat, receive, send, _ALL_TO_ALL)
    width = flat.element_size()
    work = comm.group.alltoall_base(
        as_bytes(out), as_bytes(flat), [n * width for n in receive], [n * width for n in send], _ALL_TO_ALL
    )
    return out, work


def broadcast_(tensor: Tensor, comm: Comm, source: int) -> Started:
    """Overwrite with the tensor of one rank; while compiling the result is another tensor."""
    root = source if comm.order is None else comm.order[source]
    if is_compiling():
        return functional.wait_tensor(functional.broadcast(distinct(tensor), root, comm.name)), None
    return tensor, comm.group.broadcast([tensor if tensor.dtype in PLAIN else as_bytes(tensor)], _from(root))


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view of a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)


def ordered(gathered: Tensor, comm: Comm) -> Tensor:
    """Blocks along dim 0 from the group's order to that of the communicator."""
    if comm.order is None:
        return gathered
    blocks = gathered.reshape(comm.size, -1, *gathered.shape[1:]) if gathered.numel() else None
    return gathered if blocks is None else blocks[list(comm.order)].flatten(0, 1)


def to_group(tensor: Tensor, comm: Comm) -> Tensor:
    """Blocks along dim 0 from the order of the communicator to the group's."""
    assert comm.order is not None, "called only where the orders differ"
    inverse = sorted(range(comm.size), key=comm.order.__getitem__)
    return tensor.reshape(comm.size, -1, *tensor.shape[1:])[inverse].flatten(0, 1) if tensor.numel() else tensor


def _in_group_order(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    return [size for _, size in sorted(zip(order, sizes, strict=True), key=lambda pair: pair[0])]


def split_ordered(flat: Tensor, comm: Comm, receive: Sequence[int]) -> list[Tensor]:
    """The blocks of what `all_to_all_v` gave, in index order of the communicator."""
    if comm.order is None:
        return list(torch.split(flat, list(receive)))
    blocks = torch.split(flat, _in_group_order(receive, comm.order))
    return [blocks[position] for position in comm.order]
