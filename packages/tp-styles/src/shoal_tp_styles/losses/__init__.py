"""Losses and sampling on logits whose vocabulary is sharded; no rank ever holds full logits."""

from .functional import cross_entropy, kl_div, log_prob, log_softmax, log_sum_exp, nll_loss
from .load_balance import load_balance

__all__ = ["cross_entropy", "kl_div", "load_balance", "log_prob", "log_softmax", "log_sum_exp", "nll_loss"]
