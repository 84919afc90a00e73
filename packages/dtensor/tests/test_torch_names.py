"""Covers: torch_names.py, spec.py; and attributes of a Spec under torch's names."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import shoal_dtensor
from shoal_dtensor import (
    DTensor,
    DTensorSpec,
    Partial,
    Replicate,
    Shard,
    ShardOrderEntry,
    Spec,
    TensorMeta,
    compute_global_tensor_shape,
    compute_local_shape_and_global_offset,
    compute_local_tensor_info,
)
from shoal_dtensor.errors import PlacementError
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import on_ranks

MESH = abstract_mesh((2, 2), ("dp", "tp"), rank=3)
META = TensorMeta((8, 6), (6, 1), torch.float32)


def test_a_spec_by_torchs_name_is_a_spec() -> None:
    spec = DTensorSpec(MESH, (Shard(0), Shard(0)), tensor_meta=META)
    assert spec is Spec(MESH, (Shard(0), Shard(0)), (8, 6))
    assert (spec.dim_map, spec.num_shards_map, spec.num_shards, spec.sums) == (
        [0, -1],
        [4, 1],
        4,
        [],
    )
    assert spec.is_sharded() and not Spec(MESH, (Replicate(), Partial()), (8, 6)).is_sharded()
    assert Spec.from_dim_map(MESH, [-1, 1], [0], META) is Spec(MESH, (Partial(), Shard(1)), (8, 6))
    assert ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)) == (0, (1, 0))
    with pytest.raises(ValueError, match="expected a tensor_meta"):
        DTensorSpec(MESH, (Replicate(), Replicate()))


def test_local_shapes_without_a_process_group() -> None:
    assert compute_local_shape_and_global_offset(
        (7, 4), MESH, [Shard(0), Replicate()], skip_offset=True
    ) == (
        (3, 4),
        (),
    )
    assert compute_local_tensor_info(torch.ones(4, 8).t(), MESH, [Shard(0), Replicate()]) == (
        [4, 4],
        [1, 4],
    )


@on_ranks(4)
def test_the_global_shape_of_uneven_and_empty_shards() -> None:
    mesh = init_device_mesh("cpu", (4,))
    rank = mesh.get_rank()
    assert compute_global_tensor_shape([rank, 3], mesh, [Shard(0)]) == (6, 3)
    assert compute_global_tensor_shape([2, 3], mesh, [Replicate()]) == (2, 3)
    with pytest.raises(PlacementError, match="cannot combine local tensors"):
        compute_global_tensor_shape([2, rank], mesh, [Shard(0)])
    with pytest.raises(PlacementError, match="run_check"):
        compute_global_tensor_shape([2], mesh, [Partial()])


@pytest.mark.parametrize("name", ["LocalShardsWrapper", "OpStrategy", "LocalTensorMode"])
def test_a_name_that_is_not_here_says_what_is(name: str) -> None:
    with pytest.raises(
        ImportError, match=f"no {name}: .*(ShardedTensor|register_rule|simulate_ranks)"
    ):
        __import__(shoal_dtensor.__name__, fromlist=[name])  # as `from shoal_dtensor import name`
    assert not hasattr(shoal_dtensor, name)
    with pytest.raises(AttributeError, match="register_rule"):
        DTensor._op_dispatcher  # noqa: B018  # reading it is the test


def test_a_placement_that_would_move_data_is_refused_where_it_is_defined() -> None:
    with pytest.raises(
        PlacementError, match="overrides _reduce_value, which would never be called"
    ):
        type("Scaled", (Partial,), {"_reduce_value": lambda *_: None})
    assert type("Named", (Shard,), {})(1).is_shard(1)
    for owner in (Shard, Shard(0)):
        with pytest.raises(
            AttributeError, match=r"Shard has no _custom_chunk: placements are data"
        ):
            owner._custom_chunk  # type: ignore[union-attr]  # noqa: B018  # reading it is the test


def test_a_spec_has_torchs_entries_and_copies_them() -> None:
    spec = Spec(abstract_mesh((2, 2)), (Shard(0), Shard(0)), (8,), shard_order=((0, (1, 0)),))
    (entry,) = spec.shard_order
    named: Any = entry
    assert (named.tensor_dim, named.mesh_dims) == (0, (1, 0)) == entry
    other = spec.shallow_copy_with_tensor_meta(TensorMeta((4, 2), (2, 1), torch.float64))
    assert (other.placements, other.shape, other.dtype) == (spec.placements, (4, 2), torch.float64)
    assert pickle.loads(pickle.dumps(spec)) is spec and b"ShardOrderEntry" not in pickle.dumps(spec)
