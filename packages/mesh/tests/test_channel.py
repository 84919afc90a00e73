"""Covers: channel.py: waits between ranks, and errors that end a wait in vain."""

from __future__ import annotations

import datetime as dt
import gc
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shoal_mesh import Comm, all_gather, all_reduce, comm_over, launch, reduce_scatter
from shoal_mesh.errors import CollectiveError, RankError
from shoal_mesh.internal import all_reduce_
from shoal_mesh.testing import on_ranks


def of_all() -> Comm:
    return comm_over(tuple(range(dist.get_world_size())))


@on_ranks(4)
def test_a_rank_that_is_late_is_waited_for_and_one_that_is_ahead_overwrites_nothing() -> None:
    comm, rank = of_all(), dist.get_rank()
    for turn in range(40):
        if rank == turn % 4:
            time.sleep(0.003 * (turn % 3))
        x = torch.full((1000,), float(10 * turn + rank))
        assert all_gather(x, comm).view(4, -1)[:, 0].tolist() == [10 * turn + r for r in range(4)]


@on_ranks(3)
def test_handles_may_be_waited_for_in_any_order_or_dropped() -> None:
    comm, rank = of_all(), dist.get_rank()
    sources = [torch.full((4,), float(rank + 10 * i)) for i in range(5)]
    pending = [all_gather(x, comm, async_op=True) for x in sources]
    total = all_reduce(torch.ones(3), comm)
    for i in (4, 0, 3, 1):
        assert pending[i].wait()[::4].tolist() == [r + 10 * i for r in range(3)]
    assert total.tolist() == [3.0] * 3
    last = all_gather(sources[0], comm, async_op=True)
    while not last.is_completed():
        pass
    assert last.wait()[::4].tolist() == [0.0, 1.0, 2.0]


@on_ranks(2)
def test_blocks_of_different_sizes_have_a_hint() -> None:
    comm = Comm.over(dist.new_group([0, 1]), ("ranks",), (0, 1))
    block = torch.ones(3 + dist.get_rank())
    with pytest.raises(CollectiveError, match=r"ending in _v.*run_check=True.*global shape="):
        all_gather(block, comm)


@on_ranks(3)
def test_different_collectives_raise_on_every_rank() -> None:
    group = dist.new_group([0, 1, 2])
    comm, rank = Comm.over(group, ("ranks",), (0, 1, 2)), dist.get_rank()
    all_reduce(torch.ones(1), comm)
    with pytest.raises(
        CollectiveError, match=r"rank 1: reduce_scatter sum of 3 x float32|given up"
    ):
        if rank == 1:
            reduce_scatter(torch.ones(3), comm)
        else:
            all_reduce(torch.ones(3), comm)
    with pytest.raises(CollectiveError, match=r"different collectives|given up"):  # and from now on
        all_reduce(torch.ones(3), comm)


@on_ranks(2)
def test_a_rank_that_does_not_come_ends_the_wait_at_the_timeout() -> None:
    group = dist.new_group([0, 1])
    comm = Comm.over(group, ("ranks",), (0, 1))
    all_reduce(torch.ones(1), comm)
    # as trainers do after their first steps
    dist.distributed_c10d._set_pg_timeout(dt.timedelta(seconds=1), group)
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(
            CollectiveError, match=r"rank 0 waited 1 s, .* for rank 1 \(process \d+\)"
        ):
            all_reduce(torch.ones(1), comm)
        assert 0.9 < time.monotonic() - start < 10
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(CollectiveError, match=r"rank 0 .* has given up"):
            all_reduce(torch.ones(1), comm)


@on_ranks(2)
def test_a_group_that_is_destroyed_ends_the_wait() -> None:
    group = dist.new_group([0, 1])
    comm = Comm.over(group, ("ranks",), (0, 1))
    all_reduce(torch.ones(1), comm)
    if dist.get_rank() == 0:
        pending = all_reduce(torch.ones(1), comm, async_op=True)
        dist.destroy_process_group(group)
        with pytest.raises(CollectiveError, match="destroyed"):
            pending.wait()
    dist.barrier()


def die(how: str, seen: str) -> None:
    comm = of_all()
    all_reduce(torch.ones(1), comm)
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    start = time.monotonic()
    try:
        all_reduce(torch.ones(1), comm)
    except CollectiveError as error:
        # Of a job whose rank has died the pool may say no more than that.
        Path(f"{seen}.{dist.get_rank()}").write_text(f"{time.monotonic() - start:.2f} {error}")
        raise


@pytest.mark.parametrize("how", ["killed", "exited"])
def test_a_rank_that_ends_is_named_within_a_second(how: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1"):
        launch(die, 3, how, str(tmp_path / "seen"))
    for rank in (0, 2):
        seconds, _, text = (tmp_path / f"seen.{rank}").read_text().partition(" ")
        assert float(seconds) < 5
        assert re.match(
            r"rank 1 \(process \d+\) has ended while|rank [02] .* has given up", text
        ), text


@on_ranks(2)
def test_inference_tensors_and_tensors_saved_for_backward() -> None:
    comm = of_all()
    with torch.inference_mode():
        own = torch.ones(3)
    assert all_reduce_(own, comm).tolist() == [2.0] * 3
    factor = torch.tensor([2.0, 3.0, 4.0])
    x = torch.ones(3, requires_grad=True)
    y = x * factor
    # the same values: as with a backend, autograd does not count the write
    all_reduce_(factor, comm, "max")
    y.sum().backward()  # type: ignore[no-untyped-call]  # torch does not type it
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0, 4.0]


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """The operators that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_modes_see_no_operator_of_the_exchange() -> None:
    comm, x = of_all(), torch.ones(3)
    all_reduce_(x, comm)
    with Seen() as seen:
        all_reduce_(x, comm)
        all_reduce_(x, comm, async_op=True).wait()
    assert seen.names == []
    assert x.tolist() == [8.0] * 3


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:shoal_mesh")


@on_ranks(2)
def test_a_group_takes_its_memory_with_it() -> None:
    def cycle() -> None:
        for _ in range(3):
            group = dist.new_group([0, 1])
            comm = Comm.over(group, ("ranks",), (0, 1))
            all_reduce(torch.ones(1), comm)
            dist.destroy_process_group(group)
            del comm, group

    cycle()
    # groups of earlier tests that are in reference cycles would be freed in the second cycle
    gc.collect()
    before = mapped()
    cycle()
    assert mapped() == before
