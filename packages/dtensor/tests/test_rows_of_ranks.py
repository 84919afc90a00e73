"""Automatic comparisons between ranks, in threads whose order differs by rank.

Covers: rows_of_ranks.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from shoal_dtensor import Shard, distribute_tensor, rows_of_ranks as module
from shoal_dtensor.errors import RandomStateError
from shoal_dtensor.rows_of_ranks import rows_of_ranks
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.errors import LockstepError
from shoal_mesh.testing import on_ranks


def in_threads(*programs: Callable[[], object]) -> list[object]:
    """What the programs return or raise, each in a thread.

    Every rank starts them in another order.
    """
    results: list[object] = [None] * len(programs)

    def run(place: int) -> None:
        try:
            results[place] = programs[place]()
        except Exception as error:
            results[place] = error  # for the test to look at

    first = dist.get_rank()
    threads = [
        threading.Thread(target=run, args=((first + i) % len(programs),))
        for i in range(len(programs))
    ]
    for thread in threads:
        thread.start()
        # so that each comes to its first call before the next one
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return results


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@on_ranks(4)
def test_each_thread_draws_from_its_generator() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.ones(7, 4), mesh["a"], [Shard(0)], src_data_rank=None)
    drawn = in_threads(*[lambda g=g: x.clone().normal_(generator=g) for g in generators(1, 2, 1)])
    for result, generator in zip(drawn, generators(1, 2, 1), strict=True):
        expected = torch.ones(7, 4).normal_(generator=generator)
        assert torch.equal(result.full_tensor(), expected)  # type: ignore[attr-defined]  # DTensor


@on_ranks(4)
def test_generators_of_other_states_are_refused_in_threads() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None)
    right, wrong = generators(1, 2)
    if dist.get_rank() == 3:
        wrong.get_state()
        torch.ones(3).normal_(generator=wrong)
    good, bad = in_threads(*[lambda g=g: x.clone().normal_(generator=g) for g in (right, wrong)])
    assert isinstance(bad, RandomStateError)
    assert not isinstance(good, Exception)
    assert "ranks [0, 1, 2] agree; ranks [3] agree" in str(bad)


@on_ranks(4)
def test_threads_agree_on_plain_tensors_beside_collectives_of_the_main_thread() -> None:
    mesh = init_device_mesh("cpu", (4,))
    index = torch.arange(8) % 5
    x = distribute_tensor(index, mesh, [Shard(0)], src_data_rank=None)
    encoded: list[object] = []
    worker = threading.Thread(
        target=lambda: encoded.extend(in_threads(*[lambda n=n: F.one_hot(x, n) for n in (5, 6, 7)]))
    )
    worker.start()
    sums = [all_reduce(torch.full((3,), float(step)), mesh.comm(0)) for step in range(200)]
    worker.join()
    assert [int(total[0]) for total in sums] == [4 * step for step in range(200)]
    for classes, result in zip((5, 6, 7), encoded, strict=True):
        expected = F.one_hot(index, classes)
        assert torch.equal(result.full_tensor(), expected)  # type: ignore[attr-defined]  # DTensor


@on_ranks(2)
def test_a_thread_that_no_other_rank_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    mesh = init_device_mesh("cpu", (2,))
    about = f"rank {dist.get_rank()}"
    (error,) = in_threads(lambda: rows_of_ranks(mesh, lambda: about, torch.tensor([1])))
    assert isinstance(error, LockstepError)
    assert f"no thread of ranks [{1 - dist.get_rank()}] has reached {about}" in str(error)


@on_ranks(4)
def test_rows_are_in_the_order_of_the_mesh_that_asks() -> None:
    in_order, irregular = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [[3, 0], [1, 2]])
    own = torch.tensor([dist.get_rank()])
    first, second = in_threads(
        *[lambda m=m: rows_of_ranks(m, lambda: str(m), own) for m in (in_order, irregular)]
    )
    assert first == [[0], [1], [2], [3]]
    assert second == [[3], [0], [1], [2]]
