"""Weights in torch's own DTensors and ShardedTensors, as sources.

Covers: manifest/local_boxes.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal_mesh.testing import on_ranks
from shoal_transfer import ManifestError, WeightTransfer, describe, plan_transfer

pytestmark = pytest.mark.parity


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))


def assert_arrives(model: Any) -> None:
    """The weights arrive in a plain model on every rank."""
    target = build()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    transfer = WeightTransfer(
        plan_transfer(describe(model), describe(target)), source=model, target=target
    )
    transfer.run(1)
    for name, value in build().state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name


@on_ranks(4, timeout=200)
def test_fully_shard_over_tensor_parallelism_of_torch() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = build()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    assert_arrives(model)
    assert_arrives(dict(model.state_dict()))


@on_ranks(2, timeout=200)
def test_pending_sums_of_torch_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    pending = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ManifestError, match="redistribute partial tensors first"):
        describe({"w": pending})


@on_ranks(2, timeout=200)
def test_sharded_tensors_of_torch() -> None:
    sharded_tensor: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
    rank = dist.get_rank()
    rows = torch.arange(8.0).reshape(4, 2)[2 * rank : 2 * rank + 2].clone()
    metadata = sharded_tensor.ShardMetadata([2 * rank, 0], [2, 2], f"rank:{rank}/cpu")
    shard = sharded_tensor.Shard(rows, metadata)
    table = sharded_tensor.init_from_local_shards([shard], [4, 2])
    source: Any = {"table": table}
    target = {"table": torch.zeros(4, 2)}
    plan = plan_transfer(describe(source), describe(target))
    WeightTransfer(plan, source=source, target=target).run(1)
    assert torch.equal(target["table"], torch.arange(8.0).reshape(4, 2))
