"""Sums and matrix products in the blocks of `invariant_arithmetic`: definitions, and faster forms.

`invariant_arithmetic` is the mode under which results have the same bits on any mesh. A product is
defined sample by sample and block by block, so that kernels get the same shapes on any mesh. One
call of a kernel for many samples and blocks is faster, and most kernels add in the same order in
it. So the first call with new shapes compares faster forms with the definition on random numbers.
The fastest form with the same bits is used from then on. Ranks may choose different forms.

In the shapes, B is the number of samples, R is the number of rows (tokens) of a sample, and N and K
are numbers of features. If the mode has a number of rows, every sequence is divided into samples of
that many tokens, and zeros fill its last sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from math import prod
from typing import NamedTuple

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

# Kernels of matrix products may depend on the alignment of an operand. Memory that torch has just
# allocated begins at multiples of this number of bytes.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class BlockArithmetic:
    """The division of sums into blocks.

    Attributes:
        blocks: the number of blocks that a dim is divided into; each rank has the same number of
            them if the dim is sharded.
        rows: the number of tokens of a sample that are computed together; None if all are.
    """

    blocks: int
    rows: int | None = None

    def own_blocks(self, ranks: int, size: int, dim_name: str) -> int:
        """Return the number of blocks that each of `ranks` ranks has of a dim of `size` elements.

        Raises:
            StyleError: if the ranks do not divide the blocks, or the blocks the dim.
        """
        # Example: 8 blocks allow 2, 4 or 8 ranks, and a dim of 64 elements but not of 60.
        if self.blocks % ranks or size % self.blocks:
            raise StyleError(
                f"invariant_arithmetic(blocks={self.blocks}): {dim_name} has {size} elements over "
                f"{ranks} ranks; the number of ranks must divide the number of blocks, and the "
                "number of blocks must divide the elements. Choose another number of blocks (a "
                "power of two)"
            )
        # Example: with 8 blocks on 4 ranks, each has 2.
        return self.blocks // ranks


def current_arithmetic() -> BlockArithmetic | None:
    """Return the mode that is entered, or None."""
    arithmetic: object = entered_arithmetic()
    return arithmetic if isinstance(arithmetic, BlockArithmetic) else None


def required_arithmetic() -> BlockArithmetic:
    """Return the mode that is entered; raise StyleError outside of the mode.

    Outside of it collectives would add in another order.
    """
    arithmetic = current_arithmetic()
    if arithmetic is None:
        raise StyleError(
            "a module that was made parallel inside invariant_arithmetic() must also be called "
            "and trained inside it"
        )
    return arithmetic


def blocks_of_parameter(lowered: Lowered, name: str, dim: int) -> int:
    """Return the number of blocks that this rank has of a dim of a sharded parameter.

    Raises:
        StyleError: if the blocks do not fit the shards.
    """
    spec = lowered.spec(name)
    dim_name = f"{lowered.sharding.style}: dim {dim} of {name!r}"
    blocks = required_arithmetic().own_blocks(lowered.comm.size, spec.shape[dim], dim_name)
    sizes = spec.sizes(dim)
    if len(set(sizes)) > 1:
        raise StyleError(
            f"{dim_name} has shards of different sizes {sizes}; invariant_arithmetic needs equal "
            "shards"
        )
    return blocks


def contiguous_block(tensor: Tensor) -> Tensor:
    """Return the tensor in contiguous, aligned memory.

    A kernel then cannot depend on whether the tensor is a part of a larger one.
    """
    tensor = tensor.contiguous()
    # Example: a block that begins 96 bytes after an aligned address is not aligned: 96 % 64 = 32.
    is_aligned = tensor.data_ptr() % _ALIGNMENT == 0
    return tensor if is_aligned else tensor.clone()


def tree_of(
    count: int, term: Callable[[int], Tensor], add: Callable[[Tensor, int], Tensor] | None = None
) -> Tensor:
    """Compute the `tree_sum` of `term(0)` to `term(count - 1)` with about log2(count) terms alive.

    Args:
        count: the number of terms.
        term: makes a term, in memory that nothing else refers to.
        add: adds a term to a total in place, without making the term first.

    Example:
        >>> tree_of(3, lambda i: torch.tensor([float(i)]))
        tensor([3.])
    """

    def node(start: int, count: int) -> Tensor:
        if count == 1:
            return term(start)
        # An even count is halved. An odd count is filled up with zeros to the next power of two and
        # then halved. So its left half is the largest power of two below the count. The zeros
        # change no sum and are left out. Examples: 6 = 3 + 3, 7 = 4 + 3, 5 = 4 + 1.
        left = count // 2
        if count % 2:
            left = 1 << ((count - 1).bit_length() - 1)
        middle = start + left
        right = count - left
        total = node(start, left)
        if add is not None and right == 1:
            return add(total, middle)
        return total.add_(node(middle, right))

    return node(0, count)


# The factors of a matrix product.
Pair = tuple[Tensor, Tensor]


def tree_of_products(terms: Sequence[Sequence[Pair]], *, fused: bool) -> Tensor:
    """Compute the `tree_sum` of terms. A term is the sum of the products of its pairs.

    Args:
        terms: the pairs of each term.
        fused: True if kernels add a product to the total without making the product first.
    """

    def add_product(total: Tensor, pair: Pair) -> Tensor:
        return total.addmm_(*pair) if fused else total.add_(torch.mm(*pair))

    def term(i: int) -> Tensor:
        first, *others = terms[i]
        return reduce(add_product, others, torch.mm(*first))

    def add_term(total: Tensor, i: int) -> Tensor:
        # One product is added by `add_product`. Several products are first added to each other, as
        # the definition requires.
        pairs = terms[i]
        return add_product(total, pairs[0]) if len(pairs) == 1 else total.add_(term(i))

    return tree_of(len(terms), term, add_term)


class _OperandKind(NamedTuple):
    """The facts of an operand on which the bits of a kernel depend."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class Measured:
    """A function of a number of blocks and of tensors, with faster forms.

    A call uses the fastest form with the bits of the definition. The bits are compared by a trial
    (see `_fastest_form`). Times are not measured.

    Attributes:
        definition: the form that defines the bits.
        faster: other forms of the function, which may have the same bits, the fastest first.
    """

    definition: Form
    faster: tuple[Form, ...]

    def __call__(self, blocks: int, *operands: Tensor) -> Tensor:
        tensors = [contiguous_block(operand) for operand in operands]
        kinds = tuple(
            [_OperandKind(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        )
        threads = torch.get_num_threads()
        form = _fastest_form(self, blocks, kinds, threads=threads)
        return form(blocks, *tensors)


@lru_cache(maxsize=4096)
def _fastest_form(
    measured: Measured,
    blocks: int,
    kinds: tuple[_OperandKind, ...],
    threads: int,
) -> Form:
    """Return the fastest form with the bits of the definition, for operands of these kinds.

    Args:
        measured: the function.
        blocks: the number of blocks.
        kinds: the kind of every operand.
        threads: torch's number of threads; a key of the cache, because kernels depend on it.
    """
    if any(kind.device.type == "meta" for kind in kinds):
        return measured.definition
    # The trial must not change the program. It draws from its own generator and records no
    # gradients. Modes and subclasses of the user do not observe its functions
    # (`unwatched_functions`), and activation checkpoints do not save its results (`unwatched`).
    with torch.no_grad(), unwatched_functions(), unwatched():
        draw = torch.Generator().manual_seed(0)
        operands = []
        for kind in kinds:
            drawn = torch.randn(kind.shape, generator=draw)
            operands.append(drawn.to(kind.device, kind.dtype))
        expected = measured.definition(blocks, *operands)
        for form in measured.faster:
            result = form(blocks, *operands)
            if torch.equal(result, expected):
                return form
    return measured.definition


def _contiguous_blocks(tensor: Tensor, blocks: int, dim: int) -> list[Tensor]:
    return [contiguous_block(block) for block in tensor.chunk(blocks, dim)]


# --- products with blocks of output features ------------------------------------------------------


def _spread(dim: int) -> Measured:
    """Return the function that multiplies (B, R, K) by a matrix to (B, R, N), with N in blocks.

    Args:
        dim: the dim of the matrix that has the output features: 0 for (N, K), as in a Linear, or 1
            for (K, N).
    """

    def product(x: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
        weight = matrix if dim == 0 else matrix.t()
        return linear(x, weight, *bias)

    def in_blocks(blocks: int, x: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
        operands = [_contiguous_blocks(matrix, blocks, dim)]
        operands += [_contiguous_blocks(b, blocks, 0) for b in bias]
        blocks_of_operands = list(zip(*operands, strict=True))
        outputs = []
        for sample in x:
            # (R, K) times each block of the matrix, which has N / blocks output features
            rows = contiguous_block(sample)
            products = [product(rows, *block) for block in blocks_of_operands]
            outputs.append(torch.cat(products, -1))
        return torch.stack(outputs)

    def by_samples(blocks: int, x: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
        samples = [contiguous_block(sample) for sample in x]
        return torch.stack([product(sample, matrix, *bias) for sample in samples])

    def at_once(blocks: int, x: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
        # Example: (2, 3, 8) is multiplied as (6, 8), and the result (6, N) becomes (2, 3, N).
        rows = product(x.flatten(0, 1), matrix, *bias)
        return rows.view(*x.shape[:2], -1)

    return Measured(in_blocks, (at_once, by_samples))


# --- products with blocks of summed features ------------------------------------------------------


def _sum_function(dim: int) -> Measured:
    """Return the function for sums of products of (B, R, K) and a matrix, with K in blocks.

    The result of the function is (B, R, N). The function takes the factors of any number of
    products: x and W of the first product, x and W of the second product, and so on. Here x is
    (B, R, K), and W is a matrix.

    Args:
        dim: the dim of the matrices that is summed over: 1 for (N, K), as in a Linear, or 0 for
            (K, N).
    """

    def terms_of(
        blocks: int, inputs: Sequence[Tensor], matrices: Sequence[Tensor], *, copies: bool
    ) -> list[list[Pair]]:
        """Return one term for each block: the pairs of all products.

        The inputs are (R, K). Example: two products in 4 blocks are 4 terms of 2 pairs each. A pair
        is the factors (R, K / 4) and (K / 4, N).

        Args:
            blocks: the number of blocks.
            inputs: the first factor of each product.
            matrices: the second factor of each product.
            copies: True if each block is in memory of its own.
        """
        divide = _contiguous_blocks if copies else torch.chunk
        products = []
        for x, matrix in zip(inputs, matrices, strict=True):
            blocks_of_x = divide(x, blocks, -1)
            blocks_of_matrix = divide(matrix, blocks, dim)
            if dim == 1:
                blocks_of_matrix = [block.t() for block in blocks_of_matrix]
            products.append(zip(blocks_of_x, blocks_of_matrix, strict=True))
        # `products` has a row of blocks for each product; the result has a row of products for each
        # block.
        return [list(term) for term in zip(*products, strict=True)]

    def by_samples(blocks: int, *operands: Tensor, copies: bool = False) -> Tensor:
        inputs_by_product = operands[::2]
        matrices = operands[1::2]
        outputs = []
        # In each iteration, `inputs` has one sample (R, K) of every product.
        for inputs in zip(*inputs_by_product, strict=True):
            terms = terms_of(blocks, inputs, matrices, copies=copies)
            outputs.append(tree_of_products(terms, fused=False))
        return torch.stack(outputs)

    def at_once(blocks: int, *operands: Tensor, fused: bool = False) -> Tensor:
        # The rows of all samples are computed together: (B, R, K) -> (B * R, K).
        inputs = [x.flatten(0, 1) for x in operands[::2]]
        matrices = operands[1::2]
        terms = terms_of(blocks, inputs, matrices, copies=False)
        rows = tree_of_products(terms, fused=fused)
        return rows.view(*operands[0].shape[:2], -1)

    faster = (partial(at_once, fused=True), at_once, by_samples)
    return Measured(partial(by_samples, copies=True), faster)


# --- gradients of parameters, sums over samples ---------------------------------------------------


def _weight_gradient(dim: int) -> Measured:
    """Return the function that adds grad^T x over samples, (B, R, N) and (B, R, K) -> (N, K).

    Args:
        dim: the dim of the result that is computed in blocks.
    """

    def in_blocks(blocks: int, grad: Tensor, x: Tensor) -> Tensor:
        divided, whole = (grad, x) if dim == 0 else (x, grad)
        # parts[i][j] is block j of sample i: (R, N / blocks), or (R, K / blocks) if dim is 1
        parts = [_contiguous_blocks(sample, blocks, -1) for sample in divided]
        wholes = [contiguous_block(sample) for sample in whole]

        def product(i: int, j: int) -> Tensor:
            if dim == 0:
                return parts[i][j].t().mm(wholes[i])
            return wholes[i].t().mm(parts[i][j])

        # Each sum adds block `j` of the products of all samples.
        sums = [tree_of(len(x), partial(product, j=j)) for j in range(blocks)]
        return torch.cat(sums, dim)

    def by_samples(blocks: int, grad: Tensor, x: Tensor, *, fused: bool = False) -> Tensor:
        samples = zip(grad, x, strict=True)
        terms = [[(grad_of_sample.t(), sample)] for grad_of_sample, sample in samples]
        return tree_of_products(terms, fused=fused)

    return Measured(in_blocks, (partial(by_samples, fused=True), by_samples))


def _bias_in_blocks(blocks: int, grad: Tensor) -> Tensor:
    """Return the sum over samples of the sum over rows of grad, in blocks of features."""
    parts = [_contiguous_blocks(sample, blocks, -1) for sample in grad]

    def term(i: int, j: int) -> Tensor:
        return parts[i][j].sum(0)

    sums = [tree_of(len(parts), partial(term, j=j)) for j in range(blocks)]
    return torch.cat(sums)


# The functions for `dim` 0 and for `dim` 1.
_SPREAD = (_spread(0), _spread(1))
_SUMMED = (_sum_function(0), _sum_function(1))
_WEIGHT_GRADIENT = (_weight_gradient(0), _weight_gradient(1))
_BIAS_GRADIENT = Measured(_bias_in_blocks, (lambda _, grad: tree_sum(grad.sum(1)),))


def _samples(tensor: Tensor) -> Tensor:
    """Join the dims between the first and the last, (B, ..., K) -> (B, R, K)."""
    if not tensor.shape[0]:
        raise StyleError(
            "invariant_arithmetic: this rank does not have any samples, so it cannot compute a "
            "sum over samples; give every rank at least one sample"
        )
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def _parts(tensor: Tensor) -> Tensor:
    """Return the samples, (B, ..., K) -> (B, R, K).

    If the mode has a number of rows, each sample is divided into parts of that many rows:
    (parts, rows, K).
    """
    samples = _samples(tensor)
    arithmetic = current_arithmetic()
    if arithmetic is None or arithmetic.rows is None:
        return samples
    # Example: with 4 rows, (2, 10, 8) is padded to (2, 12, 8) and becomes (6, 4, 8).
    missing = -samples.shape[1] % arithmetic.rows
    padded = pad(samples, (0, 0, 0, missing))
    return padded.reshape(-1, arithmetic.rows, samples.shape[2])


def _join_parts(parts: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo `_parts`, for a tensor of this shape."""
    # Example: (6, 4, 8) becomes (2, 12, 8), and (2, 10, 8) without the padding.
    padded = parts.view(shape[0], -1, shape[-1])
    row_count = prod(shape[1:-1])
    # The result is contiguous: elementwise kernels compute tensors with gaps in another way.
    return padded[:, :row_count].contiguous().view(shape)


def spread(x: Tensor, matrix: Tensor, dim: int, blocks: int, bias: Tensor | None = None) -> Tensor:
    """Multiply (B, ..., K) by a matrix; return (B, ..., N), computed in blocks of N.

    Args:
        x: the first factor.
        matrix: the second factor.
        dim: the dim of the matrix that has the output features.
        blocks: the number of blocks of output features that this rank has.
        bias: added to the product.
    """
    if not x.numel():
        weight = matrix if dim == 0 else matrix.t()
        return linear(x, weight, bias)
    operands = [_parts(x), matrix]
    if bias is not None:
        operands.append(bias)
    out = _SPREAD[dim](blocks, *operands)
    shape = (*x.shape[:-1], matrix.shape[dim])
    return _join_parts(out, shape)


def sum_of_products(factors: Sequence[tuple[Tensor, Tensor]], dim: int, blocks: int) -> Tensor:
    """Add products of (B, ..., K) and a matrix; return (B, ..., N), the sum over blocks of K.

    Args:
        factors: the two factors of each product.
        dim: the dim of the matrices that is summed over.
        blocks: the number of blocks of K that this rank has.
    """
    first_input, first_matrix = factors[0]
    # Example: (2, 3, 8) and (16, 8), which is summed over dim 1, give (2, 3, 16).
    shape = (*first_input.shape[:-1], first_matrix.shape[1 - dim])
    if not first_input.numel():
        return first_input.new_zeros(shape)
    operands = list[Tensor]()
    for x, matrix in factors:
        operands += (_parts(x), matrix)
    out = _SUMMED[dim](blocks, *operands)
    return _join_parts(out, shape)


def weight_gradient(grad: Tensor, x: Tensor, dim: int, blocks: int) -> Tensor:
    """Return the gradient of a weight, (B, ..., N) and (B, ..., K) -> (N, K).

    It is the tree over samples. Its dim `dim` is computed in blocks.
    """
    return _WEIGHT_GRADIENT[dim](blocks, _samples(grad), _samples(x))


def bias_gradient(grad: Tensor, blocks: int) -> Tensor:
    """Return the gradient of a bias, (B, ..., N) -> (N,): the tree over samples."""
    return _BIAS_GRADIENT(blocks, _samples(grad))
