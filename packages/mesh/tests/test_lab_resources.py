"""Covers: lab/: resources after a lab has ended, and the memory and time of many ranks."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal_mesh.errors import PeerError
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
