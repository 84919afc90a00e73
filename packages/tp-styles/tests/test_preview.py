"""Previews against counted collectives.  Covers: plan/preview.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import DTensor, Shard
from shoal_mesh import CommDebugMode, abstract_mesh, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ChannelParallel,
    ColwiseParallel,
    Heads,
    PackedColwiseParallel,
    RowwiseParallel,
    parallelize_module,
    preview,
)
from small_models import MLP, ModelArgs, Transformer, transformer_plan
from toy_modules import Conv1D

OPS = {
    "all_reduce": torch.ops._c10d_functional.all_reduce,
    "all_gather": torch.ops._c10d_functional.all_gather_into_tensor,
    "reduce_scatter": torch.ops._c10d_functional.reduce_scatter_tensor,
}


@on_ranks(4)
@pytest.mark.parametrize("sequence", [False, True])
def test_previewed_collectives_are_those_that_run(sequence: bool) -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = Transformer(ModelArgs(dropout_p=0.0, n_layers=2))
    tokens = torch.randint(8, (2, 8))
    plan = transformer_plan(sequence)
    costs = preview(model, plan, mesh, tokens)
    assert all(type(param) is nn.Parameter and not param.is_meta for param in model.parameters())
    parallelize_module(model, mesh, plan)
    with CommDebugMode() as mode:
        out = model(tokens)
    assert {op: costs.count(op)[0] for op in OPS} == {
        op: mode.get_comm_counts()[key] for op, key in OPS.items()
    }
    with CommDebugMode() as mode:
        out.sum().backward()
    assert {op: costs.count(op)[1] for op in OPS} == {
        op: mode.get_comm_counts()[key] for op, key in OPS.items()
    }
    held = {id(p): p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()}
    assert costs.parameter_bytes == sum(p.numel() * p.element_size() for p in held.values())


def test_a_preview_without_ranks() -> None:
    mesh = abstract_mesh((8,), ("tp",))
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 8))
    plan: dict[str, Any] = {
        "0": PackedColwiseParallel(blocks={"q": Heads(8, 8), "k": Heads(2, 8), "v": Heads(2, 8)}),
        "1": ColwiseParallel(),
    }
    with torch.device("meta"):
        x = torch.empty(4, 64, requires_grad=True)
    costs = preview(copy.deepcopy(model), plan, mesh, x)
    packed = costs.rows[0]
    assert packed.parameter_bytes == 3 * 8 * 65 * 4  # one head each of q, k and v
    # two activations; weight and bias of the replicated k and v
    assert costs.count("all_reduce") == (0, 6)
    text = str(costs)
    assert "all_reduce 1.0 KiB" in text and "ms of communication" in text
    assert preview(MLP(), MLP.plan, abstract_mesh((1,)), torch.zeros(2, 10)).seconds == 0


@on_ranks(4)
def test_rows_with_a_sharded_output_sum_the_gradient_of_their_bias() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Sequential(nn.Conv1d(6, 8, 1), nn.GroupNorm(4, 8), nn.Conv1d(8, 6, 1))
    plan: dict[str, Any] = {
        "0": ColwiseParallel(),
        "1": ChannelParallel(),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    x = torch.randn(4, 6, 6, requires_grad=True)
    costs = preview(model, plan, mesh, x)
    parallelize_module(model, mesh, plan)
    with CommDebugMode() as mode:
        out = model(x)
    assert {op: costs.count(op)[0] for op in OPS} == {
        op: mode.get_comm_counts()[key] for op, key in OPS.items()
    }
    with CommDebugMode() as mode:
        out.sum().backward()
    assert {op: costs.count(op)[1] for op in OPS} == {
        op: mode.get_comm_counts()[key] for op, key in OPS.items()
    }


def test_bytes_of_a_transposed_fused_weight() -> None:
    costs = preview(
        Conv1D(8, 24, bias=False),
        PackedColwiseParallel(blocks=3),
        abstract_mesh((4,)),
        torch.zeros(2, 8),
    )
    assert costs.parameter_bytes == 8 * 6 * 4
