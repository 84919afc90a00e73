"""Which redistributions travel in one round of even blocks. That they arrive is in test_shards_in_flight.py.

Covers: redistribute/even_batches.py.
"""

from __future__ import annotations

import pytest
import torch

from shoal_dtensor import Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.internal import redistribute_shards
from shoal_dtensor.redistribute.even_batches import even_batches
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.internal import topology_version
from shoal_mesh.testing import fake_world, on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def test_what_is_even_and_what_travels_together() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

        def move(shape: tuple[int, ...], before: list[Placement], after: list[Placement]) -> tuple[Spec, Spec]:
            return Spec(mesh, before, shape), Spec(mesh, after, shape)

        even = [move((8, 6), [S0, R], [R, R]), move((), [R, R], [R, R]), move((4,), [S0, R], [R, R])]
        other = [move((8, 6), [P, R], [S0, R]), move((), [P, R], [R, R])]
        batches = even_batches((*even, *other), topology_version())
        assert batches is not None
        assert [(batch.kind, batch.members) for batch in batches] == [
            ("all_gather", (0, 2)),
            ("reduce_scatter", (3,)),
            ("all_reduce", (4,)),
        ]
        assert batches[0].lengths == [24, 2]
        for apart in (
            move((7, 6), [S0, R], [R, R]),  # uneven
            move((8, 6), [S1, R], [R, R]),  # along dim 1
            move((8, 6), [P, P], [S0, R]),  # two collectives
            move((8, 6), [S0, R], [S1, R]),  # an all-to-all
        ):
            assert even_batches((*even, apart), topology_version()) is None


@pytest.mark.parametrize("lanes", [True, False])
@on_ranks(4)
def test_what_arrives_and_where(lanes: bool) -> None:
    mesh = init_device_mesh("cpu", (4,))
    dtype = torch.float32 if lanes else torch.complex64  # which only the backend sends
    shapes = [(8, 3), (4,), (16, 1)]
    moves = [(Spec(mesh, [S0], shape, None, dtype), Spec(mesh, [R], shape, None, dtype)) for shape in shapes]
    wholes = [torch.arange(torch.Size(shape).numel()).view(shape).to(dtype) + 1 for shape in shapes]
    shards = [whole.chunk(4)[mesh.get_rank()] for whole in wholes]
    with CommDebugMode() as counted:
        in_flight = redistribute_shards(shards, moves)
        places = [torch.empty(shape, dtype=dtype) for shape in shapes]
        arrived = in_flight.wait(lambda: places)
    assert counted.get_total_counts() == 1
    assert all(
        got is place and torch.equal(got, whole) for got, place, whole in zip(arrived, places, wholes, strict=True)
    )
    back = [(src.with_(placements=[P]), src) for src, _ in moves]
    for got, shard in zip(redistribute_shards(wholes, back).wait(), shards, strict=True):
        assert torch.equal(got, 4 * shard)
    summed = [(partial, whole) for (partial, _), (_, whole) in zip(back, moves, strict=True)]
    for got, whole in zip(redistribute_shards(wholes, summed).wait(), wholes, strict=True):
        assert torch.equal(got, 4 * whole)
