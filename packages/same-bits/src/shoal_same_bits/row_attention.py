"""`attention_in_rows`: attention in which a query's bits depend on no other query and no later key.

Every kernel sees one sample, `rows` queries and `KEYS` keys, however long the sequence is. Missing
queries and keys are padded, and padded keys are masked. Blocks of keys are counted from the first
key, so the keys that a query may see are in the same blocks in every call. Later blocks add zeros,
which change no bit.

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

# The number of keys in a block. It is 64, so blocks with any number of features begin at multiples
# of 64 bytes.
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
    """Attend to (B, ..., K, D) keys and (B, ..., K, V) values from (B, ..., Q, D) queries.

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
            f"invariant_arithmetic(rows={rows}): attention by rows supports plain tensors of this "
            f"rank's heads without dropout only; got dropout_p={dropout_p} and "
            f"{type(query).__name__}. Leave out rows to train, and use use_local_output=True in "
            "the plan"
        )
    if enable_gqa:
        # Example: with 8 query heads and 2 key heads, each key head serves 4 query heads.
        queries_per_key = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(queries_per_key, -3)
        value = value.repeat_interleave(queries_per_key, -3)
    out_shape = (*query.shape[:-1], value.shape[-1])
    if not query.numel() or not key.numel():
        return query.new_zeros(out_shape)
    features = query.shape[-1]
    factor = features**-0.5 if scale is None else scale
    query_count = query.shape[-2]
    key_count = key.shape[-2]
    with unwatched_functions():
        mask = _additive_mask(query, key_count, attn_mask, is_causal=is_causal)
        operands = [_by_sample(x) for x in (query * factor, key, value, mask)]
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

    It has -inf where a query does not see a key. If `attn_mask` has no dims of heads, they have the
    size 1 in the result.
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
    has_heads = mask.ndim == query.ndim
    heads = mask.shape[1:-2] if has_heads else (1,) * (query.ndim - 3)
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
    """Split (H, N, D) into blocks (H, size, D), each in memory of its own; pad the last by zeros."""
    missing = -x.shape[1] % size
    padded = functional.pad(x, (0, 0, 0, missing))
    blocks = torch.split(padded, size, 1)
    return [block.clone(memory_format=torch.contiguous_format) for block in blocks]


def _mask_blocks(mask: Tensor, rows: int) -> Iterator[list[Tensor]]:
    """Yield the blocks (H, rows, KEYS) of a mask (H, Q, K), as one list per block of queries.

    Padded keys are masked.
    """
    missing_keys = -mask.shape[2] % KEYS
    missing_queries = -mask.shape[1] % rows
    padded = functional.pad(mask, (0, missing_keys), value=-torch.inf)
    padded = functional.pad(padded, (0, 0, 0, missing_queries))
    for query_block in torch.split(padded, rows, 1):
        yield [block.contiguous() for block in torch.split(query_block, KEYS, 2)]


def _attend_block(
    q: Tensor, keys: list[Tensor], values: list[Tensor], masks: list[Tensor]
) -> Tensor:
    """Attend from one block of queries to all blocks of keys; return the output, (H, rows, V)."""
    scores = [q @ block.mT + mask for block, mask in zip(keys, masks, strict=True)]
    tops = [block.amax(-1, keepdim=True) for block in scores]
    top = torch.stack(tops).amax(0)
    # A query that sees no key has only scores of -inf, and -inf - -inf would give nan.
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = [(block - top).exp() for block in scores]
    total = weights[0].sum(-1, keepdim=True)
    out = weights[0] @ values[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        total = total + weight.sum(-1, keepdim=True)
        out = out + weight @ value
    divisor = total.masked_fill(total == 0, 1.0)
    return out / divisor
