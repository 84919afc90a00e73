"""ShardedTensor to DTensor and back.  Covers: ops/via_dtensor.py."""

from __future__ import annotations

import pytest
import torch

from sharding_cases import BRICKS, SPECS, chunk, full_of
from shoal_dtensor import Replicate, Shard, distribute_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import observed, on_ranks
from shoal_shard_api import NotExpressibleError, ShardedTensor, _shard_tensor

FULL = torch.linspace(-2, 2, 48).reshape(8, 6)


@on_ranks(4)
@pytest.mark.parametrize("spec", SPECS)
def test_conversion_shares_the_shards_both_ways(spec: str) -> None:
    tensor = _shard_tensor(FULL, SPECS[spec])
    with observed() as events:
        dtensor = tensor.to_dtensor()
        back = ShardedTensor.from_dtensor(dtensor)
    assert [event.op for event in events] == []
    assert torch.equal(dtensor.full_tensor(), FULL)
    assert {b: r for r, b in back._layout} == {b: r for r, b in tensor._layout}
    if back.local_shards() and back._local_tensors[0].numel():
        assert back.local_tensor().data_ptr() == tensor.local_tensor().data_ptr()
    dtensor.mul_(2)
    assert torch.equal(full_of(tensor), FULL * 2)


@on_ranks(4)
def test_conversion_is_differentiable() -> None:
    tensor = _shard_tensor(FULL.clone().requires_grad_(), chunk(1))
    ShardedTensor.from_dtensor(tensor.to_dtensor() * 2).to_dtensor().sum().full_tensor().backward()
    assert torch.equal(full_of(tensor.grad), torch.full((8, 6), 2.0))


@on_ranks(4)
def test_a_dtensor_without_a_counterpart() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replicated = distribute_tensor(FULL, mesh, [Replicate(), Shard(0)])
    with pytest.raises(NotExpressibleError, match=r"Replicate.* on axis 'dp'.*redistribute"):
        ShardedTensor.from_dtensor(replicated)
    nested = distribute_tensor(FULL, mesh, [Shard(0), Shard(0)])
    sharded = ShardedTensor.from_dtensor(nested)
    assert sharded.sharding_spec() == chunk(0)
    assert torch.equal(full_of(sharded), FULL)
    crossed = distribute_tensor(FULL, mesh, [Shard(1), Shard(0)])
    assert torch.equal(full_of(ShardedTensor.from_dtensor(crossed)), FULL)
    with pytest.raises(NotExpressibleError, match="hold several"):
        _shard_tensor(FULL, BRICKS).to_dtensor()
