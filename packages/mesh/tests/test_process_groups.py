"""Covers: process_groups.py: which groups exist, on real gloo ranks and in the fake world."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from shoal_mesh import DeviceMesh, all_gather, all_reduce, comm_over, init_device_mesh
from shoal_mesh.errors import BackendError
from shoal_mesh.testing import fake_world, on_ranks, rank_pool


def _count() -> int:
    return len(c10d._world.pg_names)


@on_ranks(4)
def test_equal_rank_sets_share_one_group() -> None:
    dist.destroy_process_group()
    _start("a")
    before = _count()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert _count() == before + 2
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    assert again.get_group("x") is mesh.get_group("dp")
    other = init_device_mesh("cpu", (4,)).unflatten(0, (2, 2))
    assert other.get_all_groups() == mesh.get_all_groups()
    assert mesh.flatten("all").get_group() is dist.group.WORLD
    assert mesh.comm(("tp", "dp")).group is dist.group.WORLD
    assert mesh["tp"].comm("tp") is mesh.comm("tp")
    assert mesh.comm("tp") is mesh.comm(1) is mesh.comm((1,)) is mesh.comm(("tp",))
    assert _count() == before + 2
    assert mesh._dim_group_names == [mesh.comm(0).name, mesh.comm(1).name]


def _start(name: str) -> None:
    """A default group in the place of one that a test destroyed."""
    store = dist.FileStore(  # type: ignore[attr-defined]  # not in the stubs
        f"/tmp/shoal_test_{dist_key()}_{name}", 4
    )
    dist.init_process_group(
        "gloo", store=store, rank=_rank(), world_size=4, timeout=timedelta(seconds=60)
    )


def _rank() -> int:
    import os

    return int(os.environ["RANK"])


def dist_key() -> int:
    """A number that the ranks of one pool share."""
    import os

    return os.getppid()


def _own_groups_are_used() -> tuple[bool, bool]:
    mine = dist.new_group([0, 1] if dist.get_rank() < 2 else [2, 3], use_local_synchronization=True)
    slow = [dist.new_group(r, timeout=timedelta(seconds=77)) for r in ([0, 2], [1, 3])][
        dist.get_rank() % 2
    ]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    total = all_reduce(torch.ones(1), (mesh, "dp"))
    assert total.item() == 2
    return mesh.get_group("tp") is mine, mesh.get_group("dp") is slow


def test_groups_that_the_user_made_are_shared_when_their_options_are_equal() -> None:
    pool = rank_pool(4)
    pool.close()  # a world without groups of other tests
    assert pool.run(_own_groups_are_used) == [(True, False)] * 4


def _uneven_memberships() -> int:
    """Members of one group that belong to different numbers of other groups agree on its name."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    mesh = DeviceMesh("cpu", [0, 3])
    return (
        int(all_reduce(torch.ones(1), (mesh, 0)).item()) if mesh.get_coordinate() is not None else 0
    )


def test_members_agree_on_names_whatever_else_they_are_in() -> None:
    assert rank_pool(4).run(_uneven_memberships) == [2, 0, 0, 2]


@on_ranks(2)
def test_communicators_know_whether_gloo_sends_their_tensors() -> None:
    assert comm_over((0, 1)).on_gloo


@on_ranks(4)
def test_cycles_of_init_and_destroy_leave_nothing() -> None:
    old: list[Any] = []
    for cycle in range(3):
        dist.destroy_process_group()
        _start(f"cycle{cycle}")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert all_reduce(torch.ones(1), (mesh, "tp")).item() == 2
        assert all(ref() is None for ref in old), "a group of a destroyed world is still there"
        old = [weakref.ref(group) for group in mesh.get_all_groups()]
        del mesh
        gc.collect()


@on_ranks(4)
def test_a_destroyed_group_is_made_again() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group(mesh.get_group(1))
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("c", "d"))
    assert all_reduce(torch.ones(1), (again, "d")).item() == 2


def test_backends_and_options_per_axis() -> None:
    with fake_world(4):
        plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        before = _count()
        gloo = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"b": "cpu:fake"}
        )
        assert gloo.get_group("a") is plain.get_group("a")
        assert gloo.get_group("b") is not plain.get_group("b")
        assert gloo.comm("b").backend == "cpu:fake"
        assert _count() == before + 1
        make_options: Any = torch._C._distributed_c10d.FakeProcessGroup.Options
        options = make_options()
        chosen = {1: ("fake", options)}
        one = init_device_mesh("cpu", (2, 2), backend_override=chosen)
        two = init_device_mesh("cpu", (2, 2), backend_override={1: options})
        assert one.get_group(1) is not plain.get_group("b")
        assert one == init_device_mesh("cpu", (2, 2), backend_override=chosen)
        assert two._choices[1].options is options
        with pytest.raises(BackendError, match="cannot create"):
            init_device_mesh("cpu", (4,), backend_override={0: ("mpi", options)})


@on_ranks(2)
def test_gloo_options_by_value() -> None:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    options._timeout = timedelta(seconds=50)
    mesh = init_device_mesh("cpu", (2,), backend_override={0: ("gloo", options)})
    assert mesh.get_group() is not dist.group.WORLD
    assert all_reduce(torch.ones(1), (mesh, 0)).item() == 2


@on_ranks(4)
def test_axes_find_their_groups_beside_groups_that_leave_this_rank_out() -> None:
    for ranks in ([0, 1], [2, 3]):
        dist.new_group(ranks)
    mesh = init_device_mesh("cpu", (2, 2))
    assert len(dist.get_process_group_ranks(mesh.get_group(1))) == 2
    assert all_reduce(torch.ones(()), (mesh, 0)).item() == 2


@on_ranks(4)
def test_any_ranks_in_any_order() -> None:
    rank = torch.distributed.get_rank()
    if rank in (3, 1):
        comm = comm_over((3, 1))
        assert comm.ranks == (3, 1)
        assert comm.rank == (3, 1).index(rank)
        assert all_gather(torch.tensor([rank]), comm).tolist() == [3, 1]
        assert comm_over((3, 1)).group is comm.group


@on_ranks(4)
def test_threads_share_the_group_that_the_first_of_them_creates() -> None:
    dist.destroy_process_group()
    _start("threads")
    ranks = (0, 2) if dist.get_rank() % 2 == 0 else (1, 3)
    together, groups = threading.Barrier(8), list[Any]()

    def use() -> None:
        together.wait()
        groups.append(comm_over(ranks).group)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(groups) == 8
    assert len(set(map(id, groups))) == 1
    assert all_reduce(torch.ones(2), comm_over(ranks)).tolist() == [2.0, 2.0]
