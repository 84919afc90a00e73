"""The transport of a communicator, and the collectives that use shared memory.

Covers: transport.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rank_values import over_gloo
from shoal_mesh import Comm, all_gather, all_reduce, comm_over
from shoal_mesh.collectives.c10d_transport import C10dTransport
from shoal_mesh.collectives.calls import carrier_of
from shoal_mesh.shared_memory.channel import BACKGROUND, SLOT_BYTES
from shoal_mesh.shared_memory.exchange import SharedMemoryTransport
from shoal_mesh.testing import on_ranks
from shoal_mesh.transport import as_bytes


@on_ranks(2)
def test_a_communicator_chooses_at_its_first_collective_on_cpu_tensors() -> None:
    comm = Comm.over(dist.new_group([0, 1]), ("ranks",), (0, 1))
    all_reduce(torch.ones(2, device="meta"), comm)
    before = comm.transport
    all_reduce(torch.ones(2), comm)
    chosen = comm.transport
    assert before is None and type(chosen) is SharedMemoryTransport
    all_reduce(torch.ones(2, device="meta"), comm)
    all_gather(torch.ones(2), comm)
    assert comm.transport is chosen
    gloo = over_gloo(comm)
    all_reduce(torch.ones(2), gloo)
    assert type(gloo.transport) is C10dTransport


LARGE = torch.empty(SLOT_BYTES + 1, dtype=torch.uint8)
LARGEST = torch.empty(BACKGROUND["reductions"][1] + 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensor", "op", "background", "carried"),
    [
        (torch.ones(2), "sum", False, True),
        (torch.ones(2), "sum", True, True),
        (torch.ones(2, dtype=torch.bool), "", False, True),
        (torch.ones(2, dtype=torch.bool), "max", False, False),
        (torch.ones(2, dtype=torch.int64), "band", False, False),
        (torch.ones(2, device="meta"), "sum", False, False),
        # the class does not choose: other ranks may hold a plain tensor
        (torch.nn.Parameter(torch.ones(2), requires_grad=False), "", False, True),
        (LARGE, "", False, True),
        (LARGE, "", True, True),
        (LARGE, "sum", True, True),
        (LARGEST, "sum", True, False),
        (LARGEST, "sum", False, True),
    ],
)
@on_ranks(2)
def test_what_shared_memory_carries(
    tensor: Tensor, op: str, background: bool, carried: bool
) -> None:
    kind = SharedMemoryTransport if carried else C10dTransport
    assert type(carrier_of(comm_over((0, 1)), tensor, op, background)) is kind


def test_bytes_of_any_strides() -> None:
    one = torch.ones(3, 7, dtype=torch.int16).as_strided((1, 1), (7, 3))
    assert as_bytes(one).tolist() == [1, 0]
