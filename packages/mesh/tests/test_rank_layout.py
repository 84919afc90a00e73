"""Covers: mesh/rank_layout.py, against brute force."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, strategies as st

from shoal_mesh import MeshError
from shoal_mesh.mesh.rank_layout import Layout

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def permuted(draw: st.DrawFn) -> Layout:
    """A dense grid with its axes in another order and some of them flattened."""
    shape = draw(shapes)
    layout = Layout.dense(shape, draw(st.integers(0, 5)))
    layout = layout.select(draw(st.permutations(range(layout.ndim))))
    start = draw(st.integers(0, layout.ndim - 1))
    stop = draw(st.integers(start + 1, layout.ndim))
    merged = tuple(mode for axis in layout.axes[start:stop] for mode in axis)
    return Layout((*layout.axes[:start], merged, *layout.axes[stop:]), layout.offset)


def brute(layout: Layout) -> dict[tuple[int, ...], int]:
    """Coordinate -> member, from `members` alone."""
    return dict(zip(product(*map(range, layout.shape)), layout.members(), strict=True))


@given(permuted())
def test_coordinates_and_members_invert_each_other(layout: Layout) -> None:
    table = brute(layout)
    for coordinate, member in table.items():
        assert layout(coordinate) == member
        assert layout.coordinate(member) == coordinate
    outside = {-1, max(table.values()) + 1} | (set(range(max(table.values()))) - set(table.values()))
    assert all(layout.coordinate(m) is None for m in outside)
    assert layout.is_injective()
    assert len(table) == prod(layout.shape)


@given(permuted())
def test_a_line_is_the_members(layout: Layout) -> None:
    assert tuple(layout.line()) == layout.members()


@given(permuted())
def test_fit_finds_the_same_layout_from_its_members(layout: Layout) -> None:
    assert Layout.fit(layout.shape, layout.members()) == layout


@given(st.permutations(range(8)), st.sampled_from([(8,), (2, 4), (2, 2, 2)]))
def test_fit_is_right_or_gives_up(members: list[int], shape: tuple[int, ...]) -> None:
    found = Layout.fit(shape, members)
    assert found is None or found.members() == tuple(members)


@given(permuted(), st.data())
def test_select_fixes_the_other_axes(layout: Layout, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(range(layout.ndim)), unique=True, min_size=1))
    at = tuple(data.draw(st.integers(0, n - 1)) for n in layout.shape)
    part = layout.select(axes, {a: i for a, i in enumerate(at) if a not in axes})
    table = brute(layout)
    for coordinate in product(*map(range, part.shape)):
        full = list(at)
        for axis, i in zip(axes, coordinate, strict=True):
            full[axis] = i
        assert part(coordinate) == table[tuple(full)]


@given(permuted())
def test_flatten_keeps_row_major_order_and_unflatten_undoes_it(layout: Layout) -> None:
    flat = layout.flatten()
    assert flat.members() == layout.members()
    back = flat.unflatten(0, layout.shape)
    assert back.members() == layout.members()
    assert back.listed or back == layout
    if layout.ndim == 1:
        assert back == layout


def test_unflatten_that_no_strides_say() -> None:
    flat = Layout.dense((2, 3)).select((1, 0)).flatten()  # 0 3 1 4 2 5
    assert flat.members() == (0, 3, 1, 4, 2, 5)
    assert flat.unflatten(0, (3, 2)) == Layout.dense((2, 3)).select((1, 0))
    listed = flat.unflatten(0, (2, 3))
    assert (listed.shape, listed.members()) == ((2, 3), flat.members())
    assert listed.select((1,), {0: 1}).members() == (4, 2, 5)
    assert [listed.coordinate(rank) for rank in (4, 6)] == [(1, 0), None]
    assert listed.identity() == flat.members()
    assert listed.flatten().identity() == flat


def test_overlapping_strides_still_have_coordinates() -> None:
    layout = Layout((((2, 1),), ((3, 1),)))
    assert not layout.is_injective()
    assert layout.coordinate(2) == (0, 2)
    assert layout.coordinate(9) is None
    crossing = Layout((((3, 2),), ((2, 3),)))  # 0 3 2 5 4 7
    assert crossing.is_injective()
    assert [crossing.coordinate(m) for m in (5, 6)] == [(1, 1), None]


def test_sizes_that_do_not_fit_an_axis_are_refused() -> None:
    with pytest.raises(MeshError, match="has 4 ranks"):
        Layout.dense((4,)).unflatten(0, (3,))
    with pytest.raises(MeshError, match="has 4 ranks"):
        Layout.dense((4,)).unflatten(0, (-2, -2))


def test_values() -> None:
    assert Layout.dense((4, 1)) == Layout((((4, 1),), ((1, 7),)))
    assert Layout.dense((2, 2)).flatten() == Layout.dense((4,))
    assert Layout.dense((2, 2), 4).select((1,), {0: 1}).members() == (6, 7)
    assert Layout.dense((4,), 4).unflatten(0, (2, 2)) == Layout.dense((2, 2), 4)
    assert hash(Layout.dense((2, 2))) == hash(Layout.dense((2, 2)))
    assert repr(Layout.dense((2, 3), 4)) == "Layout(2:3 x 3:1 @ 4)"
    assert repr(Layout(())) == "Layout(point @ 0)"


def test_one_stride_lists_its_members_as_a_range() -> None:
    assert Layout.dense((4, 4096), 3).line() == range(3, 3 + 16384)
    assert Layout.dense((4, 4096)).select((0,)).line() == range(0, 16384, 4096)
