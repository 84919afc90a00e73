"""Collectives whose blocks have equal sizes on all ranks.

Every function takes a `Comm` or a pair (mesh, axis or axes) and returns a fresh tensor, unless its
name ends with an underscore. Blocks are in index order of the communicator. `async_op=True` returns
a `Pending`. While torch.compile traces, the functions become functional collectives. A communicator
of one rank sends nothing. The functions are not differentiable: a tensor that requires grad is
refused, and `shoal_mesh.differentiable` has the versions with gradients. The error is raised behind
the collective, because the tensors of other ranks may not require grad.
"""

from __future__ import annotations

from functools import partial
from typing import overload

import torch
from torch import Tensor

from .._torch import is_compiling, is_compiling_code
from ..errors import CollectiveError
from ..events import run_observed
from ..groups.process_groups import Comm
from ..shared_memory.row_reductions import reduce_rows
from ..transport import Pending, Sizes
from . import calls
from .calls import Along, Async, Sync, collective, comm_of_call, normal_dim
from .reductions import WireReduction, in_tree, reduction, tree_mean, tree_sum

# A sum in a tree of up to so many bytes takes one exchange instead of two: every rank sends its
# whole tensor to every other rank.
_ONE_EXCHANGE_BYTES = 1 << 14


@overload
def all_reduce(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Sync = ...) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Async) -> Pending: ...
def all_reduce(
    tensor: Tensor, comm: Along, op: str = "sum", *, async_op: bool = False
) -> Tensor | Pending:
    """`P -> R`: reduce the tensors of all ranks to a contiguous result, equal on all ranks.

    Args:
        tensor: this rank's tensor, of any shape; shape and dtype are equal on all ranks.
        comm: a communicator, or (mesh, axes).
        op: "sum", "avg", "min", "max", "product", "band", "bor", "bxor". An average of float16 or
            bfloat16 is taken in float32 on CPUs (but not by gloo in the background); elsewhere the
            divisor is split around the sum.
        async_op: return a `Pending` at once. The tensor must not be written to before its
            `wait()` has returned, as in torch.

    Returns:
        The reduced tensor, of the shape of `tensor`; a `Pending` of it with `async_op`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: unknown op or one without a meaning for the dtype; the tensor requires
            grad.

    Example:
        >>> def example() -> list[int]:
        ...     rows = torch.tensor([3, dist.get_rank()])
        ...     return all_reduce(rows, comm_over((0, 1)), "max").tolist()
        >>> launch(example, 2)
        [[3, 1], [3, 1]]
    """
    comm = comm_of_call(tensor, comm)
    recipe = reduction(tensor.dtype, op)

    def start() -> Pending:
        # Functional collectives write to no operand, so compiled and exported code needs no copy.
        if is_compiling():
            terms = tensor.contiguous()
        else:
            terms = tensor.clone(memory_format=torch.contiguous_format)
        return start_reduction(terms, comm, recipe, async_op)

    return collective("all_reduce", tensor, comm, start, async_op=async_op, reduce_op=op)


@overload
def all_reduce_(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Sync = ...) -> Tensor: ...
@overload
def all_reduce_(tensor: Tensor, comm: Along, op: str = ..., *, async_op: Async) -> Pending: ...
def all_reduce_(
    tensor: Tensor, comm: Along, op: str = "sum", *, async_op: bool = False
) -> Tensor | Pending:
    """`P -> R`: reduce the tensors of all ranks into the tensor itself, and return it.

    A contiguous tensor is reduced in its own memory, another tensor through a copy. With `async_op`
    do not use the tensor until the `Pending` has been waited for. Arguments and errors are the same
    as for `all_reduce`.

    Example:
        >>> def example() -> list[float]:
        ...     gradient = torch.ones(2)
        ...     all_reduce_(gradient, comm_over((0, 1)), "avg")
        ...     return gradient.tolist()
        >>> launch(example, 2)
        [[1.0, 1.0], [1.0, 1.0]]
    """
    comm = comm_of_call(tensor, comm)
    # `loses_gradient` of one tensor, without the time of a call
    if tensor.requires_grad and torch.is_grad_enabled():
        calls.refuse_gradient(partial(all_reduce, tensor, comm, op))
    recipe = reduction(tensor.dtype, op)
    if comm.size == 1:
        return Pending(tensor, None) if async_op else tensor

    def start() -> Pending:
        terms = tensor
        # A compiler cannot trace `is_neg`.
        is_lazily_negated = not is_compiling_code() and tensor.is_neg()
        if not tensor.is_contiguous() or is_lazily_negated:
            _refuse_overlapping(tensor)
            terms = calls.materialize(tensor)
        pending = start_reduction(terms, comm, recipe, async_op)
        return pending if pending.value is tensor else pending.then(tensor.copy_)

    return collective("all_reduce", tensor, comm, start, async_op=async_op, reduce_op=op)


def _refuse_overlapping(tensor: Tensor) -> None:
    """Raise CollectiveError if several elements of a tensor are one memory location."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0:
            raise CollectiveError(
                f"all_reduce_ cannot write into shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}: several elements are one memory location, call clone() "
                "first"
            )


@overload
def all_gather(tensor: Tensor, comm: Along, dim: int = ..., *, async_op: Sync = ...) -> Tensor: ...
@overload
def all_gather(tensor: Tensor, comm: Along, dim: int = ..., *, async_op: Async) -> Pending: ...
def all_gather(
    tensor: Tensor, comm: Along, dim: int = 0, *, async_op: bool = False
) -> Tensor | Pending:
    """`S(dim) -> R`: join the ranks' shards along `dim` in index order: n times as long there.

    Args:
        tensor: this rank's shard; shape and dtype are equal on all ranks. A tensor without dims is
            gathered like one of shape (1,).
        comm: a communicator of n ranks, or (mesh, axes).
        dim: the sharded dim.
        async_op: return a `Pending` at once. The tensor must not be written to before its
            `wait()` has returned, as in torch.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: no such dim.
        CollectiveError: the tensor requires grad.

    Example:
        >>> launch(lambda: all_gather(torch.ones(2, 3), comm_over((0, 1)), 1).shape, 2)
        [torch.Size([2, 6]), torch.Size([2, 6])]
    """
    comm = comm_of_call(tensor, comm)
    source = tensor.view(1) if tensor.ndim == 0 else tensor
    dim = normal_dim(source, dim)

    def start() -> Pending:
        pending = calls.all_gather(source, comm, async_op)
        return pending if dim == 0 else _join_along(pending, comm, dim)

    return collective(
        "all_gather_into_tensor",
        source,
        comm,
        start,
        async_op=async_op,
        reduce_op="",
        same={"dim": dim},
    )


@overload
def reduce_scatter(
    tensor: Tensor, comm: Along, dim: int = ..., op: str = ..., *, async_op: Sync = ...
) -> Tensor: ...
@overload
def reduce_scatter(
    tensor: Tensor, comm: Along, dim: int = ..., op: str = ..., *, async_op: Async
) -> Pending: ...
def reduce_scatter(
    tensor: Tensor, comm: Along, dim: int = 0, op: str = "sum", *, async_op: bool = False
) -> Tensor | Pending:
    """`P -> S(dim)`: reduce the ranks' tensors and return this rank's block along `dim`.

    Args:
        tensor: shape and dtype are equal on all ranks; its length along `dim` is a multiple of n.
        comm: a communicator of n ranks, or (mesh, axes).
        dim: the dim to shard.
        op: as for `all_reduce`.
        async_op: return a `Pending` at once. The tensor must not be written to before its
            `wait()` has returned, as in torch.

    Returns:
        This rank's block of the reduction; a `Pending` of it with `async_op`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: no such dim.
        CollectiveError: the length along `dim` is not a multiple of n, the op has no meaning for
            the dtype, or the tensor requires grad.

    Example:
        >>> launch(lambda: reduce_scatter(torch.arange(4), comm_over((0, 1))).tolist(), 2)
        [[0, 2], [4, 6]]
    """
    comm = comm_of_call(tensor, comm)
    dim = normal_dim(tensor, dim)
    recipe = reduction(tensor.dtype, op)
    if tensor.shape[dim] % comm.size:
        calls.refuse_uneven(tensor, dim, comm)

    def start() -> Pending:
        return start_block_reduction(_blocks_first(tensor, comm.size, dim), comm, recipe, async_op)

    return collective(
        "reduce_scatter_tensor",
        tensor,
        comm,
        start,
        async_op=async_op,
        reduce_op=op,
        same={"dim": dim},
    )


@overload
def all_to_all(
    tensor: Tensor, comm: Along, split_dim: int, concat_dim: int, *, async_op: Sync = ...
) -> Tensor: ...
@overload
def all_to_all(
    tensor: Tensor, comm: Along, split_dim: int, concat_dim: int, *, async_op: Async
) -> Pending: ...
def all_to_all(
    tensor: Tensor, comm: Along, split_dim: int, concat_dim: int, *, async_op: bool = False
) -> Tensor | Pending:
    """`S(concat_dim) -> S(split_dim)`: move a sharding from one dim to another.

    Block j along `split_dim` goes to rank j; the blocks that arrive are joined.

    Args:
        tensor: this rank's shard; shape and dtype are equal on all ranks, and the length along
            `split_dim` is a multiple of n.
        comm: a communicator of n ranks, or (mesh, axes).
        split_dim: the dim to shard; the result has 1/n of its length.
        concat_dim: the dim that was sharded. The blocks are joined along it, so the result has n
            times its length.
        async_op: return a `Pending` at once. The tensor must not be written to before its
            `wait()` has returned, as in torch.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: no such dim.
        CollectiveError: the length along `split_dim` is not a multiple of n, or the tensor requires
            grad.

    Example:
        >>> launch(lambda: all_to_all(torch.tensor([[1, 2]]), comm_over((0, 1)), 1, 0).tolist(), 2)
        [[[1], [1]], [[2], [2]]]
    """
    comm = comm_of_call(tensor, comm)
    split_dim = normal_dim(tensor, split_dim)
    concat_dim = normal_dim(tensor, concat_dim)
    if tensor.shape[split_dim] % comm.size:
        calls.refuse_uneven(tensor, split_dim, comm)

    def start() -> Pending:
        blocks = _blocks_first(tensor, comm.size, split_dim)
        pending = calls.all_to_all(blocks, comm, async_op)
        return _join_along(pending, comm, concat_dim)

    dims = {"split_dim": split_dim, "concat_dim": concat_dim}
    return collective(
        "all_to_all_single", tensor, comm, start, async_op=async_op, reduce_op="", same=dims
    )


def _blocks_first(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Move the blocks along `dim` to dim 0: (a, count * b) -> (count * a, b) for dim 1."""
    return tensor if dim == 0 else torch.cat(tensor.chunk(count, dim))


def _join_along(pending: Pending, comm: Comm, dim: int) -> Pending:
    """Join blocks that arrive along dim 0 along `dim`: (n * a, b) -> (a, n * b) for dim 1."""
    if dim == 0:
        return pending
    return pending.then(lambda blocks: torch.cat(blocks.chunk(comm.size), dim))


def broadcast(tensor: Tensor, comm: Along, src: int = 0) -> Tensor:
    """`one rank -> R`: return a copy of the tensor of the rank with index `src`.

    Args:
        tensor: shape and dtype are equal on all ranks; its values are read on `src` only.
        comm: a communicator of n ranks, or (mesh, axes).
        src: index along the communicator, 0 to n - 1.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: no rank has the index, or the tensor requires grad.

    Example:
        >>> def example() -> float:
        ...     return broadcast(torch.tensor(dist.get_rank()), comm_over((0, 1)), src=1).item()
        >>> launch(example, 2)
        [1, 1]
    """
    comm = comm_of_call(tensor, comm)
    calls.check_root(src, comm, "src")
    if calls.loses_gradient([tensor]):
        calls.refuse_gradient(partial(broadcast, tensor, comm, src))
    copy = tensor.clone(memory_format=torch.contiguous_format)
    if comm.size == 1:
        return copy

    def run() -> Tensor:
        return calls.broadcast_(copy, comm, src).wait()

    same = {"shape": tensor.shape, "src": src}
    return run_observed(run, "broadcast", comm, (tensor,), same=same)


def start_reduction(tensor: Tensor, comm: Comm, recipe: WireReduction, background: bool) -> Pending:
    """`P -> R`: reduce a contiguous tensor that nothing else refers to."""
    sent = tensor if recipe.dtype is None else _to_wire(tensor, recipe.dtype)
    is_sent_as_is = recipe.dtype is None and comm.on_gloo
    if in_tree(tensor, recipe.op):
        pending = Pending(_all_reduce_in_tree(sent, comm, recipe.op), None)
    elif is_sent_as_is and calls.is_one_shot(tensor, comm, recipe.op):
        # All ranks sum the terms in the same order, so their sums have the same bits. A copy for
        # each rank: (5,) -> (4, 5).
        copies = tensor.expand(comm.size, *tensor.shape).contiguous()
        pending = calls.all_to_all(copies, comm)
        pending = pending.then(lambda terms: _reduce_terms(terms, recipe.op, out=tensor))
    else:
        pending = calls.all_reduce_(sent, comm, recipe.op, background)
    is_converted = recipe.divide or recipe.dtype
    return _from_wire(pending, comm, recipe, tensor.dtype) if is_converted else pending


def start_block_reduction(
    rows: Tensor, comm: Comm, recipe: WireReduction, background: bool, sizes: Sizes = ()
) -> Pending:
    """`P -> S(0)`: reduce blocks and return this rank's one.

    Shapes are (size * m, ...) -> (m, ...), or with `sizes` (sum(sizes), ...) -> (sizes[rank], ...).
    """
    if sizes and not calls.are_equal(sizes):
        return _reduce_uneven_blocks(rows, comm, recipe, background, sizes=sizes)
    sent = rows if recipe.dtype is None else _to_wire(rows, recipe.dtype)
    if in_tree(rows, recipe.op):
        pending = calls.all_to_all(sent, comm, background)
        pending = pending.then(lambda terms: _reduce_in_tree(terms, comm, recipe.op))
    else:
        pending = calls.reduce_scatter(sent, comm, recipe.op, background)
    is_converted = recipe.divide or recipe.dtype
    return _from_wire(pending, comm, recipe, rows.dtype) if is_converted else pending


def _reduce_uneven_blocks(
    rows: Tensor, comm: Comm, recipe: WireReduction, background: bool, *, sizes: Sizes
) -> Pending:
    """`P -> S(0)`: reduce blocks of different sizes and return this rank's one."""
    largest = max(sizes)
    own_size = sizes[comm.rank]
    # Padded blocks would send more than an all-reduce.
    if largest * comm.size > 2 * sum(sizes):
        first = sum(sizes[: comm.rank])
        whole = rows.clone(memory_format=torch.contiguous_format)
        pending = start_reduction(whole, comm, recipe, background)
        return pending.then(lambda total: total.narrow(0, first, own_size))
    # (3, 1, 2): rows a b c d e f are sent as a b c, d 0 0, e f 0
    zeros = rows.new_zeros((largest - min(sizes), *rows.shape[1:]))
    parts = []
    for block, size in zip(torch.split(rows, list(sizes)), sizes, strict=True):
        parts += [block, zeros[: largest - size]]
    pending = start_block_reduction(torch.cat(parts), comm, recipe, background)
    return pending.then(lambda block: block[:own_size])


def _to_wire(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to a dtype that backends reduce; the result is contiguous.

    It has the shape of the tensor, or (..., 2) for complex numbers.
    """
    if tensor.is_complex():
        return torch.view_as_real(calls.materialize(tensor))
    return tensor.to(dtype)


def _from_wire(pending: Pending, comm: Comm, recipe: WireReduction, dtype: torch.dtype) -> Pending:
    """Convert a result from the op and dtype of the wire to the ones that the caller requested."""
    if recipe.divide:
        pending = pending.then(lambda total: total.div_(comm.size))
    if recipe.dtype is None:
        return pending
    if dtype.is_complex:
        return pending.then(torch.view_as_complex)
    return pending.then(lambda sent: sent.to(dtype))


def _reduce_terms(terms: Tensor, op: str, out: Tensor) -> Tensor:
    """Sum or average the terms of all ranks, (size, ...) -> (...)."""
    if op == "sum":
        return torch.sum(terms, 0, out=out)
    reduce_rows(terms.view(terms.shape[0], -1), op, out.view(-1))
    return out


def _reduce_in_tree(terms: Tensor, comm: Comm, op: str) -> Tensor:
    """Return the sum or mean of the blocks of all ranks, (size * m, ...) -> (m, ...)."""
    # (8, 3) from 4 ranks: (4, 2, 3)
    rows_per_rank = terms.shape[0] // comm.size
    rows = terms.reshape(comm.size, rows_per_rank, *terms.shape[1:])
    return tree_sum(rows) if op == "sum" else tree_mean(rows)


def _all_reduce_in_tree(tensor: Tensor, comm: Comm, op: str) -> Tensor:
    """Sum or average the ranks' contiguous tensors in place; the result is complete on return.

    Up to `_ONE_EXCHANGE_BYTES` every rank gathers all terms. Beyond that, 4 elements on 2 ranks:

        rank 0   a0 a1 a2 a3     all-to-all   a0 a1, b0 b1   sums s0 s1   all-gather   s0 s1 s2 s3
        rank 1   b0 b1 b2 b3     all-to-all   a2 a3, b2 b3   sums s2 s3   all-gather   s0 s1 s2 s3
    """
    flat = tensor.view(-1)
    if tensor.nbytes <= _ONE_EXCHANGE_BYTES:
        terms = calls.all_gather(flat.unsqueeze(0), comm).wait()
        flat.copy_(tree_sum(terms) if op == "sum" else tree_mean(terms))
        return tensor
    # 10 elements of 4 ranks: parts of 3, of which each rank sums one
    count = flat.numel()
    part = -(-count // comm.size)
    # 10 elements and two zeros
    padding = flat.new_zeros(part * comm.size - count)
    padded = torch.cat([flat, padding])
    terms = calls.all_to_all(padded, comm).wait()
    own_part = _reduce_in_tree(terms, comm, op)
    # (12,), without the last two: (10,)
    gathered = calls.all_gather(own_part, comm).wait()
    flat.copy_(gathered[:count])
    return tensor
