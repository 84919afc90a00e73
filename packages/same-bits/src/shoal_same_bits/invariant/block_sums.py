"""Sums over samples and over blocks, in the tree of `tree_sum`, without keeping all of their terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal_dtensor.errors import StyleError
from shoal_tp_styles import Lowered

from .mode import BlockArithmetic, current_arithmetic

_Term = Callable[[int, list[Tensor]], Tensor]
_Add = Callable[[Tensor, int, list[Tensor]], Tensor]

# Kernels of matrix products look at where an operand begins; fresh memory of torch begins at multiples of this.
_ALIGNMENT = 64


def contiguous_block(tensor: Tensor) -> Tensor:
    """The tensor in contiguous, aligned memory: what a kernel sees must not depend on where a block came from."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def tree_of(count: int, term: Callable[[int], Tensor]) -> Tensor:
    """The `tree_sum` of `term(0)` to `term(count - 1)`, of which about log2(count) are alive at a time.

    Args:
        count: of terms, at least 1.
        term: makes one, in memory that nothing else refers to.

    Example:
        >>> tree_of(3, lambda i: torch.tensor([float(i)]))
        tensor([3.])
    """
    return _tree(0, count, lambda i, free: term(i), lambda total, i, free: total.add_(term(i)), [])


def tree_of_products(terms: Sequence[Sequence[tuple[Tensor, Tensor]]], *, fused: bool) -> Tensor:
    """The `tree_sum` of terms, each a sum of products of matrices in order; memory of terms is used again.

    Args:
        terms: the factors of the products of each term.
        fused: whether kernels add products to what is there.
    """

    def plus(total: Tensor, pair: tuple[Tensor, Tensor], free: list[Tensor]) -> Tensor:
        if fused:
            return total.addmm_(*pair)
        free.append(product(pair, free))
        return total.add_(free[-1])

    def product(pair: tuple[Tensor, Tensor], free: list[Tensor]) -> Tensor:
        return torch.mm(*pair, out=free.pop()) if free else torch.mm(*pair)

    def term(i: int, free: list[Tensor]) -> Tensor:
        first, *others = terms[i]
        total = product(first, free)
        for pair in others:
            plus(total, pair, free)
        return total

    def add(total: Tensor, i: int, free: list[Tensor]) -> Tensor:
        if len(terms[i]) == 1:
            return plus(total, terms[i][0], free)
        free.append(term(i, free))
        return total.add_(free[-1])

    return _tree(0, len(terms), term, add, [])


def _tree(start: int, count: int, term: _Term, add: _Add, free: list[Tensor]) -> Tensor:
    """The tree over `count` terms from `start` on; `free` is memory of terms that have been added."""
    if count == 1:
        return term(start, free)
    # An odd number is filled up with zeros, which change no sum, to a power of two.
    left = count // 2 if count % 2 == 0 else 1 << (count - 1).bit_length() - 1
    total = _tree(start, left, term, add, free)
    if count - left == 1:
        return add(total, start + left, free)
    right = _tree(start + left, count - left, term, add, free)
    total.add_(right)
    free.append(right)
    return total


def entered() -> BlockArithmetic:
    """The mode.

    Raises:
        StyleError: outside of it: the collectives of this form of module would add in another order.
    """
    arithmetic = current_arithmetic()
    if arithmetic is None:
        raise StyleError("a module made parallel inside invariant_arithmetic() is built, called and trained inside it")
    return arithmetic


def own_blocks(lowered: Lowered, name: str, dim: int) -> int:
    """How many blocks of a dim of a sharded parameter this rank has.

    Raises:
        StyleError: if the blocks do not fit the dim and its shards.
    """
    spec, ranks = lowered.spec(name), lowered.comm.size
    what = f"{lowered.sharding.style}: dim {dim} of {name!r}"
    blocks = entered().own_blocks(ranks, spec.shape[dim], what)
    if spec.sizes(dim) is not None and len(set(spec.sizes(dim))) > 1:
        raise StyleError(
            f"{what} has shards of different sizes {spec.sizes(dim)}; invariant_arithmetic takes equal ones"
        )
    return blocks
