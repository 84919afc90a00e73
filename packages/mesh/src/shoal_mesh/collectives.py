"""Collectives over one or several mesh axes, called straight on the process group.

Every function takes a `Comm` or a pair (mesh, axis or axes) and returns a fresh tensor, unless its name ends with an
underscore. Blocks are in index order of the communicator. `async_op=True` returns a `Pending`. While torch.compile
traces they become functional collectives. A communicator of one rank sends nothing. None is differentiable: a tensor
that requires grad is refused, `shoal_mesh.differentiable` has the versions with gradients. Uneven blocks are in
uneven.py, what has one source or target in rooted.py, lists of tensors in coalesced.py.
"""

from __future__ import annotations

from collections.abc import Callable
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
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "plain_dim",
    "reduce_scatter",
    "refuse_gradient",
    "resolve",
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

    def then(self, more: Callable[[Tensor], Tensor]) -> Pending:
        """The same collective, its result passed through `more`; use the returned one from now on."""
        first = self._then
        return Pending(self._value, self._work, more if first is None else lambda value: more(first(value)))

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


def refuse_gradient(tensor: Tensor) -> None:
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


def plain_dim(tensor: Tensor, dim: int) -> int:
    """A dim counted from the front; CollectiveError when the tensor does not have it."""
    if not -tensor.ndim <= dim < tensor.ndim:
        raise CollectiveError(f"dim {dim} of a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.ndim


def refuse_uneven(tensor: Tensor, dim: int, comm: Comm) -> None:
    """CollectiveError: the dim does not divide."""
    raise CollectiveError(
        f"dim {dim} of shape {tuple(tensor.shape)} does not divide into {comm.size} equal blocks along "
        f"{'x'.join(comm.axes)}: use the form with sizes (ending in _v)"
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
    if tensor.requires_grad:
        refuse_gradient(tensor)
    how = reduction(tensor.dtype, op)
    return _reduce_own(tensor.clone(memory_format=torch.contiguous_format), comm, how, async_op)


def _reduce_own(own: Tensor, comm: Comm, how: Reduction, async_op: bool = False) -> Tensor | Pending:
    """Reduce a contiguous tensor that nobody else holds."""
    if comm.size == 1:
        return Pending(own, None) if async_op else own
    if how.dtype is None and kernels.in_one_exchange(own, comm, how.op):
        return _result(
            kernels.exchange(own, comm), async_op, lambda parts: _finish(_added(parts, own), comm, how, own.dtype)
        )
    if how.dtype is None and not how.divide:
        return _result(kernels.all_reduce_(own, comm, how.op), async_op)
    dtype = own.dtype
    carrier = own if how.dtype is None else wire(own, how.dtype)
    return _result(kernels.all_reduce_(carrier, comm, how.op), async_op, lambda c: _finish(c, comm, how, dtype))


def _added(parts: Tensor, into: Tensor) -> Tensor:
    """The sum of what the ranks sent, in place of what this one did."""
    return torch.sum(parts, 0, out=into)


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
    if tensor.requires_grad:
        refuse_gradient(tensor)
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
    if tensor.requires_grad:
        refuse_gradient(tensor)
    source = tensor.view(1) if tensor.ndim == 0 else tensor
    if dim:
        dim = plain_dim(source, dim)
    if comm.size == 1:
        return _result((source.clone(memory_format=torch.contiguous_format), None), async_op)
    started = kernels.all_gather(source.contiguous(), comm)
    if dim == 0 and comm.order is None:
        return _result(started, async_op)
    return _result(started, async_op, lambda out: _blocks_along(kernels.ordered(out, comm), comm.size, dim))


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
    if tensor.requires_grad:
        refuse_gradient(tensor)
    if dim:
        dim = plain_dim(tensor, dim)
    how = reduction(tensor.dtype, op)
    if tensor.shape[dim] % comm.size:
        refuse_uneven(tensor, dim, comm)
    if comm.size == 1:
        return _result((tensor.clone(memory_format=torch.contiguous_format), None), async_op)
    blocks = tensor.contiguous() if dim == 0 else _blocks_first(tensor, comm.size, dim)
    if how.dtype is None and not how.divide:
        return _result(kernels.reduce_scatter(blocks, comm, how.op), async_op)
    carrier = blocks if how.dtype is None else wire(blocks, how.dtype)
    return _result(
        kernels.reduce_scatter(carrier, comm, how.op), async_op, lambda c: _finish(c, comm, how, tensor.dtype)
    )


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
    if tensor.requires_grad:
        refuse_gradient(tensor)
    split_dim, concat_dim = plain_dim(tensor, split_dim), plain_dim(tensor, concat_dim)
    if tensor.shape[split_dim] % comm.size:
        refuse_uneven(tensor, split_dim, comm)
    if comm.size == 1:
        return _result((tensor.clone(memory_format=torch.contiguous_format), None), async_op)
    started = kernels.all_to_all(_blocks_first(tensor, comm.size, split_dim), comm)
    if concat_dim == 0 and comm.order is None:
        return _result(started, async_op)
    return _result(started, async_op, lambda out: _blocks_along(kernels.ordered(out, comm), comm.size, concat_dim))
