"""Collectives over one or several mesh axes, called straight on the process group.

Every function takes a `Comm` or a pair (mesh, axis or axes) and returns a fresh tensor, unless its name ends with an
underscore. Blocks are in index order of the communicator. `async_op=True` returns a `Pending`. While torch.compile
traces they become functional collectives. A communicator of one rank sends nothing. None is differentiable: a tensor
that requires grad is refused, `shoal_mesh.differentiable` has the versions with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from . import kernels
from ._torch import Work
from .carriers import Reduction, reduction, unwire, wire
from .device_mesh import DeviceMesh
from .errors import CollectiveError
from .groups import Comm
from .observe import Event, inside_told, observed, observers

__all__ = [
    "Along",
    "Pending",
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "gather",
    "permute",
    "reduce_scatter",
    "reduce_scatter_v",
    "scatter",
]

Along = Comm | tuple[DeviceMesh, int | str | tuple[int | str, ...]]


class Pending:
    """A collective under way. `wait()` gives its result; waiting again gives the same tensor."""

    __slots__ = ("_then", "_value", "_work")

    def __init__(self, value: Tensor, work: Work | None, then: Callable[[Tensor], Tensor] | None = None) -> None:
        self._value, self._work, self._then = value, work, then

    def wait(self) -> Tensor:
        """The result, after it has arrived (on CUDA: after the current stream has been told to wait for it)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._then is not None:
            self._value, self._then = self._then(self._value), None
        return self._value

    def is_completed(self) -> bool:
        """Whether `wait()` would return at once."""
        return self._work is None or bool(self._work.is_completed())


def resolve(along: Along) -> Comm:
    """The communicator meant by a Comm or a (mesh, axes) pair."""
    return along if isinstance(along, Comm) else along[0].comm(along[1])


def _result(
    started: kernels.Started, async_op: bool, then: Callable[[Tensor], Tensor] | None = None
) -> Tensor | Pending:
    value, work = started
    if async_op:
        return Pending(value, work, then)
    if work is not None:
        work.wait()
    return value if then is None else then(value)


def _check(tensor: Tensor) -> None:
    """Refuse what would lose a gradient."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise CollectiveError(
            "this collective has no gradient, and the tensor requires one: use shoal_mesh.differentiable, "
            "or pass tensor.detach() where no gradient is wanted"
        )


def _blocks_first(tensor: Tensor, count: int, dim: int) -> Tensor:
    """The blocks along `dim` one after the other along dim 0, contiguous."""
    return tensor.contiguous() if dim == 0 else torch.cat(tensor.chunk(count, dim))


def _blocks_along(blocks: Tensor, count: int, dim: int) -> Tensor:
    """Blocks that lie one after the other along dim 0, put along `dim` instead."""
    return blocks if dim == 0 else torch.cat(blocks.chunk(count), dim)


def _dim(tensor: Tensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise CollectiveError(f"dim {dim} of a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.ndim


def _even(tensor: Tensor, dim: int, comm: Comm) -> None:
    if tensor.shape[dim] % comm.size:
        raise CollectiveError(
            f"dim {dim} of shape {tuple(tensor.shape)} does not divide into {comm.size} equal blocks on {comm.axes}: "
            "use the form with sizes (ending in _v)"
        )


@overload
def all_reduce(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Literal[True]) -> Pending: ...
def all_reduce(tensor: Tensor, comm: Along, op: str = "sum", *, async_op: bool = False) -> Tensor | Pending:
    """The reduction of the ranks' tensors, the same on all of them.

    Args:
        tensor: equal shape and dtype on every rank.
        comm: a communicator, or (mesh, axes).
        op: "sum", "avg", "min", "max", "product", "band", "bor", "bxor".
        async_op: return a `Pending` at once.

    Raises:
        CollectiveError: unknown op, or one without a meaning for the dtype.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if observers and not inside_told() and comm.size > 1:
        event = Event("all_reduce", comm, (tensor,), op)
        return observed(event, lambda: all_reduce(tensor, comm, op, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    _check(tensor)
    how = reduction(tensor.dtype, op)
    return _reduce_own(tensor.clone(memory_format=torch.contiguous_format), comm, how, async_op)


def _reduce_own(own: Tensor, comm: Comm, how: Reduction, async_op: bool = False) -> Tensor | Pending:
    """Reduce a contiguous tensor that nobody else holds."""
    if comm.size == 1:
        return Pending(own, None) if async_op else own
    if how.dtype is None and not how.divide:
        return _result(kernels.all_reduce_(own, comm, how.op), async_op)
    dtype = own.dtype
    carrier = own if how.dtype is None else wire(own, how.dtype)
    return _result(kernels.all_reduce_(carrier, comm, how.op), async_op, lambda c: _finish(c, comm, how, dtype))


def _finish(carrier: Tensor, comm: Comm, how: Reduction, dtype: torch.dtype) -> Tensor:
    if how.divide:
        carrier = carrier.div_(comm.size)
    return carrier if how.dtype is None else unwire(carrier, dtype)


@overload
def all_reduce_(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_reduce_(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Literal[True]) -> Pending: ...
def all_reduce_(tensor: Tensor, comm: Along, op: str = "sum", *, async_op: bool = False) -> Tensor | Pending:
    """`all_reduce` into the tensor itself, which is returned.

    A contiguous tensor is reduced where it lies; another one through a copy. With `async_op` the tensor must be left
    alone until the `Pending` has been waited for.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if observers and not inside_told() and comm.size > 1:
        event = Event("all_reduce", comm, (tensor,), op)
        return observed(event, lambda: all_reduce_(tensor, comm, op, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    _check(tensor)
    how = reduction(tensor.dtype, op)
    if comm.size == 1:
        return Pending(tensor, None) if async_op else tensor
    own = tensor if tensor.is_contiguous() else tensor.contiguous()
    reduced = _reduce_own(own, comm, how, async_op)
    if isinstance(reduced, Pending):
        in_place = own is tensor and how.dtype is None and not how.divide
        return reduced if in_place else Pending(tensor, None, lambda into: into.copy_(reduced.wait()))
    return tensor if reduced is tensor else tensor.copy_(reduced)


@overload
def all_gather(tensor: Tensor, comm: Along, dim: int = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_gather(tensor: Tensor, comm: Along, dim: int = ..., *, async_op: Literal[True]) -> Pending: ...
def all_gather(tensor: Tensor, comm: Along, dim: int = 0, *, async_op: bool = False) -> Tensor | Pending:
    """The ranks' tensors, joined along `dim` in index order; equal shapes on every rank.

    A tensor without dims counts as one of shape (1,).
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if observers and not inside_told() and comm.size > 1:
        event = Event("all_gather_into_tensor", comm, (tensor,))
        return observed(event, lambda: all_gather(tensor, comm, dim, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    _check(tensor)
    source = tensor.view(1) if tensor.ndim == 0 else tensor
    if dim:
        dim = _dim(source, dim)
    if comm.size == 1:
        return _result((source.clone(memory_format=torch.contiguous_format), None), async_op)
    started = kernels.all_gather(source.contiguous(), comm)
    if dim == 0 and comm.order is None:
        return _result(started, async_op)
    return _result(started, async_op, lambda out: _blocks_along(kernels.ordered(out, comm), comm.size, dim))


def all_gather_v(tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """The ranks' tensors of different sizes, joined along `dim` in index order.

    Args:
        tensor: this rank's; its size along `dim` is `sizes[comm.rank]`, all other sizes are equal on every rank.
        comm: a communicator, or (mesh, axes).
        sizes: size along `dim` of every rank's tensor, 0 allowed; equal on every rank.
        dim: the dim to join.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    dim = _dim(tensor, dim)
    _check_sizes(sizes, comm)
    if tensor.shape[dim] != sizes[comm.rank]:
        raise CollectiveError(
            f"rank {comm.rank} gives {tensor.shape[dim]} along dim {dim}, but sizes say {tuple(sizes)}"
        )
    if len(set(sizes)) == 1:
        return all_gather(tensor, comm, dim)
    if observers and not inside_told():
        event = Event("all_gather_into_tensor", comm, (tensor,))
        return observed(event, lambda: all_gather_v(tensor, comm, sizes, dim))
    _check(tensor)
    largest, total = max(sizes), sum(sizes)
    if largest * comm.size > 2 * total:  # padding would more than double what is sent
        return _exchange_uneven(tensor, comm, sizes, dim)
    pad = list(tensor.shape)
    pad[dim] = largest - sizes[comm.rank]
    source = torch.cat([tensor, tensor.new_empty(pad)], dim) if pad[dim] else tensor
    blocks = all_gather(source.movedim(dim, 0), comm).chunk(comm.size)
    joined = torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])
    return joined.movedim(0, dim).contiguous()


def _exchange_uneven(tensor: Tensor, comm: Comm, sizes: Sequence[int], dim: int) -> Tensor:
    """`all_gather_v` with exact blocks: every rank sends its own tensor to each."""
    rest = tensor.numel() // tensor.shape[dim] if tensor.shape[dim] else _numel_without(tensor, dim)
    flat = tensor.movedim(dim, 0).reshape(-1)
    counts = [size * rest for size in sizes]
    out = all_to_all_v(flat.repeat(comm.size), comm, [flat.numel()] * comm.size, counts)
    shape = (sum(sizes), *tensor.shape[:dim], *tensor.shape[dim + 1 :])
    return out.view(shape).movedim(0, dim).contiguous()


def _numel_without(tensor: Tensor, dim: int) -> int:
    count = 1
    for i, size in enumerate(tensor.shape):
        count *= size if i != dim else 1
    return count


def _check_sizes(sizes: Sequence[int], comm: Comm) -> None:
    if len(sizes) != comm.size or any(size < 0 for size in sizes):
        raise CollectiveError(f"sizes are one non-negative count for each of {comm.size} ranks, got {tuple(sizes)}")


@overload
def reduce_scatter(
    tensor: Tensor, comm: Along, dim: int = ..., op: str = ..., *, async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def reduce_scatter(
    tensor: Tensor, comm: Along, dim: int = ..., op: str = ..., *, async_op: Literal[True]
) -> Pending: ...
def reduce_scatter(
    tensor: Tensor, comm: Along, dim: int = 0, op: str = "sum", *, async_op: bool = False
) -> Tensor | Pending:
    """This rank's block along `dim` of the reduction of the ranks' tensors; the dim divides evenly.

    Args:
        tensor: equal shape and dtype on every rank.
        comm: a communicator, or (mesh, axes).
        dim: the dim to cut.
        op: as for `all_reduce`.
        async_op: return a `Pending` at once.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if observers and not inside_told() and comm.size > 1:
        event = Event("reduce_scatter_tensor", comm, (tensor,), op)
        return observed(event, lambda: reduce_scatter(tensor, comm, dim, op, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    _check(tensor)
    dim = _dim(tensor, dim)
    how = reduction(tensor.dtype, op)
    _even(tensor, dim, comm)
    if comm.size == 1:
        return _result((tensor.clone(memory_format=torch.contiguous_format), None), async_op)
    blocks = _blocks_first(tensor, comm.size, dim)
    if how.dtype is None and not how.divide:
        return _result(kernels.reduce_scatter(blocks, comm, how.op), async_op)
    carrier = blocks if how.dtype is None else wire(blocks, how.dtype)
    return _result(
        kernels.reduce_scatter(carrier, comm, how.op), async_op, lambda c: _finish(c, comm, how, tensor.dtype)
    )


def reduce_scatter_v(tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = 0, op: str = "sum") -> Tensor:
    """This rank's block of the reduction of the ranks' tensors, with block `i` of size `sizes[i]` along `dim`.

    Args:
        tensor: equal shape and dtype on every rank; `sum(sizes)` along `dim`.
        comm: a communicator, or (mesh, axes).
        sizes: block sizes in index order, 0 allowed.
        dim: the dim to cut.
        op: as for `all_reduce`.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    dim = _dim(tensor, dim)
    _check_sizes(sizes, comm)
    if tensor.shape[dim] != sum(sizes):
        raise CollectiveError(f"dim {dim} of shape {tuple(tensor.shape)} is not the sum of the blocks {tuple(sizes)}")
    if len(set(sizes)) == 1:
        return reduce_scatter(tensor, comm, dim, op)
    if observers and not inside_told():
        event = Event("reduce_scatter_tensor", comm, (tensor,), op)
        return observed(event, lambda: reduce_scatter_v(tensor, comm, sizes, dim, op))
    _check(tensor)
    largest = max(sizes)
    if largest * comm.size > 2 * sum(sizes):  # padded blocks would send more than an all-reduce
        start = sum(sizes[: comm.rank])
        return all_reduce(tensor, comm, op).narrow(dim, start, sizes[comm.rank]).contiguous()
    rows = tensor.movedim(dim, 0)
    padded = rows.new_zeros((comm.size, largest, *rows.shape[1:]))
    for slot, block in zip(padded, torch.split(rows, list(sizes)), strict=True):
        slot[: block.shape[0]] = block
    own = reduce_scatter(padded.flatten(0, 1), comm, 0, op)[: sizes[comm.rank]]
    return own.movedim(0, dim).contiguous()


@overload
def all_to_all(
    tensor: Tensor, comm: Along, split_dim: int, concat_dim: int, *, async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def all_to_all(tensor: Tensor, comm: Along, split_dim: int, concat_dim: int, *, async_op: Literal[True]) -> Pending: ...
def all_to_all(
    tensor: Tensor, comm: Along, split_dim: int, concat_dim: int, *, async_op: bool = False
) -> Tensor | Pending:
    """Block j along `split_dim` goes to rank j; what comes is joined along `concat_dim`. Equal shapes on every rank."""
    comm = comm if type(comm) is Comm else resolve(comm)
    if observers and not inside_told() and comm.size > 1:
        event = Event("all_to_all_single", comm, (tensor,))
        return observed(event, lambda: all_to_all(tensor, comm, split_dim, concat_dim, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    _check(tensor)
    split_dim, concat_dim = _dim(tensor, split_dim), _dim(tensor, concat_dim)
    _even(tensor, split_dim, comm)
    if comm.size == 1:
        return _result((tensor.clone(memory_format=torch.contiguous_format), None), async_op)
    started = kernels.all_to_all(_blocks_first(tensor, comm.size, split_dim), comm)
    if concat_dim == 0 and comm.order is None:
        return _result(started, async_op)
    return _result(started, async_op, lambda out: _blocks_along(kernels.ordered(out, comm), comm.size, concat_dim))


def all_to_all_v(flat: Tensor, comm: Along, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
    """1-D blocks of exact element counts: block j goes to rank j, block i of the result comes from rank i.

    Args:
        flat: (sum(send_sizes),).
        comm: a communicator, or (mesh, axes).
        send_sizes: elements for each rank, 0 allowed.
        recv_sizes: elements from each rank; what that rank's `send_sizes` says for this one.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    _check_sizes(send_sizes, comm)
    _check_sizes(recv_sizes, comm)
    if flat.ndim != 1 or flat.shape[0] != sum(send_sizes):
        raise CollectiveError(f"all_to_all_v of shape {tuple(flat.shape)} with blocks of {tuple(send_sizes)} elements")
    if observers and not inside_told() and comm.size > 1:
        event = Event("all_to_all_single", comm, (flat,))
        return observed(event, lambda: all_to_all_v(flat, comm, send_sizes, recv_sizes))
    _check(flat)
    if comm.size == 1:
        return flat.clone()
    return _joined(flat.contiguous(), comm, send_sizes, recv_sizes)


def _joined(flat: Tensor, comm: Comm, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    value, work = kernels.all_to_all_v(flat, comm, send, receive)
    if work is not None:
        work.wait()
    return value if comm.order is None else torch.cat(kernels.split_ordered(value, comm, receive))


def broadcast(tensor: Tensor, comm: Along, src: int = 0) -> Tensor:
    """A copy of the tensor of the rank with index `src`; equal shape and dtype on every rank."""
    comm = comm if type(comm) is Comm else resolve(comm)
    _check_index(src, comm)
    if observers and not inside_told() and comm.size > 1:
        return observed(Event("broadcast", comm, (tensor,)), lambda: broadcast(tensor, comm, src))
    _check(tensor)
    own = tensor.clone(memory_format=torch.contiguous_format)
    value = own if comm.size == 1 else _result(kernels.broadcast_(own, comm, src), False)
    assert isinstance(value, Tensor), "not asynchronous"
    return value


def scatter(tensors: Sequence[Tensor] | None, comm: Along, src: int = 0, *, out: Tensor) -> Tensor:
    """`out`, filled with this rank's tensor of the list that the rank with index `src` holds.

    Args:
        tensors: one per rank in index order, of any shapes; read on `src` only, None elsewhere.
        comm: a communicator, or (mesh, axes).
        src: index of the rank that holds them.
        out: where this rank's goes; its shape and dtype are that tensor's.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    _check_index(src, comm)
    if comm.rank == src and (tensors is None or len(tensors) != comm.size):
        got = "None" if tensors is None else str(len(tensors))
        raise CollectiveError(f"scatter from rank {src} needs {comm.size} tensors there, got {got}")
    mine = tuple(tensors or ()) if comm.rank == src else ()
    if observers and not inside_told() and comm.size > 1:
        return observed(Event("scatter", comm, mine), lambda: scatter(tensors, comm, src, out=out))
    _check(out)
    if comm.size == 1:
        return out.copy_(mine[0])
    send = [t.numel() for t in mine] or [0] * comm.size
    receive = [out.numel() if i == src else 0 for i in range(comm.size)]
    flat = torch.cat([t.detach().reshape(-1) for t in mine]) if mine else out.new_empty((0,))
    return out.copy_(_joined(flat, comm, send, receive).view(out.shape))


def gather(tensor: Tensor, comm: Along, dst: int = 0) -> list[Tensor] | None:
    """Every rank's tensor in index order on the rank with index `dst`, None elsewhere; equal shapes on every rank."""
    comm = comm if type(comm) is Comm else resolve(comm)
    _check_index(dst, comm)
    if observers and not inside_told() and comm.size > 1:
        return observed(Event("gather", comm, (tensor,)), lambda: gather(tensor, comm, dst))
    _check(tensor)
    if comm.size == 1:
        return [tensor.clone(memory_format=torch.contiguous_format)]
    send = [tensor.numel() if i == dst else 0 for i in range(comm.size)]
    receive = [tensor.numel() if comm.rank == dst else 0] * comm.size
    out = _joined(tensor.reshape(-1), comm, send, receive)
    return [block.view(tensor.shape) for block in torch.split(out, receive)] if comm.rank == dst else None


def permute(tensor: Tensor, comm: Along, targets: Sequence[int]) -> Tensor:
    """The tensor of the rank whose target is this one; equal shapes on every rank.

    Args:
        tensor: this rank's.
        comm: a communicator, or (mesh, axes).
        targets: for every index the index it sends to; each occurs once. `[1, 2, 3, 0]` shifts by one.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if sorted(targets) != list(range(comm.size)):
        raise CollectiveError(f"targets of permute name each of {comm.size} ranks once, got {tuple(targets)}")
    if observers and not inside_told() and comm.size > 1:
        return observed(Event("all_to_all_single", comm, (tensor,)), lambda: permute(tensor, comm, targets))
    _check(tensor)
    send = [tensor.numel() if i == targets[comm.rank] else 0 for i in range(comm.size)]
    receive = [tensor.numel() if target == comm.rank else 0 for target in targets]
    if comm.size == 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    return _joined(tensor.reshape(-1), comm, send, receive).view(tensor.shape)


def _check_index(index: int, comm: Comm) -> None:
    if not 0 <= index < comm.size:
        raise CollectiveError(f"rank index {index} along {comm.axes}: it has {comm.size} ranks")
