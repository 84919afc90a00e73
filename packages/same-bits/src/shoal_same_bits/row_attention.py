"""`attention_in_rows`: attention with the same bits of a query's output in any chunk of a sequence.

More queries in the call, or more keys behind the query, change no bit of the output.

Every kernel sees one sample, `rows` queries and `KEYS` keys, however long the sequence is. Missing
queries and keys are padded, and padded keys are masked.

Blocks of keys are counted from the first key. A longer sequence appends keys, so each earlier key
stays in its block and at its place there. The appended keys are masked for an earlier query: they
add zeros to its sums, which change no bit.

In the shapes, B is the number of samples, H of heads, Q of queries, K of keys, D of the features of
a query or key, and V of the features of a value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from shoal_context_parallel import UnsupportedAttentionError
from shoal_dtensor import DTensor
from shoal_dtensor.internal import unwatched_functions

# The number of keys in a block. The result of a kernel may depend on the alignment of its operands
# in memory. With 64 keys, the matrix of each head in a block (H, 64, D) has 64 * D * 4 bytes in
# float32. So each head begins at a multiple of 64 bytes for any D, and the alignment is the same
# for all blocks and heads.
KEYS = 64


def attention_in_rows(  # noqa: PLR0913  # the signature of scaled_dot_product_attention
    rows: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as `scaled_dot_product_attention` does, in blocks of fixed sizes.

    Queries have the shape (B, ..., Q, D), keys (B, ..., K, D) and values (B, ..., K, V).

    Args:
        rows: the number of queries that one kernel computes together.
        query: queries of this rank's heads, a plain tensor.
        key: keys of this rank's heads, a plain tensor.
        value: values of this rank's heads, a plain tensor.
        attn_mask: None or a plain tensor, as in `scaled_dot_product_attention`.
        dropout_p: only 0.0 is allowed.
        is_causal: as in `scaled_dot_product_attention`.
        scale: as in `scaled_dot_product_attention`.
        enable_gqa: as in `scaled_dot_product_attention`.

    Returns:
        The output, of shape (B, ..., Q, V). It is zero for a query that sees no key.

    Raises:
        UnsupportedAttentionError: for a DTensor or for dropout.
    """
    has_dtensor = any(isinstance(x, DTensor) for x in (query, key, value, attn_mask))
    if dropout_p or has_dtensor:
        raise UnsupportedAttentionError(
            f"invariant_arithmetic(rows={rows}): attention by rows supports only plain tensors of "
            f"this rank's heads, and no dropout; got dropout_p={dropout_p} and "
            f"{type(query).__name__}. To train with dropout, call invariant_arithmetic without "
            "rows. To get plain tensors, use use_local_output=True in the plan"
        )
    if enable_gqa:
        # Example: with 8 query heads and 2 key heads, each key head serves 4 query heads.
        query_heads_per_key_head = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(query_heads_per_key_head, -3)
        value = value.repeat_interleave(query_heads_per_key_head, -3)
    out_shape = (*query.shape[:-1], value.shape[-1])
    if not query.numel() or not key.numel():
        return query.new_zeros(out_shape)
    features = query.shape[-1]
    factor = features**-0.5 if scale is None else scale
    query_count = query.shape[-2]
    key_count = key.shape[-2]
    # `invariant_arithmetic` calls this function from a mode that replaces functions of torch.
    # Neither this mode nor another one needs to observe the many functions that are called below.
    with unwatched_functions():
        mask = _additive_mask(query, key_count, attn_mask, is_causal=is_causal)
        # The queries are scaled in their own dtype, before `_by_sample` converts half types.
        scaled_query = query * factor
        # All have the samples along dim 0 and the heads along dim 1. The mask (B, H or 1, Q, K) has
        # keys in the place of features.
        operands = [_by_sample(x) for x in (scaled_query, key, value, mask)]
        samples = [_attend_sample(rows, *sample) for sample in zip(*operands, strict=True)]
        # The stack has shape (B, H, padded Q, V).
        out = torch.stack(samples)[:, :, :query_count]
        return out.reshape(out_shape).to(query.dtype)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and sums: float32 for half types."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _by_sample(x: Tensor) -> Tensor:
    """Join all dims of heads to one, (B, ..., N, D) -> (B, H, N, D), in the computation's dtype."""
    wide = x.to(_compute_dtype(x.dtype))
    return wide.reshape(len(x), -1, *x.shape[-2:])


def _additive_mask(
    query: Tensor, keys: int, attn_mask: Tensor | None, *, is_causal: bool
) -> Tensor:
    """Return the mask as a summand of the scores, of shape (B, ..., Q, K).

    It has -inf where a query does not see a key. The dims of samples, queries and keys have full
    size. A dim of heads has the size that it has in `attn_mask`, or 1 if `attn_mask` lacks it.
    """
    queries = query.shape[-2]
    dtype = _compute_dtype(query.dtype)
    if attn_mask is None:
        mask = query.new_zeros(queries, keys, dtype=dtype)
        if is_causal:
            is_future = query.new_ones(queries, keys, dtype=torch.bool).triu(1)
            mask.masked_fill_(is_future, -torch.inf)
    elif attn_mask.dtype == torch.bool:
        mask = query.new_zeros(attn_mask.shape, dtype=dtype)
        mask.masked_fill_(~attn_mask, -torch.inf)
    else:
        mask = attn_mask.to(dtype)
    # Example for a query (B, H, Q, D): a mask (Q, K) gets 2 new dims, (1, 1, Q, K), and is then
    # expanded to (B, 1, Q, K). A mask (H, Q, K) becomes (1, H, Q, K), and then (B, H, Q, K).
    missing_dims = query.ndim - mask.ndim
    mask = mask[(None,) * missing_dims]
    heads = mask.shape[1:-2]
    return mask.expand(query.shape[0], *heads, queries, keys)


def _attend_sample(rows: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend from the queries of one sample, one block of queries after the other.

    Args:
        rows: the number of queries in a block.
        q: queries, (H, Q, D).
        k: keys, (H, K, D).
        v: values, (H, K, V).
        mask: the summand of the scores, (H or 1, Q, K).

    Returns:
        The output, (H, padded Q, V).
    """
    query_blocks = _padded_blocks(q, rows)
    key_blocks = _padded_blocks(k, KEYS)
    value_blocks = _padded_blocks(v, KEYS)
    outputs = []
    for query_block, masks in zip(query_blocks, _mask_blocks(mask, rows), strict=True):
        outputs.append(_attend_block(query_block, key_blocks, value_blocks, masks))
    return torch.cat(outputs, 1)


def _padded_blocks(x: Tensor, size: int) -> list[Tensor]:
    """Split (H, N, D) into blocks (H, size, D), and pad the last one by zeros.

    Each block is a contiguous copy, so that kernels get the same strides and alignment for every N.
    """
    missing = _count_missing(x.shape[1], size)
    padded = functional.pad(x, (0, 0, 0, missing))
    blocks = torch.split(padded, size, 1)
    return [block.clone(memory_format=torch.contiguous_format) for block in blocks]


def _count_missing(length: int, size: int) -> int:
    """Return how many elements to append to a length, up to the next multiple of `size`.

    Example: a length of 5 needs 3 more for the multiple 8 of the size 4.
    """
    return -length % size


def _mask_blocks(mask: Tensor, rows: int) -> Iterator[list[Tensor]]:
    """Yield the blocks (H, rows, KEYS) of a mask (H, Q, K), as one list per block of queries."""
    missing_keys = _count_missing(mask.shape[2], KEYS)
    missing_queries = _count_missing(mask.shape[1], rows)
    # No query sees a padded key. A padded query may see every key: its output is dropped.
    padded = functional.pad(mask, (0, missing_keys), value=-torch.inf)
    padded = functional.pad(padded, (0, 0, 0, missing_queries), value=0.0)
    for query_block in torch.split(padded, rows, 1):
        yield [block.contiguous() for block in torch.split(query_block, KEYS, 2)]


def _attend_block(
    q: Tensor, keys: list[Tensor], values: list[Tensor], masks: list[Tensor]
) -> Tensor:
    """Attend from one block of queries to all blocks of keys; return the output, (H, rows, V)."""
    scores = [q @ block.mT + mask for block, mask in zip(keys, masks, strict=True)]
    block_maxima = [block.amax(-1, keepdim=True) for block in scores]
    # the largest score of each query, (H, rows, 1)
    maximum = torch.stack(block_maxima).amax(0)
    # A query that sees no key has only scores of -inf, and -inf - -inf would give nan.
    maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    weights = [(block - maximum).exp() for block in scores]
    # The blocks are added one after the other. A sum over a stack of all blocks may be in an order
    # that depends on their number, and later blocks would change bits.
    total = weights[0].sum(-1, keepdim=True)
    out = weights[0] @ values[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        total = total + weight.sum(-1, keepdim=True)
        out = out + weight @ value
    divisor = total.masked_fill(total == 0, 1.0)
    return out / divisor
