"""ShardedOptimizer against the plain optimizer, also across layouts.

Covers: module/sharded_optimizer.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sharding_cases import bricks, chunk
from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    ShardedOptimizer,
    ShardedTensor,
    _shard_tensor,
    named_params_with_sharded_tensor,
    shard_parameter,
    zeros,
)
from shoal_shard_api.errors import CheckpointError, UnsupportedOpError

BRICKS = bricks(8, 6, 4)
SPECS = {"rows": chunk(0), "two ranks": chunk(1, (3, 1)), "several": BRICKS}


def model() -> Any:
    torch.manual_seed(3)
    return nn.Linear(6, 8)


def train(module: Any, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        x = torch.linspace(-1, 1, 48).view(8, 6) * (step + 1)
        loss: Any = (module.weight * x).tanh()
        loss = loss.full_tensor().sum() if isinstance(loss, ShardedTensor) else loss.sum()
        (loss + module.bias.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(4)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_it_trains_as_the_plain_optimizer(spec: str, kind: Any) -> None:
    module, plain = model(), model()
    shard_parameter(module, "weight", SPECS[spec])
    optimizer = ShardedOptimizer(dict(named_params_with_sharded_tensor(module)), kind, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(module, optimizer, 3)
    train(plain, kind(plain.parameters(), lr=0.1), 3)
    torch.testing.assert_close(module.weight.detach().full_tensor(), plain.weight.detach())
    torch.testing.assert_close(module.bias, plain.bias)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert "ShardedOptimizer of 2 parameters" in repr(optimizer)


@on_ranks(4)
@pytest.mark.parametrize("there", SPECS)
@pytest.mark.parametrize("here", SPECS)
def test_state_moves_to_another_layout(here: str, there: str) -> None:
    source, target, plain = model(), model(), model()
    shard_parameter(source, "weight", SPECS[here])
    shard_parameter(target, "weight", SPECS[there])
    first = ShardedOptimizer(dict(source.named_parameters()), torch.optim.AdamW, lr=0.1)
    second = ShardedOptimizer(dict(target.named_parameters()), torch.optim.AdamW, lr=0.2)
    train(source, first, 2)
    state = first.state_dict()
    assert isinstance(state["state"]["weight"]["exp_avg"], ShardedTensor)
    assert state["param_groups"][0]["params"] == ["weight", "bias"]
    second.load_state_dict(state)
    target.load_state_dict(source.state_dict())
    assert second.param_groups[0]["lr"] == 0.1
    train(source, first, 1, start=2)
    train(target, second, 1, start=2)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), 3)
    for module in (source, target):
        torch.testing.assert_close(module.weight.detach().full_tensor(), plain.weight.detach())
        torch.testing.assert_close(module.bias, plain.bias)


@on_ranks(4)
def test_parameter_groups() -> None:
    module: Any = nn.ModuleDict({"a": model(), "b": model()})
    shard_parameter(module["a"], "weight", chunk(0))
    optimizer = ShardedOptimizer({"a.weight": module["a"].weight}, torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": dict(module["b"].named_parameters("b")), "lr": 0.3})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    assert [group["params"] for group in optimizer.state_dict()["param_groups"]] == [
        ["a.weight"],
        ["b.weight", "b.bias"],
    ]
    with pytest.raises(ValueError, match=r"\['a.weight'\] are in the optimizer already"):
        optimizer.add_param_group({"params": {"a.weight": module["a"].weight}})


@on_ranks(4)
def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    module = model()
    shard_parameter(module, "weight", chunk(0))
    optimizer = ShardedOptimizer(dict(module.named_parameters()), torch.optim.AdamW, lr=0.1)
    train(module, optimizer, 1)
    good = optimizer.state_dict()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**good, "state": {**good["state"], "other": {}}}, r"unknown parameters \['other'\]"),
        ({**good, "param_groups": []}, "parameter groups differ"),
        (
            {**good, "state": {"weight": {"exp_avg": zeros(chunk(0), 2, 2)}}},
            r"exp_avg of weight has size \(2, 2\)",
        ),
    ]
    before = {name: id(value) for name, value in optimizer.state_dict()["state"]["bias"].items()}
    for state, text in wrong:
        with pytest.raises(CheckpointError, match=text):
            optimizer.load_state_dict(state)
    assert {
        name: id(value) for name, value in optimizer.state_dict()["state"]["bias"].items()
    } == before


@on_ranks(4)
def test_names_of_parameters_and_sharded_attributes() -> None:
    module: Any = nn.ModuleDict({"a": model(), "b": nn.Module()})
    module["b"].table = _shard_tensor(torch.zeros(4, 4), chunk(0))
    module["b"].again = module["a"].weight
    shard_parameter(module["a"], "bias", chunk(0))
    named = dict(named_params_with_sharded_tensor(module, prefix="m"))
    assert list(named) == ["m.a.weight", "m.a.bias", "m.b.table"]
    assert isinstance(named["m.a.bias"], ShardedTensor)
    assert list(dict(named_params_with_sharded_tensor(module, recurse=False))) == []


@on_ranks(4)
def test_a_parameter_that_was_resharded_is_not_stepped_in_its_old_shards() -> None:
    module = model()
    shard_parameter(module, "weight", chunk(0))
    optimizer = ShardedOptimizer(dict(module.named_parameters()), torch.optim.SGD, lr=0.1)
    state = optimizer.state_dict()
    module.weight.reshard(chunk(1))
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(
            UnsupportedOpError, match="resharded in place: construct a new optimizer"
        ):
            call()
    optimizer = ShardedOptimizer(dict(module.named_parameters()), torch.optim.SGD, lr=0.1)
    optimizer.load_state_dict(state)
    train(module, optimizer, 1)
    plain = model()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
    torch.testing.assert_close(module.weight.detach().full_tensor(), plain.weight.detach())
