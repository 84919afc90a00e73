"""ShardedTensor on real ranks: construction, access, moving, copies, pickles, sub-groups.

Covers: base.py, sharded_tensor.py, assemble.py, shard.py, groups.py, reshard.py (the move).
"""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LocalShardError,
    ProcessGroupError,
    RankMismatchError,
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorMetadata,
    ShardingSpecError,
    ShardMetadata,
    TensorProperties,
    UnsupportedOpError,
    _get_current_process_group,
    _shard_tensor,
    empty,
    init_from_local_shards,
    load_with_process_group,
    narrow_tensor,
    narrow_tensor_by_index,
    zeros,
)
from shoal_shard_api.testing import WORLD, chunk, collectives, enumerable

FULL = torch.arange(30.0).reshape(6, 5)
BRICKS = enumerable(([0, 0], [2, 3], 3), ([0, 3], [6, 2], 1), ([2, 0], [4, 3], 3))


def sharded(spec: ChunkShardingSpec | EnumerableShardingSpec, full: torch.Tensor = FULL) -> ShardedTensor:
    return _shard_tensor(full, spec)


@on_ranks(4)
def test_the_constructor_allocates_this_ranks_shards() -> None:
    tensor = ShardedTensor(chunk(0, (2, 0, 3, 1)), 6, 5, dtype=torch.float64, requires_grad=True)
    at = (2, 0, 3, 1).index(dist.get_rank())
    (shard,) = tensor.local_shards()
    assert shard.metadata.shard_offsets == [min(2 * at, 6), 0]
    assert list(shard.tensor.shape) == [2 if at < 3 else 0, 5] == shard.metadata.shard_sizes
    assert (tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_leaf) == ((6, 5), torch.float64, True, True)
    assert tensor.local_tensor() is shard.tensor
    assert tensor.metadata().tensor_properties == TensorProperties(torch.float64, requires_grad=True)
    assert len(tensor) == 6
    assert tensor.numel() == 30
    assert tensor.stride() == (5, 1)
    assert not tensor.is_pinned()
    assert "ChunkShardingSpec" in repr(tensor)


@on_ranks(4)
def test_a_rank_without_shards() -> None:
    tensor = zeros(chunk(0, (1, 2)), [6, 5])
    assert len(tensor.local_shards()) == (1 if dist.get_rank() in (1, 2) else 0)
    if dist.get_rank() == 0:
        with pytest.raises(UnsupportedOpError, match="exactly one local shard, rank 0 has 0"):
            tensor.local_tensor()
    assert torch.equal(tensor, torch.zeros(6, 5))


@on_ranks(4)
def test_what_the_constructor_refuses() -> None:
    with pytest.raises(ShardingSpecError, match=r"rank:7/cpu: global rank 7 is not among .*\[0, 1, 2, 3\]"):
        empty(chunk(0, (0, 7)), 4)
    with pytest.raises(ShardingSpecError, match=r"torch.channels_last"):
        empty(chunk(0), 2, 3, 4, 4, memory_format=torch.channels_last)
    with pytest.raises(UnsupportedOpError, match="RPC"):
        empty(chunk(0), 4, init_rrefs=True)
    with pytest.raises(TypeError, match="whole numbers"):
        empty(chunk(0), 4.5)
    with pytest.raises(TypeError, match="every dim"):
        empty(chunk(0), 4, None)
    with pytest.raises(UnsupportedOpError, match="RPC"):
        empty(chunk(0), 4).remote_shards()


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
    with collectives() as told:
        same = tensor.resharded(chunk(0))
    assert told == []
    assert same.local_tensor() is tensor.local_tensor()
    with collectives() as told:
        tensor.resharded(chunk(1))
    assert told == ["all_to_all_single"]


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
def test_a_move_is_differentiable() -> None:
    tensor: Any = sharded(chunk(0, (3, 1)))
    tensor.requires_grad_()
    weights = torch.randn(6, 5)
    moved = tensor.resharded(BRICKS)
    loss: Any = sum(
        ((s.tensor * narrow_tensor(weights, s.metadata)).sum() for s in moved.local_shards()), moved._parts[0].sum() * 0
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
    with pytest.raises(LocalShardError, match=r"rank\(s\) 1 of the 4.*size \(6, 5\) on dst=1, got None"):
        tensor.gather(1)
    with pytest.raises(LocalShardError, match=r"got a tensor of size \(5, 6\)"):
        tensor.gather(1, torch.empty(5, 6) if rank == 1 else None)
    with pytest.raises(LocalShardError, match="out must be None on every rank but dst=1"):
        tensor.gather(1, torch.empty(6, 5))
    with pytest.raises(RankMismatchError, match="dst=0 on rank: 0 does not match with dst=1 on rank: 1"):
        tensor.gather(rank, torch.empty(6, 5))
    with pytest.raises(ProcessGroupError, match="dst=4"):
        tensor.gather(4)


@on_ranks(4)
def test_init_from_local_shards() -> None:
    rank = dist.get_rank()
    shards = [Shard.from_tensor_and_offsets(torch.full((1, 3), float(rank)), [rank, 0], rank)]
    tensor = init_from_local_shards(shards, 4, 3)
    assert tensor.sharding_spec() == chunk(0)
    assert torch.equal(tensor.full_tensor(), torch.arange(4.0)[:, None].expand(4, 3))
    assert tensor.local_tensor() is shards[0].tensor
    lined_up = init_from_local_shards(
        [Shard.from_tensor_and_offsets(torch.full((rank, 3), float(rank)), [0, 0], rank)], None, 3
    )
    assert lined_up.shape == (6, 3)
    assert lined_up.full_tensor()[:, 0].tolist() == [1, 2, 2, 3, 3, 3]


@on_ranks(4)
def test_local_shards_that_do_not_make_a_tensor_are_refused_on_all_ranks() -> None:
    rank = dist.get_rank()

    def shard(offset: int, rows: int = 1, owner: int = rank, **options: Any) -> Shard:
        return Shard.from_tensor_and_offsets(torch.zeros(rows, 3, **options), [offset, 0], owner)

    cases: list[tuple[list[Shard], type[Exception], str]] = [
        ([shard(rank, 2)], ShardingSpecError, "shards 0 .* and 1 .* overlap"),
        ([shard(2 * rank)], ShardingSpecError, "sticks out"),
        ([shard(rank)] if rank != 2 else [], ShardingSpecError, r"no shard holds the part \[2:3, 0:3\]"),
        (
            [shard(rank, owner=0)],
            LocalShardError,
            r"rank\(s\) 1, 2, 3 of the 4.*placed on rank:0/cpu, but this is rank 1",
        ),
        (
            [shard(rank, dtype=torch.float64 if rank == 3 else torch.float32)],
            RankMismatchError,
            "dtype.*float32.*rank: 0.*float64.*rank: 3",
        ),
        ([shard(rank, requires_grad=rank == 1)], RankMismatchError, "requires_grad=False .*rank: 0.*=True.*rank: 1"),
        ([shard(rank), shard(rank, dtype=torch.int32)], LocalShardError, "dtype is torch.int32"),
        ([], ShardingSpecError, "no rank has a local shard"),
    ]
    for shards, kind, text in cases:
        with pytest.raises(kind, match=text):
            init_from_local_shards(shards, 4, 3)
    with pytest.raises(RankMismatchError, match="global size"):
        init_from_local_shards([shard(rank)], 4 + rank, 3)
    with pytest.raises(LocalShardError, match="needs one shard on every rank"):
        init_from_local_shards([], None, 3)
    with pytest.raises(ShardingSpecError, match="at most one dim"):
        init_from_local_shards([shard(rank)], None, None)


@on_ranks(4)
def test_init_from_a_local_tensor_shares_it() -> None:
    local = torch.full((2, 3), float(dist.get_rank()))
    tensor = ShardedTensor._init_from_local_tensor(local, chunk(0), [8, 3])
    assert tensor.local_tensor() is local
    with pytest.raises(LocalShardError, match=r"size \[2, 3\]"):
        ShardedTensor._init_from_local_tensor(local, chunk(0), [12, 3])
    with pytest.raises(LocalShardError, match="not contiguous"):
        ShardedTensor._init_from_local_tensor(torch.zeros(3, 2).t(), chunk(0), [8, 3])
    with pytest.raises(LocalShardError, match="2 shards"):
        ShardedTensor._init_from_local_tensor(local, chunk(0, [dist.get_rank()] * 2), [4, 3])


@on_ranks(4)
def test_init_from_global_metadata() -> None:
    made = sharded(chunk(0))
    metadata = made.metadata()
    again = ShardedTensor._init_from_local_shards_and_global_metadata(made.local_shards(), metadata)
    assert again.sharding_spec() == chunk(0)
    assert torch.equal(again, FULL)
    with pytest.raises(LocalShardError, match="must give the shards"):
        ShardedTensor._init_from_local_shards_and_global_metadata([], metadata)
    wrong = replace(metadata, tensor_properties=replace(metadata.tensor_properties, dtype=torch.int32))
    with pytest.raises(LocalShardError, match=r"dtype is torch.float32, the sharded tensor's is torch.int32"):
        ShardedTensor._init_from_local_shards_and_global_metadata(made.local_shards(), wrong)
    gap = replace(metadata, shards_metadata=metadata.shards_metadata[:2])
    with pytest.raises(ShardingSpecError, match="no shard holds"):
        ShardedTensor._init_from_local_shards_and_global_metadata(made.local_shards(), gap)


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
def test_copy_from_any_layout_and_from_a_plain_tensor() -> None:
    target = zeros(BRICKS, 6, 5)
    assert target.copy_(sharded(chunk(1))) is target
    assert torch.equal(target, FULL)
    target.copy_(FULL[0])
    assert torch.equal(target, FULL[0].expand(6, 5))
    plain = torch.empty(6, 5)
    assert torch.equal(plain.copy_(sharded(BRICKS)), FULL)
    with pytest.raises(LocalShardError, match=r"\(5,\) does not fit \(6, 5\)"):
        target.copy_(zeros(chunk(0), 5))
    with pytest.raises(LocalShardError, match="does not broadcast"):
        target.copy_(torch.zeros(3, 5))


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


@on_ranks(4)
def test_equal_and_allclose_compare_any_layouts_alike_on_every_rank() -> None:
    a, b = sharded(chunk(0)), sharded(BRICKS)
    changed = FULL.clone()
    changed[5, 4] += 1e-7
    assert torch.equal(a, b)
    assert a.equal(FULL)
    assert torch.equal(FULL, b)
    assert not torch.equal(a, FULL + 1)
    assert not torch.equal(a, zeros(chunk(0), 5, 6))
    assert torch.allclose(a, changed)
    assert torch.allclose(changed, b)
    assert not torch.allclose(a, FULL + 1)
    assert torch.allclose(a, FULL + 1, atol=2.0)
    with pytest.raises(LocalShardError, match="sizes differ"):
        torch.allclose(a, zeros(chunk(0), 5, 6))


@on_ranks(4)
def test_pickles_come_back_on_the_same_place_only() -> None:
    tensor = sharded(chunk(0))
    tensor.requires_grad_()
    buffer = io.BytesIO()
    torch.save({"w": tensor, "p": torch.nn.Parameter(tensor)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded["w"].detach(), FULL)
    assert loaded["w"].requires_grad
    assert isinstance(loaded["p"], torch.nn.Parameter)
    assert loaded["w"].sharding_spec() == chunk(0)
    text = pickle.dumps(tensor)
    with load_with_process_group(dist.distributed_c10d._get_default_group()):
        assert torch.equal(pickle.loads(text).detach(), FULL)


@on_ranks(4)
def test_a_pickle_of_another_world_is_refused() -> None:
    text = pickle.dumps(sharded(chunk(0)))
    pair = (0, 1) if dist.get_rank() < 2 else (2, 3)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    with load_with_process_group(group):
        assert _get_current_process_group() is group
        with pytest.raises(ProcessGroupError, match=r"cannot be loaded with (rank|size)"):
            pickle.loads(text)
        with pytest.raises(RuntimeError, match="nested"), load_with_process_group(group):
            raise AssertionError("not reached")
        assert _get_current_process_group() is group
    assert _get_current_process_group() is dist.group.WORLD
    with pytest.raises(KeyError), load_with_process_group(group):
        raise KeyError
    assert _get_current_process_group() is dist.group.WORLD
    local = ShardedTensor._init_from_local_tensor(
        torch.full((1, 2), float(dist.get_rank())), chunk(0, pair), 2, 2, process_group=group
    )
    with load_with_process_group(group):
        assert torch.equal(pickle.loads(pickle.dumps(local)), local)


@on_ranks(4)
def test_sub_groups_work_side_by_side() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    pair = ((0, 2), (1, 3))[mine]
    full = FULL + 100 * mine
    tensor = _shard_tensor(full, chunk(0, pair[::-1]), src_rank=1, process_group=groups[mine])
    assert torch.equal(tensor.full_tensor(), full)
    assert torch.equal(tensor.resharded(chunk(1, pair)), full)
    doubled: Any = tensor * 2 + 1
    assert torch.equal(doubled.full_tensor(), full * 2 + 1)
    assert tensor.process_group is groups[mine]
    out = torch.empty(6, 5) if dist.get_rank(groups[mine]) == 1 else None
    tensor.gather(1, out)
    assert out is None or torch.equal(out, full)
    with pytest.raises(ShardingSpecError, match="is not among"):
        tensor.resharded(chunk(0, WORLD))
    with pytest.raises(ProcessGroupError, match="not in the given process group"):
        empty(chunk(0), 4, process_group=groups[1 - mine])


def test_without_a_process_group() -> None:
    with pytest.raises(ProcessGroupError, match="init_process_group"):
        empty(chunk(0), 4)


def test_the_base_class_needs_no_process_group() -> None:
    metadata = ShardedTensorMetadata(
        [ShardMetadata([0], [2], "rank:0/cpu"), ShardMetadata([2], [2], "rank:1/cpu")],
        torch.Size([4]),
        TensorProperties(),
    )
    shard = Shard(torch.ones(2), metadata.shards_metadata[0])
    base = ShardedTensorBase._init_from_local_shards_and_global_metadata([shard], metadata)
    assert base.local_shards() == [shard]
    assert base.metadata() == metadata
    assert base.sharding_spec() == chunk(0, (0, 1))
    assert tuple(base.size()) == (4,)
    stranger = Shard(torch.ones(1), ShardMetadata([0], [1], "rank:0/cpu"))
    with pytest.raises(LocalShardError, match="is not in the metadata"):
        ShardedTensorBase._init_from_local_shards_and_global_metadata([stranger], metadata)
    assert ShardedTensorBase(chunk(0, (0, 1)), 4, requires_grad=True).requires_grad


def test_a_shard_fits_its_metadata() -> None:
    with pytest.raises(LocalShardError, match=r"size \[2\], its metadata say \[3\]"):
        Shard(torch.zeros(2), ShardMetadata([0], [3], "rank:0/cpu"))
    with pytest.raises(LocalShardError, match="is on cpu, its placement is rank:0/cuda:0"):
        Shard(torch.zeros(2), ShardMetadata([0], [2], "rank:0/cuda:0"))
    assert torch.equal(narrow_tensor(FULL, ShardMetadata([2, 1], [2, 3])), FULL[2:4, 1:4])
    with pytest.raises(ShardingSpecError, match="do not fit 2 dims"):
        narrow_tensor_by_index(FULL, [1], [1])
