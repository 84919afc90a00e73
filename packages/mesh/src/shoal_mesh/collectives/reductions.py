"""Reductions of tensors over ranks: the ops of each dtype, the dtype sent, and the order of sums.

Backends send few dtypes and reduce fewer (gloo has no int16 and no complex all-gather). Data that
only moves is sent as bytes, complex sums as pairs of reals, and small integers are reduced in a
wider dtype. An average is a sum and a division. The sum of half types may leave the range although
every value and the mean are within it. Where this package sums, averages of half types are
therefore summed in float32. Where a backend sums, the divisor is split into two factors: values are
divided by one factor before the sum, and the sum is divided by the other
(`transport.split_divisor`).

A backend adds in its own order: gloo's ring begins at another rank for each part, NCCL chooses.
Inside `sums_in_tree` ranks exchange their terms instead, and every rank adds the terms of its part
in the tree of `tree_sum`, in index order, so that the bits do not depend on how many ranks share
the terms. This sends as much as a reduction: one all-to-all, and an all-gather if every rank needs
the whole result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import is_compiling
from ..argument_types import require
from ..errors import CollectiveError, CollectiveTypeError
from ..scoped_value import ScopedValue, value_when_traced
from ..shared_memory.row_reductions import HALF_TYPES
from .c10d_transport import PLAIN, REDUCE

_SENT_AS = {
    torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64,
    torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64,
}  # fmt: skip
# dtypes with two numbers in one element, which torch does not convert
_MOVED_ONLY = {getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name)}
_BITWISE = {"band", "bor", "bxor"}


class WireReduction(NamedTuple):
    """A recipe to reduce one dtype with one op."""

    # The op for the transport. It is "avg" only for half types, whose averages the transport
    # divides in a way that keeps sums within the range; other averages are "sum" with `divide`.
    op: str
    # the dtype that is sent; None for the dtype of the tensor
    dtype: torch.dtype | None = None
    # whether the sum is divided by the number of ranks afterwards
    divide: bool = False


def reduction(dtype: torch.dtype, op: str) -> WireReduction:
    """Return the recipe to reduce `dtype` with `op`.

    Raises CollectiveError if there is no such op, or if it has no meaning for the dtype.
    """
    if type(op) is not str:
        require(op, str, f"a reduction is one of {', '.join(REDUCE)}", CollectiveTypeError)
    return _reduction(dtype, op)


@cache  # bounded by dtypes times ops
def _reduction(dtype: torch.dtype, op: str) -> WireReduction:
    if op not in REDUCE:
        raise CollectiveError(f"unknown reduction {op!r}: the reductions are {', '.join(REDUCE)}")
    is_integer_or_bool = not dtype.is_floating_point and not dtype.is_complex
    if op in _BITWISE and not is_integer_or_bool:
        raise CollectiveError(
            f"reduction {op!r} works on bits and is not defined for {dtype}: use an integer dtype"
        )
    if op == "avg" and is_integer_or_bool:
        raise CollectiveError(
            f"the average of {dtype} is not a {dtype}: reduce with 'sum' and divide, or convert "
            "to float"
        )
    if dtype.is_complex and op not in {"sum", "avg"}:
        raise CollectiveError(
            f"reduction {op!r} of {dtype}: complex numbers support 'sum' and 'avg' only"
        )
    if dtype in _MOVED_ONLY:
        raise CollectiveError(
            f"reduction {op!r} of {dtype}: this dtype cannot be reduced, only moved"
        )
    sent_as = None
    # every backend reduces the dtypes in PLAIN
    if dtype not in PLAIN:
        sent_as = _SENT_AS.get(dtype)
        # float8 dtypes and other floating-point dtypes that are not listed are summed in float32
        if sent_as is None and dtype.is_floating_point:
            sent_as = torch.float32
        if sent_as is None:
            raise CollectiveError(
                f"reduction {op!r} of {dtype}: this dtype cannot be reduced, only moved"
            )
    if op != "avg":
        return WireReduction(op, sent_as)
    if (sent_as or dtype) in HALF_TYPES:
        return WireReduction("avg", sent_as)
    return WireReduction("sum", sent_as, divide=True)


_in_tree = ScopedValue("shoal_mesh_sums_in_tree", False)
# One entry for each block that is open in code that a compiler traces. The compiler can trace the
# changes of a list, but not those of the context variable in `_in_tree`.
_traced_blocks: list[None] = []


@contextmanager
def sums_in_tree() -> Iterator[None]:
    """Open a block in which floating-point sums over ranks are taken in one binary tree.

    The block also covers the backward passes that are started in it, on the threads of autograd,
    too. All ranks must be in the block together. In it, 8 terms on one rank, 4 each on two ranks
    and 1 each on eight have the same sum, bit for bit, if each rank adds up its own terms by
    `tree_sum`.

    Example:
        >>> def example() -> list[float]:
        ...     with sums_in_tree():
        ...         return all_reduce(torch.tensor([0.1, 0.2]), comm_over((0, 1))).tolist()
        >>> launch(example, 2)[0]
        [0.20000000298023224, 0.4000000059604645]
    """
    if is_compiling():
        _traced_blocks.append(None)
        try:
            yield
        finally:
            _traced_blocks.pop()
        return
    with _in_tree.change(lambda _: True):
        yield


def sums_are_in_tree() -> bool:
    """Return whether `sums_in_tree` is entered."""
    if _traced_blocks:
        return True
    if not _in_tree.blocks:
        return False
    # In traced code, the block was opened outside of it; the value is then a constant of the graph.
    return value_when_traced(_in_tree) if is_compiling() else _in_tree.get()


def in_tree(tensor: Tensor, op: str) -> bool:
    """Return whether `sums_in_tree` orders a reduction."""
    # no block is open in any thread
    if not _in_tree.blocks and not _traced_blocks:
        return False
    if op not in ("sum", "avg") or not sums_are_in_tree():
        return False
    return tensor.is_floating_point() or tensor.is_complex()


def tree_sum(terms: Tensor) -> Tensor:
    """Return the sum over dim 0 in a binary tree, (n, ...) -> (...).

    The tree divides the terms into halves, and the halves again. A part with an odd number of terms
    is first padded with zeros to a power of two, which does not change its sum. For example, 6
    terms are added as ((a + b) + (c + 0)) + ((d + e) + (f + 0)).

    Each half is the tree of its own terms. If a rank has the first or second half, or one of the
    four quarters, the sum of its terms is therefore a node of the tree.

    Example:
        >>> tree_sum(torch.tensor([1.0, 2.0, 3.0]))
        tensor(6.)
    """
    if terms.shape[0] == 0:
        return terms.new_zeros(terms.shape[1:])
    terms = _pad_odd_groups(terms)
    # from the leaves to the root: each step adds neighbors
    while terms.shape[0] > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def _pad_odd_groups(terms: Tensor) -> Tensor:
    """Pad the terms of a tree with zeros at each odd group, (n, ...) -> (a power of two, ...)."""
    n = terms.shape[0]
    term_shape = terms.shape[1:]
    # n = odd * 2 ** k: 6 terms are 2 groups of 3, which are padded to 4
    odd = n // (n & -n)
    group_count = n // odd
    full = 1 << (odd - 1).bit_length()
    if full == odd:
        return terms
    groups = terms.reshape(group_count, odd, *term_shape)
    zeros = groups.new_zeros((group_count, full - odd, *term_shape))
    return torch.cat([groups, zeros], 1).flatten(0, 1)


def tree_mean(terms: Tensor) -> Tensor:
    """Return `tree_sum / n` of a half type without sums outside of its range, (n, ...) -> (...).

    Each node is the mean of its two children, rounded to the half type. Halving only changes the
    exponent, so the mean has the same digits as the rounded sum of the children, unless it is
    smaller than the smallest normal number of the half type.

    Example:
        >>> tree_mean(torch.full((4,), 60_000.0, dtype=torch.float16))
        tensor(60000., dtype=torch.float16)
    """
    count = terms.shape[0]
    dtype = terms.dtype
    terms = _pad_odd_groups(terms)
    leaves = terms.shape[0]
    while terms.shape[0] > 1:
        even_halves = terms[0::2].float() / 2
        odd_halves = terms[1::2].float() / 2
        terms = (even_halves + odd_halves).to(dtype)
    # The root is the mean of the leaves, zeros included. Example: 3 terms and a zero are 4 leaves,
    # whose mean is 3/4 of the mean of the terms.
    total = terms[0].double() * leaves
    return (total / count).to(dtype)
