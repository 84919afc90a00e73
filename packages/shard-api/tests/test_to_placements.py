"""Layouts and grids of placements, each expressed in the other, without ranks.

Covers: ops/grids.py.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from shoal_dtensor import Shard
from shoal_dtensor.internal import Box, volume
from shoal_shard_api import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    NotExpressibleError,
    TensorProperties,
)
from shoal_shard_api._torch import RemoteDevice
from shoal_shard_api.ops.grids import Grid, grid_of
from shoal_shard_api.spec.specs import spec_of

MEMBERS = (0, 1, 2, 3)


DEVICES = {rank: RemoteDevice(f"rank:{rank}/cpu") for rank in range(8)}


def boxes_of(grid: Grid, shape: tuple[int, ...]) -> dict[int, Box]:
    """What every rank of a grid holds, by the meaning of its placements."""
    held = {}
    for rank, coordinate in zip(grid.ranks, product(*map(range, grid.mesh_shape)), strict=True):
        box = [(0, n) for n in shape]
        for placement, at in zip(grid.placements, coordinate, strict=True):
            assert placement.sizes is not None
            start = sum(placement.sizes[:at])
            box[placement.dim] = (start, start + placement.sizes[at])
        held[rank] = tuple(box)
    return held


@given(st.integers(1, 20), st.permutations(MEMBERS), st.integers(1, 4), st.integers(0, 1))
def test_a_chunk_spec_on_some_ranks_in_any_order(
    size: int, order: list[int], count: int, dim: int
) -> None:
    shape = (size, 3) if dim == 0 else (3, size)
    spec = ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in order[:count]])
    layout = spec.build_metadata(torch.Size(shape), TensorProperties()).layout
    grid = grid_of(layout, shape, MEMBERS)
    assert sorted(grid.ranks) == list(MEMBERS)
    held = boxes_of(grid, shape)
    for rank, box in layout:
        assert held[rank] == box or volume(box) == 0
    assert sum(volume(box) for box in held.values()) == 3 * size


@given(st.permutations(MEMBERS), st.integers(1, 6), st.integers(1, 4))
def test_a_two_by_two_grid(order: list[int], row: int, column: int) -> None:
    shape = (7, 5)
    cells = [
        ((a, b), (c, d)) for a, b in ((0, row), (row, 7)) for c, d in ((0, column), (column, 5))
    ]
    layout = tuple(zip(order, cells, strict=True))
    grid = grid_of(layout, shape, MEMBERS)
    assert grid.mesh_shape == (2, 2)
    assert boxes_of(grid, shape) == dict(layout)
    inferred = spec_of(layout, DEVICES)
    assert isinstance(inferred, EnumerableShardingSpec)
    assert inferred.build_metadata(torch.Size(shape), TensorProperties()).layout == layout


def test_idle_ranks_become_empty_cells() -> None:
    cells = [((a, b), (c, d)) for a, b in ((0, 1), (1, 2)) for c, d in ((0, 1), (1, 2))]
    grid = grid_of(tuple(zip((0, 1, 2, 3), cells, strict=True)), (2, 2), tuple(range(6)))
    assert grid.mesh_shape == (3, 2)
    assert grid.placements == (Shard(0, sizes=(1, 1, 0)), Shard(1, sizes=(1, 1)))
    assert grid.ranks == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("layout", "shape", "members", "reason"),
    [
        pytest.param(((0, ()),), (), (0, 1), "0 dims", id="0-dim"),
        pytest.param(
            ((0, ((0, 1),)), (0, ((1, 2),))),
            (2,),
            (0, 1),
            r"ranks \[0\] hold several",
            id="several",
        ),
        pytest.param(
            ((0, ((0, 1), (0, 2))), (1, ((1, 2), (0, 1))), (2, ((1, 2), (1, 2)))),
            (2, 2),
            (0, 1, 2),
            r"not all cells of a grid.*\[0:1, 0:2\] on rank 0",
            id="bricks",
        ),
        pytest.param(
            tuple(enumerate(((a, a + 1), (c, c + 1)) for a in (0, 1) for c in (0, 1))),
            (2, 2),
            tuple(range(5)),
            r"leaves the ranks \[4\] idle",
            id="idle",
        ),
    ],
)
def test_what_has_no_placements(  # type: ignore[no-untyped-def]  # parametrized
    layout, shape, members, reason
) -> None:
    with pytest.raises(NotExpressibleError, match=reason):
        grid_of(layout, shape, members)


def test_all_elements_on_one_rank() -> None:
    grid = grid_of(((2, ((0, 4), (0, 3))),), (4, 3), MEMBERS)
    assert grid == Grid((4,), (2, 0, 1, 3), (Shard(0, sizes=(4, 0, 0, 0)),))


def test_a_tensor_without_elements_is_sharded_along_its_empty_dim() -> None:
    layout = (
        ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        .build_metadata(torch.Size([4, 0]), TensorProperties())
        .layout
    )
    assert grid_of(layout, (4, 0), (0, 1)) == Grid((2,), (0, 1), (Shard(1, sizes=(0, 0)),))


def test_empty_boxes_are_dropped_unless_a_chunk_spec_has_them() -> None:
    layout = [(0, ((0, 3),)), (1, ((3, 3),)), (2, ((3, 4),))]
    assert [
        each.rank
        for each in spec_of(layout, DEVICES)
        .build_metadata(torch.Size([4]), TensorProperties())
        .shards_metadata
    ] == [0, 2]
    assert spec_of([(1, ((0, 2),)), (0, ((2, 3),))], DEVICES) == ChunkShardingSpec(
        0, ["rank:1/cpu", "rank:0/cpu"]
    )
