"""Overlap, coverage and grids of boxes against brute force on small index sets.

Covers: layout/boxes.py.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, strategies as st

from shoal_dtensor.layout.boxes import (
    Box,
    box_at,
    format_box,
    gap,
    grid,
    intersect,
    overlap,
    shape_of,
    slices_of,
    spans,
    volume,
    whole_box,
)

SHAPE = (5, 4)


def elements(of: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, stop) for start, stop in of)))


def intervals(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(
        lambda pair: (min(pair), max(pair))
    )


boxes_2d = st.tuples(intervals(SHAPE[0]), intervals(SHAPE[1]))


@given(boxes_2d, boxes_2d)
def test_the_common_part_is_the_common_elements(a: Box, b: Box) -> None:
    common = intersect(a, b)
    assert (elements(common) if common is not None else set()) == elements(a) & elements(b)
    if common is not None:
        assert volume(common) == len(elements(common))
        inside = slices_of(common, a)
        assert [s.stop - s.start for s in inside] == shape_of(common)


@given(st.lists(boxes_2d, max_size=6))
def test_overlap_names_two_boxes_that_share_an_element(boxes: list[Box]) -> None:
    pair = overlap(boxes)
    shared = any(
        elements(boxes[i]) & elements(boxes[j])
        for i in range(len(boxes))
        for j in range(i + 1, len(boxes))
    )
    assert (pair is not None) == shared
    if pair is not None:
        assert elements(boxes[pair[0]]) & elements(boxes[pair[1]])


@given(st.lists(boxes_2d, max_size=4))
def test_gap_is_a_box_in_no_other(boxes: list[Box]) -> None:
    if overlap(boxes) is not None:
        return
    missing = gap(boxes, SHAPE)
    held = set().union(*map(elements, boxes))
    assert (missing is None) == (held == elements(whole_box(SHAPE)))
    if missing is not None:
        assert elements(missing)
        assert not elements(missing) & held


@given(st.sets(st.integers(1, 4), max_size=3), st.sets(st.integers(1, 3), max_size=2), st.randoms())
def test_a_grid_is_recognised_in_any_order_and_not_with_a_cell_merged(
    rows: set[int], columns: set[int], random: Any
) -> None:
    row_edges, column_edges = sorted({0, 5} | rows), sorted({0, 4} | columns)
    cells = [(r, c) for r in pairwise(row_edges) for c in pairwise(column_edges)]
    random.shuffle(cells)
    expected = tuple(
        tuple(b - a for a, b in pairwise(edges)) for edges in (row_edges, column_edges)
    )
    assert grid(cells, SHAPE) == expected
    if len(row_edges) > 2 and len(column_edges) > 2:
        first, second = (row_edges[0], row_edges[1]), (row_edges[1], row_edges[2])
        column = (column_edges[0], column_edges[1])
        merged = [cell for cell in cells if cell not in ((first, column), (second, column))]
        merged.append(((first[0], second[1]), column))
        assert grid(merged, SHAPE) is None


def test_empty_boxes_do_not_disturb_a_grid() -> None:
    assert grid([((0, 5), (0, 2)), ((0, 5), (2, 4)), ((5, 5), (0, 4))], SHAPE) == ((5,), (2, 2))


def test_two_boxes_without_dims_overlap() -> None:
    assert overlap([(), ()]) == (0, 1)
    assert overlap([()]) is None


def test_boxes_without_dims_or_elements() -> None:
    assert intersect(((0, 2),), ((2, 4),)) is None
    assert intersect((), ()) == ()
    assert volume(()) == 1


def test_spans_follow_one_another() -> None:
    assert spans([]) == []
    assert spans([2, 0, 3]) == [(0, 2), (2, 2), (2, 5)]


def test_box_and_show() -> None:
    assert format_box(box_at([1, 0], [2, 3])) == "[1:3, 0:3]"
    with pytest.raises(ValueError, match="longer"):
        box_at([1], [2, 3])
