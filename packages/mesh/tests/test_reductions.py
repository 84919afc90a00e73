"""Covers: reductions.py, on real gloo ranks: which reductions a dtype has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rank_values import EVERY, INTS, ORDERS, assert_near, comm_of, values_of_all
from shoal_mesh import CollectiveError, all_reduce, reduce_scatter
from shoal_mesh.internal import all_reduce_
from shoal_mesh.testing import on_ranks

WANT: dict[str, Any] = {
    "sum": lambda s: s.sum(0),
    "avg": lambda s: s.sum(0) / s.shape[0],
    "min": lambda s: s.amin(0),
    "max": lambda s: s.amax(0),
    "product": lambda s: s.prod(0),
    "band": lambda s: _fold(s, torch.bitwise_and),
    "bor": lambda s: _fold(s, torch.bitwise_or),
    "bxor": lambda s: _fold(s, torch.bitwise_xor),
}


def _fold(stack: Tensor, op: Any) -> Tensor:
    total = stack[0]
    for row in stack[1:]:
        total = op(total, row)
    return total


def _legal(op: str, dtype: torch.dtype) -> bool:
    if op in {"band", "bor", "bxor"}:
        return dtype in INTS or dtype is torch.bool or dtype is torch.uint16
    if op == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return not (dtype.is_complex and op != "sum")


@pytest.mark.parametrize("order", list(ORDERS))
@on_ranks(4)
def test_reductions_of_every_dtype(order: str) -> None:
    comm = comm_of(order)
    for dtype in EVERY:
        for op, want_of in WANT.items():
            every = values_of_all(comm, (4, 4), dtype)
            if not _legal(op, dtype):
                with pytest.raises(CollectiveError, match=r"reduction '|the average of"):
                    all_reduce(every[comm.rank], comm, op)
                with pytest.raises(CollectiveError, match=r"reduction '|the average of"):
                    reduce_scatter(every[comm.rank], comm, 0, op)
                continue
            wide = (
                torch.float32 if dtype.is_floating_point and dtype is not torch.float64 else dtype
            )
            wide = torch.int32 if dtype is torch.uint16 else wide
            want = want_of(torch.stack([x.to(wide) for x in every])).to(dtype)
            if dtype is torch.bool and op in {"sum", "product"}:
                want = want_of(torch.stack(every).to(torch.int32)).to(torch.bool)
            assert_near(all_reduce(every[comm.rank], comm, op), want)
            assert_near(all_reduce(every[comm.rank].t(), comm, op), want.t())
            for dim in (0, 1):
                assert_near(
                    reduce_scatter(every[comm.rank], comm, dim, op),
                    want.chunk(comm.size, dim)[comm.rank],
                )
            for view in (
                every[comm.rank].clone(),
                every[comm.rank].repeat(1, 2)[:, ::2].clone().t(),
            ):
                expected = want if view.stride() == (4, 1) else None
                got = all_reduce_(view, comm, op)
                assert got is view
                if expected is not None:
                    assert_near(got, expected)
    with pytest.raises(CollectiveError, match="no reduction 'median'"):
        all_reduce(torch.ones(1), comm, "median")
