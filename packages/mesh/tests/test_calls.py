"""Covers: {calls,transport}.py: refused calls, and handles, on real gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rank_values import comm_of, values_of
from shoal_mesh import (
    CollectiveError,
    all_gather,
    all_gather_v,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_v,
    broadcast,
    init_device_mesh,
    permute,
    reduce_scatter,
    reduce_scatter_v,
    scatter,
)
from shoal_mesh.internal import Pending, all_reduce_
from shoal_mesh.testing import fake_world, on_ranks


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: all_gather(torch.ones(2), c, 3), "no dim 3 in a tensor"),
        (lambda c: reduce_scatter(torch.ones(3), c), "equal blocks"),
        (lambda c: all_to_all(torch.ones(4, 3), c, 1, 0), "use the form with sizes"),
        (lambda c: all_gather_v(torch.ones(3), c, [3]), "one non-negative count"),
        (lambda c: all_gather_v(torch.ones(3), c, [2, 3]), "gives 3 along dim 0"),
        (lambda c: reduce_scatter_v(torch.ones(3), c, [1, 1]), "sum of the blocks"),
        (lambda c: all_to_all_v(torch.ones(3), c, [1, 1], [1, 1]), "blocks of"),
        (
            lambda c: broadcast(torch.ones(1), c, 2),
            "src 2 is not a rank along 0: indices are 0 to 1",
        ),
        (lambda c: scatter(None, c, out=torch.ones(1)), "needs 2 tensors there, got None"),
        (lambda c: scatter([torch.ones(1)], c, out=torch.ones(1)), "got 1"),
        (
            lambda c: scatter([torch.ones(1)] * 2, c, out=torch.ones(1, dtype=torch.int)),
            "of tensors of",
        ),
        (lambda c: permute(torch.ones(1), c, [0, 0]), "once"),
        (lambda c: all_reduce(torch.ones(1, requires_grad=True), c), "is not differentiable"),
        (
            lambda c: all_reduce_coalesced([torch.ones(1, requires_grad=True)], c),
            "is not differentiable",
        ),
    ],
    ids=[str(i) for i in range(14)],
)
def test_what_cannot_be_right_is_refused(call: Any, text: str) -> None:
    with fake_world(2):
        comm = init_device_mesh("cpu", (2,)).comm(0)
        with pytest.raises(CollectiveError, match=text):
            call(comm)
        with torch.no_grad():
            all_reduce(torch.ones(1, requires_grad=True), comm)


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
