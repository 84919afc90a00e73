"""Local shards that move together beside computation equal those moved one by one; on real gloo ranks.

Covers: redistribute/shards_in_flight.py, tensor/shard_access.py.
"""

from __future__ import annotations

import weakref

import pytest
import torch

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard, Spec, distribute_tensor
from shoal_dtensor.internal import local_shard, redistribute_shards
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
MOVES: list[tuple[list[Placement], list[Placement]]] = [
    ([S0, R], [R, R]),
    ([S0, S1], [R, S1]),
    ([S0, S0], [R, S0]),
    ([P, S1], [S0, S1]),
    ([P, R], [S0, R]),
    ([R, S1], [R, S1]),
    ([P, P], [S0, R]),  # two rounds of collectives
]


def placed(value: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """A DTensor of these placements; where they are partial, every rank adds as much as the others."""
    whole = [R if placement.is_partial() else placement for placement in placements]
    shard = distribute_tensor(value, mesh, whole).to_local()
    return DTensor.from_local(shard, mesh, placements, shape=value.shape)


@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (1, 2)])
@on_ranks(4)
def test_they_arrive_as_each_alone(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    sources = [placed(value + i, mesh, src) for i, (src, _) in enumerate(MOVES)]
    targets = [s.spec.with_(placements=dst) for s, (_, dst) in zip(sources, MOVES, strict=True)]
    shards = [local_shard(source) for source in sources]
    in_flight = redistribute_shards(shards, [(s.spec, t) for s, t in zip(sources, targets, strict=True)])
    arrived = in_flight.wait()
    for source, target, got in zip(sources, targets, arrived, strict=True):
        assert torch.equal(got, source.redistribute(placements=target.placements).to_local())
    assert in_flight.wait() is arrived


@on_ranks(4)
def test_meshes_that_share_a_communicator_share_a_message() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    one, two = Spec(mesh["data"], [S0], (4, 2)), Spec(mesh, [S0, S1], (6, 2))
    moves = [(one, one.with_(placements=[R])), (two, two.with_(placements=[R, S1]))]
    with CommDebugMode() as counted:
        arrived = redistribute_shards([torch.ones(2, 2), torch.ones(3, 1)], moves).wait()
    assert counted.get_total_counts() == 1
    assert [tuple(tensor.shape) for tensor in arrived] == [(4, 2), (6, 1)]


@on_ranks(4)
def test_results_are_written_where_they_are_wanted() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    value = torch.arange(40, dtype=torch.float64).reshape(8, 5)
    sources = [placed(value + i, mesh, src) for i, (src, _) in enumerate(MOVES)]
    targets = [s.spec.with_(placements=dst) for s, (_, dst) in zip(sources, MOVES, strict=True)]
    moves = [(s.spec, t) for s, t in zip(sources, targets, strict=True)]
    expected = redistribute_shards([local_shard(source) for source in sources], moves).wait()
    memory = [torch.full_like(one, -1) for one in expected]
    got = redistribute_shards([local_shard(source) for source in sources], moves).wait(lambda: memory)
    assert all(one is other for one, other in zip(got, memory, strict=True))
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@on_ranks(4)
def test_sources_are_not_held_while_they_travel() -> None:
    mesh = init_device_mesh("cpu", (4,))
    shards = [torch.zeros(8) for _ in range(2)]
    spec = Spec(mesh, [P], (8,))
    held = [weakref.ref(shard) for shard in shards]
    in_flight = redistribute_shards(shards, [(spec, spec.with_(placements=[S0]))] * 2)
    del shards
    assert [ref() for ref in held] == [None, None]
    assert [tensor.shape for tensor in in_flight.wait()] == [(2,), (2,)]
