"""Waits between ranks, collectives in flight together, and errors that end a wait in vain.

Covers: channel.py.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import signal
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Never
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shared_slots import small_slots
from shoal_mesh import Comm, all_gather, all_reduce, comm_over, launch
from shoal_mesh.collectives.c10d_transport import C10dTransport
from shoal_mesh.errors import CollectiveError, PeerError, RankError
from shoal_mesh.internal import Flat, Pending, start_packed
from shoal_mesh.shared_memory import exchange
from shoal_mesh.shared_memory.channel import channel_of
from shoal_mesh.shared_memory.packed_messages import Packer
from shoal_mesh.testing import on_ranks


def got(pending: Pending[Flat]) -> list[Tensor]:
    return pending.then(lambda tensors: [tensor.clone() for tensor in tensors]).wait()


@on_ranks(4)
def test_a_rank_that_is_late_is_waited_for_and_one_that_is_ahead_overwrites_nothing() -> None:
    comm, late = small_slots(4, 1 << 10), 0
    for turn in range(40):
        if comm.rank == turn % 4:
            time.sleep(0.003 * (turn % 3))
        gather = start_packed(
            "all_gather", [torch.full((90,), 10.0 * turn + comm.rank)], comm, [90] * 4
        )
        sums = start_packed(
            "reduce_scatter", [torch.full((2000,), float(turn + comm.rank))], comm, [500] * 4
        )
        late += not sums.is_completed()
        assert [row[89].item() for row in got(gather)] == [10.0 * turn + rank for rank in range(4)]
        assert got(sums)[0].tolist() == [4.0 * turn + 6] * 500
    assert late  # some were under way


@on_ranks(2)
def test_what_is_sent_may_be_released_at_once() -> None:
    comm = small_slots(2, 1 << 10)
    tensor = torch.ones(200)
    pending = start_packed("reduce_scatter", [tensor], comm, [100, 100])
    tensor.fill_(5)
    assert got(pending)[0].tolist() == [2.0] * 100


@on_ranks(3)
def test_different_collectives_raise_on_every_rank_and_from_then_on() -> None:
    comm = small_slots(3, 1 << 10)
    with pytest.raises(
        CollectiveError, match=r"rank 1: reduce_scatter sum of 3 x float32|given up"
    ):
        if comm.rank == 1:
            got(start_packed("reduce_scatter", [torch.ones(3)], comm, [1] * 3))
        else:
            got(start_packed("all_reduce", [torch.ones(3)], comm))
    for _ in range(2):
        with pytest.raises(CollectiveError, match=r"different collectives|given up"):
            got(start_packed("all_gather", [torch.ones(1)], comm, [1] * 3))


@on_ranks(2)
def test_a_rank_that_does_not_come_ends_the_wait_at_the_timeout() -> None:
    comm = Comm.over(dist.new_group([0, 1], timeout=dt.timedelta(seconds=1)), ("ranks",), (0, 1))
    got(start_packed("all_reduce", [torch.ones(1)], comm))
    if comm.rank == 0:
        with pytest.raises(
            CollectiveError, match=r"rank 0 waited 1 s, .* for rank 1 \(process \d+\)"
        ):
            got(start_packed("all_reduce", [torch.ones(1)], comm))
    dist.barrier()
    if comm.rank == 1:
        with pytest.raises(CollectiveError, match=r"rank 0 .* has given up"):
            # another stream of the same memory
            got(start_packed("all_gather", [torch.ones(1)], comm, [1, 1]))


@on_ranks(2)
def test_an_error_while_results_are_taken_is_one_of_every_rank() -> None:
    comm = small_slots(2, 1 << 10)

    def unpack(tensors: object) -> None:
        raise MemoryError("no room")

    pending = start_packed("all_gather", [torch.ones(600)], comm, [600, 600])  # of three rounds
    # Rank 1 may have read the last round by then, or not; the barrier is before the next collective
    # of both.
    expected = pytest.raises(MemoryError) if comm.rank == 0 else contextlib.nullcontext()
    with expected:
        try:
            pending.then(unpack if comm.rank == 0 else lambda tensors: None).wait()
        except CollectiveError as error:
            if "given up" not in str(error):
                raise
    dist.barrier()
    with pytest.raises(CollectiveError, match=r"no room|given up"):
        got(start_packed("all_reduce", [torch.ones(1)], comm))


# a failure of one rank before it had shared anything closed the group, too
@on_ranks(2)
def test_a_failure_before_anything_is_shared_leaves_the_group_usable() -> None:
    comm = comm_over((0, 1))

    def fail(*_: object) -> Never:
        raise MemoryError("no room")

    for turn in range(6):
        with mock.patch.object(exchange, "_movable", fail), pytest.raises(MemoryError):
            all_gather(torch.ones(2), comm)
        with mock.patch.object(exchange, "_movable", fail), pytest.raises(MemoryError):
            all_gather(torch.ones(2), comm, async_op=True)
        with mock.patch.object(Packer, "pack", fail), pytest.raises(MemoryError):
            got(start_packed("all_reduce", [torch.ones(1)], comm))
        x = torch.arange(3.0) + comm.rank + turn
        first, second = [*range(turn, turn + 3)], [*range(turn + 1, turn + 4)]
        assert all_gather(x, comm).tolist() == [*first, *second]
        assert all_gather(x, comm, async_op=True).wait().tolist() == [*first, *second]
        total = got(start_packed("all_reduce", [x], comm))[0]
        assert total.tolist() == [a + b for a, b in zip(first, second, strict=True)]


# of the rank that failed the error was untyped, and did not say that the group was closed
@on_ranks(2)
def test_a_failure_after_something_is_shared_closes_the_group_on_all_ranks() -> None:
    comm, other = small_slots(2, 1 << 10), comm_over((0, 1))

    def fail(*_: object) -> Never:
        raise MemoryError("no room")

    broken = mock.patch.object(exchange, "reduce_rows", fail) if comm.rank == 0 else nullcontext()
    with broken, suppress(PeerError):
        all_reduce(torch.ones(2), comm)
    for _ in range(2):
        with pytest.raises(
            PeerError, match=r"after it had shared its part .*no room.*closed on all ranks"
        ) as raised:
            all_reduce(torch.ones(2), comm)
        assert raised.value.ranks == (0,)
    # another group goes on
    assert got(start_packed("all_reduce", [torch.ones(1)], other))[0].tolist() == [2.0]


@on_ranks(2)
def test_a_call_that_the_backend_refuses_is_taken_back() -> None:
    comm = comm_over((0, 1))
    all_reduce(torch.ones(2), comm)
    backend = C10dTransport(comm, channel_of(comm.group))
    if comm.rank == 0:
        with pytest.raises(RuntimeError):
            # gloo has no such call
            backend.all_gather(torch.ones(2), torch.empty(5))
    # else rank 1 might have announced the next one before
    all_reduce(torch.ones(2), comm)
    for _ in range(20):
        tensor = torch.ones(2)
        backend.all_reduce_(tensor, "sum", False).wait()
        assert tensor.tolist() == [2.0, 2.0]


def die(how: str, seen: str) -> None:
    comm = small_slots(3, 1 << 10)
    pending = start_packed("all_reduce", [torch.ones(1000)], comm)
    dist.barrier()
    if comm.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    try:
        # rank 1 has shown the first of four rounds
        got(pending)
    except CollectiveError as error:
        Path(f"{seen}.{comm.rank}").write_text(str(error))
        raise


@pytest.mark.parametrize("how", ["killed", "exited"])
def test_a_rank_that_ends_within_a_collective_is_named(how: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1"):
        launch(die, 3, how, str(tmp_path / "seen"))
    for rank in (0, 2):
        text = (tmp_path / f"seen.{rank}").read_text()
        assert re.match(
            r"rank 1 \(process \d+\) has ended while|rank [02] .* has given up", text
        ), text
    assert not [path for path in Path("/dev/shm").iterdir() if "shoal" in path.name]
