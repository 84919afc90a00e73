"""Covers: groups.py, world.py: which groups exist, on real gloo ranks and in the fake world."""

from __future__ import annotations

import gc
import pickle
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from shoal_mesh import (
    BackendError,
    DeviceMesh,
    MeshError,
    MeshMismatchError,
    NoGroupError,
    all_gather,
    all_reduce,
    init_device_mesh,
)
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
    dist.init_process_group("gloo", store=store, rank=_rank(), world_size=4, timeout=timedelta(seconds=60))


def _rank() -> int:
    import os

    return int(os.environ["RANK"])


def dist_key() -> int:
    """A number that the ranks of one pool share."""
    import os

    return os.getppid()


def _own_groups_are_used() -> tuple[bool, bool]:
    mine = dist.new_group([0, 1] if dist.get_rank() < 2 else [2, 3], use_local_synchronization=True)
    slow = [dist.new_group(r, timeout=timedelta(seconds=77)) for r in ([0, 2], [1, 3])][dist.get_rank() % 2]
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
    return int(all_reduce(torch.ones(1), (mesh, 0)).item()) if mesh.get_coordinate() is not None else 0


def test_members_agree_on_names_whatever_else_they_are_in() -> None:
    assert rank_pool(4).run(_uneven_memberships) == [2, 0, 0, 2]


@on_ranks(4)
def test_irregular_and_transposed_ranks_count_in_their_order() -> None:
    mesh = DeviceMesh("cpu", [[3, 0], [1, 2]], mesh_dim_names=("a", "b"))
    assert mesh.comm(("a", "b")).ranks == (3, 0, 1, 2)
    assert mesh.comm(("a", "b")).order == (3, 0, 1, 2)
    mine = torch.tensor([mesh.get_rank()])
    assert all_gather(mine, (mesh, ("a", "b"))).tolist() == [3, 0, 1, 2]
    assert all_gather(mine, (mesh, ("b", "a"))).tolist() == [3, 1, 0, 2]
    assert all_gather(mine, (mesh, "b")).tolist() == ([3, 0] if mesh.get_rank() in (0, 3) else [1, 2])
    comm = mesh.comm(("a", "b"))
    assert comm.ranks[comm.rank] == mesh.get_rank()
    assert repr(comm).startswith("Comm(axb: rank ")


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


def test_a_mesh_of_a_destroyed_world_says_so() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), lazy=True)
        same = init_device_mesh("cpu", (4,), lazy=True)
        assert mesh == same
    with fake_world(4):
        assert mesh != init_device_mesh("cpu", (4,))
        with pytest.raises(NoGroupError, match="destroyed"):
            mesh.comm(0)


@on_ranks(4)
def test_lazy_groups_and_meshes_of_some_ranks() -> None:
    before = _count()
    lazy = init_device_mesh("cpu", (1, 4), mesh_dim_names=("one", "four"), lazy=True)
    assert _count() == before
    assert all_reduce(torch.ones(1), (lazy, "four")).item() == 4
    some = init_device_mesh("cpu", (3,))
    if dist.get_rank() == 3:
        with pytest.raises(NoGroupError, match="not in"):
            some.comm(0)
    else:
        assert all_reduce(torch.ones(1), (some, 0)).item() == 3


@on_ranks(4)
def test_from_group() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    rows, columns = mesh.get_group(1), mesh.get_group(0)
    one = DeviceMesh.from_group(rows, "cpu", mesh_dim_names=("tp",))
    assert one.get_group() is rows
    assert one.ranks == ((0, 1) if rank < 2 else (2, 3))
    two = DeviceMesh.from_group([columns, rows], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert two.get_all_groups() == [columns, rows]
    assert two["tp"].get_group() is rows
    for wrong, text in (
        (lambda: DeviceMesh.from_group([], "cpu"), "at least one"),
        (lambda: DeviceMesh.from_group([columns, rows], "cpu"), "needs mesh="),
        (lambda: DeviceMesh.from_group([rows], "cpu", [[0, 1], [2, 3]]), "one per axis"),
        (lambda: DeviceMesh.from_group([rows, columns], "cpu", [[0, 1], [2, 3]]), "runs through ranks"),
    ):
        with pytest.raises(MeshError, match=text):
            wrong()  # type: ignore[no-untyped-call]  # a lambda


def test_a_mesh_of_some_ranks_from_a_group_elsewhere() -> None:
    with fake_world(4, rank=3):
        group = init_device_mesh("cpu", (4,)).get_group()
        mesh = DeviceMesh.from_group(group, "cpu", [0, 1])
        assert mesh.get_coordinate() is None


@on_ranks(4)
def test_ranks_that_disagree_all_get_the_same_error() -> None:
    shape = (4, 1) if dist.get_rank() == 2 else (2, 2)
    with pytest.raises(MeshMismatchError, match="different arguments") as caught:
        init_device_mesh("cpu", shape)
    texts: list[Any] = [None] * 4
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    assert "ranks 0-1, 3: cpu mesh of shape (2, 2)" in texts[0]
    assert "rank 2: cpu mesh of shape (4, 1)" in texts[0]
    names = ("a", "b") if dist.get_rank() else ("a", "c")
    with pytest.raises(MeshMismatchError, match="names"):
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
    init_device_mesh("cpu", (4,), mesh_dim_names=(f"m{dist.get_rank()}",), validate=False)


@on_ranks(4)
def test_pickles_find_the_groups_and_slices_follow_the_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    back = pickle.loads(pickle.dumps(mesh))
    assert back == mesh
    assert back.get_group("tp") is mesh.get_group("tp")
    box = [pickle.dumps(mesh["tp"])] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box, 0)
    assert box[0] is not None
    assert pickle.loads(box[0]) == mesh["tp"]


def test_backends_and_options_per_axis() -> None:
    with fake_world(4):
        plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        before = _count()
        gloo = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"b": "cpu:fake"})
        assert gloo.get_group("a") is plain.get_group("a")
        assert gloo.get_group("b") is not plain.get_group("b")
        assert gloo.comm("b").backend == "cpu:fake"
        assert _count() == before + 1
        options = torch._C._distributed_c10d.FakeProcessGroup.Options()  # type: ignore[call-arg]  # the stub asks for more
        chosen = {1: ("fake", options)}
        one = init_device_mesh("cpu", (2, 2), backend_override=chosen)
        two = init_device_mesh("cpu", (2, 2), backend_override={1: options})
        assert one.get_group(1) is not plain.get_group("b")
        assert one == init_device_mesh("cpu", (2, 2), backend_override=chosen)
        assert two._choices[1].options is options
        with pytest.raises(BackendError, match="cannot make"):
            init_device_mesh("cpu", (4,), backend_override={0: ("mpi", options)})


@on_ranks(2)
def test_gloo_options_by_value() -> None:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    options._timeout = timedelta(seconds=50)
    mesh = init_device_mesh("cpu", (2,), backend_override={0: ("gloo", options)})
    assert mesh.get_group() is not dist.group.WORLD
    assert all_reduce(torch.ones(1), (mesh, 0)).item() == 2


def test_the_fake_world_is_alone() -> None:
    with fake_world(2), pytest.raises(MeshError, match="inside of"), fake_world(2):
        pass
    with fake_world(2):
        dist.destroy_process_group()  # the program may have done it


@on_ranks(4)
def test_axes_find_their_groups_beside_groups_that_leave_this_rank_out() -> None:
    for ranks in ([0, 1], [2, 3]):
        dist.new_group(ranks)
    mesh = init_device_mesh("cpu", (2, 2))
    assert len(dist.get_process_group_ranks(mesh.get_group(1))) == 2
    assert all_reduce(torch.ones(()), (mesh, 0)).item() == 2
