"""Covers: lockstep.py, on real gloo ranks."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from shoal_mesh import (
    Comm,
    CommDebugMode,
    LockstepError,
    PeerError,
    all_gather,
    all_gather_v,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_blocks,
    all_to_all_v,
    broadcast,
    comm_over,
    gather,
    init_device_mesh,
    lockstep,
    permute,
    purpose,
    reduce_scatter,
    reduce_scatter_v,
    restart_world,
    scatter,
)
from shoal_mesh.errors import RankError
from shoal_mesh.testing import RankPool, fake_world, on_ranks, rank_pool


@pytest.fixture(autouse=True, scope="module")
def _whole_groups() -> Iterator[None]:
    """Errors break communicators: what runs after this file begins with new ones."""
    yield
    rank_pool(4).run(_renew)


def _renew() -> None:
    restart_world()


def _new_comm() -> Comm:
    """A communicator that no error of another test has broken."""
    restart_world()
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)).comm(0)


@on_ranks(4)
def test_ranks_in_step_pass() -> None:
    restart_world()
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
    comm = _new_comm()
    collective = all_gather if comm.rank == 2 else all_reduce
    with lockstep(timeout=20):
        all_reduce(torch.ones(2), comm)
        with (
            purpose("layer 3"),
            purpose("mm of weight"),
            pytest.raises(LockstepError, match="step 1 along") as caught,
        ):
            collective(torch.ones(2), comm)
    text = str(caught.value)
    assert (
        "  rank 2: all_gather_into_tensor float32 shape (2,), dim 0, for mm of weight; layer 3 "
        "(test_lockst" in text
    )
    assert (
        "  ranks 0, 1, 3: all_reduce sum float32 shape (2,), for mm of weight; layer 3 "
        "(test_lockstep.py:" in text
    )


def _different(comm: Comm) -> dict[str, tuple[Callable[[], object], str]]:
    """Calls that differ on rank 1 in one thing, and what the error says of rank 1."""
    one, size = comm.rank == 1, comm.size
    x = torch.ones(4, 4)
    sizes = [1, 2, 3, 4]
    own = torch.ones(sizes[comm.rank])
    # rank 1 takes one row more from the last rank
    taken = [[x[1 : 2 + (one and i == 3)]] for i in range(size)]
    return {
        "shape of all_reduce": (lambda: all_reduce(torch.ones(2 + one), comm), "shape (3,)"),
        "all_gather of 6 against 4": (
            lambda: all_gather(torch.ones(6 if one else 4), comm),
            "shape (6,), dim 0",
        ),
        "dim of all_gather": (lambda: all_gather(x, comm, int(one)), "shape (4, 4), dim 1"),
        "dim of reduce_scatter": (lambda: reduce_scatter(x, comm, int(one)), "dim 1"),
        "op of reduce_scatter": (
            lambda: reduce_scatter(x, comm, 0, "max" if one else "sum"),
            "scatter_tensor max",
        ),
        "dtype": (lambda: all_reduce(x.double() if one else x, comm), "all_reduce sum float64"),
        "dims of all_to_all": (
            lambda: all_to_all(x, comm, int(one), 0),
            "split_dim 1, concat_dim 0",
        ),
        "root of broadcast": (lambda: broadcast(x, comm, int(one)), "src 1"),
        "root of scatter": (
            lambda: scatter([x] * 4 if comm.rank < 2 else None, comm, int(one), out=x),
            "src 1",
        ),
        "root of gather": (lambda: gather(x, comm, int(one)), "dst 1"),
        "targets": (
            lambda: permute(x, comm, [1, 0, 3, 2] if one else [0, 1, 2, 3]),
            "targets (1, 0, 3, 2)",
        ),
        "sizes of all_gather_v": (
            lambda: all_gather_v(own, comm, [1, 2, 3, 3 + (not one)]),
            "sizes (1, 2, 3, 3)",
        ),
        "sizes of reduce_scatter_v": (
            lambda: reduce_scatter_v(torch.ones(10), comm, [2, 1, 3, 4] if one else sizes),
            "sizes (2, 1, 3, 4)",
        ),
        "counts of all_to_all_v": (
            lambda: all_to_all_v(torch.ones(size + one), comm, [1] * 3 + [1 + one], [1] * size),
            "sends [1, 1, 1, 2], receives [1, 1, 1, 1]",
        ),
        "counts of all_to_all_blocks": (
            lambda: all_to_all_blocks([[x[:1]]] * 4, comm, taken),
            "receives [4, 0, 4, 8]",
        ),
        "lists": (
            lambda: all_reduce_coalesced([x, x[0]] if one else [x[0], x], comm),
            "shapes ((4, 4), (4,))",
        ),
        "coalesced or not": (
            lambda: all_reduce_coalesced([x], comm) if one else [all_reduce(x, comm)],
            "_coalesced",
        ),
    }


@pytest.mark.parametrize("name", _different(cast(Comm, SimpleNamespace(rank=0, size=4))))
@on_ranks(4)
def test_what_differs_on_one_rank_raises_on_all(name: str) -> None:
    comm = _new_comm()
    call, text = _different(comm)[name]
    with pytest.raises(LockstepError, match="at step 0 along tp") as caught, lockstep(timeout=20):
        call()
    line = next(line for line in str(caught.value).split("\n") if line.startswith("  rank 1:"))
    assert text in line, line


@on_ranks(4)
def test_equal_bytes_of_different_shardings_differ_by_purpose() -> None:
    """S(0) on three ranks, S(1) on one.

    The (2, 2) shards and the all-gather of dim 0 are the same, the meaning is not.
    """
    comm = _new_comm()
    layout = "S(1)" if comm.rank == 3 else "S(0)"
    with lockstep(timeout=20):
        with purpose(lambda: "redistribute S(0) -> R"):
            all_gather(torch.ones(2, 2), comm)
        with purpose(lambda: f"redistribute {layout} -> R"), pytest.raises(LockstepError) as caught:
            all_gather(torch.ones(2, 2), comm)
    assert (
        "ranks 0-2: all_gather_into_tensor float32 shape (2, 2), dim 0, for redistribute S(0) -> R"
        in str(caught.value)
    )
    assert (
        "rank 3: all_gather_into_tensor float32 shape (2, 2), dim 0, for redistribute S(1) -> R"
        in str(caught.value)
    )


@on_ranks(4)
def test_equal_collectives_that_are_swapped_differ_by_purpose() -> None:
    comm = _new_comm()
    texts = ["gradient of weight", "gradient of bias"]
    with pytest.raises(LockstepError, match="step 0 along tp"), lockstep(timeout=20):
        for text in texts if comm.rank else reversed(texts):
            with purpose(text):
                all_reduce(torch.ones(2), comm)


@on_ranks(4)
def test_blocks_of_one_pair_of_ranks_are_in_step() -> None:
    """Ranks without any block do not know the dtype of the others."""
    comm = _new_comm()
    block, out = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    with lockstep(timeout=20):
        all_to_all_blocks(
            [[block] if comm.rank == 0 and i == 2 else [] for i in range(4)],
            comm,
            [[out] if comm.rank == 2 and i == 0 else [] for i in range(4)],
        )
    assert out.sum() == 3 * (comm.rank == 2)


@on_ranks(4)
def test_equal_collectives_of_different_lines_are_swapped_or_allowed() -> None:
    comm = _new_comm()
    with lockstep(timeout=20), pytest.raises(LockstepError, match="step 0 along tp") as caught:
        if comm.rank == 3:
            all_reduce(torch.ones(2), comm)
        all_reduce(torch.zeros(2), comm)
    assert caught.value.ranks == (3,)
    assert (
        len({line.split("(test_lockstep.py:")[1] for line in str(caught.value).split("\n")[1:]})
        == 2
    )
    comm = _new_comm()
    with lockstep(timeout=20, call_sites=False):
        total = all_reduce(torch.ones(2), comm) if comm.rank else all_reduce(torch.zeros(2), comm)
    assert total.eq(3).all()


@on_ranks(4)
def test_every_third_collective_is_compared() -> None:
    comm = _new_comm()
    with lockstep(timeout=20, every=3):
        for step in range(6):
            with purpose("swapped" if step == 4 and comm.rank == 1 else f"step {step}"):
                all_reduce(torch.ones(2), comm)
        with (
            purpose(f"{comm.rank == 1}"),
            pytest.raises(LockstepError, match="at step 6 along tp") as caught,
        ):
            all_reduce(torch.ones(2), comm)
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize(
    "fault", ["leaves", "raises", "ends", "ends with the store", "is elsewhere"]
)
@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
def test_a_rank_that_does_not_come_is_named(fault: str, transport: str) -> None:
    culprit, dies = (
        0 if fault == "ends with the store" else 3,
        fault not in ("leaves", "is elsewhere"),
    )
    with tempfile.TemporaryDirectory() as folder, RankPool(4) as pool:
        with suppress(RankError):  # of the rank at fault
            pool.run(_without_one, fault, transport, culprit, folder, timeout=30)
        texts = {rank: Path(folder, str(rank)).read_text() for rank in range(4) if rank != culprit}
    for text in texts.values():
        kind, ranks, seconds, said = text.split("|", 3)
        assert kind == "LockstepError" or (dies and kind == "PeerError"), text
        assert ranks == str([culprit]), text
        assert float(seconds) < 9, text
        assert f"rank {culprit}" in said, text
        if fault in ("leaves", "raises"):
            assert ("ValueError: wrong data" in said) == (fault == "raises"), text
            assert (
                "ValueError" in said
                or "waits: all_reduce sum float32 shape (2,), for losses (test_lock" in said
            ), text


def _without_one(fault: str, transport: str, culprit: int, folder: str) -> None:
    os.environ["SHOAL_SHARED_MEMORY"] = str(int(transport == "shared memory"))
    restart_world(timeout=60)
    comm = init_device_mesh("cpu", (4,)).comm(0)
    all_reduce(torch.ones(1), comm)
    start = time.monotonic()
    try:
        with lockstep(timeout=1.5), purpose("losses"):
            if comm.rank == culprit:
                _fail(
                    fault, [Path(folder, str(rank)) for rank in range(comm.size) if rank != culprit]
                )
                return
            all_reduce(torch.ones(2), comm)
    except PeerError as error:
        seen = f"{type(error).__name__}|{list(error.ranks)}|{time.monotonic() - start}|{error}"
        Path(folder, str(comm.rank)).write_text(seen)
    except ValueError:
        # the block is left by it, the process is not: a pool gives ranks beside a failed one
        # seconds
        assert comm.rank == culprit


def _fail(fault: str, answers: list[Path]) -> None:
    if fault == "raises":
        raise ValueError("wrong data")
    if fault.startswith("ends"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "is elsewhere":
        # until the others have given up on this rank
        while not all(path.exists() for path in answers):
            time.sleep(0.01)


def test_one_process_has_nobody_to_compare_with() -> None:
    with fake_world(4), lockstep(), CommDebugMode() as debug:
        summed = all_reduce(torch.ones(1), (init_device_mesh("cpu", (4,)), 0))
    assert summed.shape == (1,)
    assert debug.get_total_counts() == 1


@on_ranks(2)
def test_what_a_new_group_sets_up_is_not_counted() -> None:
    restart_world()
    comm = comm_over((0, 1))
    with CommDebugMode() as debug, lockstep():
        all_reduce(torch.ones(1), comm)
    assert debug.get_total_counts() == 1
