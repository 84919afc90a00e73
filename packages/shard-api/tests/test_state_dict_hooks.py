"""State dicts of modules with ShardedTensors.  Covers: module/state_dict_hooks.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from sharding_cases import chunk, enumerable
from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    ShardedTensor,
    _shard_tensor,
    pre_load_state_dict_hook,
    shard_parameter,
    state_dict_hook,
    zeros,
)

FULL = torch.arange(24.0).view(4, 6)


def holder(value: Any) -> nn.Module:
    """A module with a child that holds ``value`` as a plain attribute."""
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Module())
    module[1].table = value
    module[1].name = "no tensor"
    module._register_state_dict_hook(state_dict_hook)
    module._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)
    return nn.ModuleDict({"outer": module})


@on_ranks(4)
def test_attributes_travel_with_the_hooks() -> None:
    source = holder(_shard_tensor(FULL, chunk(0)))
    state = source.state_dict()
    assert "outer.1.table" in state
    target = holder(zeros(chunk(1), 4, 6))
    target.load_state_dict(state)
    table: Any = target.get_submodule("outer.1").table
    assert table is source.get_submodule("outer.1").table
    target = holder(None)
    target.load_state_dict(state)
    assert isinstance(target.get_submodule("outer.1").table, ShardedTensor)


@on_ranks(4)
def test_a_strict_load_reports_what_does_not_fit() -> None:
    state = holder(_shard_tensor(FULL, chunk(0))).state_dict()
    with pytest.raises(
        RuntimeError, match=r"size mismatch for outer.1.table: \(4, 6\) given, \(2, 6\) present"
    ):
        holder(zeros(chunk(0), 2, 6)).load_state_dict(state)
    del state["outer.1.table"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"outer.1.table"'):
        holder(zeros(chunk(0), 4, 6)).load_state_dict(state)
    holder(zeros(chunk(0), 4, 6)).load_state_dict(state, strict=False)


@on_ranks(4)
def test_parameters_need_no_hooks_and_may_be_sharded_otherwise() -> None:
    bricks = enumerable(([0, 0], [2, 3], 3), ([0, 3], [4, 3], 1), ([2, 0], [2, 3], 3))
    source, target = nn.Linear(6, 4), nn.Linear(6, 4)
    shard_parameter(source, "weight", chunk(0))
    shard_parameter(target, "weight", bricks)
    expected = copy.deepcopy(source.state_dict())
    target.load_state_dict(source.state_dict())
    weight: Any = target.weight
    assert weight.sharding_spec() == bricks
    assert torch.equal(target.weight.detach(), expected["weight"])
    plain = nn.Linear(6, 4)
    target.load_state_dict(plain.state_dict())
    assert torch.equal(target.weight.detach(), plain.weight.detach())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        target.load_state_dict(nn.Linear(5, 4).state_dict())


@on_ranks(4)
def test_a_module_changes_dtype_with_its_shards_and_gradients() -> None:
    module: Any = nn.Linear(6, 4)
    plain = copy.deepcopy(module)
    shard_parameter(module, "weight", chunk(0))
    (module(torch.ones(2, 6)) * 1.0).sum().backward()
    module.double()
    assert isinstance(module.weight, nn.Parameter)
    weight: Any = module.weight
    assert weight.dtype == weight.local_tensor().dtype == weight.grad.dtype == torch.float64
    assert torch.equal(module.weight.detach(), plain.weight.detach().double())
    module.requires_grad_(False)
    assert not module.weight.requires_grad
    module.zero_grad()
    assert module.weight.grad is None
