"""Covers: even.py, on real gloo ranks."""

from __future__ import annotations

import pytest
import torch

from rank_values import EVERY, ORDERS, assert_same, comm_of, values_of_all
from shoal_mesh import (
    all_gather,
    all_gather_v,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_v,
    broadcast,
    gather,
    init_device_mesh,
    permute,
    reduce_scatter,
    reduce_scatter_v,
    scatter,
)
from shoal_mesh.internal import all_reduce_
from shoal_mesh.testing import fake_world, on_ranks


@pytest.mark.parametrize("order", list(ORDERS))
@on_ranks(4)
def test_every_dtype_and_order(order: str) -> None:
    comm = comm_of(order)
    n, me = comm.size, comm.rank
    for dtype in EVERY:
        own, every = values_of_all(comm, (4, 4), dtype)[me], values_of_all(comm, (4, 4), dtype)
        for dim in (0, 1, -1):
            assert_same(all_gather(own, comm, dim), torch.cat(every, dim))
            assert_same(all_gather(own.t(), comm, dim), torch.cat([x.t() for x in every], dim))
        for split in (0, 1):
            for join in (0, 1):
                want = torch.cat([x.chunk(n, split)[me] for x in every], join)
                assert_same(all_to_all(own, comm, split, join), want)
        for root in range(n):
            assert_same(broadcast(own, comm, root), every[root])
            assert_same(broadcast(own[:, ::2], comm, root), every[root][:, ::2])
            got = scatter(every if me == root else None, comm, root, out=torch.empty_like(own))
            assert_same(got, own)
            listed = gather(own, comm, root)
            assert (listed is None) == (me != root)
            for x, y in zip(listed or [], every, strict=False):
                assert_same(x, y)
        shift = [(i + 1) % n for i in range(n)]
        assert_same(permute(own, comm, shift), every[(me - 1) % n])


@on_ranks(2)
def test_tensors_without_elements_or_dims() -> None:
    comm = init_device_mesh("cpu", (2,)).comm(0)
    none = torch.empty(0, 3)
    assert all_reduce(none, comm).shape == (0, 3)
    assert all_gather(none, comm).shape == (0, 3)
    assert all_gather(none, comm, 1).shape == (0, 6)
    assert reduce_scatter(none, comm).shape == (0, 3)
    assert all_to_all(none, comm, 0, 1).shape == (0, 6)
    assert broadcast(none, comm).shape == (0, 3)
    scalar = torch.tensor(float(comm.rank))
    assert all_reduce(scalar, comm).shape == ()
    assert all_gather(scalar, comm).tolist() == [0, 1]
    assert broadcast(scalar, comm, 1).item() == 1


def test_one_rank_sends_nothing_and_gives_fresh_tensors() -> None:
    with fake_world(1):
        comm = init_device_mesh("cpu", (1,)).comm(0)
        x = torch.randn(4, 2)
        for got in (
            all_reduce(x, comm, "avg"),
            all_gather(x, comm, 1),
            all_gather_v(x, comm, [4]),
            reduce_scatter(x, comm),
            reduce_scatter_v(x, comm, [4]),
            all_to_all(x, comm, 0, 1),
            broadcast(x, comm),
            permute(x, comm, [0]),
            scatter([x], comm, out=torch.empty(4, 2)),
            gather(x, comm)[0],  # type: ignore[index]  # this rank is the target
            all_to_all_v(x.view(-1), comm, [8], [8]).view(4, 2),
            all_reduce(x, comm, async_op=True).wait(),
            all_reduce_coalesced([x], comm)[0],
        ):
            assert torch.equal(got, x)
            assert got.data_ptr() != x.data_ptr()
        assert all_reduce_(x, comm) is x
        assert all_reduce_(x, comm, async_op=True).wait() is x


@on_ranks(4)
def test_an_in_place_reduction_may_run_beside_other_work() -> None:
    comm = init_device_mesh("cpu", (4,)).comm(0)
    for dtype in (torch.float32, torch.bfloat16):
        for own in (
            torch.full((2, 3), 1.0 + comm.rank, dtype=dtype),
            torch.ones(3, 2, dtype=dtype).t(),
        ):
            expected = all_reduce(own, comm)
            pending = all_reduce_(own, comm, async_op=True)
            assert pending.wait() is own
            assert torch.equal(own, expected)
