"""Every operator that torch's DTensor has a strategy for runs on shards: by a rule or by others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._prims  # registers operators
import torch.distributed.tensor._ops  # registers strategies

from shoal_dtensor.dispatch.propagate import _composite_of
from shoal_dtensor.rules.all_rules import TABLE

pytestmark = pytest.mark.parity


def operators_of_torch() -> set[Any]:
    dispatcher: Any = torch.distributed.tensor.DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    # versions differ in the tables that they have
    return {op for table in tables for op in getattr(propagator, table, ())}


def test_every_operator_with_a_strategy_of_torch_runs_on_shards() -> None:
    operators = operators_of_torch()
    assert len(operators) > 400
    lacking = sorted(str(op) for op in operators if op not in TABLE and _composite_of(op) is None)
    assert not lacking
