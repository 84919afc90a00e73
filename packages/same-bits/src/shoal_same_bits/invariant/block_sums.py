"""The mode's blocks, sums over samples and over blocks, and faster forms of what is defined block by block.

Sums are taken in the tree of `tree_sum`, without keeping all of their terms. What is defined block by block is computed
by kernels that see the same shapes on any mesh. Larger calls are faster, and most kernels add in the same order in
them. So whenever shapes are new, faster forms are tried beside the definition on random numbers, and used from then on
if they have the same bits. Ranks need not choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import current_arithmetic as entered_arithmetic, unwatched, unwatched_functions
from shoal_tp_styles import Lowered

Form = Callable[..., Tensor]

# Kernels of matrix products look at where an operand begins; fresh memory of torch begins at multiples of this.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class BlockArithmetic:
    """How sums are divided."""

    blocks: int  # into how many parts a dim that ranks may share is divided; degrees divide it
    rows: int | None = None  # how many tokens of a sample are computed together; None for all

    def own_blocks(self, ranks: int, size: int, what: str) -> int:
        """How many of the blocks one of so many ranks has that share a dim; a StyleError if they cannot share them."""
        if self.blocks % ranks or size % self.blocks:  # 8 blocks: 2, 4 or 8 ranks, a dim of 64, not of 60
            raise StyleError(
                f"invariant_arithmetic(blocks={self.blocks}): {what} of {size} elements over {ranks} ranks; the ranks "
                "must divide the blocks, and the blocks the dim. Choose another number of blocks (a power of two)"
            )
        return self.blocks // ranks  # 8 blocks on 4 ranks: 2


def current_arithmetic() -> BlockArithmetic | None:
    """The mode that is entered, or None."""
    entered: object = entered_arithmetic()
    return entered if isinstance(entered, BlockArithmetic) else None


def entered() -> BlockArithmetic:
    """The mode; a StyleError outside of it, where the collectives of this form of module would add in another order."""
    arithmetic = current_arithmetic()
    if arithmetic is None:
        raise StyleError("a module made parallel inside invariant_arithmetic() is built, called and trained inside it")
    return arithmetic


def own_blocks(lowered: Lowered, name: str, dim: int) -> int:
    """How many blocks of a dim of a sharded parameter this rank has; a StyleError if they do not fit its shards."""
    spec, ranks = lowered.spec(name), lowered.comm.size
    what = f"{lowered.sharding.style}: dim {dim} of {name!r}"
    blocks = entered().own_blocks(ranks, spec.shape[dim], what)
    if spec.sizes(dim) is not None and len(set(spec.sizes(dim))) > 1:
        raise StyleError(
            f"{what} has shards of different sizes {spec.sizes(dim)}; invariant_arithmetic takes equal ones"
        )
    return blocks


def contiguous_block(tensor: Tensor) -> Tensor:
    """The tensor in contiguous, aligned memory: what a kernel sees must not depend on where a block came from."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor  # at 96: 96 % 64 = 32


def tree_of(count: int, term: Callable[[int], Tensor], add: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
    """The `tree_sum` of `term(0)` to `term(count - 1)`, of which about log2(count) are alive at a time.

    A term is in memory that nothing else refers to. `add` adds one in place, without making it first.

    Example:
        >>> tree_of(3, lambda i: torch.tensor([float(i)]))
        tensor([3.])
    """

    def node(start: int, count: int) -> Tensor:
        if count == 1:
            return term(start)
        # An odd number is filled up with zeros, which change no sum, to a power of two.
        left = count // 2 if count % 2 == 0 else 1 << (count - 1).bit_length() - 1  # 6: 3 + 3; 7: 4 + 3; 5: 4 + 1
        total = node(start, left)
        if add is not None and count - left == 1:
            return add(total, start + left)
        return total.add_(node(start + left, count - left))

    return node(0, count)


def tree_of_products(terms: Sequence[Sequence[tuple[Tensor, Tensor]]], *, fused: bool) -> Tensor:
    """The `tree_sum` of terms, each a sum of products of its pairs of matrices in order.

    Where `fused`, kernels add products to what is there.
    """

    def plus(total: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        return total.addmm_(*pair) if fused else total.add_(torch.mm(*pair))

    def term(i: int) -> Tensor:
        first, *others = terms[i]
        return reduce(plus, others, torch.mm(*first))

    def add(total: Tensor, i: int) -> Tensor:
        return plus(total, terms[i][0]) if len(terms[i]) == 1 else total.add_(term(i))

    return tree_of(len(terms), term, add)


@dataclass(frozen=True, eq=False)
class Measured:
    """A function of a number of blocks and of tensors."""

    definition: Form  # what it computes
    faster: tuple[Form, ...]  # forms that may have the same bits, the fastest first

    def __call__(self, blocks: int, *operands: Tensor) -> Tensor:
        tensors = [contiguous_block(operand) for operand in operands]
        layouts = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        return _form(self, blocks, layouts, torch.get_num_threads())(blocks, *tensors)


@lru_cache(maxsize=4096)
def _form(
    measured: Measured, blocks: int, layouts: tuple[tuple[torch.Size, torch.dtype, torch.device], ...], _: int
) -> Form:
    """The fastest form with the bits of the definition, for operands like these and so many threads."""
    if any(device.type == "meta" for *_, device in layouts):
        return measured.definition
    # Neither random numbers nor checkpoints of the program that runs hear of a trial.
    with torch.no_grad(), unwatched_functions(), unwatched():
        draw = torch.Generator().manual_seed(0)
        operands = [torch.randn(shape, generator=draw).to(device, dtype) for shape, dtype, device in layouts]
        want = measured.definition(blocks, *operands)
        same = (form for form in measured.faster if torch.equal(form(blocks, *operands), want))
        return next(same, measured.definition)
