"""Covers: layout/partition_spec.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal_dtensor import (
    DTensor,
    Partial,
    PartitionSpec,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    zeros,
)
from shoal_dtensor.errors import PlacementError
from shoal_dtensor.layout.partition_spec import read_placements
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.errors import AxisError
from shoal_mesh.testing import on_ranks

MESH = abstract_mesh((2, 2, 2), ("dp", "cp", "tp"))


@pytest.mark.parametrize(
    ("written", "placements", "order"),
    [
        (PartitionSpec("dp", None), (Shard(0), Replicate(), Replicate()), ((0, (0,)),)),
        (PartitionSpec(None, "tp"), (Replicate(), Replicate(), Shard(1)), ((1, (2,)),)),
        (
            PartitionSpec(("tp", "dp"), 1),
            (StridedShard(0, split_factor=2), Shard(1), Shard(0)),
            ((0, (2, 0)), (1, (1,))),
        ),
        (
            PartitionSpec("dp", partial={"cp": "max"}),
            (Shard(0), Partial("max"), Replicate()),
            ((0, (0,)),),
        ),
        (PartitionSpec(), (Replicate(),) * 3, ()),
    ],
    ids=repr,
)
def test_dims_become_axes(written: PartitionSpec, placements: Any, order: Any) -> None:
    assert written.resolve(MESH) == (placements, order)
    assert read_placements(MESH, written) == (placements, order)


def test_misuse_is_named() -> None:
    with pytest.raises(PlacementError, match="'dp' is used twice"):
        PartitionSpec("dp", ("tp", "dp")).resolve(MESH)
    with pytest.raises(AxisError, match="pp"):
        PartitionSpec("pp").resolve(MESH)
    with pytest.raises(PlacementError, match="leave out shard_order"):
        read_placements(MESH, PartitionSpec("dp"), ((0, (0,)),))


@on_ranks(4)
def test_it_is_taken_wherever_placements_are() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(35.0).view(7, 5)
    x: Any = distribute_tensor(whole, mesh, PartitionSpec(("tp", "dp"), None))
    assert x.shard_order == ((0, (1, 0)),) and torch.equal(x.full_tensor(), whole)
    y = x.redistribute(placements=PartitionSpec("dp", "tp"))
    assert y.placements == (Shard(0), Shard(1)) and torch.equal(y.full_tensor(), whole)
    assert DTensor.from_local(
        torch.ones(2), mesh, PartitionSpec(partial={"dp": "sum"})
    ).full_tensor().tolist() == [
        2.0,
        2.0,
    ]
    assert zeros(4, 2, device_mesh=mesh, placements=PartitionSpec(None, "dp")).to_local().shape == (
        4,
        1,
    )
