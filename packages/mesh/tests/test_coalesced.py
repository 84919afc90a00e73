"""Covers: coalesced.py, on real gloo ranks."""

from __future__ import annotations

import pytest
import torch

from rank_values import ORDERS, assert_near, assert_same, comm_of, values_of
from shoal_mesh import (
    CollectiveError,
    all_gather_coalesced,
    all_reduce_coalesced,
    reduce_scatter_coalesced,
)
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_lists_travel_together() -> None:
    for order in ORDERS:
        comm = comm_of(order)
        shapes = [(4, 4), (8,), (4, 0), (4, 1, 2)]
        dtypes = [torch.float32, torch.int64, torch.float32, torch.bfloat16]
        table = [[values_of(r, s, d) for s, d in zip(shapes, dtypes, strict=True)] for r in comm.ranks]
        own = table[comm.rank]
        columns = list(zip(*table, strict=True))
        for got, column in zip(all_reduce_coalesced(own, comm), columns, strict=True):
            assert_near(got, torch.stack(column).sum(0).to(got.dtype))
        for got, column in zip(all_gather_coalesced(own, comm), columns, strict=True):
            assert_same(got, torch.cat(column))
        for got, column in zip(all_gather_coalesced(own[:1] + own[3:], comm, 1), (columns[0], columns[3]), strict=True):
            assert_same(got, torch.cat(column, 1))
        for got, column in zip(reduce_scatter_coalesced(own, comm), columns, strict=True):
            assert_near(got, torch.stack(column).sum(0).to(got.dtype).chunk(comm.size)[comm.rank])
        assert all_reduce_coalesced([], comm) == []
        with pytest.raises(CollectiveError, match="does not divide"):
            reduce_scatter_coalesced([torch.ones(5)], comm)
