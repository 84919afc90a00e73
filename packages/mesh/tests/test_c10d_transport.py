"""Covers: c10d_transport.py: where there is no gloo, or a backend without reductions on bits."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import all_reduce, all_to_all_v, comm_over, reduce_scatter
from shoal_mesh.collectives.c10d_transport import C10dTransport
from shoal_mesh.testing import all_ranks, fake_world, on_ranks


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_any_tensor_finds_the_process_group(device: str) -> None:
    with fake_world(2):
        comm = comm_over((0, 1))
        all_reduce(torch.ones(2, device=device), comm)
        chosen = comm.transport
        all_reduce(torch.ones(2), comm)
    assert type(chosen) is C10dTransport
    assert comm.transport is chosen


def test_a_fake_rank_that_sends_nothing_receives_zeros() -> None:
    with fake_world(2):
        comm = comm_over((0, 1))
        assert all_to_all_v(torch.ones(0), comm, (0, 0), (0, 3)).tolist() == [0, 0, 0]


@on_ranks(4)
@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
@pytest.mark.parametrize("shape", [(8,), (4, 3), (0, 2)])
def test_values_are_moved_and_reduced_on_arrival(op: str, shape: tuple[int, ...]) -> None:
    comm = all_ranks().comm(0)
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape) * (
        3 + dist.get_rank()
    )
    got, part = x.clone(), x.new_empty((shape[0] // 4, *shape[1:]))
    with mock.patch.object(C10dTransport, "_moves_only", return_value=True):
        transport = C10dTransport(comm, None)
        handle = transport.all_reduce_(got, op, False)
        scattered = transport.reduce_scatter(x, part, op)
    handle.wait()
    handle.wait()  # once more does nothing
    scattered.wait()
    assert handle.is_completed() and torch.equal(got, all_reduce(x, comm, op))
    assert torch.equal(part, reduce_scatter(x, comm, op=op))
