"""The steps that collectives share: checks of arguments, and seven calls that send.

Checks raise before anything is sent, except for gradients (`refuse_gradient`). Every collective is
made of the seven calls, which use the communicator's transport. While a compiler traces, they are
functional collectives instead. The blocks of the calls are in index order of the communicator along
dim 0, and the communicator has several ranks. Inputs of equal blocks may have any strides, other
inputs are contiguous.
`background` means that the caller computes between the start and the wait.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import Literal, NoReturn

import torch
from torch import Tensor

from .._torch import (
    WORLDS,
    disabled_subclasses,
    forward_levels,
    is_compiling,
    is_compiling_code,
    is_traced,
    is_transformed,
    transforms_active,
    transforms_run,
)
from ..argument_types import kind_of, require, require_each
from ..errors import CollectiveError, CollectiveTypeError, DimError
from ..events import observers, run_observed
from ..groups.process_groups import Comm
from ..mesh.device_mesh import DeviceMesh
from ..shared_memory.channel import channel_of, ranks_per_host
from ..shared_memory.exchange import SharedMemoryTransport
from ..transport import Handle, Pending, Sizes, Transport
from ..watch.recorder import refuse_recorded
from .c10d_transport import AcrossHosts, C10dTransport
from .graph_dependences import in_graph

Along = Comm | tuple[DeviceMesh, int | str | tuple[int | str, ...]]
# Types of `async_op`: without it the result is returned, with it a `Pending`.
Sync = Literal[False]
Async = Literal[True]
_STRIDED = torch.strided
# read by `map`, which takes half the time of a loop in Python
_is_quantized = attrgetter("is_quantized")
_is_nested = attrgetter("is_nested")
LOST_GRADIENT = (
    "this collective is not differentiable, but the tensor requires a gradient: use "
    "shoal_mesh.differentiable, or pass tensor.detach() if the gradient is not needed"
)
TRANSFORMED = (
    "collectives do not support transforms of torch.func (grad, vjp, jvp, vmap, ...) and "
    "forward-mode derivatives: use torch.autograd.grad with shoal_mesh.differentiable, or call the "
    "collective outside of the transformed function"
)
# An all-reduce of up to so many ranks and bytes is faster as one all-to-all of the whole tensor
# than in gloo's ring: for 4 ranks and 64 KiB it takes a third of the time.
ONE_SHOT_RANKS = 8
ONE_SHOT_BYTES = 1 << 16
# For tensors of this size and above, malloc takes new memory from the system each time. The system
# provides the memory page by page as it is first written: 20 ms for 32 MiB, eight times as long as
# copying. In pages of 2 MiB it takes 3 ms.
LARGE_BYTES = 32 << 20


# --- arguments and results ------------------------------------------------------------------------


def resolve(along: object) -> Comm:
    """Return the communicator of a Comm or a (mesh, axes) pair; CollectiveTypeError otherwise."""
    if isinstance(along, Comm):
        return along
    rejected = along
    if isinstance(along, tuple) and len(along) == 2:
        mesh, axes = along
        if isinstance(mesh, DeviceMesh):
            return mesh.comm(axes)
        rejected = mesh
    raise CollectiveTypeError(
        "a collective runs along a Comm, such as comm_over(ranks), or a pair (mesh, axes), got "
        f"{kind_of(rejected)}"
    )


def comm_of_call(tensor: Tensor, along: Along, name: str = "tensor") -> Comm:
    """Check the operand of a collective (`check_operand`), and return the communicator."""
    comm = along if type(along) is Comm else resolve(along)
    if type(tensor) is not Tensor or not is_dense(tensor):
        check_operand(tensor, name)
    return comm


def comm_of_calls(tensors: Sequence[Tensor], along: Along, allowed: str) -> Comm:
    """Check a list of tensors as `comm_of_call` does; `allowed` describes the allowed arguments."""
    require_tensors(tensors, allowed)
    comm = resolve(along)
    if not are_dense(tensors):
        for tensor in tensors:
            check_operand(tensor)
    return comm


def require_tensors(tensors: Sequence[Tensor], allowed: str) -> None:
    """Raise CollectiveTypeError unless given a sequence of tensors; `allowed` describes it."""
    is_list = isinstance(tensors, list | tuple)
    if not is_list or set(map(type, tensors)) != {Tensor}:
        require_each(tensors, Tensor, allowed, CollectiveTypeError)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements are numbers in memory at strides."""
    # Compilers trace dense tensors only, and do not let a backward read the layout.
    if is_compiling_code():
        return True
    return tensor.layout is _STRIDED and not tensor.is_quantized and not tensor.is_nested


def are_dense(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are dense, as `is_dense` does, without a call for each."""
    if is_compiling_code():
        return True
    are_strided = {tensor.layout for tensor in tensors} == {_STRIDED}
    return (
        are_strided and not any(map(_is_quantized, tensors)) and not any(map(_is_nested, tensors))
    )


def check_operand(tensor: Tensor, name: str = "tensor") -> None:
    """Raise CollectiveError for a tensor that is not dense."""
    require(tensor, Tensor, f"{name} of a collective is a torch.Tensor", CollectiveTypeError)
    if is_dense(tensor):
        return
    if tensor.is_quantized:
        raise CollectiveError(
            f"collectives send numbers, got the quantized dtype {tensor.dtype}: send int_repr() "
            "and quantize again with the same scale and zero point, or dequantize() first"
        )
    if tensor.is_nested:
        raise CollectiveError(
            "collectives send dense tensors, got a nested tensor: send its values() and offsets(), "
            "or call to_padded_tensor() first"
        )
    raise CollectiveError(
        f"collectives send dense tensors, got layout {tensor.layout}: call to_dense() first"
    )


def loses_gradient(tensors: Iterable[Tensor]) -> bool:
    """Return whether a collective, which is not differentiable, would lose a tensor's gradient."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def refuse_transformed(tensors: Iterable[Tensor]) -> None:
    """Raise CollectiveError for a tensor of a transform of torch.func, or with a tangent.

    The transport copies the memory of a tensor, which holds neither the batch of a transform nor a
    tangent. All ranks run the same transform, so all ranks raise.
    """
    if transforms_run() and any(is_transformed(tensor) for tensor in tensors):
        raise CollectiveError(TRANSFORMED)


def refuse_gradient(take_part: Callable[[], object]) -> NoReturn:
    """Take part in a collective of tensors that require gradients, and raise CollectiveError.

    The tensors of other ranks may not require gradients. These ranks run the collective, so this
    rank raises behind it: the group stays usable.

    Args:
        take_part: the collective; it runs without gradients, and its result is dropped.
    """
    with torch.no_grad():
        result = take_part()
        if isinstance(result, Pending):
            result.wait()
    raise CollectiveError(LOST_GRADIENT)


def materialize(tensor: Tensor) -> Tensor:
    """Return the tensor with its values in contiguous memory, as backends read them.

    `conj()` and `imag` may be lazy views.
    """
    # a compiler resolves lazy views itself
    return tensor.contiguous() if is_compiling() else in_memory(tensor)


def in_memory(tensor: Tensor) -> Tensor:
    """Return what `materialize` returns, for calls that no compiler traces.

    A compiler cannot trace the checks for lazy views.
    """
    if type(tensor) is not Tensor:
        tensor = as_plain(tensor)
    if tensor.is_conj() or tensor.is_neg():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def as_plain(tensor: Tensor) -> Tensor:
    """Return the tensor without its subclass.

    Other ranks may not have the subclass, so the transport is chosen by the plain tensor. The
    result shares the memory of the tensor, except if the subclass computes its values
    (`__torch_dispatch__`): then it is a copy.

    Raises:
        CollectiveTypeError: the subclass does not let its values be copied.
    """
    cls = type(tensor)
    if cls is Tensor or is_traced(tensor):
        return tensor
    if cls.__torch_dispatch__ is Tensor.__torch_dispatch__:
        with disabled_subclasses():
            return tensor.detach()
    try:
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return plain.copy_(tensor.detach())
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise CollectiveTypeError(
            f"a collective sends plain tensors, but the values of this {cls.__name__} cannot be "
            f"copied into a plain tensor: pass the tensors that it contains ({error})"
        ) from error


def normal_dim(tensor: Tensor, dim: int) -> int:
    """Return a dim counted from the front; raise DimError if the tensor does not have it."""
    if type(dim) is not int:
        require(dim, int, "a dim of a tensor is an int", CollectiveTypeError)
    ndim = tensor.ndim
    if not -ndim <= dim < ndim:
        allowed = "it has 0 dims, call view(1) first"
        if ndim:
            allowed = f"dims are {-ndim} to {ndim - 1}"
        raise DimError(f"no dim {dim} in a tensor of shape {tuple(tensor.shape)}: {allowed}")
    return dim % ndim


def refuse_uneven(tensor: Tensor, dim: int, comm: Comm) -> NoReturn:
    """Raise CollectiveError because the dim does not divide."""
    axes = "x".join(comm.axes)
    raise CollectiveError(
        f"dim {dim} of shape {tuple(tensor.shape)} does not divide into {comm.size} equal blocks "
        f"along {axes}: use the form with sizes (ending in _v)"
    )


def check_sizes(sizes: Sizes, comm: Comm, name: str = "sizes") -> int:
    """Return the sum of sizes; CollectiveError unless they are one non-negative count per rank."""
    allowed = "the sizes of blocks are a sequence of int, one per rank"
    try:
        total = sum(sizes)
        fits = len(sizes) == comm.size
    except (TypeError, RuntimeError):
        # RuntimeError: for torch's own mesh, and for sparse tensors
        raise CollectiveTypeError(f"{allowed}, got {kind_of(sizes)} as {name}") from None
    if type(total) is not int:
        require(total, int | torch.SymInt, allowed, CollectiveTypeError)
    if not fits or min(sizes) < 0:
        raise CollectiveError(
            f"{name} must be one non-negative count for each of {comm.size} ranks, got "
            f"{tuple(sizes)}"
        )
    return total


def are_equal(sizes: Sizes) -> bool:
    """Return whether all sizes are equal.

    The sizes may be symbols of a compiler, which have no hash.
    """
    return not sizes or sizes.count(sizes[0]) == len(sizes)


def check_root(index: int, comm: Comm, name: str) -> None:
    """Raise CollectiveError unless an index of a rank along the communicator is given."""
    if type(index) is int and 0 <= index < comm.size:
        return
    axes = "x".join(comm.axes)
    require(index, int, f"{name} is the index of a rank along {axes}", CollectiveTypeError)
    if not 0 <= index < comm.size:
        raise CollectiveError(
            f"{name} {index} is not a rank along {axes}: indices are 0 to {comm.size - 1}, counted "
            "along the axes (not global ranks)"
        )


def collective(  # noqa: PLR0913  # the fields of an event, and how it runs
    op: str,
    tensor: Tensor,
    comm: Comm,
    start: Callable[[], Pending],
    async_op: bool,
    reduce_op: str = "",
    same: Mapping[str, object] = MappingProxyType({}),
    flow: tuple[Sizes, Sizes] | None = None,
) -> Tensor | Pending:
    """Return the result of a collective of one tensor, and report it to observers once.

    The result comes from `start`, or is a copy of the tensor if the communicator has one rank.
    Observers get the fields of an `Event`; `same` also has the shape of the tensor, unless ranks
    send different amounts.
    """
    # `loses_gradient` of one tensor, without the time of a call
    if tensor.requires_grad and torch.is_grad_enabled():
        again = partial(collective, op, tensor, comm, start, async_op)
        refuse_gradient(partial(again, reduce_op=reduce_op, same=same, flow=flow))
    if comm.size == 1:
        copy = tensor.clone(memory_format=torch.contiguous_format)
        return Pending(copy, None) if async_op else copy
    if not observers:
        pending = start()
        return pending if async_op else pending.wait()

    def run() -> Tensor | Pending:
        pending = start()
        return pending if async_op else pending.wait()

    same_values = {"shape": tensor.shape, **same} if flow is None else same
    return run_observed(run, op, comm, (tensor,), reduce_op=reduce_op, same=same_values, flow=flow)


# --- the seven calls ------------------------------------------------------------------------------


def carrier_of(
    comm: Comm, tensor: Tensor, op: str = "", background: bool = False, uneven: bool = False
) -> Transport:
    """Return the transport that carries a message of a communicator.

    Raises:
        CollectiveError: the message belongs to a transform of torch.func, or has a tangent.
    """
    # the questions of `transforms_run`, without the time of a call
    if forward_levels._current_level >= 0 or transforms_active():
        refuse_transformed((tensor,))
    # The world is compared before the transport is read: another thread that renews the
    # communicator drops the old transport before it sets `_world`.
    transport = comm.transport if WORLDS._default_pg is comm._world else None
    if transport is None:
        transport = _connect(comm, tensor)
    return transport.carrier(tensor, op, background, uneven)


def _connect(comm: Comm, tensor: Tensor) -> Transport:
    """Return the transport of a communicator in the present world.

    Over gloo it is chosen for the first CPU tensor.
    """
    refuse_recorded(tensor.numel())
    # The group is read first: in a new world this drops the transport of the old world.
    group = comm.group
    transport = comm.transport
    if transport is not None:
        return transport
    channel = channel_of(group) if comm.on_gloo and tensor.is_cpu else None
    transport = C10dTransport(comm, channel)
    if channel is not None:
        transport = SharedMemoryTransport(channel, transport)
    elif per_host := ranks_per_host(group):
        transport = AcrossHosts(comm, per_host)
    # Over gloo, ranks find out at the first CPU tensor whether they share memory. The transport
    # for an earlier tensor is not stored.
    if tensor.is_cpu or not comm.on_gloo:
        comm.transport = transport
    return transport


def is_read_at_start(tensor: Tensor, comm: Comm, op: str = "") -> bool:
    """Return whether a background collective has read its operand once it has started.

    If so, the operand has been copied to shared memory.
    """
    return comm.size == 1 or type(carrier_of(comm, tensor, op, True)) is SharedMemoryTransport


def all_reduce_(tensor: Tensor, comm: Comm, op: str, background: bool = False) -> Pending:
    """Reduce in place; while compiling the result is another tensor, so use the returned one."""
    if is_traced(tensor):
        return in_graph("all_reduce", tensor, comm, op)
    sent = tensor if type(tensor) is Tensor else as_plain(tensor)
    work = carrier_of(comm, sent, op, background).all_reduce_(sent, op, background)
    return Pending(tensor, work) if sent is tensor else _write_back(tensor, sent, work)


def is_one_shot(tensor: Tensor, comm: Comm, op: str) -> bool:
    """Return whether an all-reduce is fastest as one all-to-all with the sums taken on arrival.

    gloo's ring takes 2 (size - 1) turns, each of which waits for another process; one all-to-all
    waits once. The answer is the same on all ranks, because all its conditions are.
    """
    if op not in ("sum", "avg") or not 2 < comm.size <= ONE_SHOT_RANKS:
        return False
    # `is_traced` comes first, because the size may be a symbol of a compiler
    if is_traced(tensor) or not 0 < tensor.nbytes <= ONE_SHOT_BYTES:
        return False
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return False
    return type(carrier_of(comm, tensor, op)) is C10dTransport


def all_gather(
    tensor: Tensor, comm: Comm, background: bool = False, out: Tensor | None = None
) -> Pending:
    """Gather blocks, (m, ...) -> (size * m, ...).

    Writes into `out` if it is given; then `tensor` is a view of this rank's block in `out`.
    """
    if is_traced(tensor):
        pending = in_graph("all_gather_into_tensor", tensor.contiguous(), comm, comm.size)
    else:
        tensor = in_memory(tensor)
        if out is None:
            # (3, 5) on 4 ranks: (12, 5)
            shape = (comm.size * tensor.shape[0], *tensor.shape[1:])
            out = in_huge_pages(tensor.new_empty(shape))
        work = carrier_of(comm, tensor, "", background).all_gather(tensor, out)
        pending = Pending(out, work)
    order = comm.order
    return pending if order is None else pending.then(lambda out: _reorder_blocks(out, order))


def all_gather_v(rows: Tensor, comm: Comm, sizes: Sizes, background: bool) -> Pending:
    """Gather blocks, `S(0) -> R`: (sizes[rank], ...) -> (sum(sizes), ...)."""
    largest = max(sizes)
    row_count = sum(sizes)
    row_shape = rows.shape[1:]
    # Sizes (9, 0, 0) would be padded to 27 rows, so exactly 9 rows go to each of the others. Sizes
    # (3, 1, 2) are padded to 9 rows, which take one step.
    if largest * comm.size > 2 * row_count:
        flat = rows.reshape(-1)
        arrivals = [size * prod(row_shape) for size in sizes]
        send = [flat.numel()] * comm.size
        copies = flat.repeat(comm.size)
        pending = all_to_all_v(copies, comm, send, arrivals, background=background)
        return pending.then(lambda out: out.view(row_count, *row_shape))
    missing = largest - rows.shape[0]
    if missing:
        padding = rows.new_empty((missing, *row_shape))
        rows = torch.cat([rows, padding])
    pending = all_gather(rows, comm, background)
    if are_equal(sizes):
        return pending

    def join(padded: Tensor) -> Tensor:
        # (3, 1, 2): of the 9 rows that arrive 3, 1 and 2 are joined
        blocks = zip(padded.chunk(comm.size), sizes, strict=True)
        return torch.cat([block[:size] for block, size in blocks])

    return pending.then(join)


def reduce_scatter(tensor: Tensor, comm: Comm, op: str, background: bool = False) -> Pending:
    """Reduce blocks and return this rank's one, (size * m, ...) -> (m, ...)."""
    if comm.order is not None:
        tensor = _reorder_blocks(tensor, group_to_index(comm))
    if is_traced(tensor):
        return in_graph("reduce_scatter_tensor", tensor.contiguous(), comm, op, comm.size)
    tensor = in_memory(tensor)
    # (12, 5) on 4 ranks: (3, 5)
    shape = (tensor.shape[0] // comm.size, *tensor.shape[1:])
    out = in_huge_pages(tensor.new_empty(shape))
    work = carrier_of(comm, tensor, op, background).reduce_scatter(tensor, out, op)
    return Pending(out, work)


def all_to_all(tensor: Tensor, comm: Comm, background: bool = False) -> Pending:
    """Exchange equal blocks, (size * m, ...) -> (size * m, ...).

    Block j goes to rank j, block i comes from rank i.
    """
    if comm.order is not None:
        tensor = _reorder_blocks(tensor, group_to_index(comm))
    if is_traced(tensor):
        # (12, 5) on 4 ranks: [3, 3, 3, 3]
        sizes = [tensor.shape[0] // comm.size] * comm.size
        pending = in_graph("all_to_all_single", tensor.contiguous(), comm, sizes, sizes)
    else:
        tensor = in_memory(tensor)
        out = in_huge_pages(torch.empty_like(tensor))
        work = carrier_of(comm, tensor, "", background).all_to_all(tensor, out)
        pending = Pending(out, work)
    order = comm.order
    return pending if order is None else pending.then(lambda out: _reorder_blocks(out, order))


def all_to_all_v(
    flat: Tensor, comm: Comm, send: Sizes, receive: Sizes, background: bool = False
) -> Pending:
    """Send blocks of `send[j]` elements to rank j; receive `receive[i]` elements from rank i."""
    indices = group_to_index(comm)
    order = comm.order
    if order is not None:
        flat = _reorder_blocks(flat, indices, send)
    departures = [send[index] for index in indices]
    arrivals = [receive[index] for index in indices]
    pending = all_to_all_exact(flat, comm, departures, arrivals, background=background)
    return (
        pending
        if order is None
        else pending.then(lambda out: _reorder_blocks(out, order, arrivals))
    )


def all_to_all_exact(
    flat: Tensor,
    comm: Comm,
    send: list[int],
    receive: list[int],
    out: Tensor | None = None,
    background: bool = False,
) -> Pending:
    """Run `all_to_all_v` in the order of the group; write into `out` if it is given."""
    if is_traced(flat):
        return in_graph("all_to_all_single", flat, comm, receive, send)
    flat = flat if type(flat) is Tensor else as_plain(flat)
    if out is None:
        out = in_huge_pages(flat.new_empty((sum(receive),)))
    carrier = carrier_of(comm, flat, "", background, uneven=True)
    return Pending(out, carrier.all_to_all_v(flat, out, send, receive))


def broadcast_(tensor: Tensor, comm: Comm, source: int) -> Pending:
    """Overwrite with the tensor of one rank; while compiling the result is another tensor."""
    # order (2, 0, 1): index 0 along the communicator is rank 2 of the group
    root = source if comm.order is None else comm.order[source]
    if is_traced(tensor):
        return in_graph("broadcast", tensor, comm, root)
    sent = tensor if type(tensor) is Tensor else as_plain(tensor)
    work = carrier_of(comm, sent).broadcast_(sent, root)
    return Pending(tensor, work) if sent is tensor else _write_back(tensor, sent, work)


def _write_back(tensor: Tensor, sent: Tensor, work: Handle) -> Pending:
    """Overwrite a tensor of a subclass with the values of the plain tensor that was sent for it."""
    shares_memory = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if shares_memory:
        return Pending(tensor, work)
    return Pending(tensor, work, lambda _: tensor.copy_(sent))


def group_to_index(comm: Comm) -> list[int]:
    """Return the index along the communicator of each rank in the group, inverse to `order`."""
    indices = list(range(comm.size))
    if comm.order is not None:
        # Order (2, 0, 1): indices 0, 1, 2 are the ranks 2, 0, 1 of the group. The group's ranks 0,
        # 1, 2 have the indices 1, 2, 0.
        indices.sort(key=comm.order.__getitem__)
    return indices


def _reorder_blocks(tensor: Tensor, order: Sequence[int], sizes: Sizes = ()) -> Tensor:
    """Return blocks along dim 0 in another order, equal blocks if `sizes` are not given.

    It does not use an index tensor, which would have to be sent to the device.
    """
    if sizes:
        blocks: Sequence[Tensor] = torch.split(tensor, list(sizes))
    elif tensor.numel():
        # (12, 5) on 4 ranks: 4 of (3, 5)
        blocks = tensor.reshape(len(order), -1, *tensor.shape[1:]).unbind()
    else:
        return tensor
    return torch.cat([blocks[i] for i in order])


def in_huge_pages(new: Tensor) -> Tensor:
    """Put a tensor that nothing has been written to in huge pages if it is large and on the CPU.

    Systems give huge pages to programs that request them (`madvise`, the usual setting). Returns
    the tensor.
    """
    if new.nbytes < LARGE_BYTES or not new.is_cpu or not hasattr(mmap, "MADV_HUGEPAGE"):
        return new
    page = mmap.PAGESIZE
    address = new.data_ptr()
    # address 5000, pages of 4096: 8192
    first = -(-address // page) * page
    length = (address + new.nbytes - first) // page * page
    # The system may refuse the request, which only costs time.
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return new
