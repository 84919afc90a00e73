"""The same calls on torch's own classes and on these, where torch can do them at all.

The shards are the same everywhere.

Covers: what this package promises to have in common with torch.distributed._shard.
"""

from __future__ import annotations

import warnings
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard as OurShard,
    ShardedTensor,
    ShardMetadata,
    TensorProperties,
    _infer_sharding_spec_from_shards_metadata,
    _shard_tensor,
    init_from_local_shards,
)

pytestmark = pytest.mark.parity


def shards_of(metadata: Any) -> list[tuple[list[int], list[int], str]]:
    """Non-empty shards; torch lets an empty one begin beyond the end of the tensor."""
    return [
        (list(each.shard_offsets), list(each.shard_sizes), str(each.placement))
        for each in metadata.shards_metadata
        if 0 not in each.shard_sizes
    ]


def cases(count: int) -> list[tuple[list[int], int, list[str]]]:
    random = Random(1)
    drawn = []
    for _ in range(count):
        shape = [random.randint(4, 17) for _ in range(random.randint(1, 3))]
        order = random.sample(range(4), 4)
        drawn.append((shape, random.randrange(len(shape)), [f"rank:{rank}/cpu" for rank in order]))
    return drawn


def test_chunk_specs_describe_the_same_shards() -> None:
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TheirProperties
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as Theirs
    from torch.distributed._shard.sharding_spec.api import (
        _infer_sharding_spec_from_shards_metadata as their_guess,
    )

    for shape, dim, placements in cases(200):
        size = torch.Size(shape)
        theirs = Theirs(dim, list(placements)).build_metadata(size, TheirProperties())
        ours = ChunkShardingSpec(dim, placements).build_metadata(size, TensorProperties())
        assert shards_of(ours) == shards_of(theirs)
        if all(0 not in each.shard_sizes for each in theirs.shards_metadata):
            guess = _infer_sharding_spec_from_shards_metadata(ours.shards_metadata)
            guess_theirs: Any = their_guess
            assert type(guess).__name__ == type(guess_theirs(theirs.shards_metadata)).__name__


@on_ranks(4)
def test_sharding_resharding_and_gathering_give_the_same_data() -> None:
    warnings.simplefilter("ignore")
    from torch.distributed._shard.api import _shard_tensor as their_shard_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as Theirs

    for shape, dim, placements in cases(40):
        shape = [
            4 * n if d in (dim, (dim + 1) % len(shape)) else n for d, n in enumerate(shape)
        ]  # torch: even shards only
        full = torch.randn(shape)
        theirs = their_shard_tensor(full, Theirs(dim, list(placements)), src_rank=1)
        ours = _shard_tensor(full, ChunkShardingSpec(dim, placements), src_rank=1)
        assert torch.equal(ours.local_tensor(), theirs.local_tensor())
        other = (dim + 1) % len(shape)
        theirs.reshard(Theirs(other, list(placements[::-1])))
        ours.reshard(ChunkShardingSpec(other, placements[::-1]))
        assert torch.equal(ours.local_tensor(), theirs.local_tensor())
        outs = [torch.empty(shape) if dist.get_rank() == 2 else None for _ in range(2)]
        theirs.gather(2, outs[0])
        ours.gather(2, outs[1])
        if outs[0] is not None and outs[1] is not None:
            assert torch.equal(outs[0], outs[1])


@on_ranks(4)
def test_tensors_from_local_shards_have_the_same_metadata() -> None:
    warnings.simplefilter("ignore")
    from torch.distributed._shard.metadata import ShardMetadata as TheirMetadata
    from torch.distributed._shard.sharded_tensor import init_from_local_shards as their_init
    from torch.distributed._shard.sharded_tensor.shard import Shard as TheirShard

    rank = dist.get_rank()
    for row, column in ((3, 4), (5, 2)):
        offsets = [0 if rank < 2 else row, 0 if rank % 2 == 0 else column]
        sizes = [row if rank < 2 else 8 - row, column if rank % 2 == 0 else 6 - column]
        local, where = torch.randn(sizes), f"rank:{rank}/cpu"
        theirs = their_init([TheirShard(local, TheirMetadata(offsets, sizes, where))], 8, 6)
        ours = init_from_local_shards([OurShard(local, ShardMetadata(offsets, sizes, where))], 8, 6)
        assert shards_of(ours.metadata()) == shards_of(theirs.metadata())
        assert ours.metadata().size == theirs.metadata().size
        assert isinstance(ours.sharding_spec(), EnumerableShardingSpec)
        assert type(theirs.sharding_spec()).__name__ == "EnumerableShardingSpec"
        for name in ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"):
            ours_has, theirs_has = (
                getattr(each.metadata().tensor_properties, name) for each in (ours, theirs)
            )
            assert ours_has == theirs_has


@on_ranks(4)
def test_checkpoints_of_torchs_tensors_load_into_these() -> None:
    warnings.simplefilter("ignore")
    import tempfile

    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard.api import _shard_tensor as their_shard_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as Theirs

    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    full = torch.randn(8, 6)
    placements = [f"rank:{rank}/cpu" for rank in range(4)]
    dcp.save({"w": their_shard_tensor(full, Theirs(0, list(placements)))}, checkpoint_id=where[0])
    mine = ShardedTensor(ChunkShardingSpec(1, placements[:3]), 8, 6)
    dcp.load({"w": mine}, checkpoint_id=where[0])
    assert torch.equal(mine, full)
