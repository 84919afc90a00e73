"""Covers: mesh/rank_layout.py: layouts, against brute force."""

from __future__ import annotations

import pickle
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given, strategies as st

from shoal_mesh import MeshError
from shoal_mesh.mesh.rank_layout import Layout

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def permuted(draw: st.DrawFn) -> Layout:
    """A dense grid with its axes in another order and some of them flattened."""
    layout = Layout.dense(draw(shapes))
    layout = layout.select(draw(st.permutations(range(layout.ndim))), (0,) * layout.ndim)
    start = draw(st.integers(0, layout.ndim - 1))
    stop = draw(st.integers(start + 1, layout.ndim))
    return Layout(
        (*layout.shape[:start], prod(layout.shape[start:stop]), *layout.shape[stop:]), layout.ranks
    )


def brute(layout: Layout) -> dict[tuple[int, ...], int]:
    """Coordinate -> rank, from the list alone."""
    return dict(zip(product(*map(range, layout.shape)), layout.ranks, strict=True))


@given(permuted())
def test_coordinates_and_ranks_invert_each_other(layout: Layout) -> None:
    table = brute(layout)
    for coordinate, rank in table.items():
        assert layout.rank_at(coordinate) == rank
        assert layout.coordinate(rank) == coordinate
    assert layout.coordinate(-1) is layout.coordinate(len(table)) is None
    assert len(table) == prod(layout.shape)


@given(permuted(), st.data())
def test_select_fixes_the_other_axes(layout: Layout, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(range(layout.ndim)), unique=True, min_size=1))
    at = tuple(data.draw(st.integers(0, n - 1)) for n in layout.shape)
    part = layout.select(axes, at)
    table = brute(layout)
    for coordinate in product(*map(range, part.shape)):
        full = list(at)
        for axis, i in zip(axes, coordinate, strict=True):
            full[axis] = i
        assert part.rank_at(coordinate) == table[tuple(full)]


@given(permuted())
def test_flatten_keeps_row_major_order_and_unflatten_undoes_it(layout: Layout) -> None:
    flat = layout.flatten()
    assert (flat.shape, flat.ranks) == ((prod(layout.shape),), layout.ranks)
    assert flat.unflatten(0, layout.shape) == layout


@given(shapes, st.data())
def test_slices_through_a_rank_cross_in_it(shape: tuple[int, ...], data: st.DataObject) -> None:
    grid = Layout.dense(shape)
    axes = data.draw(st.lists(st.sampled_from(range(grid.ndim)), unique=True, min_size=1))
    at = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    cut = data.draw(st.integers(0, len(axes) - 1))
    parts = [grid.select(part, at) for part in (axes[:cut], axes[cut:]) if part]
    assert grid.cross_parts(parts) == grid.select(axes, at)
    assert grid.is_crossed_by_axes(grid.select(axes, at))
    if len(parts[0].ranks) > 1:
        assert grid.cross_parts([*parts, parts[0]]) is None


@given(shapes, st.data())
def test_parallel_slices_run_through_any_rank(shape: tuple[int, ...], data: st.DataObject) -> None:
    grid = Layout.dense(shape)
    axes = data.draw(st.lists(st.sampled_from(range(grid.ndim)), unique=True, min_size=1))
    here, there = (tuple(data.draw(st.integers(0, n - 1)) for n in shape) for _ in range(2))
    for kind in (lambda part: part, Layout.flatten):
        moved = grid.parallel(kind(grid.select(axes, here)), grid.rank_at(there))
        assert moved == kind(grid.select(axes, there))


def test_parts_of_part_of_an_axis() -> None:
    grid = Layout.dense((12,))
    by_six, by_four = (grid.unflatten(0, sizes) for sizes in ((2, 6), (3, 4)))
    assert grid.parallel(by_four.select((1,), (1, 0)), 9).ranks == range(8, 12)
    assert grid.cross_parts([by_six.select((0,), (0, 0)), by_four.select((1,), (0, 0))]) == Layout(
        (2, 4), (0, 1, 2, 3, 6, 7, 8, 9)
    )
    # 8 + 6 is not a rank
    assert grid.cross_parts([by_six.select((0,), (0, 0)), by_four.select((0,), (0, 0))]) is None
    # none in common
    assert grid.cross_parts([by_six.select((1,), (0, 0)), by_six.select((1,), (1, 0))]) is None


def test_unflatten_that_no_steps_say() -> None:
    grid = Layout.dense((2, 3))
    flat = grid.select((1, 0), (0, 0)).flatten()
    assert flat.ranks == (0, 3, 1, 4, 2, 5)
    assert flat.unflatten(0, (3, 2)) == grid.select((1, 0), (0, 0))
    assert grid.is_crossed_by_axes(flat.unflatten(0, (3, 2)))
    listed = flat.unflatten(0, (2, 3))
    assert not grid.is_crossed_by_axes(listed)
    assert listed.select((1,), (1, 0)).ranks == (4, 2, 5)
    assert [listed.coordinate(rank) for rank in (4, 6)] == [(1, 0), None]
    assert listed.flatten() == flat


def test_sizes_that_do_not_fit_an_axis_are_refused() -> None:
    with pytest.raises(MeshError, match="has 4 ranks"):
        Layout.dense((4,)).unflatten(0, (3,))
    with pytest.raises(MeshError, match="has 4 ranks"):
        Layout.dense((4,)).unflatten(0, (-2, -2))


def test_values() -> None:
    assert Layout.dense((2, 2)).flatten() == Layout.dense((4,)) == Layout.of([4], [0, 1, 2, 3])
    assert Layout.of((4,), range(4, 8)).unflatten(0, (2, 2)) == Layout.of((2, 2), (4, 5, 6, 7))
    assert hash(Layout.dense((2, 2))) == hash(Layout.of((2, 2), [0, 1, 2, 3]))
    assert repr(Layout.dense((16,)).select((0,), (0,))) == "Layout(shape=(16,), ranks=range(0, 16))"


def test_ranks_with_one_step_are_a_range() -> None:
    assert Layout.dense((4, 4096)).ranks == range(16384)
    assert Layout.dense((4, 4096)).select((0,), (0, 0)).ranks == range(0, 16384, 4096)
    assert Layout.of((3,), (5, 3, 1)).ranks == range(5, -1, -2)


@pytest.mark.parametrize(
    ("axes", "offset", "listed", "shape", "ranks"),
    [
        ((((2, 4),), ((4, 1),)), 0, None, (2, 4), [0, 1, 2, 3, 4, 5, 6, 7]),
        ((((4, 1),),), 4, None, (4,), [4, 5, 6, 7]),
        ((((3, 2), (2, 1)), ()), 0, (5, 3, 1, 0, 2, 4), (6, 1), [5, 3, 1, 0, 2, 4]),
    ],
)
def test_files_that_hold_strides_are_read(
    axes: Any, offset: int, listed: Any, shape: Any, ranks: list[int]
) -> None:
    layout = Layout.__new__(Layout)
    layout.__setstate__({"axes": axes, "offset": offset, "listed": listed})
    assert layout == Layout.of(shape, ranks) and layout.coordinate(ranks[0]) == (0,) * len(shape)
    assert pickle.loads(pickle.dumps(layout)) == layout
