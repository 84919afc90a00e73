"""Modules that several test files shard, and checkpoints of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sharding_cases import chunk
from shoal_shard_api import ShardedOptimizer, Sharder, ShardingPlan, _shard_tensor, shard_parameter
from shoal_shard_api.checkpoint import save

FULL = torch.arange(60.0).view(10, 6)


class MLP(nn.Module):
    """Linear 16-8, ReLU, Linear 8-16, with parameters from seed 5."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(16, 8)
        self.down = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


class Doubled(Sharder):
    """Replaces a Linear by one that holds a sharded weight and doubles its result."""

    def shard(self, module: Any) -> nn.Module:
        class Double(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(_shard_tensor(module.weight.detach(), chunk(0)))
                self.inner = nn.Identity()

            def forward(self, x: torch.Tensor) -> Any:
                return self.inner(torch.nn.functional.linear(x, self.weight) * 2)

        return Double()


def megatron(output: Any = None) -> ShardingPlan:
    """Columns, then rows of an `MLP`, and batches of the output on each rank."""
    return ShardingPlan(
        plan={"up.weight": chunk(0), "up.bias": chunk(0), "down.weight": chunk(1)},
        output_plan={"": output or chunk(0)},
        return_local_tensor=[""],
    )


def snapshot(module: nn.Module) -> list[Any]:
    """All that sharding could change: objects, not copies."""
    return [
        (
            path,
            id(owner),
            [(n, id(p)) for n, p in owner._parameters.items()],
            len(owner._forward_hooks),
        )
        for path, owner in module.named_modules()
    ]


def model(spec: Any, width: int = 10) -> Any:
    """A Linear whose weight, sharded so, counts up; `FULL` by default."""
    torch.manual_seed(0)
    module = nn.Linear(6, width)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0 * width).view(width, 6))
    shard_parameter(module, "weight", spec)
    return module


def save_model(where: str, spec: Any) -> None:
    """A checkpoint of such a model with weight `FULL`, and of its AdamW after a step."""
    module = model(spec)
    optimizer = ShardedOptimizer(dict(module.named_parameters()), torch.optim.AdamW)
    (module.weight * 2).full_tensor().sum().backward()
    optimizer.step()
    with torch.no_grad():
        module.weight.copy_(FULL)
    save(
        {"model": module.state_dict(), "optimizer": optimizer.state_dict()["state"], "step": 7},
        where,
    )
