"""shard_module: parameters, Sharders, tied parameters, outputs.  Covers: module/shard_module.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sharded_modules import MLP, Doubled, megatron
from sharding_cases import chunk, enumerable
from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    ChunkShardingSpec,
    ShardedTensor,
    ShardingPlan,
    _collect_local_shard,
    _reshard_output,
    _shard_tensor,
    shard_module,
)
from shoal_shard_api.errors import UnsupportedOpError


@on_ranks(4)
def test_a_plan_shards_parameters_and_hooks_outputs() -> None:
    model = MLP()
    alone = copy.deepcopy(model)
    shard_module(model, megatron())
    x = torch.randn(8, 16)
    local, rank = model(x), dist.get_rank()
    assert type(local) is torch.Tensor
    torch.testing.assert_close(local, alone(x)[2 * rank : 2 * rank + 2])
    assert {n for n, p in model.named_parameters() if isinstance(p, ShardedTensor)} == {
        "up.weight",
        "up.bias",
        "down.weight",
    }


@on_ranks(4)
def test_a_megatron_mlp_trains_as_on_one_device() -> None:
    model = MLP()
    alone = copy.deepcopy(model)
    shard_module(model, megatron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    rank = dist.get_rank()
    for step in range(5):
        torch.manual_seed(step)
        x, target = torch.randn(8, 16), torch.randn(8, 16)
        rows = slice(2 * rank, 2 * rank + 2)
        ((model(x) - target[rows]) ** 2).sum().backward()
        ((alone(x) - target) ** 2).sum().backward()
        for name, parameter in alone.named_parameters():
            got = model.get_parameter(name).grad
            assert got is not None
            full = got.full_tensor() if isinstance(got, ShardedTensor) else got
            torch.testing.assert_close(full, parameter.grad)
        optimizer.step(), expected.step()
        optimizer.zero_grad(), expected.zero_grad()
    for name, parameter in alone.named_parameters():
        got = model.get_parameter(name).detach()
        full = got.full_tensor() if isinstance(got, ShardedTensor) else got
        torch.testing.assert_close(full, parameter.detach())


@on_ranks(4)
def test_the_squeezed_dim_is_that_of_the_sharding_alone() -> None:
    class Give(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    give = _collect_local_shard(Give())
    full = torch.arange(20.0).view(4, 5)
    assert give(_shard_tensor(full, chunk(0))).shape == (5,)
    assert give(_shard_tensor(full, chunk(1))).shape == (
        (4, 2) if dist.get_rank() < 2 else (4,) if dist.get_rank() == 2 else (4, 0)
    )
    assert give(_shard_tensor(torch.zeros(8, 1), chunk(0))).shape == (2, 1)
    assert give(full) is full
    pair = [full]
    assert give(pair) is pair
    cells = enumerable(([0, 0], [1, 5], 0), ([1, 0], [1, 5], 1), ([2, 0], [2, 5], 2))
    assert (
        give(_shard_tensor(full, cells)).shape
        == {0: (1, 5), 1: (1, 5), 2: (2, 5), 3: (0,)}[dist.get_rank()]
    )
    several = enumerable(([0, 0], [2, 5], 0), ([2, 0], [2, 5], 0))
    if dist.get_rank() == 0:
        with pytest.raises(UnsupportedOpError, match="rank 0 has 2 shards"):
            give(_shard_tensor_alone(full, several))


def _shard_tensor_alone(full: torch.Tensor, spec: Any) -> ShardedTensor:
    """Two shards on this rank, without the others' help."""
    tensor = ShardedTensor(spec, *full.shape)
    for local, new in zip(tensor._local_tensors, full.chunk(2), strict=True):
        local.copy_(new)
    return tensor


@on_ranks(4)
def test_reshard_output_leaves_other_outputs_alone() -> None:
    identity = _reshard_output(nn.Identity(), chunk(1))
    tensor = _shard_tensor(torch.arange(20.0).view(4, 5), chunk(0))
    assert identity(tensor).sharding_spec() == chunk(1)
    assert tensor.sharding_spec() == chunk(0)
    plain = torch.zeros(2)
    assert identity(plain) is plain


@on_ranks(4)
def test_a_sharder_replaces_its_module() -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 16))
    alone = copy.deepcopy(model)
    plan = ShardingPlan(
        plan={"0": Doubled(), "2.weight": chunk(0)},
        output_plan={"0.inner": chunk(1)},
        return_local_tensor=[],
    )
    shard_module(model, plan)
    assert type(model[0]).__name__ == "Double"
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x).full_tensor(), alone[2](torch.relu(alone[0](x) * 2)))


@on_ranks(4)
def test_a_module_that_occurs_twice_is_replaced_twice() -> None:
    shared = nn.Linear(16, 16, bias=False)
    model: Any = nn.Sequential(shared, nn.Sequential(shared))
    shard_module(model, ShardingPlan(plan={"1.0": Doubled()}))
    assert model[0] is model[1][0]
    assert type(model[0]).__name__ == "Double"


@on_ranks(4)
@pytest.mark.parametrize("both", [False, True], ids=["one name", "both names"])
def test_tied_parameters_stay_tied(both: bool) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(12, 8), "head": nn.Linear(8, 12, bias=False)})
    model["head"].weight = model["embed"].weight
    plan = {"embed.weight": chunk(0)} | ({"head.weight": chunk(0)} if both else {})
    shard_module(model, ShardingPlan(plan=plan))
    assert isinstance(model["head"].weight, ShardedTensor)
    assert model["head"].weight is model["embed"].weight
    with torch.no_grad():
        model["head"].weight.fill_(1)
    assert torch.equal(model["embed"].weight.detach(), torch.ones(12, 8))


@on_ranks(4)
def test_modules_on_sub_groups() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    pair = ((0, 1), (2, 3))[mine]
    model = MLP()
    alone = copy.deepcopy(model)
    specs: dict[str, ChunkShardingSpec] = {
        "up.weight": chunk(0, pair),
        "up.bias": chunk(0, pair),
        "down.weight": chunk(1, pair),
    }
    shard_module(model, ShardingPlan(plan=specs), src_rank=1, process_group=groups[mine])
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x).full_tensor(), alone(x))
