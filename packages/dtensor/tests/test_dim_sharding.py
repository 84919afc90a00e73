"""Shardings of dims, against torch.chunk and brute force.

Covers: dim_sharding.py, axis_order.py, partition_spec.py, placements.py.
"""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from shoal_dtensor import Partial, Placement, Replicate, Shard, StridedShard
from shoal_dtensor.errors import ArgumentTypeError, PlacementError
from shoal_dtensor.layout.dim_sharding import DimSharding, chunk_sizes, shard_dim
from shoal_dtensor.layout.partition_spec import normalize_placements, resolved_layout

MESH_SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_sizes_are_those_of_torch(length: int, pieces: int) -> None:
    expected = [len(part) for part in torch.arange(length).chunk(pieces)] if length else []
    assert list(chunk_sizes(length, pieces)) == expected + [0] * (pieces - len(expected))


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 9))
def test_chunk_sizes_divide_at_units_and_cover(length: int, pieces: int, unit: int) -> None:
    sizes = chunk_sizes(length, pieces, unit)
    assert sum(sizes) == length
    assert all(sum(sizes[:i]) % unit == 0 or sum(sizes[:i]) == length for i in range(pieces))


@given(st.integers(0, 30), MESH_SHAPES, st.data())
def test_nested_sharding_is_repeated_chunking(
    length: int, mesh_shape: list[int], data: st.DataObject
) -> None:
    axes = data.draw(st.permutations(range(len(mesh_shape))))
    cut = shard_dim(length, axes, [Shard(0)] * len(mesh_shape), mesh_shape)
    for coordinate in product(*(range(n) for n in mesh_shape)):
        piece = torch.arange(length)
        for axis in axes:
            parts = [*piece.chunk(mesh_shape[axis])] if len(piece) else []
            piece = parts[coordinate[axis]] if coordinate[axis] < len(parts) else piece[:0]
        start, stop = cut.interval(coordinate)
        assert piece.tolist() == list(range(start, stop))


@given(st.integers(0, 30), MESH_SHAPES, st.data())
def test_a_sharding_survives_as_placements(
    length: int, mesh_shape: list[int], data: st.DataObject
) -> None:
    axes = tuple(data.draw(st.permutations(range(len(mesh_shape)))))
    pieces = len([*product(*(range(n) for n in mesh_shape))])
    bounds = sorted(
        data.draw(st.lists(st.integers(0, length), min_size=pieces - 1, max_size=pieces - 1))
    )
    sizes = tuple(b - a for a, b in zip([0, *bounds], [*bounds, length], strict=True))
    cut = DimSharding(axes, tuple(mesh_shape[a] for a in axes), sizes)
    placements: list[Placement] = [cut.placements(0)[axis] for axis in range(len(mesh_shape))]
    normal, order, (sharding,) = resolved_layout(placements, mesh_shape, (length,), None)
    assert normal == tuple(placements)
    # axes of one rank may stand elsewhere
    assert [axis for axis in order[0][1] if mesh_shape[axis] > 1] == [
        axis for axis in axes if mesh_shape[axis] > 1
    ]
    assert isinstance(sharding, DimSharding) and sharding.sizes == sizes
    again = resolved_layout(placements, mesh_shape, (length,), ((0, axes),))
    assert again == (normal, order, (sharding,))


@given(st.integers(0, 30), MESH_SHAPES, st.data())
def test_the_closed_form_of_chunks_is_their_sizes(
    length: int, mesh_shape: list[int], data: st.DataObject
) -> None:
    units = data.draw(
        st.lists(st.integers(1, 3), min_size=len(mesh_shape), max_size=len(mesh_shape))
    )
    axes, shape = tuple(range(len(mesh_shape))), tuple(mesh_shape)
    sizes: tuple[int, ...] = (length,)
    for ways, unit in zip(mesh_shape, units, strict=True):
        sizes = tuple(inner for outer in sizes for inner in chunk_sizes(outer, ways, unit))
    sharding = shard_dim(length, axes, [Shard(0, multiple_of=unit) for unit in units], shape)
    assert sharding == DimSharding(axes, shape, sizes) and sharding.sizes == sizes
    assert sharding.step == max(sizes) and sharding.even == (len(set(sizes)) == 1)
    starts = [sum(sizes[:shard]) for shard in range(len(sizes))]
    assert sharding.offsets == tuple(starts)
    for shard, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        assert sharding.interval_of(shard) == (start, start + size)
        assert all(sharding.shard_with(index) == shard for index in range(start, start + size))
    for unit in (2, 3):
        assert sharding.scaled(unit).sizes == tuple(size * unit for size in sizes)
        divided = sharding.divided(unit)
        assert (divided is None) == any(size % unit for size in sizes)
        assert divided is None or divided.sizes == tuple(size // unit for size in sizes)
    inner = len(sizes) // shape[0]
    assert sharding.outer(1).sizes == tuple(
        sum(sizes[i : i + inner]) for i in range(0, len(sizes), inner)
    )


def test_sizes_that_chunk_would_give_are_dropped() -> None:
    assert resolved_layout([Shard(0, sizes=(3, 2))], (2,), (5,), None)[0] == (Shard(0),)


@pytest.mark.parametrize(
    ("placements", "mesh_shape", "order"),
    [
        ([StridedShard(0, split_factor=2), Shard(0)], (4, 2), ((0, (1, 0)),)),
        ([Shard(0), Shard(0)], (4, 2), ((0, (0, 1)),)),
        ([StridedShard(0, split_factor=6), Shard(0), Shard(0)], (2, 2, 3), ((0, (1, 2, 0)),)),
        ([StridedShard(-1, split_factor=2), Replicate(), Shard(1)], (2, 2, 2), ((1, (2, 0)),)),
    ],
)
def test_strided_spelling_is_an_order(
    placements: list[Placement],
    mesh_shape: tuple[int, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...],
) -> None:
    normal, found = normalize_placements(placements, mesh_shape, 2)
    assert found == order
    assert not any(isinstance(p, StridedShard) for p in normal)


def test_an_inner_axis_that_chunks_what_a_ragged_outer_one_leaves_names_no_sizes() -> None:
    assert DimSharding((0, 1), (2, 2), (2, 1, 1, 0)).placements(0) == {
        0: Shard(0, sizes=(3, 1)),
        1: Shard(0),
    }


def test_a_sharding_is_counted_in_units_only_where_every_shard_is() -> None:
    cut = DimSharding((0,), (2,), (6, 2))
    assert cut.divided(2) == DimSharding((0,), (2,), (3, 1)) and cut.divided(4) is None


def test_a_given_order_agrees_with_the_strided_spelling() -> None:
    placements = [StridedShard(0, split_factor=2), Shard(0)]
    assert normalize_placements(placements, (2, 2), 1)[1] == ((0, (1, 0)),)
    assert normalize_placements(placements, (2, 2), 1, ((0, (1, 0)),))[1] == ((0, (1, 0)),)
    with pytest.raises(PlacementError, match=r"mesh axis 0 shards the dim after .* make 2 shards"):
        normalize_placements(placements, (2, 2), 1, ((0, (0, 1)),))


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Shard(0)], "one placement for each of the 2 axes"),
        ([Shard(2), Replicate()], "the tensor has 2 dims"),
        (
            [StridedShard(0, split_factor=3), Shard(0)],
            r"no leading part of these sizes .*\. Use a factor .* pad the dim",
        ),
        (
            [StridedShard(0, split_factor=4), Replicate()],
            r"have sizes \[\].*\. Use a factor .* pad the dim to a multiple of 4",
        ),
        (
            ["S(0)", Replicate()],
            r"expected Shard, Replicate or Partial of shoal_dtensor, got 'S.0.' .builtins.str",
        ),
    ],
)
def test_misfits_are_named(placements: list[Placement], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        normalize_placements(placements, (2, 2), 2)


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(PlacementError, match=r"add up to \(6,\), got 2 that add up to \(5,\)"):
        shard_dim(6, (0,), [Shard(0, sizes=(3, 2))], (2,))
    with pytest.raises(PlacementError, match="expected 2 sizes"):
        shard_dim(6, (0,), [Shard(0, sizes=(3, 2, 1))], (2,))
    with pytest.raises(PlacementError, match="must not be negative"):
        Shard(0, sizes=(3, -1))
    with pytest.raises(PlacementError, match="not both"):
        Shard(0, sizes=(3, 1), multiple_of=2)
    with pytest.raises(PlacementError, match="multiple_of must be at least 1, got 0"):
        Shard(0, multiple_of=0)
    with pytest.raises(ArgumentTypeError, match=r"dim must be an int, got 1\.5"):
        Shard(1.5)  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match="one of sum, avg"):
        Partial("mean")
    with pytest.raises(PlacementError, match="norm and an order"):
        Partial("norm")
    with pytest.raises(PlacementError, match=r"'norm1' is Partial\('sum'\)"):
        Partial("norm1")
    with pytest.raises(PlacementError, match=r"is Partial\('min'\)"):
        Partial("norm-inf")
    with pytest.raises(PlacementError, match=r"shard it by axes \(0, 1\)"):
        normalize_placements([Shard(0), Shard(0)], (2, 2), 1, ((0, (1,)),))


PLACEMENTS = [
    Shard(1),
    Shard(0, sizes=(2, 1)),
    Shard(0, multiple_of=4),
    Replicate(),
    Partial("max"),
    Partial("norm2.5"),
    StridedShard(0, split_factor=2),
    StridedShard(0, split_factor=2, sizes=(3, 1)),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_placements_are_interned_values(placement: Placement) -> None:
    assert pickle.loads(pickle.dumps(placement)) is placement
    assert copy.deepcopy(placement) is placement
    with pytest.raises(AttributeError, match="immutable"):
        setattr(placement, "dim", 3)  # noqa: B010  # the point of the test


@given(st.integers(0, 40), st.integers(1, 9))
def test_one_piece_of_a_shard(length: int, pieces: int) -> None:
    sizes = chunk_sizes(length, pieces)
    for rank in range(pieces):
        assert Shard.local_shard_size_and_offset(length, pieces, rank) == (
            sizes[rank],
            sum(sizes[:rank]),
        )


def test_the_same_sharding_on_another_dim() -> None:
    assert Shard(0, sizes=(2, 1)).on_dim(1) is Shard(1, sizes=(2, 1))
    assert Shard(0, multiple_of=4).on_dim(1) is Shard(1, multiple_of=4)
    strided = StridedShard(0, split_factor=2, sizes=(3, 1))
    assert strided.on_dim(1) is StridedShard(1, split_factor=2, sizes=(3, 1))


def test_orders_of_norms_have_one_spelling() -> None:
    assert Partial("norm2.0") is Partial("norm2") is not Partial("norm2.5")
    assert Partial("norm1e60").reduce_op == "norm1e+60"


def test_predicates() -> None:
    assert Shard(1).is_shard() and Shard(1).is_shard(1) and not Shard(1).is_shard(0)
    assert Partial("max").is_partial("max") and not Partial("max").is_partial("sum")
    assert Replicate().is_replicate() and not Replicate().is_shard() and not Shard(0).is_replicate()
