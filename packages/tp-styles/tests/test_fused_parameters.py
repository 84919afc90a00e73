"""Covers: apply/apply.py: fused parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import Shard, distribute_tensor
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    PackedColwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)


@on_ranks(4)
def test_gate_and_up_in_one_matrix_train_load_and_copy() -> None:
    axis = all_ranks()
    single: Any = nn.Linear(8, 24).double()
    module: Any = parallelize_module(
        copy.deepcopy(single), axis, PackedColwiseParallel(blocks={"gate": 12, "up": 12})
    )
    names = [name for name, _ in module.named_parameters()]
    assert names == ["weight", "bias"]
    x = torch.randn(3, 8, dtype=torch.double)
    rows = torch.cat([half.chunk(4)[axis.get_local_rank()] for half in torch.arange(24).chunk(2)])
    torch.testing.assert_close(module(x), single(x)[:, rows])
    for model in (single, module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(module(x), single(x)[:, rows])
    torch.testing.assert_close(copy.deepcopy(module)(x), single(x)[:, rows])
    other = nn.Linear(8, 24).double()
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(module(x), other(x)[:, rows])
    entries = {
        name: distribute_tensor(value, axis, [Shard(0)])
        for name, value in single.state_dict().items()
    }
    assert module.load_state_dict(entries, strict=True).missing_keys == []
    torch.testing.assert_close(module(x), single(x)[:, rows])
    with pytest.raises(LayoutError, match="have 20 features, but the module has 24"):
        parallelize_module(nn.Linear(8, 24), axis, PackedColwiseParallel(blocks={"a": 10, "b": 10}))
    with pytest.raises(LayoutError, match="3 heads cannot be sharded over 4 ranks"):
        parallelize_module(nn.Linear(8, 24), axis, ColwiseParallel().heads(3, 8))
    with pytest.raises(UnsupportedModuleError, match="only Linear"):
        parallelize_module(nn.Embedding(8, 24), axis, PackedColwiseParallel(blocks=2))
