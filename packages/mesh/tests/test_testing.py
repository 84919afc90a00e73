"""Covers: testing.py: the unittest base, skip decorators, with_comms, the fake world, counts."""

from __future__ import annotations

import os
import unittest

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import (
    CommDebugMode,
    DeviceMesh,
    MeshError,
    all_reduce,
    all_to_all_v,
    init_device_mesh,
    reduce_scatter,
)
from shoal_mesh.accelerator import accelerator, device_count
from shoal_mesh.testing import (
    RankTestCase,
    all_ranks,
    counts,
    default_world_size,
    device_type,
    fake_world,
    on_ranks,
    rank_pool,
    skip_unless_backend,
    skip_unless_gpus,
    with_comms,
)


class TestOnRanks(RankTestCase):
    world_size = 2
    mesh: DeviceMesh

    def setUp(self) -> None:
        self.scale = 3

    def set_up_rank(self) -> None:
        self.mesh = self.build_mesh(names=("dp",))

    def test_the_method_runs_on_ranks(self) -> None:
        total = all_reduce(torch.ones(()), (self.mesh, "dp")).item()
        self.assertEqual(total * self.scale, 6)  # noqa: PT009  # a unittest
        for i in range(2):
            with self.subTest(i=i):
                assert dist.get_world_size() == 2


class Failing(RankTestCase):
    """Runs that fail and are skipped; pytest does not collect them."""

    world_size = 2
    __test__ = False

    def test_fails(self) -> None:
        raise KeyError("on a rank")

    def test_skips(self) -> None:
        self.skipTest("no reason")


@pytest.mark.parametrize(("method", "kind"), [("test_fails", "errors"), ("test_skips", "skipped")])
def test_failures_and_skips_reach_unittest(method: str, kind: str) -> None:
    result = unittest.TestResult()
    Failing(method).run(result)
    assert len(getattr(result, kind)) == 1
    assert result.testsRun == 1
    rank_pool(2).run(int)  # and the pool is well


def test_what_is_here() -> None:
    assert device_type() == (accelerator() or "cpu")
    assert default_world_size() in {2, 3, 4}
    gpus = device_count()

    @skip_unless_gpus(gpus + 1)
    def needs_more() -> None:
        raise AssertionError("ran")

    with pytest.raises(unittest.SkipTest, match=f"needs {gpus + 1} GPU"):
        needs_more()
    skip_unless_backend("gloo")(lambda: None)()
    with pytest.raises(unittest.SkipTest, match="the backend 'pigeon' is not available"):
        skip_unless_backend("pigeon")(lambda: None)()


def test_all_ranks_are_those_of_the_present_world() -> None:
    for size, rank in ((2, 0), (3, 0), (2, 1)):
        with fake_world(size, rank):
            mesh = all_ranks()
            assert (mesh.size(), mesh.get_rank(), mesh.get_coordinate()) == (size, rank, (rank,))


@on_ranks(2)
def test_collectives_over_all_ranks_are_counted_by_short_names() -> None:
    comm = all_ranks().comm(0)
    assert all_ranks() is all_ranks()
    assert comm.size == 2
    with CommDebugMode() as mode:
        for _ in range(2):
            all_reduce(torch.ones(2), comm)
        reduce_scatter(torch.ones(2), comm)
        all_to_all_v(torch.ones(2), comm, [1, 1], [1, 1])
    assert counts(mode) == {"all_reduce": 2, "reduce_scatter": 1, "all_to_all": 1}


@with_comms
def _size() -> int:
    return dist.get_world_size()


@on_ranks(2)
def test_with_comms_uses_the_group_that_is_up() -> None:
    assert _size() == 2
    assert dist.is_initialized()


def _makes_its_own(port: int) -> int:
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        size = _size()
        assert not dist.is_initialized()
    finally:
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return size


def test_with_comms_makes_and_destroys_a_group() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert rank_pool(2).run(_makes_its_own, port) == [2, 2]


def test_the_fake_world_is_alone() -> None:
    with (
        fake_world(2),
        pytest.raises(MeshError, match="cannot be used in a process that has a default"),
        fake_world(2),
    ):
        pass
    with fake_world(2):
        dist.destroy_process_group()  # the program may have done it


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64])
def test_a_rank_of_the_fake_world_may_send_nothing_and_receive(dtype: torch.dtype) -> None:
    with fake_world(3):
        comm = init_device_mesh("cpu", (3,)).comm(0)
        arrived = all_to_all_v(torch.empty(0, dtype=dtype), comm, [0, 0, 0], [0, 2, 1])
        assert arrived.dtype is dtype
        assert arrived.tolist() == [0, 0, 0]
