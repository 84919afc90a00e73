"""Covers: rooted.py, on real gloo ranks."""

from __future__ import annotations

import torch

from rank_values import comm_of
from shoal_mesh import (
    scatter,
)
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_scatter_of_different_shapes() -> None:
    comm = comm_of("turned")
    parts = [torch.full((i + 1, 2), float(i)) for i in range(4)]
    out = scatter(parts if comm.rank == 2 else None, comm, 2, out=torch.empty(comm.rank + 1, 2))
    assert out.eq(comm.rank).all()
