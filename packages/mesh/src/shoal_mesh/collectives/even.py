"""Collectives whose blocks have equal sizes on all ranks.

Every function takes a `Comm` or a pair (mesh, axis or axes) and returns a fresh tensor, unless its name ends with an
underscore. Blocks are in index order of the communicator. `async_op=True` returns a `Pending`. While torch.compile
traces they become functional collectives. A communicator of one rank sends nothing. None is differentiable: a tensor
that requires grad is refused, `shoal_mesh.differentiable` has the versions with gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor

from .._torch import is_compiling, is_traced
from ..errors import CollectiveError
from ..events import Event, in_observed, observers, run_observed
from ..groups.process_groups import Comm
from . import backend_calls
from .operands import Along, check_operand, normal_dim, refuse_uneven, resolve
from .pending import Pending
from .tree_sums import in_tree, tree_sum
from .wire import Reduction, materialized, reduction, require_op, unwire, wire

# Up to here, for a sum in a tree, every rank sends all it has to each other rank: one exchange instead of two.
_ONE_EXCHANGE_BYTES = 1 << 14


def _result(
    started: backend_calls.Started, async_op: bool, then: Callable[[Tensor], Tensor] | None = None
) -> Tensor | Pending:
    value, work = started
    if async_op:
        return Pending(value, work, then)
    if work is not None:
        work.wait()
    return value if then is None else then(value)


def _fresh(tensor: Tensor, async_op: bool) -> Tensor | Pending:
    """What a collective over one rank returns."""
    return _result((tensor.clone(memory_format=torch.contiguous_format), None), async_op)


def _blocks_first(tensor: Tensor, count: int, dim: int) -> Tensor:
    """The blocks along `dim` along dim 0: (a, count * b) -> (count * a, b) for dim 1."""
    return tensor if dim == 0 else torch.cat(tensor.chunk(count, dim))


def _blocks_along(blocks: Tensor, count: int, dim: int) -> Tensor:
    """Blocks that follow one another along dim 0, joined along `dim` instead: (count * a, b) -> (a, count * b)."""
    return blocks if dim == 0 else torch.cat(blocks.chunk(count), dim)


@overload
def all_reduce(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Literal[True]) -> Pending: ...
def all_reduce(tensor: Tensor, comm: Along, op: str = "sum", *, async_op: bool = False) -> Tensor | Pending:
    """`P -> R`: the reduction of the ranks' tensors, the same on all of them.

    Args:
        tensor: this rank's, of any shape; shape and dtype are equal on all ranks.
        comm: a communicator, or (mesh, axes).
        op: "sum", "avg", "min", "max", "product", "band", "bor", "bxor".
        async_op: return a `Pending` at once.

    Returns:
        A contiguous tensor of the shape of `tensor`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: unknown op or one without a meaning for the dtype; the tensor requires grad.

    Example:
        >>> launch(lambda rows: all_reduce(rows, comm_over((0, 1)), "max").tolist(), 2, torch.tensor([3, 4]))
        [[3, 4], [3, 4]]
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor)
    how = reduction(tensor.dtype, op if type(op) is str else require_op(op))
    if observers and not in_observed() and comm.size > 1:
        event = Event("all_reduce", comm, (tensor,), op, same={"shape": tuple(tensor.shape)})
        return run_observed(event, lambda: all_reduce(tensor, comm, op, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if is_compiling() and comm.size > 1:  # functional collectives write to no operand
        return _reduce_own(tensor.contiguous(), comm, how, async_op)
    return _reduce_own(tensor.clone(memory_format=torch.contiguous_format), comm, how, async_op)


def _reduce_own(own: Tensor, comm: Comm, how: Reduction, async_op: bool = False) -> Tensor | Pending:
    """Reduce a contiguous tensor that nobody else holds."""
    if comm.size == 1:
        return Pending(own, None) if async_op else own
    if in_tree(own, how.op):
        sent = own if how.dtype is None else wire(own, how.dtype)
        summed = _finish(_all_reduce_in_tree(sent, comm), comm, how, own.dtype)
        return Pending(summed, None) if async_op else summed
    if how.dtype is None and backend_calls.is_one_shot(own, comm, how.op):
        # In the same order everywhere, so the sums of all ranks agree bit by bit.
        started = backend_calls.all_to_all(own.expand(comm.size, *own.shape).contiguous(), comm)
        return _result(started, async_op, lambda all_: _finish(torch.sum(all_, 0, out=own), comm, how, own.dtype))
    if how.dtype is None and not how.divide:
        return _result(backend_calls.all_reduce_(own, comm, how.op, async_op), async_op)
    dtype = own.dtype
    sent = own if how.dtype is None else wire(own, how.dtype)
    return _result(
        backend_calls.all_reduce_(sent, comm, how.op, async_op), async_op, lambda r: _finish(r, comm, how, dtype)
    )


def _finish(reduced: Tensor, comm: Comm, how: Reduction, dtype: torch.dtype) -> Tensor:
    if how.divide:
        reduced = reduced.div_(comm.size)
    return reduced if how.dtype is None else unwire(reduced, dtype)


@overload
def all_reduce_(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_reduce_(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Literal[True]) -> Pending: ...
def all_reduce_(tensor: Tensor, comm: Along, op: str = "sum", *, async_op: bool = False) -> Tensor | Pending:
    """`P -> R`: `all_reduce` into the tensor itself, which is returned.

    A contiguous tensor is reduced in its own memory, another one through a copy. With `async_op` do not use the tensor
    until the `Pending` has been waited for. Arguments and errors are those of `all_reduce`.

    Example:
        >>> def example() -> list[float]:
        ...     gradient = torch.ones(2)
        ...     all_reduce_(gradient, comm_over((0, 1)), "avg")
        ...     return gradient.tolist()
        >>> launch(example, 2)
        [[1.0, 1.0], [1.0, 1.0]]
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor)
    how = reduction(tensor.dtype, op if type(op) is str else require_op(op))
    if observers and not in_observed() and comm.size > 1:
        event = Event("all_reduce", comm, (tensor,), op, same={"shape": tuple(tensor.shape)})
        return run_observed(event, lambda: all_reduce_(tensor, comm, op, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if comm.size == 1:
        return Pending(tensor, None) if async_op else tensor
    in_order = tensor.is_contiguous() and (is_compiling() or not tensor.is_neg())  # a compiler cannot trace `is_neg`
    own = tensor if in_order else _not_overlapping(tensor)
    reduced = _reduce_own(own, comm, how, async_op)
    if isinstance(reduced, Pending):
        in_place = own is tensor and how.dtype is None and not how.divide and not is_traced(tensor)
        return reduced if in_place else Pending(tensor, None, lambda into: into.copy_(reduced.wait()))
    return tensor if reduced is tensor else tensor.copy_(reduced)


def _not_overlapping(tensor: Tensor) -> Tensor:
    """A copy to reduce in place of a tensor that the result can be written to."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise CollectiveError(
            f"all_reduce_ cannot write into shape {tuple(tensor.shape)} with strides {tensor.stride()}: "
            "several elements are one memory location, call clone() first"
        )
    return materialized(tensor)


@overload
def all_gather(tensor: Tensor, comm: Along, dim: int = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_gather(tensor: Tensor, comm: Along, dim: int = ..., *, async_op: Literal[True]) -> Pending: ...
def all_gather(tensor: Tensor, comm: Along, dim: int = 0, *, async_op: bool = False) -> Tensor | Pending:
    """`S(dim) -> R`: the ranks' shards joined along `dim` in index order.

    Args:
        tensor: this rank's shard; shape and dtype are equal on all ranks. One without dims counts as of shape (1,).
        comm: a communicator of n ranks, or (mesh, axes).
        dim: the sharded dim.
        async_op: return a `Pending` at once.

    Returns:
        A tensor that is n times as long along `dim`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: no such dim.
        CollectiveError: the tensor requires grad.

    Example:
        >>> launch(lambda: all_gather(torch.ones(2, 3), comm_over((0, 1)), 1).shape, 2)
        [torch.Size([2, 6]), torch.Size([2, 6])]
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor)
    source = tensor.view(1) if tensor.ndim == 0 else tensor
    if type(dim) is not int or dim:
        dim = normal_dim(source, dim)
    if observers and not in_observed() and comm.size > 1:
        event = Event("all_gather_into_tensor", comm, (tensor,), same={"shape": tuple(source.shape), "dim": dim})
        return run_observed(event, lambda: all_gather(tensor, comm, dim, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if comm.size == 1:
        return _fresh(source, async_op)
    started = backend_calls.all_gather(source, comm, async_op)
    if dim == 0 and comm.order is None:
        return _result(started, async_op)
    return _result(
        started, async_op, lambda out: _blocks_along(backend_calls.in_index_order(out, comm), comm.size, dim)
    )


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
    """`P -> S(dim)`: this rank's block along `dim` of the reduction of the ranks' tensors.

    Args:
        tensor: shape and dtype are equal on all ranks; its length along `dim` is a multiple of n.
        comm: a communicator of n ranks, or (mesh, axes).
        dim: the dim to shard.
        op: as for `all_reduce`.
        async_op: return a `Pending` at once.

    Returns:
        A tensor of a 1/n of the length along `dim`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: no such dim.
        CollectiveError: the dim does not divide, the op has no meaning for the dtype, the tensor requires grad.

    Example:
        >>> launch(lambda: reduce_scatter(torch.arange(4), comm_over((0, 1))).tolist(), 2)
        [[0, 2], [4, 6]]
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor)
    if type(dim) is not int or dim or tensor.ndim == 0:
        dim = normal_dim(tensor, dim)
    how = reduction(tensor.dtype, op if type(op) is str else require_op(op))
    if tensor.shape[dim] % comm.size:
        refuse_uneven(tensor, dim, comm)
    if observers and not in_observed() and comm.size > 1:
        event = Event("reduce_scatter_tensor", comm, (tensor,), op, same={"shape": tuple(tensor.shape), "dim": dim})
        return run_observed(event, lambda: reduce_scatter(tensor, comm, dim, op, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if comm.size == 1:
        return _fresh(tensor, async_op)
    blocks = _blocks_first(tensor, comm.size, dim)
    if in_tree(blocks, how.op):
        sent = blocks if how.dtype is None else wire(blocks, how.dtype)
        started = backend_calls.all_to_all(sent, comm, async_op)
        return _result(started, async_op, lambda r: _finish(_sum_in_tree(r, comm), comm, how, tensor.dtype))
    if how.dtype is None and not how.divide:
        return _result(backend_calls.reduce_scatter(blocks, comm, how.op, async_op), async_op)
    sent = blocks if how.dtype is None else wire(blocks, how.dtype)
    return _result(
        backend_calls.reduce_scatter(sent, comm, how.op, async_op),
        async_op,
        lambda r: _finish(r, comm, how, tensor.dtype),
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
    """`S(concat_dim) -> S(split_dim)`: block j along `split_dim` goes to rank j, what arrives is joined.

    Args:
        tensor: this rank's shard; shape and dtype are equal on all ranks, `split_dim` divides by n.
        comm: a communicator of n ranks, or (mesh, axes).
        split_dim: the dim to shard.
        concat_dim: the dim that was sharded, along which the blocks are joined.
        async_op: return a `Pending` at once.

    Returns:
        A tensor of 1/n of the length along `split_dim`, n times as long along `concat_dim`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: no such dim.
        CollectiveError: the dim does not divide, or the tensor requires grad.

    Example:
        >>> launch(lambda: all_to_all(torch.tensor([[1, 2]]), comm_over((0, 1)), 1, 0).tolist(), 2)
        [[[1], [1]], [[2], [2]]]
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor)
    split_dim, concat_dim = normal_dim(tensor, split_dim), normal_dim(tensor, concat_dim)
    if tensor.shape[split_dim] % comm.size:
        refuse_uneven(tensor, split_dim, comm)
    if observers and not in_observed() and comm.size > 1:
        event = Event(
            "all_to_all_single",
            comm,
            (tensor,),
            same={"shape": tuple(tensor.shape), "split_dim": split_dim, "concat_dim": concat_dim},
        )
        return run_observed(event, lambda: all_to_all(tensor, comm, split_dim, concat_dim, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if comm.size == 1:
        return _fresh(tensor, async_op)
    started = backend_calls.all_to_all(_blocks_first(tensor, comm.size, split_dim), comm, async_op)
    if concat_dim == 0 and comm.order is None:
        return _result(started, async_op)
    return _result(
        started, async_op, lambda out: _blocks_along(backend_calls.in_index_order(out, comm), comm.size, concat_dim)
    )


def _sum_in_tree(arrived: Tensor, comm: Comm) -> Tensor:
    """(size * m, ...) -> (m, ...): the sum of the blocks that all ranks have sent."""
    rows = backend_calls.in_index_order(arrived, comm)
    return tree_sum(rows.reshape(comm.size, rows.shape[0] // comm.size, *rows.shape[1:]))


def _all_reduce_in_tree(tensor: Tensor, comm: Comm) -> Tensor:
    """The sum of all ranks' tensors in place of a contiguous one, complete when it returns."""
    flat = tensor.view(-1)
    if tensor.nbytes <= _ONE_EXCHANGE_BYTES:
        terms = _wait(backend_calls.all_gather(flat.unsqueeze(0), comm))
        flat.copy_(tree_sum(backend_calls.in_index_order(terms, comm)))
        return tensor
    part = -(-flat.numel() // comm.size)
    padded = torch.cat([flat, flat.new_zeros(part * comm.size - flat.numel())])
    arrived = _wait(backend_calls.all_to_all(padded, comm))
    whole = _wait(backend_calls.all_gather(_sum_in_tree(arrived, comm), comm))
    flat.copy_(backend_calls.in_index_order(whole, comm)[: flat.numel()])
    return tensor


def _wait(started: backend_calls.Started) -> Tensor:
    tensor, work = started
    if work is not None:
        work.wait()
    return tensor
