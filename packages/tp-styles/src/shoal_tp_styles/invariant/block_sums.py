"""Sums over samples and over blocks, in the tree of `tree_sum`, without keeping all of their terms."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..arithmetic import InvariantArithmetic, current_arithmetic
from ..errors import StyleError
from ..lowering.lowered import Lowered

__all__ = ["contiguous_block", "entered", "own_blocks", "tree_of"]

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
    if count % 2 == 0:
        half = count // 2
        return tree_of(half, term).add_(tree_of(half, lambda i: term(half + i)))
    return _padded(0, 1 << (count - 1).bit_length(), count, term)


def _padded(start: int, width: int, count: int, term: Callable[[int], Tensor]) -> Tensor:
    """The tree over terms `start` to `start + width`, those from `count` on being zeros, which change no sum."""
    if width == 1:
        return term(start)
    half = width // 2
    left = _padded(start, half, count, term)
    return left if start + half >= count else left.add_(_padded(start + half, half, count, term))


def entered() -> InvariantArithmetic:
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
