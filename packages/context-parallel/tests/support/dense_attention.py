"""Attention on one device with its mask as a tensor, the reference for context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Window = tuple[int | None, int | None]


def dense_mask(length: int, causal: bool, window: Window, ids: Tensor | None) -> Tensor:
    """(rows or 1, 1, length, length): True where a query reads a key."""
    behind = torch.arange(length).unsqueeze(-1) - torch.arange(length)
    mask = torch.ones(length, length, dtype=torch.bool)
    left, right = window
    if causal:
        mask &= behind >= 0
    if left is not None:
        mask &= behind <= left
    if right is not None:
        mask &= behind >= -right
    mask = mask.unsqueeze(0)
    if ids is not None:
        rows = ids.view(-1, length)
        mask = mask & (rows.unsqueeze(-1) == rows.unsqueeze(-2))
    return mask.unsqueeze(1)


@dataclass(frozen=True)
class Sample:
    """Queries, keys and values of a whole sequence, and attention to them on one device."""

    tensors: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    seed: Tensor
    grads: tuple[Tensor, ...]


def sample(  # sizes
    length: int,
    mask: Tensor,
    *,
    heads: int = 4,
    shared: int = 2,
    width: int = 8,
    value_width: int = 8,
    dtype: torch.dtype = torch.float64,
) -> Sample:
    """Random tensors of two batch rows, equal on all ranks, their attention and its gradients."""
    generator = torch.Generator().manual_seed(length)
    sizes = (heads, width), (shared, width), (shared, value_width)
    tensors = [
        torch.randn(2, h, length, w, dtype=dtype, generator=generator).requires_grad_()
        for h, w in sizes
    ]
    q, k, v = tensors
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    seed = torch.randn(out.shape, dtype=dtype, generator=generator)
    grads = torch.autograd.grad(out, tensors, seed)
    return Sample((q.detach(), k.detach(), v.detach()), out.detach(), seed, grads)
