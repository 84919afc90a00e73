"""Covers: styles/lora.py, modules/composed_linear.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LoRA,
    ParallelStyle,
    RowwiseParallel,
    adapter_parameters,
    merge_adapters,
    parallelize_module,
)
from tp_checks import naming

PLANS: dict[str, dict[str, ParallelStyle]] = {
    "multiples of 4": {
        "0": LoRA(base=ColwiseParallel().aligned(4), rank=3),
        "1": LoRA(base=RowwiseParallel().aligned(4), rank=3),
    },
    "5 heads of 2": {
        "0": ColwiseParallel().heads(5, 2),
        "1": LoRA(base=RowwiseParallel().heads(5, 2), rank=3),
    },
}


@on_ranks(4)
@pytest.mark.parametrize("kind", PLANS)
def test_adapters_have_the_shards_of_their_weights(kind: str) -> None:
    torch.manual_seed(1)
    start: Any = nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 8)).double()
    module: Any = parallelize_module(copy.deepcopy(start), all_ranks(), PLANS[kind])
    adapters: dict[str, Any] = dict(adapter_parameters(module))
    with torch.no_grad():
        for name, param in adapters.items():
            if name.endswith("B"):
                param.add_(0.3)
    full = {name: param.detach().full_tensor().requires_grad_() for name, param in adapters.items()}
    x = torch.randn(4, 8, dtype=torch.double)
    expected: Any = x
    for number, layer in enumerate(start):
        out = layer(expected)
        if f"{number}.lora_A" in full:
            low = expected @ full[f"{number}.lora_A"].T
            out = out + 16.0 / 3 * low @ full[f"{number}.lora_B"].T
        expected = out
    got = module(x)
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    for name, param in adapters.items():
        torch.testing.assert_close(param.grad.full_tensor(), full[name].grad, msg=naming(name))


@on_ranks(4)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("base", [False, True])
def test_adapters(sequence: bool, base: bool) -> None:
    axis = all_ranks()
    start: Any = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()
    arriving = Shard(0) if sequence else Replicate()
    plan = {
        "0": LoRA(base=ColwiseParallel(input_layouts=arriving), rank=3, alpha=6.0, train_base=base),
        "2": LoRA(
            base=RowwiseParallel(output_layouts=arriving), rank=3, alpha=6.0, train_base=base
        ),
    }
    torch.manual_seed(1)
    module: Any = parallelize_module(copy.deepcopy(start), axis, plan)
    adapters: dict[str, Any] = dict(adapter_parameters(module))
    assert sorted(adapters) == ["0.lora_A", "0.lora_B", "2.lora_A", "2.lora_B"]
    trained = dict(module.named_parameters()) if base else adapters
    assert [name for name, param in module.named_parameters() if param.requires_grad] == list(
        trained
    )
    with torch.no_grad():
        for name, param in adapters.items():
            if name.endswith("B"):
                param.add_(0.3)
    full = {name: param.detach().full_tensor().requires_grad_() for name, param in adapters.items()}
    rows = torch.randn(4, 8, dtype=torch.double)
    x = rows.clone().requires_grad_()
    h = functional.gelu(start[0](x) + 2 * x @ full["0.lora_A"].T @ full["0.lora_B"].T)
    expected = start[2](h) + 2 * h @ full["2.lora_A"].T @ full["2.lora_B"].T
    rank = axis.get_local_rank()
    y = (rows[rank : rank + 1] if sequence else rows).clone().requires_grad_()
    got = module(y)
    torch.testing.assert_close(got, expected[rank : rank + 1] if sequence else expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(y.grad, x.grad[rank : rank + 1] if sequence else x.grad)
    for name, param in adapters.items():
        assert isinstance(param.grad, DTensor)
        torch.testing.assert_close(param.grad.full_tensor(), full[name].grad, msg=naming(name))
    for name, param in start.named_parameters() if base else ():
        torch.testing.assert_close(trained[name].grad.full_tensor(), param.grad, msg=naming(name))
    with CommDebugMode() as counted:
        merge_adapters(module)
    assert counted.get_total_counts() == 0
    torch.testing.assert_close(module(y), got)
