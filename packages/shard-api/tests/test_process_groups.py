"""Sub-groups, the default group, and the group of unpickled tensors.

Covers: ranks/process_groups.py.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharding_cases import FULL, WORLD, chunk, sharded
from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    ShardedTensor,
    _get_current_process_group,
    _shard_tensor,
    empty,
    load_with_process_group,
)
from shoal_shard_api.errors import ProcessGroupError, RankMismatchError, ShardingSpecError
from shoal_shard_api.ranks.process_groups import Fact, agree_on


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
    with pytest.raises(KeyError, match="mine"), load_with_process_group(group):
        raise KeyError("mine")
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


@on_ranks(2)
def test_ranks_that_name_different_values_do_not_agree() -> None:
    rank, group = dist.get_rank(), dist.GroupMember.WORLD
    assert group is not None
    with pytest.raises(
        RankMismatchError, match="size must be equal on all ranks: 3 on rank 0, None on rank 1"
    ):
        agree_on(group, lambda: {"other": 3} if rank else {"size": 3})
    facts = {"size": Fact(3, required=False), "own": Fact(0, compare=False)}
    assert agree_on(group, lambda: {} if rank else facts) == [{"size": 3, "own": 0}, {}]
