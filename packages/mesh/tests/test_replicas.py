"""Covers: lockstep.py: check_replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import (
    LockstepError,
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
