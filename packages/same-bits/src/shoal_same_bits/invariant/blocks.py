"""Sums and matrix products in the blocks of the mode: as they are defined, and in faster forms with the same bits.

A product is defined sample by sample and block by block, and computed by kernels that see the same
shapes on any mesh. Larger calls are faster, and most kernels add in the same order in them. So
whenever shapes are new, faster forms are tried beside the definition on random numbers, and used
from then on if they have the same bits. Ranks need not choose alike.

Here B are samples, R rows of each, N and K features. Where the mode has a number of rows, a sample
is that many tokens, and the last ones of a sequence are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import (
    current_arithmetic as entered_arithmetic,
    unwatched,
    unwatched_functions,
)
from shoal_mesh.internal import tree_sum
from shoal_tp_styles import Lowered

Form = Callable[..., Tensor]

# Kernels of matrix products look at where an operand begins; fresh memory of torch begins at
# multiples of this.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class BlockArithmetic:
    """How sums are divided."""

    # into how many parts a dim that ranks may share is divided; degrees divide it
    blocks: int
    # how many tokens of a sample are computed together; None for all
    rows: int | None = None

    def own_blocks(self, ranks: int, size: int, what: str) -> int:
        """How many of the blocks one of so many ranks has that share a dim; a StyleError if they cannot share them."""
        # 8 blocks: 2, 4 or 8 ranks, a dim of 64, not of 60
        if self.blocks % ranks or size % self.blocks:
            raise StyleError(
                f"invariant_arithmetic(blocks={self.blocks}): {what} of {size} elements over "
                f"{ranks} ranks; the ranks "
                "must divide the blocks, and the blocks the dim. Choose another number of blocks "
                "(a power of two)"
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
        raise StyleError(
            "a module made parallel inside invariant_arithmetic() is built, called and trained "
            "inside it"
        )
    return arithmetic


def own_blocks(lowered: Lowered, name: str, dim: int) -> int:
    """How many blocks of a dim of a sharded parameter this rank has; a StyleError if they do not fit its shards."""
    spec = lowered.spec(name)
    ranks = lowered.comm.size
    what = f"{lowered.sharding.style}: dim {dim} of {name!r}"
    blocks = entered().own_blocks(ranks, spec.shape[dim], what)
    if spec.sizes(dim) is not None and len(set(spec.sizes(dim))) > 1:
        raise StyleError(
            f"{what} has shards of different sizes {spec.sizes(dim)}; invariant_arithmetic takes "
            "equal ones"
        )
    return blocks


def contiguous_block(tensor: Tensor) -> Tensor:
    """The tensor in contiguous, aligned memory: what a kernel sees must not depend on where a block came from."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor  # at 96: 96 % 64 = 32


def tree_of(
    count: int, term: Callable[[int], Tensor], add: Callable[[Tensor, int], Tensor] | None = None
) -> Tensor:
    """The `tree_sum` of `term(0)` to `term(count - 1)`, of which about log2(count) are alive at a time.

    A term is in memory that nothing else refers to. `add` adds one in place, without making it
    first.

    Example:
        >>> tree_of(3, lambda i: torch.tensor([float(i)]))
        tensor([3.])
    """

    def node(start: int, count: int) -> Tensor:
        if count == 1:
            return term(start)
        # An odd number is filled up with zeros, which change no sum, to a power of two.
        # 6: 3 + 3; 7: 4 + 3; 5: 4 + 1
        left = count // 2 if count % 2 == 0 else 1 << (count - 1).bit_length() - 1
        total = node(start, left)
        if add is not None and count - left == 1:
            return add(total, start + left)
        return total.add_(node(start + left, count - left))

    return node(0, count)


def tree_of_products(terms: Sequence[Sequence[tuple[Tensor, Tensor]]], *, fused: bool) -> Tensor:
    """The `tree_sum` of terms, each a sum of products of its pairs; `fused`: kernels add to what is there."""

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
    # forms that may have the same bits, the fastest first
    faster: tuple[Form, ...]

    def __call__(self, blocks: int, *operands: Tensor) -> Tensor:
        tensors = [contiguous_block(operand) for operand in operands]
        layouts = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        return _form(self, blocks, layouts, torch.get_num_threads())(blocks, *tensors)


@lru_cache(maxsize=4096)
def _form(
    measured: Measured,
    blocks: int,
    layouts: tuple[tuple[torch.Size, torch.dtype, torch.device], ...],
    _: int,
) -> Form:
    """The fastest form with the bits of the definition, for operands like these and so many threads."""
    if any(device.type == "meta" for *_, device in layouts):
        return measured.definition
    # Neither random numbers nor checkpoints of the program that runs hear of a trial.
    with torch.no_grad(), unwatched_functions(), unwatched():
        draw = torch.Generator().manual_seed(0)
        operands = [
            torch.randn(shape, generator=draw).to(device, dtype) for shape, dtype, device in layouts
        ]
        want = measured.definition(blocks, *operands)
        same = (form for form in measured.faster if torch.equal(form(blocks, *operands), want))
        return next(same, measured.definition)


def _blocks(tensor: Tensor, blocks: int, dim: int) -> list[Tensor]:
    return [contiguous_block(block) for block in tensor.chunk(blocks, dim)]


# --- (B, R, K) x (N, K) or (K, N) -> (B, R, N), N in blocks ---------------------------------------


def _spread(dim: int) -> Measured:
    """`dim` of the matrix has the features of the output: 0 as in a Linear, 1 as in its gradient."""

    def product(x: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
        return linear(x, matrix if dim == 0 else matrix.t(), *bias)

    def in_blocks(blocks: int, x: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
        operands = [_blocks(matrix, blocks, dim), *(_blocks(b, blocks, 0) for b in bias)]
        samples = [contiguous_block(sample) for sample in x]  # (2, 3, 8): two of (3, 8)
        return torch.stack(
            [
                torch.cat([product(s, *each) for each in zip(*operands, strict=True)], -1)
                for s in samples
            ]
        )

    def by_samples(blocks: int, x: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
        return torch.stack([product(contiguous_block(sample), matrix, *bias) for sample in x])

    def at_once(blocks: int, x: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
        # (2, 3, 8) as (6, 8), back to (2, 3, N)
        return product(x.flatten(0, 1), matrix, *bias).view(*x.shape[:2], -1)

    return Measured(in_blocks, (at_once, by_samples))


# --- (B, R, K) x (N, K) or (K, N) -> (B, R, N), a sum over blocks of K; or the sum of several such
# products


def _summed(dim: int) -> Measured:
    """`dim` of the matrices is summed over: 1 as in a Linear, 0 as in its gradient."""

    def factors(
        blocks: int, operands: Sequence[Tensor], *, copies: bool
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """Of each block, those of each product."""
        divided = _blocks if copies else torch.chunk
        pairs = []
        for x, matrix in zip(operands[::2], operands[1::2], strict=True):
            # (N, 8) in 4 blocks of dim 1: four of (N, 2)
            matrices = divided(matrix, blocks, dim)
            pairs.append(
                zip(
                    divided(x, blocks, -1),
                    (m.t() for m in matrices) if dim == 1 else matrices,
                    strict=True,
                )
            )
        # q and k in 4 blocks: 4 terms of 2 pairs
        return [list(term) for term in zip(*pairs, strict=True)]

    def by_samples(blocks: int, *operands: Tensor, copies: bool = False) -> Tensor:
        samples = zip(*operands[::2], strict=True)
        terms = [
            [each for pair in zip(s, operands[1::2], strict=True) for each in pair] for s in samples
        ]
        return torch.stack(
            [tree_of_products(factors(blocks, t, copies=copies), fused=False) for t in terms]
        )

    def at_once(blocks: int, *operands: Tensor, fused: bool = False) -> Tensor:
        # x, W, x, W
        rows = [
            operand.flatten(0, 1) if i % 2 == 0 else operand for i, operand in enumerate(operands)
        ]
        total = tree_of_products(factors(blocks, rows, copies=False), fused=fused)
        return total.view(*operands[0].shape[:2], -1)

    return Measured(
        partial(by_samples, copies=True), (partial(at_once, fused=True), at_once, by_samples)
    )


# --- (B, R, N), (B, R, K) -> (N, K), a sum over samples, one dim of it in blocks ------------------


def _weight_gradient(dim: int) -> Measured:
    def in_blocks(blocks: int, grad: Tensor, x: Tensor) -> Tensor:
        split, other = (grad, x) if dim == 0 else (x, grad)
        # parts[i][j]: sample i, (R, N / blocks)
        parts = [_blocks(sample, blocks, -1) for sample in split]
        others = [contiguous_block(sample) for sample in other]

        def product(i: int, j: int) -> Tensor:
            return parts[i][j].t().mm(others[i]) if dim == 0 else others[i].t().mm(parts[i][j])

        columns = [tree_of(len(x), partial(product, j=j)) for j in range(blocks)]
        return torch.cat(columns, dim)

    def by_samples(blocks: int, grad: Tensor, x: Tensor, *, fused: bool = False) -> Tensor:
        return tree_of_products(
            [[(g.t(), sample)] for g, sample in zip(grad, x, strict=True)], fused=fused
        )

    return Measured(in_blocks, (partial(by_samples, fused=True), by_samples))


def _bias_in_blocks(blocks: int, grad: Tensor) -> Tensor:
    parts = [_blocks(sample, blocks, -1) for sample in grad]

    def term(i: int, j: int) -> Tensor:
        return parts[i][j].sum(0)

    return torch.cat([tree_of(len(parts), partial(term, j=j)) for j in range(blocks)])


_SPREAD, _SUMMED, _GRADIENT = (
    tuple(make(dim) for dim in (0, 1)) for make in (_spread, _summed, _weight_gradient)
)
_BIAS = Measured(_bias_in_blocks, (lambda _, grad: tree_sum(grad.sum(1)),))


def _samples(tensor: Tensor) -> Tensor:
    """(B, ..., K) -> (B, R, K)."""
    if not tensor.shape[0]:
        raise StyleError("invariant_arithmetic: a rank without any sample has no sum over samples")
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def _parts(tensor: Tensor) -> Tensor:
    """(B, ..., K) -> (B, R, K), or with the mode's number of rows (parts, rows, K)."""
    # (2, 10, 8), by 4 rows (2, 12, 8), then (6, 4, 8)
    whole = _samples(tensor)
    arithmetic = current_arithmetic()
    if arithmetic is None or arithmetic.rows is None:
        return whole
    return pad(whole, (0, 0, 0, -whole.shape[1] % arithmetic.rows)).reshape(
        -1, arithmetic.rows, whole.shape[2]
    )


def _joined(parts: Tensor, shape: Sequence[int]) -> Tensor:
    """`_parts` back, for a tensor of this shape."""
    # (6, 4, 8) -> (2, 12, 8) -> (2, 10, 8)
    whole = parts.view(shape[0], -1, shape[-1])[:, : prod(shape[1:-1])]
    # elementwise kernels that follow take memory with gaps another way
    return whole.contiguous().view(shape)


def spread(x: Tensor, matrix: Tensor, dim: int, blocks: int, bias: Tensor | None = None) -> Tensor:
    """(B, ..., K) times a matrix whose dim `dim` has the features of the output, of which `blocks` blocks are here."""
    size = matrix.shape[dim]
    if not x.numel():
        return linear(x, matrix if dim == 0 else matrix.t(), bias)
    out = _SPREAD[dim](blocks, _parts(x), matrix, *(() if bias is None else (bias,)))
    return _joined(out, (*x.shape[:-1], size))


def summed(factors: Sequence[tuple[Tensor, Tensor]], dim: int, blocks: int) -> Tensor:
    """The sum of products of (B, ..., K) and a matrix whose dim `dim` is summed over, in `blocks` blocks."""
    x, matrix = factors[0]
    # (2, 3, 8) and (16, 8), dim 1 summed: (2, 3, 16)
    shape = (*x.shape[:-1], matrix.shape[1 - dim])
    if not x.numel():
        return x.new_zeros(shape)
    operands = [each for rows, weight in factors for each in (_parts(rows), weight)]
    return _joined(_SUMMED[dim](blocks, *operands), shape)


def weight_gradient(grad: Tensor, x: Tensor, dim: int, blocks: int) -> Tensor:
    """(N, K), of (B, ..., N) and (B, ..., K): the tree over samples, dim `dim` of the result in blocks."""
    return _GRADIENT[dim](blocks, _samples(grad), _samples(x))


def bias_gradient(grad: Tensor, blocks: int) -> Tensor:
    """(N,), of (B, ..., N): the tree over samples."""
    return _BIAS(blocks, _samples(grad))
