"""Covers: api/local_map.py: outputs are what out_placements says, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal_dtensor import DTensor, Partial, Replicate, Shard, checked_replicas, distribute_tensor, local_map
from shoal_dtensor.errors import PlacementError
from shoal_mesh import CommDebugMode, init_device_mesh, lockstep
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_uneven_outputs_of_even_inputs() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)], src_data_rank=None)

    @local_map(out_placements=[Shard(0)])
    def some(local: Tensor) -> Tensor:
        return local[: dist.get_rank()]

    for _ in range(2):  # the second call knows that sizes differ
        result = some(x)
        assert result.shape == (6,)
        assert result.full_tensor().tolist() == [4, 8, 9, 12, 13, 14]


@on_ranks(4)
def test_outputs_that_are_not_replicated_are_refused() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)], src_data_rank=None)
    total = local_map(lambda local: local.sum(0, keepdim=True), out_placements=[Replicate()])
    for _ in range(2):
        with pytest.raises(PlacementError, match="output 0 of local_map"):
            total(x)
    assert local_map(lambda local: local.sum(0), out_placements=[Partial()])(x).full_tensor().item() == 120


@on_ranks(4)
def test_only_the_first_call_compares() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)], src_data_rank=None)
    twice = local_map(lambda local: local * 2, out_placements=[Shard(0)])
    counts = []
    for _ in range(3):
        with CommDebugMode() as seen:
            twice(x)
        counts.append(sum(seen.get_comm_counts().values()))
    assert counts == [1, 0, 0]


@on_ranks(4)
def test_from_local_of_other_sizes_is_found_in_debug_modes() -> None:
    mesh = init_device_mesh("cpu", (4,))
    local = torch.ones(dist.get_rank() + 1)
    for block in (checked_replicas(), lockstep()):
        with block:
            with pytest.raises(PlacementError, match="run_check=True"):
                DTensor.from_local(local, mesh, [Shard(0)])
            assert DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).shape == (8,)
            with pytest.raises(PlacementError, match="differ"):
                DTensor.from_local(torch.ones(2) * dist.get_rank(), mesh, [Replicate()])
