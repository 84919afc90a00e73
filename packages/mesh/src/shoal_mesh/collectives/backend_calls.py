"""The seven backend calls that collectives consist of: by the communicator's transport, functional while compiling.

Blocks follow one another along dim 0 in index order of the communicator, which has several ranks; inputs of equal
blocks may have any strides, others are contiguous. `background` says that the caller goes on before it waits.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._torch import WORLDS, functional, has_tangent, is_compiling, is_exporting, is_traced
from ..errors import CollectiveError
from ..groups.process_groups import Comm
from ..shared_memory.channel import channel_of, ranks_per_host
from ..shared_memory.exchange import SharedMemoryTransport
from ..transport import Handle, Pending, Receive, Transport
from .across_hosts import AcrossHosts
from .c10d_transport import C10dTransport
from .graph_dependences import NAMESPACE, distinct, in_its_pass
from .reductions import in_memory

# Up to here one all-to-all of the unsharded tensor is faster than gloo's ring: 4 ranks, 64 KiB, a third of the time.
ONE_SHOT_RANKS, ONE_SHOT_BYTES = 8, 1 << 16
# Of this size malloc takes new memory from the system each time, page by page as it is first written: 20 ms for 32 MiB,
# eight times what copying takes. In pages of 2 MiB it takes 3.
LARGE_BYTES = 32 << 20


def carrier_of(comm: Comm, tensor: Tensor, op: str = "", background: bool = False, uneven: bool = False) -> Transport:
    """What carries a message by its communicator's transport."""
    # The world first: another thread that renews the communicator drops the old transport before it notes the world.
    transport = comm.transport if WORLDS._default_pg is comm._world else None
    if transport is None:
        transport = _connected(comm, tensor)
    return transport.carrier(tensor, op, background, uneven)


def _connected(comm: Comm, tensor: Tensor) -> Transport:
    """The transport of a communicator in the present world, which over gloo is chosen for the first CPU tensor."""
    group, transport = comm.group, comm.transport  # in this order: the group of a new world has no transport yet
    if transport is not None:
        return transport
    channel = channel_of(group) if comm.on_gloo and tensor.is_cpu else None
    transport = C10dTransport(comm, channel)
    if channel is not None:
        transport = SharedMemoryTransport(channel, transport)
    elif per_host := ranks_per_host(group):
        transport = AcrossHosts(comm, per_host, C10dTransport)
    if tensor.is_cpu or not comm.on_gloo:  # else the ranks have not yet been asked whether they share memory
        comm.transport = transport
    return transport


def _in_graph(name: str, operand: Tensor, comm: Comm, *arguments: object) -> Pending:
    """A functional collective in the graph, complete.

    It is this package's operator on gloo, where that is faster, and on groups written in Python, which C++ cannot call;
    torch's elsewhere and in exported programs, which run without this package.
    """
    if not is_compiling() and has_tangent(operand):
        raise CollectiveError("collectives have no forward-mode derivative, and the tensor has a tangent")
    here = (comm.in_python or (comm.on_gloo and operand.is_cpu)) and not is_exporting()
    collective = getattr(getattr(torch.ops, NAMESPACE) if here else functional, name)
    result = in_its_pass(collective, distinct(operand), *arguments, comm.name)
    return Pending(functional.wait_tensor(result), None)


def all_reduce_(tensor: Tensor, comm: Comm, op: str, background: bool = False) -> Pending:
    """Reduce in place; while compiling the result is another tensor, so use what it brings."""
    if is_traced(tensor):
        return _in_graph("all_reduce", tensor, comm, op)
    return Pending(tensor, carrier_of(comm, tensor, op, background).all_reduce_(tensor, op, background))


def is_one_shot(tensor: Tensor, comm: Comm, op: str) -> bool:
    """Whether an all-reduce is fastest when every rank sends its tensor to each other rank and adds up on arrival.

    gloo's ring takes 2 (size - 1) turns, each of which waits for another process; one all-to-all waits once. The answer
    is the same on all ranks: it depends on nothing that differs between them.
    """
    return (
        op == "sum"
        and 2 < comm.size <= ONE_SHOT_RANKS
        and not is_traced(tensor)  # before the size, which a compiler may know as a symbol only
        and 0 < tensor.nbytes <= ONE_SHOT_BYTES
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and type(carrier_of(comm, tensor, op)) is C10dTransport
    )


def all_gather(tensor: Tensor, comm: Comm, background: bool = False, out: Tensor | None = None) -> Pending:
    """(m, ...) -> (size * m, ...); writes into `out` when there is one, of which `tensor` is this rank's block."""
    if is_traced(tensor):
        pending = _in_graph("all_gather_into_tensor", tensor.contiguous(), comm, comm.size)
    else:
        tensor = in_memory(tensor)
        if out is None:
            shape = list(tensor.shape)
            shape[0] *= comm.size  # (3, 5) on 4 ranks: (12, 5)
            out = in_huge_pages(tensor.new_empty(shape))
        pending = Pending(out, carrier_of(comm, tensor, "", background).all_gather(tensor, out))
    order = comm.order
    return pending if order is None else pending.then(lambda out: _reordered(out, order))


def reduce_scatter(tensor: Tensor, comm: Comm, op: str, background: bool = False) -> Pending:
    """(size * m, ...) -> (m, ...)."""
    if comm.order is not None:
        tensor = _reordered(tensor, group_to_index(comm))
    if is_traced(tensor):
        return _in_graph("reduce_scatter_tensor", tensor.contiguous(), comm, op, comm.size)
    tensor = in_memory(tensor)
    shape = list(tensor.shape)
    shape[0] //= comm.size  # (12, 5) on 4 ranks: (3, 5)
    out = in_huge_pages(tensor.new_empty(shape))
    return Pending(out, carrier_of(comm, tensor, op, background).reduce_scatter(tensor, out, op))


def all_to_all(tensor: Tensor, comm: Comm, background: bool = False) -> Pending:
    """(size * m, ...) -> (size * m, ...): block j goes to rank j, block i comes from rank i."""
    if comm.order is not None:
        tensor = _reordered(tensor, group_to_index(comm))
    if is_traced(tensor):
        sizes = [tensor.shape[0] // comm.size] * comm.size  # (12, 5) on 4 ranks: [3, 3, 3, 3]
        pending = _in_graph("all_to_all_single", tensor.contiguous(), comm, sizes, sizes)
    else:
        tensor = in_memory(tensor)
        out = in_huge_pages(torch.empty_like(tensor))
        pending = Pending(out, carrier_of(comm, tensor, "", background).all_to_all(tensor, out))
    order = comm.order
    return pending if order is None else pending.then(lambda out: _reordered(out, order))


def all_to_all_v(
    flat: Tensor, comm: Comm, send: Sequence[int], receive: Sequence[int], background: bool = False
) -> Pending:
    """1-D blocks of `send[j]` elements for rank j -> `receive[i]` elements from rank i."""
    order = group_to_index(comm)
    if comm.order is not None:
        blocks = torch.split(flat, list(send))
        flat = torch.cat([blocks[index] for index in order])
    arrivals = [receive[index] for index in order]
    pending = all_to_all_exact(flat, comm, [send[index] for index in order], arrivals, background=background)
    positions = comm.order
    if positions is None:
        return pending

    def in_index_order(out: Tensor) -> Tensor:
        blocks = torch.split(out, arrivals)
        return torch.cat([blocks[position] for position in positions])

    return pending.then(in_index_order)


def all_to_all_exact(
    flat: Tensor, comm: Comm, send: list[int], receive: list[int], out: Tensor | None = None, background: bool = False
) -> Pending:
    """`all_to_all_v` with blocks and counts in the order of the group; writes into `out` when there is one."""
    if is_traced(flat):
        return _in_graph("all_to_all_single", flat, comm, receive, send)
    if out is None:
        out = in_huge_pages(flat.new_empty((sum(receive),)))
    return Pending(out, carrier_of(comm, flat, "", background, uneven=True).all_to_all_v(flat, out, send, receive))


def broadcast_(tensor: Tensor, comm: Comm, source: int) -> Pending:
    """Overwrite with the tensor of one rank; while compiling the result is another tensor."""
    root = source if comm.order is None else comm.order[source]  # order (2, 0, 1): index 0 is rank 2
    if is_traced(tensor):
        return _in_graph("broadcast", tensor, comm, root)
    return Pending(tensor, carrier_of(comm, tensor).broadcast_(tensor, root))


def packed(
    kind: str, tensors: Sequence[Tensor], comm: Comm, receive: Receive, sizes: Sequence[int] = (), op: str = ""
) -> Handle | None:
    """Many tensors in one message in the background; None where the caller packs them."""
    if comm.size == 1 or is_traced(tensors[0]):
        return None
    carrier, order = carrier_of(comm, tensors[0], op), comm.order
    if kind != "all_gather" or order is None:
        return carrier.packed(kind, tensors, receive, sizes, comm.rank, op)
    sizes = [sizes[index] for index in group_to_index(comm)]
    return carrier.packed(kind, tensors, lambda rows: receive([rows[i] for i in order]), sizes, comm.rank, op)


def group_to_index(comm: Comm) -> list[int]:
    """Rank in the group -> index along the communicator, the inverse of `comm.order`."""
    indices = range(comm.size)  # order (2, 0, 1), index 0 being rank 2 of the group: its ranks have indices 1, 2, 0
    return list(indices) if comm.order is None else sorted(indices, key=comm.order.__getitem__)


def _reordered(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Equal blocks along dim 0 in another order; not by an index, which would be copied to the device."""
    if not tensor.numel():
        return tensor
    blocks = tensor.reshape(len(order), -1, *tensor.shape[1:])  # (12, 5) on 4 ranks: (4, 3, 5)
    return torch.cat([blocks[i] for i in order])


def in_huge_pages(new: Tensor) -> Tensor:
    """The tensor, whose memory nobody has written yet: a large one on the CPU will be in huge pages.

    Systems give them to programs that ask (`madvise`, the usual setting).

    Example:
        >>> in_huge_pages(torch.empty(1 << 23)).shape
        torch.Size([8388608])
    """
    madvise = _madvise() if new.nbytes >= LARGE_BYTES and new.is_cpu else None
    if madvise is not None:
        first = -(-new.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # address 5000, pages of 4096: 8192
        length = (new.data_ptr() + new.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(first, length, mmap.MADV_HUGEPAGE)  # a wish: whether it is granted changes nothing but the time
    return new


@cache
def _madvise() -> Any:
    """The system's; None where it has no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
