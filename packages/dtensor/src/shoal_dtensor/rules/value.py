"""Reading one Python number: from replicated values, so `item()` of a partial or sharded tensor is the true one."""

from __future__ import annotations

import torch

from .rule import Rule, Table

__all__ = ["VALUE"]

VALUE: Table = {torch.ops.aten._local_scalar_dense.default: Rule(lambda call: ())}
