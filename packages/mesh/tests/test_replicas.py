"""Covers: replicas.py: check_replicas and check_distinct."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import (
    LockstepError,
    check_distinct,
    check_replicas,
    init_device_mesh,
)
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_replicas() -> None:
    comm = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)).comm("dp")
    check_replicas(torch.ones(3, 2).t(), comm)
    check_replicas(torch.tensor(True), comm)
    wrong = torch.ones(3) + (1e-7 if dist.get_rank() in (1, 2) else 0)
    wrong[0] = 5.0 if dist.get_rank() == 1 else 1.0
    with pytest.raises(LockstepError, match=r"replicas of weight \(3,\) differ along dp: ranks"):
        check_replicas(wrong, comm, "weight")


@on_ranks(4)
def test_replicas_by_name() -> None:
    comm = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)).comm("dp")
    state = {"weight": torch.ones(3), "bias": torch.ones(2) * (1 + (dist.get_rank() == 2))}
    check_replicas({}, comm)
    with pytest.raises(
        LockstepError, match=r"of the model.bias \(2,\) differ along dp: ranks \[2\]"
    ) as caught:
        check_replicas(state, comm, "the model")
    assert caught.value.ranks == (2,)
    with pytest.raises(LockstepError, match=r"compare \[2, 2, 2, 1\] tensors of tensor"):
        check_replicas({"weight": state["weight"]} if dist.get_rank() == 3 else state, comm)


@on_ranks(4)
def test_rows_that_two_ranks_share() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    rank = dist.get_rank()
    along = (mesh, "data")
    mask = torch.ones(3, dtype=torch.bool)
    check_distinct(torch.full((3,), rank), along)
    check_distinct({"rows": torch.full((3,), rank), "mask": mask}, along)
    # several ranks may be without rows at the end of an epoch
    check_distinct(torch.zeros(max(rank - 1, 0), 2), along)
    check_distinct({}, along)
    with pytest.raises(
        LockstepError, match="batch has equal values on ranks 0, 1 and on ranks 2, 3 along data"
    ) as caught:
        check_distinct({"rows": torch.full((3,), rank // 2), "mask": mask}, along, "batch")
    assert caught.value.ranks == (0, 1, 2, 3)
    with pytest.raises(LockstepError, match="tensor has equal values on ranks 0-2 along data"):
        check_distinct(torch.tensor(float(rank == 3)), along)
