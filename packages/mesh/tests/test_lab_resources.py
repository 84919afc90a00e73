"""Covers: lab/: resources after a lab has ended, and the memory and time of many ranks."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal_mesh.errors import PeerError, RankError
from shoal_mesh.local_ranks.pool import ForkServer
from shoal_mesh.testing import lab

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@pytest.fixture(autouse=True)
def folder_of_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep temporary files away from labs of other processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def one_sum() -> float:
    tensor = torch.full((2000,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def resources() -> dict[str, Any]:
    """Return the threads, descriptors, children and shared memory of this process."""
    threads = [thread.name for thread in threading.enumerate()]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "shoal" in line]
    folders = sorted(path.name for path in Path(tempfile.gettempdir()).glob("shoal_lab_*"))
    return {
        "threads": threads,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": children,
        "shared": shared,
        "folders": folders,
        "default group": dist.group.WORLD,
    }


def test_worlds_on_threads_leave_nothing() -> None:
    lab(2, "thread").run(one_sum)
    before = resources()
    for _ in range(1000):
        assert lab(2, "thread").run(one_sum) == [2.0, 2.0]
    assert resources() == before


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(100_000))


def test_worlds_of_processes_leave_nothing_after_killed_ranks() -> None:
    lab(2).run(one_sum)
    before = resources()
    for number in range(20):
        if number % 4:
            assert lab(2).run(one_sum) == [2.0, 2.0]
        else:
            with pytest.raises(PeerError, match="rank 1 has died"):
                lab(2).run(die)
    assert resources() == before


def resources_of_server() -> dict[str, Any]:
    """Return the descriptors, threads and children of the process that ranks are forked from."""
    pid = ForkServer.get().process.pid
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    children = list[str]()
    for task in tasks:
        children += (task / "children").read_text().split()
    return {
        "server": pid,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(tasks),
        "children": children,
    }


def entries_of_shared_memory() -> set[str]:
    """Return the files in /dev/shm, without the ones of other programs that torch names."""
    return {path.name for path in Path("/dev/shm").glob("*shoal*")}


def die_early_or_late(number: int) -> None:
    """Kill a rank before, in or after a collective."""
    if number % 3 == 0 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(100_000))
    if number % 3 == 1 and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def run_worlds_of_processes(count: int) -> None:
    """Run worlds of two ranks; every fifth loses a rank."""
    for number in range(count):
        if number % 5:
            assert lab(2).run(one_sum) == [2.0, 2.0]
        else:
            # the other rank waits for it, or has returned
            with pytest.raises((PeerError, RankError), match=r"has died|had returned"):
                lab(2).run(die_early_or_late, number // 5)


def resources_of_all() -> tuple[Any, ...]:
    """Return the resources when all ranks have ended, which is a moment after their world."""
    deadline = time.monotonic() + 20
    while resources_of_server()["children"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return resources(), resources_of_server(), entries_of_shared_memory()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_1000_worlds_of_processes_leave_nothing_in_any_process() -> None:
    run_worlds_of_processes(6)
    before = resources_of_all()
    run_worlds_of_processes(1000)
    assert resources_of_all() == before


def fail() -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        raise ValueError("of rank 1")
    dist.all_reduce(torch.ones(1))


def test_failed_worlds_on_threads_leave_nothing() -> None:
    before = resources()
    for _ in range(50):
        with pytest.raises(ValueError, match="of rank 1"):
            lab(3, "thread").run(fail)
    assert resources() == before


def train_transformer() -> float:
    """Train two layers in shards by all-gathers and reduce-scatters; return the last loss."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    parameters = list(model.parameters())
    shapes = [parameter.shape for parameter in parameters]
    shards = []
    for parameter in parameters:
        padding = -parameter.numel() % size
        flat = nn.functional.pad(parameter.detach().view(-1), (0, padding))
        shards.append(flat.chunk(size)[rank].clone())
    batch = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(rank))
    loss = torch.zeros(())
    for _ in range(2):
        for parameter, shard, shape in zip(parameters, shards, shapes, strict=True):
            whole = torch.empty(shard.numel() * size)
            dist.all_gather_into_tensor(whole, shard)
            parameter.data = whole[: shape.numel()].view(shape)
        loss = model(batch).square().mean()
        loss.backward()
        for parameter, shard in zip(parameters, shards, strict=True):
            assert parameter.grad is not None
            padding = -parameter.numel() % size
            flat = nn.functional.pad(parameter.grad.view(-1), (0, padding))
            mine = torch.empty_like(shard)
            dist.reduce_scatter_tensor(mine, flat)
            shard.add_(mine, alpha=-0.1 / size)
            parameter.grad = None
            parameter.data = torch.empty(0)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / size


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_64_ranks_train_two_layers() -> None:
    results = {isolation: lab(64, isolation).run(train_transformer) for isolation in ISOLATIONS}
    assert len({*results["thread"], *results["process"]}) == 1


ISOLATIONS: tuple[Any, ...] = ("thread", "process")
