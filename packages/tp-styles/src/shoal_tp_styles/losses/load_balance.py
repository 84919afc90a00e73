"""The load-balance loss of a router, over the tokens of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_dtensor.errors import LayoutError
from shoal_mesh import all_reduce, differentiable
from shoal_mesh.internal import Along


def load_balance(probabilities: Tensor, chosen: Tensor, along: Along | None = None) -> Tensor:
    """How much a router prefers the experts that it fills, over the tokens of all ranks: 1 where it is even.

    `experts * sum over experts of (share of choices * mean probability)`, as in the Switch Transformer; shares and
    means are those of all tokens, which the mean of the ranks' own losses is not. Every rank gets the same value.
    Gradients are those of the sum of the ranks' values: right where data parallelism averages them over the same ranks;
    where they are summed, divide the loss by the number of ranks.

    Args:
        probabilities: `(*tokens, experts)` of this rank's tokens, after the softmax.
        chosen: `(*tokens, choices)` the experts that each token goes to.
        along: a communicator, or (mesh, axes), whose ranks have tokens of their own; None: this rank has all tokens.

    Raises:
        LayoutError: if the two are not of the same tokens.

    Example:
        >>> load_balance(torch.full((4, 2), 0.5), torch.tensor([[0], [1], [0], [1]]))
        tensor(1.)
    """
    if probabilities.shape[:-1] != chosen.shape[:-1]:
        raise LayoutError(
            f"load_balance: expected probabilities (*tokens, experts) and choices (*tokens, choices), got "
            f"{tuple(probabilities.shape)} and {tuple(chosen.shape)}"
        )
    experts = probabilities.shape[-1]
    rows = probabilities.reshape(-1, experts)
    shares = torch.zeros(experts + 1, dtype=rows.dtype, device=rows.device)
    shares[:experts].index_add_(0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1), dtype=rows.dtype))
    shares[experts] = len(rows)
    total = rows.sum(0)
    if along is not None:
        shares, total = all_reduce(shares, along), differentiable.all_reduce(total, along)
    tokens = shares[experts].clamp(min=1)
    return experts * (shares[:experts] / (tokens * max(chosen.shape[-1], 1)) * (total / tokens)).sum()
