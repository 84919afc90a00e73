"""Covers: pending.py, on real gloo ranks."""

from __future__ import annotations

import torch

from rank_values import comm_of, values_of
from shoal_mesh import all_gather, all_reduce, all_to_all, reduce_scatter
from shoal_mesh.internal import Pending, all_reduce_
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_handles() -> None:
    comm = comm_of("turned")
    x = values_of(comm.ranks[comm.rank], (4, 4), torch.float32)
    pairs = [
        (all_reduce(x, comm, "avg", async_op=True), all_reduce(x, comm, "avg")),
        (all_gather(x, comm, 1, async_op=True), all_gather(x, comm, 1)),
        (reduce_scatter(x, comm, 1, async_op=True), reduce_scatter(x, comm, 1)),
        (all_to_all(x, comm, 0, 1, async_op=True), all_to_all(x, comm, 0, 1)),
        (all_reduce_(x.clone(), comm, async_op=True), all_reduce(x, comm)),
        (all_reduce_(x.t().clone().t(), comm, "avg", async_op=True), all_reduce(x, comm, "avg")),
    ]
    for handle, now in pairs:
        assert isinstance(handle, Pending)
        got = handle.wait()
        assert handle.is_completed()
        assert handle.wait() is got
        torch.testing.assert_close(got, now)
