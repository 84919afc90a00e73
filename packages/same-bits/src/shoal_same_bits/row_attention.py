"""`attention_in_rows`: attention whose bits do not depend on how many queries come at once or how many keys follow.

Kernels see one sample, `rows` queries and `KEYS` keys, however many there are: what is missing is
filled up and masked. Blocks of keys begin at the first key, so what a query may see is in the same
blocks in every call; later blocks add zeros, which change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from shoal_context_parallel import UnsupportedAttentionError
from shoal_dtensor import DTensor
from shoal_dtensor.internal import unwatched_functions

# of a block: with it blocks of any number of features begin at multiples of 64 bytes
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
    """(B, ..., Q, D), (B, ..., K, D), (B, ..., K, V) -> (B, ..., Q, V), zeros for a query that sees no key."""
    if dropout_p or any(isinstance(x, DTensor) for x in (query, key, value, attn_mask)):
        raise UnsupportedAttentionError(
            f"invariant_arithmetic(rows={rows}): attention by rows takes plain tensors of this "
            "rank's heads, without "
            f"dropout; got dropout_p={dropout_p} and {type(query).__name__}. Leave out rows to "
            "train, and use "
            "use_local_output=True in the plan"
        )
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    queries = query.shape[-2]
    keys = key.shape[-2]
    shape = (*query.shape[:-1], value.shape[-1])
    if not query.numel() or not key.numel():
        return query.new_zeros(shape)
    with unwatched_functions():
        mask = _mask(query, keys, attn_mask, is_causal)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        dtype = torch.float32 if query.dtype.itemsize < 4 else query.dtype
        wide = (
            x.to(dtype).reshape(len(query), -1, *x.shape[-2:])
            for x in (query * factor, key, value, mask)
        )
        samples = [
            torch.cat(
                [
                    *_outputs(
                        _blocks(q, rows), _blocks(k, KEYS), _blocks(v, KEYS), _allowed(m, rows)
                    )
                ],
                1,
            )
            for q, k, v, m in zip(*wide, strict=True)
        ]
        return torch.stack(samples)[:, :, :queries].reshape(shape).to(query.dtype)


def _mask(query: Tensor, keys: int, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """What to add to scores, for every head or for one that stands for all: (B, ..., Q, K)."""
    queries = query.shape[-2]
    dtype = torch.float32 if query.dtype.itemsize < 4 else query.dtype
    if attn_mask is None:
        mask = query.new_zeros(queries, keys, dtype=dtype)
        if is_causal:
            mask.masked_fill_(query.new_ones(queries, keys, dtype=torch.bool).triu(1), -torch.inf)
    elif attn_mask.dtype == torch.bool:
        mask = query.new_zeros(attn_mask.shape, dtype=dtype).masked_fill_(~attn_mask, -torch.inf)
    else:
        mask = attn_mask.to(dtype)
    heads = mask.shape[1:-2] if mask.ndim == query.ndim else (1,) * (query.ndim - 3)
    return mask.expand(query.shape[0], *heads, queries, keys)


def _blocks(x: Tensor, size: int) -> list[Tensor]:
    """(H, N, D) -> blocks (H, size, D) in memory of their own, the last filled up with zeros."""
    padded = functional.pad(x, (0, 0, 0, -x.shape[1] % size))
    return [
        block.clone(memory_format=torch.contiguous_format) for block in torch.split(padded, size, 1)
    ]


def _allowed(mask: Tensor, rows: int) -> list[list[Tensor]]:
    """(H, Q, K) -> for every block of queries, those of keys; no query sees a key that fills up."""
    filled = functional.pad(mask, (0, -mask.shape[2] % KEYS), value=-torch.inf)
    filled = functional.pad(filled, (0, 0, 0, -mask.shape[1] % rows))
    return [
        [part.contiguous() for part in torch.split(block, KEYS, 2)]
        for block in torch.split(filled, rows, 1)
    ]


def _outputs(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], masks: list[list[Tensor]]
) -> Iterator[Tensor]:
    """Of every block of queries, (H, rows, V)."""
    for block, of_block in zip(q, masks, strict=True):
        scores = [block @ keys.mT + mask for keys, mask in zip(k, of_block, strict=True)]
        top = torch.stack([each.amax(-1, keepdim=True) for each in scores]).amax(0)
        top = top.masked_fill(top == -torch.inf, 0.0)
        weights = [(each - top).exp() for each in scores]
        total = weights[0].sum(-1, keepdim=True)
        out = weights[0] @ v[0]
        for weight, values in zip(weights[1:], v[1:], strict=True):
            total, out = total + weight.sum(-1, keepdim=True), out + weight @ values
        yield out / total.masked_fill(total == 0, 1.0)
