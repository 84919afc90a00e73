"""Operators that read values out: one Python number, or whether two tensors are equal.

A number is read from replicated values, so `item()` of a partial or sharded tensor is the true one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_mesh import all_reduce

from .rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table

__all__ = ["VALUE"]

aten = torch.ops.aten


def _any_dim(call: OpCall) -> Sequence[Row]:
    first, second = call.tensors
    if first.shape != second.shape:
        return ()
    return [Row((S(dim), S(dim)), (), traffic=1) for dim in range(first.ndim)]


def _equal_everywhere(decided: LocalCall) -> LocalFunction | None:
    """Every rank compares its own parts; they are equal if all say so."""
    spec = decided.inputs[0]
    axes = tuple(sorted(axis for cut in spec.cuts for axis in cut.axes))
    if not axes:
        return None

    def equal(first: Tensor, second: Tensor) -> bool:
        mine = torch.tensor([int(torch.equal(first, second))], device=first.device)
        return bool(all_reduce(mine, spec.mesh.comm(axes), "min").item())

    return equal


VALUE: Table = {
    aten._local_scalar_dense.default: Rule(lambda call: ()),
    aten.equal.default: Rule(_any_dim, _equal_everywhere),
}
