"""Losses and sampling on logits whose vocabulary is sharded; no rank ever holds full logits.

May import: _torch.
"""

from .functional import (
    cross_entropy,
    kl_div,
    load_balance,
    log_prob,
    log_softmax,
    log_sum_exp,
    nll_loss,
)
from .linear_cross_entropy import linear_cross_entropy

__all__ = [
    "cross_entropy",
    "kl_div",
    "linear_cross_entropy",
    "load_balance",
    "log_prob",
    "log_softmax",
    "log_sum_exp",
    "nll_loss",
]
