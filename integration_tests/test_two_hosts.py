"""Covers: two_hosts.py: ranks of two hosts train as one process does, and name a lost rank."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integration_tests.two_hosts import Hosts, begin, two_hosts
from torch import nn

from shoal_data_parallel import fully_shard
from shoal_mesh import (
    PeerError,
    all_gather,
    all_reduce,
    broadcast,
    comm_over,
    init_device_mesh,
    reduce_scatter,
)
from shoal_mesh.collectives import c10d_transport
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

JOB = "integration_tests.test_two_hosts"
TIMEOUT = 5.0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts("1gbit"))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no namespaces: {getattr(error, 'stderr', '') or error}")
        yield hosts


def run(what: str, folder: str) -> None:
    """One rank: what it has seen goes to a file."""
    rank = begin(TIMEOUT if what in {"kill", "disconnect"} else 60)
    seen = {"train": _train, "values": _values, "kill": _lose, "disconnect": _lose}[what](
        what, Path(folder)
    )
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seen))
    if what in {"kill", "disconnect"}:
        # the others hear of it though this process does not end
        time.sleep(TIMEOUT)
    else:
        dist.destroy_process_group()


def _train(what: str, folder: Path) -> list[float]:
    """Differences of a TP x FSDP model, sharded over and inside hosts, from one process."""
    torch.manual_seed(0)
    differences = []
    for inside, over in (("tp", "dp"), ("dp", "tp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(over, inside))
        plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model: Any = fully_shard(
            parallelize_module(copy.deepcopy(plain), mesh["tp"], styles), mesh["dp"]
        )
        x = torch.arange(24.0).view(4, 6).double().sin()
        rows = x.chunk(2)[mesh.get_local_rank("dp")]
        for module, inputs in ((plain, x), (model, rows)):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            for _ in range(2):
                optimizer.zero_grad()
                module(inputs).square().mean().backward()
                optimizer.step()
        expected = plain(x).chunk(2)[mesh.get_local_rank("dp")]
        differences.append((model(rows) - expected).abs().max().item())
    return differences


def _values(what: str, folder: Path) -> list[float]:
    """Differences between collectives as they are and by gloo alone."""
    comm = comm_over((0, 1, 2, 3))
    x = torch.linspace(-1, 1, 1_000_004, dtype=torch.float64) * (1 + comm.rank)

    def all_values() -> list[torch.Tensor]:
        quarter = x[: x.numel() // 4]
        return [
            all_reduce(x, comm),
            reduce_scatter(x, comm),
            all_gather(quarter, comm),
            broadcast(x, comm, 3),
        ]

    combined = all_values()
    assert type(comm.transport) is c10d_transport.AcrossHosts and comm.transport._parts
    c10d_transport.LEAST_BYTES = 1 << 62
    return [(a - b).abs().max().item() for a, b in zip(combined, all_values(), strict=True)]


def _lose(what: str, folder: Path) -> list[Any]:
    comm = comm_over((0, 1, 2, 3))
    x = torch.ones(1 << 20)
    all_reduce(x, comm)
    if what == "kill" and comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "disconnect":
        (folder / f"ready{comm.rank}").touch()
        while not (folder / "disconnect").exists():
            time.sleep(0.02)
    start = time.monotonic()
    try:
        all_reduce(x, comm)
    except PeerError as error:
        return [time.monotonic() - start, error.ranks, str(error)]
    return [0.0, [], "nothing"]


def _seen(folder: Path) -> dict[int, Any]:
    return {int(path.stem[4:]): json.loads(path.read_text()) for path in folder.glob("rank*.json")}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["train", "values"])
def test_ranks_of_two_hosts_compute_what_one_process_does(
    hosts: Hosts, what: str, tmp_path: Path
) -> None:
    printed = hosts.run(JOB, 2, what, str(tmp_path))
    seen = _seen(tmp_path)
    assert sorted(seen) == [0, 1, 2, 3], printed
    assert all(difference < 1e-12 for each in seen.values() for difference in each), seen


@pytest.mark.slow
def test_a_killed_rank_is_named_on_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    printed = hosts.run(JOB, 2, "kill", str(tmp_path))
    seen = _seen(tmp_path)
    assert sorted(seen) == [0, 1, 2], printed
    assert all(
        ranks == [3] and "rank 3 " in text and seconds < TIMEOUT
        for seconds, ranks, text in seen.values()
    ), seen


@pytest.mark.slow
def test_a_lost_link_is_noticed_on_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    with hosts.running(JOB, 2, "disconnect", str(tmp_path)) as processes:
        while sum((tmp_path / f"ready{rank}").exists() for rank in range(4)) < 4:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.1)
        hosts.disconnect()
        (tmp_path / "disconnect").touch()
        printed = "".join(process.communicate(timeout=90)[0] for process in processes)
    seen = _seen(tmp_path)
    assert sorted(seen) == [0, 1, 2, 3], printed
    assert all(seconds < TIMEOUT + 12 for seconds, _, _ in seen.values()), seen
    # Of the host with the store the others are out of reach, of the others the store is.
    assert all({2, 3} & set(seen[rank][1]) for rank in (0, 1)), seen
    assert all("rank 0?" in seen[rank][2] for rank in (2, 3)), seen
