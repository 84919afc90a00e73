"""How tensors are reduced over ranks: which reductions a dtype has, as which dtype it is sent, in which order summed.

Backends send few dtypes and reduce fewer (gloo has no int16 and no complex all-gather). Data that only moves is sent as
bytes, complex sums as pairs of reals, small integers are reduced in a wider dtype. An average on a backend without one
is a sum and a division.

A backend adds in an order of its own: gloo's ring begins at another rank for each part, NCCL chooses. Inside
`sums_in_tree` ranks exchange their terms instead and every rank adds those of its part in the tree of `tree_sum`, in
index order, so that their bits do not depend on how many ranks share the terms. What is sent is what a reduction sends:
one all-to-all, and an all-gather where every rank wants the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..argument_types import require
from ..errors import CollectiveError, CollectiveTypeError
from ..groups.process_groups import Comm
from ..transport import Pending, Sizes
from . import calls
from .c10d_transport import PLAIN, REDUCE
from .calls import are_equal, materialized

_SENT_AS = {
    torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64,
    torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64,
}  # fmt: skip
_BITWISE = {"band", "bor", "bxor"}
# Up to here, for a sum in a tree, every rank sends all it has to each other rank: one exchange instead of two.
_ONE_EXCHANGE_BYTES = 1 << 14


class WireReduction(NamedTuple):
    """How to reduce one dtype with one op."""

    op: str  # what the backend is asked for
    dtype: torch.dtype | None = None  # dtype on the wire, None for that of the tensor
    divide: bool = False  # whether the sum is divided by the number of ranks afterwards


def reduction(dtype: torch.dtype, op: str) -> WireReduction:
    """How `dtype` is reduced with `op`; CollectiveError if there is no such op, or it has no meaning for the dtype."""
    if type(op) is not str:
        require(op, str, f"a reduction is one of {', '.join(REDUCE)}", CollectiveTypeError)
    return _reduction(dtype, op)


@cache  # bounded by dtypes times ops
def _reduction(dtype: torch.dtype, op: str) -> WireReduction:
    if op not in REDUCE:
        raise CollectiveError(f"no reduction {op!r}: there are {', '.join(REDUCE)}")
    exact = not dtype.is_floating_point and not dtype.is_complex
    if op in _BITWISE and not exact:
        raise CollectiveError(f"reduction {op!r} works on bits, so it has no meaning for {dtype}: use an integer dtype")
    if op == "avg" and exact:
        raise CollectiveError(
            f"the average of {dtype} is no {dtype}: reduce with 'sum' and divide, or convert to float"
        )
    if dtype.is_complex and op not in {"sum", "avg"}:
        raise CollectiveError(f"reduction {op!r} of {dtype}: complex numbers have only 'sum' and 'avg' here")
    sent_as = None
    if dtype not in PLAIN:  # of float8 and others that are not listed more bits are summed
        sent_as = _SENT_AS.get(dtype, torch.float32 if dtype.is_floating_point else None)
        if sent_as is None:
            raise CollectiveError(f"reduction {op!r} of {dtype}: this dtype cannot be reduced, only moved")
    return WireReduction("sum" if op == "avg" else op, sent_as, op == "avg")


_entered = 0


@contextmanager
def sums_in_tree() -> Iterator[None]:
    """A block in which floating-point sums over ranks are taken in one binary tree, in every thread of the process.

    All ranks must be inside. With it, 8 terms on one rank, 4 each on two ranks and 1 each on eight have the same sum,
    bit for bit, if each rank adds up its own by `tree_sum`.

    Example:
        >>> def example() -> list[float]:
        ...     with sums_in_tree():
        ...         return all_reduce(torch.tensor([0.1, 0.2]), comm_over((0, 1))).tolist()
        >>> launch(example, 2)[0]
        [0.20000000298023224, 0.4000000059604645]
    """
    global _entered  # noqa: PLW0603  # backward passes run in threads of their own
    _entered += 1
    try:
        yield
    finally:
        _entered -= 1


def sums_are_in_tree() -> bool:
    """Whether `sums_in_tree` is entered."""
    return _entered > 0


def in_tree(tensor: Tensor, op: str) -> bool:
    """Whether a reduction is one that `sums_in_tree` orders."""
    return _entered > 0 and op == "sum" and (tensor.is_floating_point() or tensor.is_complex())


def tree_sum(terms: Tensor) -> Tensor:
    """(n, ...) -> (...): the sum over dim 0 in a tree that halves n while it is even.

    Every half is the tree of its own terms, so a rank with an aligned half or quarter of them has a node of the tree.
    What is left, an odd number, is filled up with zeros, which change no sum, and halved on.

    Example:
        >>> tree_sum(torch.tensor([1.0, 2.0, 3.0]))
        tensor(6.)
    """
    n = terms.shape[0]
    if n == 0:
        return terms.new_zeros(terms.shape[1:])
    odd = n // (n & -n)  # n = odd * 2 ** k
    full = 1 << (odd - 1).bit_length()
    if full != odd:
        groups = terms.reshape(n // odd, odd, *terms.shape[1:])
        zeros = groups.new_zeros((n // odd, full - odd, *terms.shape[1:]))
        terms = torch.cat([groups, zeros], 1).flatten(0, 1)
    while terms.shape[0] > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def reduced(own: Tensor, comm: Comm, how: WireReduction, background: bool) -> Pending:
    """`P -> R`: reduce a contiguous tensor that nobody else holds."""
    sent = own if how.dtype is None else _as_sent(own, how.dtype)
    if in_tree(own, how.op):
        pending = Pending(_all_reduce_in_tree(sent, comm), None)
    elif how.dtype is None and comm.on_gloo and calls.is_one_shot(own, comm, how.op):
        # In the same order everywhere, so the sums of all ranks agree bit by bit.
        pending = calls.all_to_all(own.expand(comm.size, *own.shape).contiguous(), comm)  # (5,) -> (4, 5)
        pending = pending.then(lambda terms: torch.sum(terms, 0, out=own))
    else:
        pending = calls.all_reduce_(sent, comm, how.op, background)
    return _as_asked(pending, comm, how, own.dtype) if how.divide or how.dtype else pending


def reduced_blocks(rows: Tensor, comm: Comm, how: WireReduction, background: bool, sizes: Sizes = ()) -> Pending:
    """`P -> S(0)`: (size * m, ...) -> (m, ...); with `sizes` (sum(sizes), ...) -> (sizes[rank], ...)."""
    if sizes and not are_equal(sizes):
        largest, own = max(sizes), sizes[comm.rank]
        if largest * comm.size > 2 * sum(sizes):  # padded blocks would send more than an all-reduce
            first, whole = sum(sizes[: comm.rank]), rows.clone(memory_format=torch.contiguous_format)
            return reduced(whole, comm, how, background).then(lambda total: total.narrow(0, first, own))
        # (3, 1, 2): rows a b c d e f are sent as a b c, d 0 0, e f 0
        zeros = rows.new_zeros((largest - min(sizes), *rows.shape[1:]))
        blocks = zip(torch.split(rows, list(sizes)), sizes, strict=True)
        padded = torch.cat([part for block, n in blocks for part in (block, zeros[: largest - n])])
        return reduced_blocks(padded, comm, how, background).then(lambda block: block[:own])
    sent = rows if how.dtype is None else _as_sent(rows, how.dtype)
    if in_tree(rows, how.op):
        pending = calls.all_to_all(sent, comm, background).then(lambda terms: _sum_in_tree(terms, comm))
    else:
        pending = calls.reduce_scatter(sent, comm, how.op, background)
    return _as_asked(pending, comm, how, rows.dtype) if how.divide or how.dtype else pending


def _as_sent(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of a dtype to reduce in place of another: same shape, (..., 2) for complex."""
    return torch.view_as_real(materialized(tensor)) if tensor.is_complex() else tensor.to(dtype)


def _as_asked(pending: Pending, comm: Comm, how: WireReduction, dtype: torch.dtype) -> Pending:
    """A reduction on the wire, as that of the caller's op and dtype."""
    if how.divide:
        pending = pending.then(lambda total: total.div_(comm.size))
    if how.dtype is None:
        return pending
    return pending.then(lambda sent: torch.view_as_complex(sent) if dtype.is_complex else sent.to(dtype))


def _sum_in_tree(terms: Tensor, comm: Comm) -> Tensor:
    """(size * m, ...) -> (m, ...): the sum of the blocks that all ranks have sent."""
    return tree_sum(terms.reshape(comm.size, terms.shape[0] // comm.size, *terms.shape[1:]))  # (8, 3) of 4: (4, 2, 3)


def _all_reduce_in_tree(tensor: Tensor, comm: Comm) -> Tensor:
    """The sum of all ranks' tensors in place of a contiguous one, complete when it returns."""
    flat = tensor.view(-1)
    if tensor.nbytes <= _ONE_EXCHANGE_BYTES:
        flat.copy_(tree_sum(calls.all_gather(flat.unsqueeze(0), comm).wait()))
        return tensor
    part = -(-flat.numel() // comm.size)  # 10 elements of 4 ranks: parts of 3, of which each rank sums one
    padded = torch.cat([flat, flat.new_zeros(part * comm.size - flat.numel())])  # 10 and two zeros
    own = _sum_in_tree(calls.all_to_all(padded, comm).wait(), comm)
    flat.copy_(calls.all_gather(own, comm).wait()[: flat.numel()])  # (12,), of which 10 are wanted
    return tensor
