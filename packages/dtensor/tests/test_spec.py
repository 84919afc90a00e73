"""Covers: layout/{spec,spec_text,tensor_meta,memory_order}.py, on abstract meshes."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from shoal_dtensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    compute_local_shape_and_global_offset,
    draw_sharding,
)
from shoal_dtensor.errors import PlacementError
from shoal_dtensor.layout.memory_order import contiguous_stride
from shoal_mesh import abstract_mesh

MESH = abstract_mesh((2, 2), ("dp", "tp"), rank=3)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.data())
def test_boxes_tile_the_tensor_once_per_replica(shape: list[int], data: st.DataObject) -> None:
    choices: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    placements = tuple(data.draw(st.sampled_from(choices)) for _ in range(2))
    spec = Spec(MESH, placements, shape)
    counts = torch.zeros(shape)
    for coordinate in product(range(2), range(2)):
        counts[tuple(slice(start, stop) for start, stop in spec.box(coordinate))] += 1
    replicas = 2 ** sum(isinstance(p, Replicate) for p in placements)
    assert bool((counts == replicas).all())
    assert spec.local_shape == spec.local_shape_at((1, 1))


def test_equal_specs_are_one_object() -> None:
    a = Spec(MESH, (Shard(0), Replicate()), (4, 4))
    assert a is Spec(MESH, [Shard(-2), Replicate()], torch.Size((4, 4)), (4, 1), torch.float32)
    assert a is Spec(
        abstract_mesh((2, 2), ("dp", "tp"), rank=3), (Shard(0, sizes=(2, 2)), Replicate()), (4, 4)
    )
    assert a is copy.deepcopy(a) and a is pickle.loads(pickle.dumps(a))
    ordered = Spec(MESH, (Shard(0), Shard(0)), (4, 4), shard_order=((-2, (1, 0)),))
    assert ordered.shard_order == ((0, (1, 0)),) and pickle.loads(pickle.dumps(ordered)) is ordered
    assert a is not a.with_(dtype=torch.float64) and a is a.with_(
        placements=(Shard(0), Replicate())
    )


def test_with_keeps_the_order_unless_placements_say_another_one() -> None:
    spec = Spec(MESH, (Shard(0), Shard(0)), (8, 8), shard_order=((0, (1, 0)),))
    assert spec.with_(dtype=torch.int64).shard_order == ((0, (1, 0)),)
    assert spec.with_(placements=spec.placements).shard_order == ((0, (1, 0)),)
    assert spec.with_(placements=(Shard(-2), Shard(-2))).shard_order == ((0, (0, 1)),)
    assert spec.with_(placements=(Shard(0), Shard(1))).shard_order == ((0, (0,)), (1, (1,)))
    assert spec.with_(shape=(4, 2)).stride == (2, 1)


def test_layouts_are_compared_by_boxes_and_partial_values() -> None:
    spec = Spec(MESH, (Shard(0), Replicate()), (4, 4))
    assert spec.same_layout(spec.with_(dtype=torch.int64, stride=(1, 4)))
    assert spec.same_layout(spec.with_(placements=(Shard(0, multiple_of=2), Replicate())))
    for other in (
        (Shard(0), Partial()),
        (Replicate(), Shard(0)),
        (Shard(0, sizes=(1, 3)), Replicate()),
    ):
        assert not spec.same_layout(spec.with_(placements=other)), other
    assert not spec.same_layout(
        Spec(abstract_mesh((2, 2), ("dp", "pp"), rank=3), spec.placements, (4, 4))
    )


def test_a_spec_cannot_be_changed() -> None:
    spec = Spec(MESH, (Shard(0), Partial()), (4,))
    with pytest.raises(AttributeError, match="use with_"):
        spec.shape = (5,)  # type: ignore[assignment]  # the point of the test
    with pytest.raises(AttributeError, match="immutable"):
        del spec.shape


def test_a_spec_reads_well() -> None:
    assert repr(Spec(MESH, (Shard(0), Partial()), (4, 6))) == (
        "Spec(f32[4@(dp), 6], partial sum over tp on (dp=2, tp=2))"
    )
    assert repr(Spec(MESH, (Shard(0), Replicate()), (5,), dtype=torch.bfloat16)) == (
        "Spec(bf16[5@(dp)=[3, 2]] on (dp=2, tp=2))"
    )


def test_outside_the_mesh_there_is_nothing() -> None:
    spec = Spec(abstract_mesh((2,), rank=5), (Shard(0),), (5, 4))
    assert spec.coordinate is None
    assert (spec.local_shape, spec.local_offset, spec.offset(0)) == (torch.Size((0,)), (0,), 0)


def test_shapes_strides_and_offsets() -> None:
    assert contiguous_stride((2, 0, 3)) == (3, 3, 1)
    assert compute_local_shape_and_global_offset((5, 4), MESH, [Shard(0), Shard(1)]) == (
        (2, 2),
        (3, 2),
    )


def test_misfits_are_named() -> None:
    with pytest.raises(PlacementError, match="one placement for each of the 2 axes"):
        Spec(MESH, (Shard(0),), (4,))
    with pytest.raises(PlacementError, match="the tensor has 1 dims"):
        Spec(MESH, (Shard(0), Shard(1)), (4,))


def test_the_picture_shows_who_holds_what() -> None:
    assert draw_sharding(Spec(MESH, (Shard(0), Shard(1)), (5, 3))).split() == (
        ["0:2", "2:3", "0:3", "0", "1", "3:5", "2", "3"]
    )
    assert draw_sharding(Spec(MESH, (Replicate(), Shard(0)), (3,))).split() == [
        "0:2",
        "2:3",
        "0:1",
        "0,2",
        "1,3",
    ]
    with pytest.raises(PlacementError, match="one or two dims"):
        draw_sharding(Spec(MESH, (Replicate(), Replicate()), (2, 2, 2)))
