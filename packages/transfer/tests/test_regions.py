"""Intersections, gaps and overlaps of progressions against sets of indices.

Covers: mapping/regions.py.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from shoal_transfer.mapping.regions import (
    Region,
    common_positions,
    contains,
    count_elements,
    first_gap,
    first_overlap,
    format_region,
    intersect_regions,
    take,
)


def draw_indices(drawing: random.Random, size: int) -> range:
    start = drawing.randrange(size)
    return range(start, drawing.randint(start, size), drawing.choice((1, 1, 2, 3, 4, 6)))


def elements(region: Region) -> set[tuple[int, ...]]:
    return {*product(*region)}


@pytest.mark.parametrize("seed", range(200))
def test_common_positions_are_those_of_shared_indices(seed: int) -> None:
    drawing = random.Random(seed)
    one = draw_indices(drawing, 30)
    other = draw_indices(drawing, 30)
    in_one, in_other = common_positions(one, other)
    assert [*take(one, in_one)] == [*take(other, in_other)] == sorted({*one} & {*other})


@pytest.mark.parametrize("seed", range(100))
def test_regions_are_sets_of_elements(seed: int) -> None:
    drawing = random.Random(seed)
    shape = (5, 6)
    regions = [tuple(draw_indices(drawing, size) for size in shape) for _ in range(3)]
    sets = [elements(region) for region in regions]
    common = intersect_regions(regions[0], regions[1])
    assert elements(common or (range(0), range(0))) == sets[0] & sets[1]
    assert contains(regions[0], regions[1]) == (sets[1] <= sets[0])
    missing = {*product(*map(range, shape))} - sets[0] - sets[1] - sets[2]
    gap = first_gap(regions, shape)
    assert (gap is None) == (not missing)
    assert gap is None or elements(gap) <= missing
    pair = first_overlap(regions)
    pairs = [(i, j) for i in range(3) for j in range(i + 1, 3) if sets[i] & sets[j]]
    assert (pair is None) == (not pairs)
    assert pair is None or pair in pairs


def test_a_region_reads_as_slices() -> None:
    region = (range(2, 4), range(0, 6, 2))
    assert format_region(region) == "[2:4, 0:6:2]"
    assert count_elements(region) == 6
