"""Ranks that wait for each other in different collectives are named, slow ones are not.

Covers: deadlocks.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import all_gather, all_reduce, comm_over, init_device_mesh, launch
from shoal_mesh.errors import PeerError, RankError
from shoal_mesh.internal import start_packed
from shoal_mesh.testing import on_ranks
from shoal_mesh.watch import deadlocks
from shoal_mesh.watch.deadlocks import Address, describe_deadlock, processes_that_wait

State = Mapping[str, Any]


def state_of(rank: int, *awaits: int, call: str = "") -> State:
    """The board of a process whose number is 10 more than its rank."""
    waits = [
        {"serial": 1, "text": f"a call of {rank}", "awaits": [(r, 10 + r, 3)], "call": call}
        for r in awaits
    ]
    return {"rank": rank, "beat": 1, "waits": waits}


BOARDS: dict[str, tuple[list[State], list[int]]] = {
    "two": ([state_of(0, 1), state_of(1, 0)], [0, 1]),
    "a ring": ([state_of(0, 1), state_of(1, 2), state_of(2, 0)], [0, 1, 2]),
    "a ring of others": ([state_of(0, 1), state_of(1, 2), state_of(2, 1)], [0, 1, 2]),
    "one that computes": ([state_of(0, 1), state_of(1, 2), state_of(2)], []),
    "one of two awaited computes": ([state_of(0, 1, 2), state_of(1, 0), state_of(2)], []),
    "one that is not known": ([state_of(0, 1), state_of(1, 5)], []),
    "one call": ([state_of(0, 1, call="barrier"), state_of(1, 0, call="barrier")], []),
    "two calls": ([state_of(0, 1, call="barrier"), state_of(1, 0, call="all_reduce")], [0, 1]),
}


@pytest.mark.parametrize("name", BOARDS)
def test_processes_wait_for_each_other_where_none_of_them_does_anything_else(name: str) -> None:
    boards, want = BOARDS[name]
    by_pid = {10 + each["rank"]: each for each in boards}

    def read(address: Address) -> State | None:
        return by_pid.get(address.pid)

    states = processes_that_wait(10, boards[0], read)
    assert sorted(pid - 10 for pid in states) == want
    if want:
        text, waits = describe_deadlock(states)
        assert all(f"rank {rank} waits in a call of {rank}" in text for rank in want)
        assert waits == {rank: f"a call of {rank}" for rank in want}


def _one_more_then_a_barrier() -> None:
    comm = comm_over(range(dist.get_world_size()))
    all_reduce(torch.ones(2), comm)
    if comm.rank == 0:
        start_packed("all_reduce", [torch.ones(5)], comm).wait()
    dist.barrier()


def _other_streams() -> None:
    comm = comm_over(range(dist.get_world_size()))
    if comm.rank == 0:
        start_packed("all_reduce", [torch.ones(5)], comm).wait()
    all_gather(torch.ones(2), comm)


def _other_groups() -> None:
    # every rank waits for its right neighbor in a group that this one comes to last
    size, rank = dist.get_world_size(), dist.get_rank()
    pairs = {tuple(sorted((i, (i + 1) % size))) for i in range(size)}
    comms = {pair: comm_over(pair) for pair in sorted(pairs) if rank in pair}
    for _, comm in sorted(comms.items()):
        all_reduce(torch.ones(2), comm)
    mine = tuple(sorted((rank, (rank + 1) % size)))
    for pair in (mine, *(pair for pair in comms if pair != mine)):
        all_reduce(torch.ones(2), comms[pair])


def _gloo_and_a_barrier() -> None:
    comm = comm_over(range(dist.get_world_size()))
    all_reduce(torch.ones(2), comm)
    if comm.rank == 0:
        # reductions on bits are gloo's
        all_reduce(torch.ones(2, dtype=torch.int32), comm, "bxor")
        all_reduce(torch.ones(2), comm)
    dist.all_reduce(torch.ones(3), group=dist.new_group([*comm.ranks]))


def _a_mesh_on_one_rank() -> None:
    comm = comm_over(range(dist.get_world_size()))
    all_reduce(torch.ones(2), comm)
    if comm.rank == 0:
        init_device_mesh("cpu", (1, comm.size))
    all_reduce(torch.ones(2), comm)


# all of them waited until the timeout of the process group
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "program",
    [
        _one_more_then_a_barrier,
        _other_streams,
        _other_groups,
        _gloo_and_a_barrier,
        _a_mesh_on_one_rank,
    ],
)
def test_ranks_that_wait_for_each_other_are_named_within_seconds(
    program: Callable[[], None], size: int
) -> None:
    if program is _other_groups and size == 2:
        # of two ranks there is one pair
        return
    start = time.monotonic()
    with pytest.raises((RankError, PeerError), match="wait for each other in different") as caught:
        launch(program, size)
    # starting ranks included, on a machine that others use; the timeout is half an hour
    assert time.monotonic() - start < 120
    text = str(caught.value)
    assert all(f"rank {rank} waits in" in text for rank in range(size))


@contextmanager
def frequent_looks() -> Iterator[None]:
    """Five times as many looks in a second, so that a false alarm is raised within one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlocks, "_SECONDS", 0.1)
        yield


@on_ranks(2)
@frequent_looks()
def test_a_slow_rank_is_neither_a_hang_nor_an_alarm() -> None:
    comm = comm_over((0, 1))
    for slow in (0, 1):
        if comm.rank == slow:
            time.sleep(1.5)
        assert all_reduce(torch.ones(2), comm).tolist() == [2.0, 2.0]
        if comm.rank == slow:
            time.sleep(1.5)
        dist.barrier()


@on_ranks(2)
@frequent_looks()
def test_threads_that_come_in_any_order_are_not_an_alarm() -> None:
    comms = [comm_over((0, 1)), comm_over((1, 0))]
    groups = [dist.new_group([0, 1]) for _ in comms]
    rank, results = dist.get_rank(), []

    def work(i: int) -> None:
        # each thread of rank 0 waits for one of rank 1 that comes later
        time.sleep(1.5 * (i != rank))
        total = torch.ones(1)
        dist.all_reduce(total, group=groups[i])
        results.append(total.item())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [2.0, 2.0]
    assert all_reduce(torch.ones(1), comms[0]).item() == 2.0
