"""Covers: local_reductions.py: against the backend's own reductions, which gloo has on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import all_reduce, reduce_scatter
from shoal_mesh.collectives.c10d_transport import C10dTransport
from shoal_mesh.collectives.local_reductions import all_reduce_here, reduce_scatter_here
from shoal_mesh.testing import all_ranks, on_ranks


@on_ranks(4)
@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
@pytest.mark.parametrize("shape", [(8,), (4, 3), (0, 2)])
def test_values_are_moved_and_reduced_on_arrival(op: str, shape: tuple[int, ...]) -> None:
    comm = all_ranks().comm(0)
    moves = C10dTransport(comm, None)
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape) * (3 + dist.get_rank())
    got = x.clone()
    handle = all_reduce_here(got, comm.size, op, moves)
    handle.wait()
    handle.wait()  # once more does nothing
    assert handle.is_completed() and torch.equal(got, all_reduce(x, comm, op))
    part = x.new_empty((shape[0] // 4, *shape[1:]))
    reduce_scatter_here(x, part, comm.size, op, moves).wait()
    assert torch.equal(part, reduce_scatter(x, comm, op=op))
