"""Covers: uneven.py, on real gloo ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rank_values import ORDERS, assert_near, assert_same, comm_of, values_of, values_of_all
from shoal_mesh import (
    Comm,
    all_gather_v,
    all_to_all_v,
    reduce_scatter_v,
    scatter,
)
from shoal_mesh.testing import on_ranks


@pytest.mark.parametrize("order", list(ORDERS))
@on_ranks(4)
def test_uneven_blocks(order: str) -> None:
    comm = comm_of(order)
    n, me = comm.size, comm.rank
    for sizes in (
        [3, 1, 2, 0][:n],
        [9, 0, 0, 0][:n],
        [2, 2, 2, 2][:n],
        [0, 0, 0, 0][:n],
        [2, 3, 3, 3][:n],
    ):
        for dim in (0, 1):
            for dtype in (torch.float32, torch.int16, torch.complex64):
                shape = [2, 2]
                blocks = []
                for rank, size in zip(comm.ranks, sizes, strict=True):
                    shape[dim] = size
                    blocks.append(values_of(rank, tuple(shape), dtype))
                assert_same(all_gather_v(blocks[me], comm, sizes, dim), torch.cat(blocks, dim))
                shape[dim] = sum(sizes)
                every = values_of_all(comm, tuple(shape), dtype)
                want = torch.split(torch.stack(every).sum(0).to(dtype), sizes, dim)[me]
                assert_near(reduce_scatter_v(every[me], comm, sizes, dim), want.contiguous())
    counts = [[(i * n + j) % 3 for j in range(n)] for i in range(n)]  # i sends counts[i][j] to j
    for dtype in (torch.float32, torch.int16):
        own = torch.cat([torch.full((counts[me][j],), 10 * me + j) for j in range(n)]).to(dtype)
        got = all_to_all_v(own, comm, counts[me], [counts[i][me] for i in range(n)])
        want = torch.cat([torch.full((counts[i][me],), 10 * i + me) for i in range(n)]).to(dtype)
        assert_same(got, want)


def wait_for(flag: Path) -> None:
    """Wait until another rank has made the file.

    It can only do so if what it started did not wait for this rank.
    """
    end = time.monotonic() + 40
    while not flag.exists():
        assert time.monotonic() < end, "the other rank never got past starting its collective"
        time.sleep(0.005)


def gather_as_many_rows_as_the_rank(comm: Comm, **options: Any) -> Any:
    rows = torch.full((comm.rank + 1, 2), float(comm.rank))
    return all_gather_v(rows, comm, range(1, comm.size + 1), **options)


def gather_columns_of_one_rank(comm: Comm, **options: Any) -> Any:
    counts = [9 if rank == 1 else 0 for rank in range(comm.size)]
    return all_gather_v(torch.ones(2, counts[comm.rank]), comm, counts, 1, **options)


def reduce_scatter_columns(comm: Comm, **options: Any) -> Any:
    columns = torch.arange(10.0).view(1, 10)
    return reduce_scatter_v(columns, comm, [1, 2, 3, 4], 1, "avg", **options)


def reduce_scatter_to_one_rank(comm: Comm, **options: Any) -> Any:
    return reduce_scatter_v(torch.arange(9.0), comm, [0, 9, 0, 0], **options)


def exchange_as_many_as_the_rank(comm: Comm, **options: Any) -> Any:
    own = torch.arange(float(comm.rank * comm.size))
    return all_to_all_v(own, comm, [comm.rank] * comm.size, list(range(comm.size)), **options)


UNEVEN: dict[str, Callable[..., Any]] = {
    "all_gather_v": gather_as_many_rows_as_the_rank,
    "all_gather_v, one rank": gather_columns_of_one_rank,
    "reduce_scatter_v": reduce_scatter_columns,
    "reduce_scatter_v, one rank": reduce_scatter_to_one_rank,
    "all_to_all_v": exchange_as_many_as_the_rank,
}


@pytest.mark.parametrize("order", ["straight", "turned"])
@pytest.mark.parametrize("name", UNEVEN)
@on_ranks(4)
def test_uneven_collectives_go_on_while_the_program_does(
    name: str, order: str, tmp_path: Path
) -> None:
    flag = tmp_path / "started"
    comm = comm_of(order)
    if comm.rank:
        wait_for(flag)
    pending = UNEVEN[name](comm, async_op=True)
    if comm.rank == 0:
        assert not pending.is_completed()
        flag.touch()
    got = pending.wait()
    assert pending.wait() is got
    assert_same(got, UNEVEN[name](comm))


@on_ranks(4)
def test_scatter_of_different_shapes() -> None:
    comm = comm_of("turned")
    parts = [torch.full((i + 1, 2), float(i)) for i in range(4)]
    out = scatter(parts if comm.rank == 2 else None, comm, 2, out=torch.empty(comm.rank + 1, 2))
    assert out.eq(comm.rank).all()
