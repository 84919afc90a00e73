"""ShardedTensor on real ranks: access, resharding, gathering, conversion, copies, checkpoints.

Covers: tensor/sharded_tensor.py, ranks/reshard.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharded_modules import FULL as WEIGHT, save_model
from sharding_cases import FULL, bricks, chunk, sharded
from shoal_mesh.testing import observed, on_ranks, rank_pool
from shoal_shard_api import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedTensor,
    ShardMetadata,
    narrow_tensor,
    zeros,
)
from shoal_shard_api.errors import (
    CheckpointError,
    LocalShardError,
    ProcessGroupError,
    RankMismatchError,
    UnsupportedOpError,
)

BRICKS = bricks(6, 5)


@on_ranks(4)
def test_a_rank_without_shards() -> None:
    tensor = zeros(chunk(0, (1, 2)), [6, 5])
    assert len(tensor.local_shards()) == (1 if dist.get_rank() in (1, 2) else 0)
    if dist.get_rank() == 0:
        with pytest.raises(UnsupportedOpError, match="exactly one local shard, but rank 0 has 0"):
            tensor.local_tensor()
    assert torch.equal(tensor, torch.zeros(6, 5))


@on_ranks(4)
def test_reshard_replaces_the_layout_in_place_and_resharded_does_not() -> None:
    tensor = sharded(chunk(0))
    other = tensor.resharded(BRICKS)
    assert tensor.sharding_spec() == chunk(0)
    assert other.sharding_spec() == BRICKS
    assert [list(s.tensor.shape) for s in other.local_shards()] == (
        {1: [[6, 2]], 3: [[2, 3], [4, 3]]}.get(dist.get_rank(), [])
    )
    assert tensor.reshard(BRICKS) is tensor
    assert torch.equal(tensor, FULL)
    assert torch.equal(tensor.full_tensor(), FULL)


@on_ranks(4)
def test_an_equal_layout_moves_nothing() -> None:
    tensor = sharded(chunk(0))
    with observed() as events:
        same = tensor.resharded(chunk(0))
    assert [event.op for event in events] == []
    assert same.local_tensor() is tensor.local_tensor()
    with observed() as events:
        tensor.resharded(chunk(1))
    assert [event.op for event in events] == ["all_to_all_single"]


@on_ranks(4)
def test_a_parameter_that_is_resharded_stays_a_leaf_and_takes_its_gradient_along() -> None:
    parameter: Any = torch.nn.Parameter(sharded(chunk(0)))
    (parameter * FULL).sum().backward()
    parameter.reshard(BRICKS)
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.is_leaf
    assert parameter.requires_grad
    gradient: Any = parameter.grad
    assert torch.equal(gradient, FULL)
    assert gradient.sharding_spec() == BRICKS
    parameter.grad = None
    assert parameter.grad is None


@on_ranks(4)
def test_a_gradient_on_some_ranks_is_refused_on_all_ranks() -> None:
    tensor = sharded(chunk(0))
    local = tensor.local_tensor().requires_grad_()
    if dist.get_rank() == 2:
        local.grad = torch.ones_like(local)
    before = tensor.local_tensor()
    text = "ranks 0, 1, 3: without a gradient; rank 2: with a gradient"
    with observed() as events, pytest.raises(RankMismatchError, match=text):
        tensor.reshard(chunk(1))
    assert len(events) == 1
    assert tensor.sharding_spec() == chunk(0)
    assert tensor.local_tensor() is before
    local.grad = None
    assert torch.equal(tensor.reshard(chunk(1)), FULL)


@on_ranks(4)
def test_specs_that_differ_between_ranks_are_refused_on_all_ranks() -> None:
    """The messages have equal sizes, so values would arrive in other places."""
    tensor = zeros(chunk(0), [8, 8, 8])
    spec = chunk(1 + dist.get_rank() % 2)
    with pytest.raises(RankMismatchError, match=r"ranks 0, 2: to the shards .*; ranks 1, 3: to"):
        tensor.resharded(spec)
    with pytest.raises(RankMismatchError, match="the same spec"):
        tensor.reshard(spec)
    assert tensor.sharding_spec() == chunk(0)
    assert torch.equal(tensor.full_tensor(), torch.zeros(8, 8, 8))


@on_ranks(4)
def test_a_move_is_differentiable() -> None:
    tensor: Any = sharded(chunk(0, (3, 1)))
    tensor.requires_grad_()
    weights = torch.randn(6, 5)
    moved = tensor.resharded(BRICKS)
    loss: Any = sum(
        ((s.tensor * narrow_tensor(weights, s.metadata)).sum() for s in moved.local_shards()),
        moved._local_tensors[0].sum() * 0,
    )
    loss.backward()
    assert torch.equal(tensor.grad, weights)
    tensor.grad = None
    (tensor.full_tensor() * weights).sum().backward()
    assert torch.equal(tensor.grad, weights)


@on_ranks(4)
@pytest.mark.parametrize("dst", [0, 2])
@pytest.mark.parametrize("spec", [chunk(1), BRICKS], ids=["chunk", "bricks"])
def test_gather(dst: int, spec: ChunkShardingSpec) -> None:
    here = dist.get_rank() == dst
    out = torch.empty(6, 5) if here else None
    sharded(spec).gather(dst, out)
    assert out is None or torch.equal(out, FULL)
    out = torch.empty(6, 5, dtype=torch.int64) if here else None
    sharded(spec, FULL + 0.5).gather(dst, out, dtype=torch.int32)
    assert out is None or torch.equal(out, FULL.long())
    with pytest.warns(FutureWarning, match="enforce_dtype"):
        sharded(spec).gather(dst, out, enforce_dtype=True)


@on_ranks(4)
def test_wrong_arguments_of_gather_are_raised_on_all_ranks() -> None:
    tensor, rank = sharded(chunk(0)), dist.get_rank()
    with pytest.raises(
        LocalShardError, match=r"^rank 1: gather: on dst=1, .*shape \(6, 5\) .*got None"
    ):
        tensor.gather(1)
    with pytest.raises(LocalShardError, match=r"got torch.Tensor of shape \(5, 6\)"):
        tensor.gather(1, torch.empty(5, 6) if rank == 1 else None)
    with pytest.raises(LocalShardError, match="out must be None on every rank but dst=1"):
        tensor.gather(1, torch.empty(6, 5))
    with pytest.raises(
        RankMismatchError, match="dst must be equal on all ranks: 0 on rank 0, 1 on rank 1"
    ):
        tensor.gather(rank, torch.empty(6, 5))
    with pytest.raises(ProcessGroupError, match="dst=4"):
        tensor.gather(4)


@on_ranks(4)
def test_copies() -> None:
    tensor = sharded(chunk(0))
    tensor.requires_grad_()
    deep = copy.deepcopy(tensor)
    assert deep.requires_grad
    assert deep.is_leaf
    with torch.no_grad():
        deep.zero_()
    assert torch.equal(tensor.detach(), FULL)
    clone = tensor.clone()
    assert clone.grad_fn is not None
    detached: Any = tensor.detach()
    assert detached.local_tensor().data_ptr() == tensor.local_tensor().data_ptr()
    parameter = torch.nn.Parameter(tensor)
    assert isinstance(copy.deepcopy(parameter), torch.nn.Parameter)
    both = copy.deepcopy([parameter, parameter])
    assert both[0] is both[1]


@on_ranks(4)
def test_to_another_type() -> None:
    tensor = sharded(BRICKS)
    assert tensor.to(torch.float32) is tensor
    assert tensor.cpu() is tensor
    assert tensor.to("cpu") is tensor
    half: Any = tensor.to(torch.float16)
    assert (half.dtype, half.metadata().tensor_properties.dtype) == (torch.float16, torch.float16)
    assert torch.equal(half, FULL.half())
    assert tensor.double().dtype == torch.float64
    assert tensor.type_as(half).dtype == torch.float16
    assert torch.zeros(1).type_as(half).dtype == torch.float16
    assert tensor.to(half).dtype == torch.float16
    assert tensor.to(torch.float32, copy=True) is not tensor


@on_ranks(2)
def test_a_move_to_the_device_of_one_rank_is_a_move_of_the_tensor_on_all_ranks() -> None:
    spec = EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [3, 5], "rank:0/meta"),
            ShardMetadata([3, 0], [3, 5], "rank:1/cpu"),
        ]
    )
    moved = zeros(spec, 6, 5).to("meta")
    placements = [str(shard.placement) for shard in moved.metadata().shards_metadata]
    assert placements == ["rank:0/meta", "rank:1/meta"]
    assert moved.to("meta") is moved
    assert moved.to(torch.float32) is moved


def load_with_torch(where: str) -> None:
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {
        "model": {"weight": zeros(chunk(1), 10, 6), "bias": torch.zeros(10)},
        "step": 0,
    }
    dcp.load(state, checkpoint_id=where)
    assert torch.equal(state["model"]["weight"], WEIGHT)


# torch's own, on saving
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_torchs_own_load_and_save_know_the_tensors(tmp_path: Path) -> None:
    rank_pool(4).run(save_model, str(tmp_path / "saved"), chunk(0, (2, 0)))
    rank_pool(4).run(load_with_torch, str(tmp_path / "saved"))


@on_ranks(4)
def test_a_shard_that_is_not_here() -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    tensor = zeros(chunk(0), 4, 2)
    index = MetadataIndex("w", torch.Size([dist.get_rank(), 0]))
    assert tensor.__get_tensor_shard__(index).data_ptr() == tensor.local_tensor().data_ptr()
    with pytest.raises(CheckpointError, match="w: no local shard begins at"):
        tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size([9, 0])))
    assert isinstance(tensor, ShardedTensor)
    assert len(ShardedTensor(chunk(0), 2, 2).__create_chunk_list__()) == (
        1 if dist.get_rank() < 2 else 0
    )


@on_ranks(4)
def test_a_notebook_shows_the_shards_of_all_ranks_without_a_collective() -> None:
    tensor = sharded(chunk(0))
    with observed() as events:
        html = tensor._repr_html_()
    assert not events
    assert "<caption" in html and html.count("<tr>") == 1 + len(tensor.metadata().shards_metadata)
