"""Adapters that are merged on the shards of each rank, before they are sent.

Covers: running/weight_transfer.py, manifest/describe.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import full_tensor
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LoRA,
    RowwiseParallel,
    adapter_parameters,
    merge_adapters,
    parallelize_module,
)
from shoal_transfer import WeightTransfer, describe, plan_transfer

RANK = 3
SCALE = 2.0


def merged(model: Any) -> dict[str, Tensor]:
    """The weights with their adapters, each on its own shards; the model keeps both."""
    state = {}
    for name, value in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        layer = model.get_submodule(owner)
        if kind == "weight":
            state[name] = torch.addmm(value, layer.lora_B, layer.lora_A, alpha=SCALE).detach()
        elif kind == "bias":
            state[name] = value
    return state


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("keeps_adapters", [False, True])
def test_a_server_of_merged_adapters_after_three_syncs(keeps_adapters: bool) -> None:
    torch.manual_seed(0)
    start: Any = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()
    styles = {
        "0": LoRA(base=ColwiseParallel(), rank=RANK, alpha=RANK * SCALE),
        "2": LoRA(base=RowwiseParallel(), rank=RANK, alpha=RANK * SCALE),
    }
    trainer: Any = parallelize_module(copy.deepcopy(start), all_ranks(), styles)
    server = copy.deepcopy(start)
    source = merged(trainer) if keeps_adapters else trainer
    plan = plan_transfer(describe(source), describe(server))
    transfer = WeightTransfer(plan, source=source, target=server, deltas=True)
    optimizer = torch.optim.SGD([one for _, one in adapter_parameters(trainer)], lr=0.1)
    inputs = torch.randn(4, 8, dtype=torch.double)
    for version in (1, 2, 3):
        trainer(inputs).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = trainer(inputs).detach()
        if keeps_adapters:
            for name, value in merged(trainer).items():
                source[name].copy_(value)
        else:
            merge_adapters(trainer)
        transfer.run(version)
        torch.testing.assert_close(server(inputs).detach(), expected)
    assert bool(full_tensor(trainer[0].lora_B).any()) == keeps_adapters
