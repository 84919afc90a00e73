"""Covers: calls.py: one-shot all-reduces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rank_values import over_gloo
from shoal_mesh import CommDebugMode, all_gather, all_reduce, init_device_mesh
from shoal_mesh.collectives import calls
from shoal_mesh.internal import all_reduce_
from shoal_mesh.testing import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 2), (1 << 12,), (1 << 15,)])
@on_ranks(4)
def test_sums_agree_on_all_ranks(shape: tuple[int, ...], op: str, dtype: torch.dtype) -> None:
    comm = over_gloo(init_device_mesh("cpu", (4,)).comm(0))
    torch.manual_seed(comm.rank)
    mine = torch.randn(shape, dtype=torch.float64).to(dtype)
    tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert calls.is_one_shot(mine, comm, "sum") is (mine.nbytes <= calls.ONE_SHOT_BYTES)
    parts = all_gather(mine.reshape(1, -1), comm).double()
    expected = (parts.sum(0) if op == "sum" else parts.mean(0)).view(shape)
    with CommDebugMode() as debug:
        found = all_reduce(mine, comm, op)
    assert debug.get_total_counts() == 1
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    everywhere = all_gather(found.reshape(1, -1), comm)
    assert all(torch.equal(everywhere[0], other) for other in everywhere)
    pending = all_reduce(mine, comm, op, async_op=True)
    assert torch.equal(pending.wait(), found)
    own = mine.clone()
    assert all_reduce_(own, comm, op) is own
    assert torch.equal(own, found)
    own = mine.clone()
    assert all_reduce_(own, comm, op, async_op=True).wait() is own
    assert torch.equal(own, found)
    turned = torch.stack((mine, mine), -1)[..., 0]
    all_reduce_(turned, comm, op)
    assert torch.equal(turned, found)


@on_ranks(4)
def test_what_is_no_one_shot_all_reduce() -> None:
    local = init_device_mesh("cpu", (4,)).comm(0)
    whole = over_gloo(local)
    pair = replace(whole, size=2)
    small = torch.ones(4)
    assert not calls.is_one_shot(small, local, "sum")
    assert calls.is_one_shot(small, whole, "sum")
    assert not calls.is_one_shot(small, pair, "sum")
    assert not calls.is_one_shot(small, whole, "max")
    assert not calls.is_one_shot(small.int(), whole, "sum")
    assert not calls.is_one_shot(torch.ones(0), whole, "sum")
    assert not calls.is_one_shot(torch.ones(1 << 15), whole, "sum")
