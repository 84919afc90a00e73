"""Covers: lockstep.py, profiling.py, observe.py."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import (
    LockstepError,
    all_gather,
    all_gather_v,
    all_reduce,
    annotate_collectives,
    check_replicas,
    init_device_mesh,
    lockstep,
    purpose,
    scatter,
)
from shoal_mesh.testing import fake_world, on_ranks


@on_ranks(4)
def test_ranks_in_step_pass() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with lockstep(timeout=20):
        assert all_reduce(torch.ones(2), (mesh, "tp")).eq(2).all()
        for size in (2, 3):
            sizes = [size, size + 1]
            all_gather_v(torch.ones(sizes[mesh.get_local_rank("dp")]), (mesh, "dp"), sizes)
        src = mesh.get_local_rank("dp") == 0
        scatter([torch.ones(1)] * 2 if src else None, (mesh, "dp"), out=torch.empty(1))
    all_reduce(torch.ones(2), (mesh, "tp"))


@on_ranks(4)
def test_different_collectives_are_named_on_every_rank() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    rank = mesh.get_rank()
    collective = all_gather if rank == 2 else all_reduce
    with lockstep(timeout=20):
        all_reduce(torch.ones(2), (mesh, "tp"))
        with purpose("layer 3"), purpose("mm of weight"), pytest.raises(LockstepError, match="step 1 along") as caught:
            collective(torch.ones(2), (mesh, "tp"))
    text = str(caught.value)
    assert "rank 2: {" in text
    assert "ranks 0, 1, 3: {" in text
    assert "mm of weight; layer 3" in text


@on_ranks(4)
def test_other_shapes_differ_too() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with pytest.raises(LockstepError, match="different collectives"), lockstep(timeout=20):
        all_reduce(torch.ones(2 + (mesh.get_rank() == 1)), (mesh, "tp"))


@on_ranks(4)
def test_a_rank_that_never_comes_is_named() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = mesh.get_rank()
    if rank == 3:
        with lockstep():
            all_reduce(torch.ones(2), (mesh, "dp"))
        time.sleep(2)
        return
    everyone, waiting = mesh.comm(("dp", "tp")), mesh.comm("dp" if rank == 1 else "tp")
    with lockstep(timeout=1):
        all_reduce(torch.ones(2), (mesh, "dp"))
        if rank == 0:  # it has nothing to do with rank 3 yet, and hears the alarm later
            time.sleep(2.5)
            waiting = everyone
        with pytest.raises(LockstepError) as caught:
            all_reduce(torch.ones(2), waiting)
    assert "rank 3 has not come; last seen: left the lockstep block" in str(caught.value)


def test_one_process_has_nobody_to_compare_with() -> None:
    with fake_world(4), lockstep():
        all_reduce(torch.ones(1), (init_device_mesh("cpu", (4,)), 0))


@on_ranks(4)
def test_replicas() -> None:
    comm = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)).comm("dp")
    check_replicas(torch.ones(3, 2).t(), comm)
    check_replicas(torch.tensor(True), comm)
    wrong = torch.ones(3) + (1e-7 if dist.get_rank() in (1, 2) else 0)
    wrong[0] = 5.0 if dist.get_rank() == 1 else 1.0
    with pytest.raises(LockstepError, match=r"replicas of weight \(3,\) differ along dp: ranks"):
        check_replicas(wrong, comm, "weight")


def test_profiles_show_axes_and_bytes() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile,
            annotate_collectives(),
        ):
            all_reduce(torch.ones(8), (mesh, "tp"))
        assert "shoal::all_reduce[tp] 32 B" in {event.key for event in profile.key_averages()}
