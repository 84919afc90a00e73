"""Choosing tokens from logits whose vocabulary is cut over ranks: the same ones on every rank and for every cut."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_mesh import all_gather, all_reduce, all_reduce_

from .losses import log_sum_exp
from .vocab import Vocab, local_logits

__all__ = ["argmax", "sample"]


def argmax(logits: Tensor, *, dim: int = -1, vocab: Vocab | None = None) -> Tensor:
    """Index of the largest logit per row; the smallest index among equals, on all ranks."""
    x, cut = local_logits(logits.detach(), vocab, dim)
    if cut.own:
        best, index = x.max(-1)
    else:
        best, index = x.new_full(x.shape[:-1], -torch.inf), torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    values = all_gather(best.unsqueeze(0), cut.comm, 0)
    indices = all_gather((index + min(cut.first, cut.total - 1)).unsqueeze(0), cut.comm, 0)
    top = values.amax(0)
    return indices.masked_fill(values != top, cut.total).amin(0)


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    dim: int = -1,
    vocab: Vocab | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token per row, drawn from softmax(logits / temperature): the same on all ranks and for any cut.

    A uniform number per row (rank 0's) falls into the cumulative probabilities, which each rank knows for its own
    classes once it knows the mass before them.
    """
    if temperature <= 0:
        return argmax(logits, dim=dim, vocab=vocab)
    x, cut = local_logits(logits.detach(), vocab, dim)
    x = x.double() / temperature
    mass = (x - log_sum_exp(x, cut).unsqueeze(-1)).exp_().cumsum(-1)
    rows = x.shape[:-1]
    own = mass[..., -1] if cut.own else x.new_zeros(rows)
    ends = all_gather(own.unsqueeze(0), cut.comm, 0).cumsum(0)
    before = ends[cut.comm.rank - 1] if cut.comm.rank else torch.zeros_like(own)
    point = torch.rand(rows, dtype=torch.double, device=x.device, generator=generator)
    if cut.comm.rank:
        point.zero_()
    all_reduce_(point, cut.comm)
    point = (point * ends[-1]).unsqueeze(-1)
    # How many cumulative masses lie at or below the point: over all ranks, that is the index.
    below = ((mass + before.unsqueeze(-1)) <= point).sum(-1)
    return all_reduce(below, cut.comm).clamp_(max=cut.total - 1)
