"""Covers: elastic.py, on real ranks that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import ElasticWorld, MeshError, PeerError, all_reduce, init_device_mesh
from shoal_mesh._torch import TCPStore
from shoal_mesh.errors import BackendError, MeshTypeError, RankError
from shoal_mesh.shared_memory.channel import Stream
from shoal_mesh.testing import RankPool

STEPS = 6


@dataclass(frozen=True)
class _Process:
    """What a process is given: its number, where it writes its result, and where the store is."""

    number: int
    folder: Path
    port: int

    def world(self, size: int, **options: Any) -> ElasticWorld:
        """Another elastic world for every test: stores are not shared."""
        return ElasticWorld(TCPStore("127.0.0.1", self.port, is_master=False), size, **options)

    def write(self, result: object) -> None:
        """The result of this process."""
        (self.folder / str(self.number)).write_text(json.dumps(result))


def _results(folder: Path, count: int, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
    """What processes have written, by number.

    Each is in a pool of its own, so that its end ends no other.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(number: int) -> None:
        with RankPool(1) as pool, contextlib.suppress(RankError):  # of a process that was killed
            pool.run(function, _Process(number, folder, store.port), *args, timeout=60.0)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(run, range(count)))
    return {
        int(path.name): json.loads(path.read_text())
        for path in folder.iterdir()
        if path.name.isdigit()
    }


def _kill(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def _train(process: _Process, kills: dict[int, int], gloo: bool) -> None:
    """Add up the ranks of every step; at some steps a rank of the present world is killed."""
    if gloo:
        os.environ["SHOAL_SHARED_MEMORY"] = "0"
    world, step, seen = process.world(4), 0, list[tuple[int, float]]()

    def steps() -> None:
        nonlocal step
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        step = int(all_reduce(torch.tensor(step), (mesh, "dp"), "max"))
        while step < STEPS:
            world.admit()
            if step in kills and world.round == [*kills].index(step):
                _kill(kills[step])
            seen.append((step, all_reduce(torch.tensor(1.0), (mesh, "dp")).item()))
            step += 1

    world.run(steps)
    process.write([len(seen), seen[-1], world.round, {size for _, size in seen} == {4.0, 3.0, 2.0}])


@pytest.mark.parametrize("gloo", [False, True])
def test_survivors_go_on_in_the_same_processes(tmp_path: Path, gloo: bool) -> None:
    # of the first world, then of the one of three
    results = _results(tmp_path, 4, _train, {1: 0, 3: 1}, gloo)
    assert results.keys() < {0, 1, 2, 3} and len(results) == 2
    assert all(result == [6, [5, 2.0], 2, True] for result in results.values())


def _joins_late(process: _Process) -> None:
    world, began, seen = process.world(3), process.folder / "began", list[int]()

    def steps() -> int:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        while True:
            world.admit()
            seen.append(int(all_reduce(torch.tensor(1), (mesh, 0))))
            began.touch()
            if seen[-1] == 4:
                return dist.get_rank()

    while process.number == 3 and not began.exists():
        time.sleep(0.01)
    rank = world.run(steps)
    process.write([sorted({*seen}), rank])


def test_newcomers_are_let_in_between_two_steps(tmp_path: Path) -> None:
    results = _results(tmp_path, 4, _joins_late)
    assert results[3] == [[4], 3]
    assert sorted(results[number][1] for number in range(3)) == [0, 1, 2]
    assert all(results[number][0] == [3, 4] for number in range(3))


def _fails(process: _Process) -> None:
    sizes = []

    def wrong() -> None:
        sizes.append(dist.get_world_size())
        if process.number == 2:
            raise ZeroDivisionError("a mistake")
        all_reduce(torch.ones(1), (init_device_mesh("cpu", (3,)), 0))

    try:
        process.world(3).run(wrong)
    except Exception as error:
        process.write([type(error).__name__, sizes])


def test_an_error_of_the_program_is_raised_where_nobody_is_lost(tmp_path: Path) -> None:
    results = _results(tmp_path, 3, _fails)
    assert results == {0: ["PeerError", [3]], 1: ["PeerError", [3]], 2: ["ZeroDivisionError", [3]]}


def _stays_away(process: _Process) -> None:
    world = process.world(3, patience=2.0)

    def step() -> int:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if world.round == 0 and process.number == 1:
            # until the others have come to the end
            while not all((process.folder / name).exists() for name in "02"):
                time.sleep(0.01)
        if world.round == 0 and process.number == 2:
            raise ValueError("lost its data")
        return int(all_reduce(torch.ones(1), (mesh, 0)))

    process.write(world.run(step))


def test_a_member_that_does_not_come_is_left_behind(tmp_path: Path) -> None:
    assert _results(tmp_path, 3, _stays_away) == {0: 2, 1: 1, 2: 2}  # 1 went on alone


def _waits_in_vain(process: _Process) -> None:
    try:
        process.world(2).run(lambda: None, wait=0.2)
    except PeerError as error:
        process.write(str(error))


def test_too_few_ranks_give_up(tmp_path: Path) -> None:
    assert "no world accepted this rank" in _results(tmp_path, 1, _waits_in_vain)[0]


def _enters_while_the_other_reads(port: int) -> int:
    """Rank 0 reads the result of a collective late, when rank 1 is in the elastic world already."""
    mesh = init_device_mesh("cpu", (2,))
    stream_wait = Stream.wait

    def late(stream: Stream, awaited: int) -> None:
        time.sleep(1.0)
        stream_wait(stream, awaited)

    ones = torch.ones(1)
    all_reduce(ones, (mesh, 0))
    if dist.get_rank() == 0:
        Stream.wait = late  # type: ignore[method-assign, assignment]  # for one call
    total = all_reduce(ones, (mesh, 0))
    Stream.wait = stream_wait  # type: ignore[method-assign]  # as above
    world = ElasticWorld(TCPStore("127.0.0.1", port, is_master=False), 2)
    return world.run(lambda: int(total))


def test_a_rank_leaves_the_first_world_when_all_have_read() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankPool(2) as pool:
        assert pool.run(_enters_while_the_other_reads, store.port, timeout=60.0) == [2, 2]


def test_wrong_arguments() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(MeshTypeError, match="store"):
        ElasticWorld("store", 2)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(MeshError, match="positive"):
        ElasticWorld(store, 0)
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(BackendError, match="supports the backend gloo only"):
            ElasticWorld(store, 1, backend=backend)
    with pytest.raises(MeshTypeError, match="function"):
        ElasticWorld(store, 1).run(3)  # type: ignore[arg-type]  # the mistake
