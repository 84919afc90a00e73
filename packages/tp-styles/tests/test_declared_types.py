"""Covers: declared_types.py: lowered modules pass the checker of plain SPMD code, with the right types."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Replicate, Shard
from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import I, R, ShardType as S, spmd
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def typed(mesh: DeviceMesh, kind: object, *shape: int) -> Tensor:
    tensor = torch.randn(shape, requires_grad=True)
    spmd.assert_tensor_type(tensor, {"tp": kind})  # type: ignore[dict-item]  # a type
    return tensor


def type_over(tensor: Tensor, mesh: DeviceMesh) -> object:
    found = spmd.type_of(tensor)
    assert found is not None
    return found.by_axis[spmd.normalize_axis("tp")]


def test_a_block_of_linears_takes_and_returns_invariant_activations(mesh: DeviceMesh) -> None:
    block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        x = typed(mesh, I, 4, 16)
        hidden = block[0](x)
        assert type_over(hidden, mesh) is S(1)
        assert type_over(block[2](block[1](hidden)), mesh) is I
        # three readers of one activation share a reduction
        assert type_over(block(x) + block(x), mesh) is I
        with pytest.raises(SpmdTypeError, match="column-wise Linear"):
            block(typed(mesh, R, 4, 16))
        with pytest.raises(SpmdTypeError, match="mm"):
            block[2](typed(mesh, S(0), 4, 8))


def test_sequence_parallelism_has_shards_between_the_linears(mesh: DeviceMesh) -> None:
    block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16))
    plan = {
        "0": SequenceParallel(sequence_dim=0, use_local_output=True),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(block, mesh, plan)
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        normed = block[0](typed(mesh, S(0), 8, 16))
        assert type_over(normed, mesh) is S(0)
        assert type_over(block[1](normed), mesh) is S(1)
        assert type_over(block(normed), mesh) is S(0)


def test_tables_sharded_by_rows_and_by_columns(mesh: DeviceMesh) -> None:
    tables = nn.ModuleList([nn.Embedding(32, 8), nn.Embedding(32, 8)])
    parallelize_module(
        tables, mesh, {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel()}
    )
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        tokens = torch.arange(6)
        spmd.assert_tensor_type(tokens, {"tp": I})
        assert type_over(tables[0](tokens), mesh) is I
        assert type_over(tables[1](tokens), mesh) is S(1)


def test_local_tensors_of_dtensors_have_the_types_of_their_placements(mesh: DeviceMesh) -> None:
    linear = parallelize_module(nn.Linear(16, 32), mesh, ColwiseParallel())
    weight = linear.weight
    assert isinstance(weight, DTensor)
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        assert type_over(weight.to_local(), mesh) is S(0)
        whole = weight.redistribute(placements=[Replicate()])
        assert type_over(whole.to_local(), mesh) is I
        assert type_over(whole.to_local(grad_placements=[Partial()]), mesh) is R
