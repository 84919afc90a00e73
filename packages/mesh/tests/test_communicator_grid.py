"""Covers: rank_grid.py: communicators along its axes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from shoal_mesh import (
    Comm,
    DeviceMesh,
    MeshError,
    abstract_mesh,
    all_gather,
    all_reduce,
    comm_over,
    init_device_mesh,
)
from shoal_mesh.errors import NoGroupError
from shoal_mesh.testing import fake_world, on_ranks

NAMES = ("pp", "dp", "tp")


@pytest.fixture
def cube() -> DeviceMesh:
    return abstract_mesh((2, 3, 4), NAMES, rank=17)


def test_an_abstract_mesh_sends_nothing(cube: DeviceMesh) -> None:
    with pytest.raises(NoGroupError, match="abstract"):
        cube.comm("tp")
    with pytest.raises(NoGroupError, match="abstract"):
        cube.get_group("tp")


@on_ranks(2)
def test_a_simulated_mesh_and_its_submeshes_ask_for_their_communicators_once() -> None:
    asked: list[tuple[int, ...]] = []
    group = comm_over((0, 1))

    def connect(ranks: tuple[int, ...]) -> Comm:
        asked.append(ranks)
        return group

    mesh = abstract_mesh((2, 3), ("dp", "tp"), rank=4, connect=connect)
    assert mesh.comm("dp") is mesh.comm("dp") is group
    assert mesh["tp"].comm(0) is group
    assert asked == [(1, 4), (3, 4, 5)]
    assert mesh == abstract_mesh((2, 3), ("dp", "tp"), rank=4, connect=connect)
    assert mesh != abstract_mesh((2, 3), ("dp", "tp"), rank=4)


def _count() -> int:
    return len(c10d._world.pg_names)


@on_ranks(4)
def test_irregular_and_transposed_ranks_count_in_their_order() -> None:
    mesh = DeviceMesh("cpu", [[3, 0], [1, 2]], mesh_dim_names=("a", "b"))
    assert mesh.comm(("a", "b")).ranks == (3, 0, 1, 2)
    assert mesh.comm(("a", "b")).order == (3, 0, 1, 2)
    mine = torch.tensor([mesh.get_rank()])
    assert all_gather(mine, (mesh, ("a", "b"))).tolist() == [3, 0, 1, 2]
    assert all_gather(mine, (mesh, ("b", "a"))).tolist() == [3, 1, 0, 2]
    assert all_gather(mine, (mesh, "b")).tolist() == (
        [3, 0] if mesh.get_rank() in (0, 3) else [1, 2]
    )
    comm = mesh.comm(("a", "b"))
    assert comm.ranks[comm.rank] == mesh.get_rank()
    assert repr(comm).startswith("Comm(axb: rank ")


def test_a_mesh_goes_on_in_a_world_alike_and_in_no_other() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), lazy=True)
        used = init_device_mesh("cpu", (2, 2))
        first = used.comm(1).group
        same = init_device_mesh("cpu", (4,), lazy=True)
        assert mesh == same
    with pytest.raises(NoGroupError, match="none now"):
        used.get_group(1)
    with fake_world(4):
        assert mesh == init_device_mesh("cpu", (4,))
        assert mesh.comm(0).group is dist.group.WORLD
        assert used.comm(1).group is not first
    for size, rank in ((8, 0), (4, 1)):
        with fake_world(size, rank=rank):
            assert mesh != init_device_mesh("cpu", (4,))
            with pytest.raises(NoGroupError, match="destroyed"):
                same.comm(0)
            with pytest.raises(NoGroupError, match="begin one alike"):
                used.get_group(1)


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
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    mesh = init_device_mesh("cpu", (2, 2))
    rows, columns = mesh.get_group(1), mesh.get_group(0)
    one = DeviceMesh.from_group(rows, "cpu", mesh_dim_names=("tp",))
    assert one.get_group() is rows
    assert one.ranks == ((0, 1) if rank < 2 else (2, 3))
    two = DeviceMesh.from_group(
        [columns, rows], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")
    )
    assert two.get_all_groups() == [columns, rows]
    assert two["tp"].get_group() is rows
    for wrong, text in (
        (lambda: DeviceMesh.from_group([], "cpu"), "at least one"),
        (lambda: DeviceMesh.from_group([columns, rows], "cpu"), "needs mesh="),
        (lambda: DeviceMesh.from_group([rows], "cpu", [[0, 1], [2, 3]]), "one per axis"),
        (lambda: DeviceMesh.from_group([rows, columns], "cpu", [[0, 1], [2, 3]]), "has the ranks"),
        # on ranks 2 and 3 too
        (lambda: DeviceMesh.from_group(world, "cpu", [0, 1]), "its group has"),
    ):
        with pytest.raises(MeshError, match=text):
            wrong()  # type: ignore[no-untyped-call]  # a lambda


def test_a_mesh_of_some_ranks_from_a_group_elsewhere() -> None:
    with fake_world(4, rank=3):
        group = init_device_mesh("cpu", (2, 2)).get_group(1)
        mesh = DeviceMesh.from_group(group, "cpu", [0, 1])
        assert mesh.get_coordinate() is None


def test_the_communicator_of_the_world_lists_no_ranks_until_asked() -> None:
    with fake_world(16384):
        mesh = init_device_mesh("cpu", (16384,))
        comm = mesh.comm(0)
        assert comm.line == range(16384) and comm.group is dist.group.WORLD
        assert comm.ranks == tuple(range(16384)) and comm.order is None and comm.rank == 0


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
)
@on_ranks(4, timeout=200)  # Dynamo is imported on each
def test_compiled_code_asks_a_mesh_for_its_groups() -> None:
    from torch.distributed import _functional_collectives as functional

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def sums(x: torch.Tensor) -> torch.Tensor:
        once: torch.Tensor = functional.all_reduce(x * 2, "sum", grid.get_group("tp"))
        twice: torch.Tensor = functional.all_reduce(x, "sum", grid["dp"].get_group())
        return once + twice + grid.get_group(0).size()

    x = torch.full((3,), float(dist.get_rank()))
    torch._dynamo.reset()
    compiled = torch.compile(sums, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), sums(x))


@on_ranks(4)
def test_meshes_of_one_root_share_communicators() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), lazy=True)
    early, split = mesh["tp"], mesh.unflatten("dp", (2, 1), ("a", "b"))
    assert (
        early.comm(0)
        is mesh.comm("tp")
        is split.comm("tp")
        is DeviceMesh.concatenate([split["tp"], split["a"]]).comm(0)
    )
    assert split.comm("a") is not mesh.comm("dp")  # its axis has another name
    rows = [dist.new_group(ranks, timeout=timedelta(seconds=77)) for ranks in ([0, 1], [2, 3])]
    group = rows[dist.get_rank() // 2]
    own = DeviceMesh.from_group(
        [mesh.get_group("dp"), group], "cpu", mesh.mesh, mesh_dim_names=("dp", "tp")
    )
    assert own["tp"].get_group() is group is not mesh.get_group("tp")
