"""Combined collectives have gloo's values; simulated hosts, real ones in test_two_hosts.

Covers: c10d_transport.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal_mesh import (
    Comm,
    CommDebugMode,
    PeerError,
    all_gather,
    all_reduce,
    broadcast,
    comm_over,
    launch,
    reduce_scatter,
    restart_world,
)
from shoal_mesh.collectives import c10d_transport
from shoal_mesh.collectives.c10d_transport import AcrossHosts, C10dTransport
from shoal_mesh.errors import RankError
from shoal_mesh.shared_memory import channel
from shoal_mesh.testing import rank_pool


@pytest.fixture(autouse=True, scope="module")
def _one_host() -> Iterator[None]:
    """What runs after this file begins with a world of one host."""
    yield
    rank_pool(4).run(_renew)


def _renew() -> None:
    restart_world()


def on_hosts(hosts: tuple[int, ...], timeout: float | None = None) -> Comm:
    """The communicator of all ranks, of which rank i is on host `hosts[i]`, in a new world."""
    with patch.object(channel, "machine", lambda: hosts[dist.get_rank()]):
        restart_world(timeout=timeout)
        comm = comm_over(tuple(range(len(hosts))))
        all_reduce(torch.ones(1), comm)
        with patch.object(c10d_transport, "LEAST_BYTES", 0):
            all_reduce(torch.ones(1), comm)  # connects
    return comm


def average_transposed(x: Tensor, comm: Comm) -> Tensor:
    return all_reduce(x.t(), comm, "avg" if x.is_floating_point() else "sum")


COLLECTIVES: dict[str, Callable[[Tensor, Comm], Tensor]] = {
    "all_reduce": lambda x, comm: all_reduce(x, comm),
    "all_reduce max": lambda x, comm: all_reduce(x, comm, "max"),
    "all_reduce avg": average_transposed,
    "all_gather": lambda x, comm: all_gather(x, comm, 1),
    "reduce_scatter": lambda x, comm: reduce_scatter(x, comm),
    "reduce_scatter product": lambda x, comm: reduce_scatter(x, comm, 0, "product"),
    "broadcast 0": lambda x, comm: broadcast(x, comm, 0),
    "broadcast 3": lambda x, comm: broadcast(x, comm, 3),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_values_are_those_of_gloo_alone(dtype: torch.dtype) -> None:
    rank_pool(4).run(_compare, dtype)


def _compare(dtype: torch.dtype) -> None:
    everybody = on_hosts((7, 7, 9, 9))
    orders = [everybody, Comm.over(everybody.group, ("turned",), (2, 0, 3, 1))]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for shape in ((4, 3), (8, 1), (4, 0), (4, 300_001)):
        x = torch.randint(-4, 5, shape, generator=generator).to(dtype)
        for comm in orders:
            for name, run in COLLECTIVES.items():
                plain = run(x, comm)
                with patch.object(c10d_transport, "LEAST_BYTES", 0):
                    torch.testing.assert_close(
                        run(x, comm), plain, rtol=0, atol=0, msg=f"{name} {shape} {comm}"
                    )


def test_large_messages_in_the_foreground_take_it() -> None:
    rank_pool(4).run(_choose)


def _choose() -> None:
    comm = on_hosts((7, 7, 9, 9))
    large, transport = torch.ones(1 << 16), comm.transport
    assert type(transport) is AcrossHosts
    carrier = transport.carrier
    # The class of a tensor, which may differ between ranks, does not choose the way.
    for carried in (large, torch.nn.Parameter(large)):
        assert carrier(carried, "sum", False, False) is transport
        assert carrier(carried, "", False, False) is transport
    plain: tuple[tuple[Any, ...], ...] = (
        (large[1:], "sum", False, False),
        (large, "sum", True, False),
        (large, "", False, True),
        (large.int(), "bor", False, False),
    )
    assert all(type(carrier(*message)) is C10dTransport for message in plain)
    # the class does not choose: other ranks may hold a plain tensor
    assert carrier(torch.nn.Parameter(large), "sum", False, False) is transport
    with CommDebugMode() as mode:
        total = all_reduce(large, comm)
    assert mode.get_total_counts() == 1
    parameter = torch.nn.Parameter(large, requires_grad=False)
    assert torch.equal(all_reduce(parameter, comm), total)


@pytest.mark.parametrize("hosts", [(7, 7, 7, 9), (7, 9, 7, 9), (7, 8, 9, 10)])
def test_other_hosts_keep_gloo(hosts: tuple[int, ...]) -> None:
    assert rank_pool(4).run(_sum_on_hosts, hosts) == [("C10dTransport", 4.0)] * 4


def _sum_on_hosts(hosts: tuple[int, ...]) -> tuple[str, float]:
    comm = on_hosts(hosts)
    return type(comm.transport).__name__, all_reduce(torch.ones(1 << 18), comm)[-1].item()


def _lose_rank_3(seen: str) -> None:
    comm = on_hosts((7, 7, 9, 9), timeout=20)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as caught:
        all_reduce(torch.ones(1 << 18), comm)
    Path(f"{seen}.{dist.get_rank()}").write_text(f"{caught.value.ranks} {caught.value}")
    # the others learn of it though no process of this host ends
    time.sleep(6)


def test_a_killed_rank_is_named_on_both_hosts(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 3"):
        launch(_lose_rank_3, 4, str(tmp_path / "seen"), timeout=30)
    for rank in range(3):
        said = (tmp_path / f"seen.{rank}").read_text()
        assert said.startswith("(3,)") and "rank 3 " in said, said
