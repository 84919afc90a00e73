"""Covers: c10d_transport.py: where there is no gloo."""

from __future__ import annotations

import pytest
import torch

from shoal_mesh import all_reduce, all_to_all_v, comm_over
from shoal_mesh.collectives.c10d_transport import C10dTransport
from shoal_mesh.testing import fake_world


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
