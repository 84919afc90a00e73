"""Covers: rules/shape/{views,slicing,rearrangement}.py: rows by brute force."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from shoal_dtensor.layout.dim_sharding import DimSharding
from shoal_dtensor.rules.shape.rearrangement import REARRANGEMENT
from shoal_dtensor.rules.shape.slicing import SLICING, SliceGradMap, SliceMap
from shoal_dtensor.rules.shape.views import VIEWS, groups, reshape_mappings
from shoal_dtensor.testing import validate

aten = torch.ops.aten
FUNCTIONAL = ["slice_scatter", "select_scatter"]
TABLE = {
    op: rule
    for op, rule in (VIEWS | SLICING).items()
    if op.__name__.partition(".")[0] not in FUNCTIONAL
}
TABLE |= {op: REARRANGEMENT[op] for op in (aten.diagonal.default, aten.diagonal_backward.default)}


def filled(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(1, prod(shape) + 1).reshape(shape).to(dtype)


X = filled(4, 6, 5)
CASES: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.view.default, (X, (24, 5))),
    (aten.view.default, (X, (2, 2, 6, 5))),
    (aten.view.default, (X, (8, 3, 5))),
    (aten.view.default, (X, (-1,))),
    (aten.view.default, (X, (4, 1, 6, 5))),
    (aten.view.default, (filled(1, 6), (6,))),
    (aten.view.default, (filled(6, 1), (2, 3))),
    (aten.view.default, (filled(4, 0), (4, 0, 3))),
    (aten._unsafe_view.default, (X, (4, 30))),
    (aten._reshape_alias.default, (X, (24, 5), (5, 1))),
    (aten.unsqueeze.default, (X, 1)),
    (aten.unsqueeze.default, (X, -1)),
    (aten.unsqueeze.default, (filled(1, 5), 0)),
    (aten.squeeze.default, (filled(1, 6, 1, 5),)),
    (aten.squeeze.dim, (filled(1, 1, 5), 0)),
    (aten.squeeze.dim, (filled(1, 6, 1, 5), 2)),
    (aten.squeeze.dim, (X, 0)),
    (aten.squeeze.dims, (filled(1, 6, 1, 5), [0, 1, 2])),
    (aten.permute.default, (X, (2, -3, 1))),
    (aten.transpose.int, (X, -1, 0)),
    (aten.transpose.int, (X, 1, 1)),
    (aten.t.default, (filled(4, 6),)),
    (aten.t.default, (filled(4),)),
    (aten.expand.default, (filled(1, 6, 1), (3, 4, 6, 5))),
    (aten.expand.default, (filled(1, 6, 1), (4, -1, 1))),
    (aten.unfold.default, (filled(8, 3), 0, 2, 2)),
    (aten.unfold.default, (filled(8, 3), 0, 2, 4)),
    (aten.unfold.default, (filled(8, 3), 0, 3, 1)),
    (aten.diagonal.default, (X, 1, 0, 2)),
    (aten.diagonal.default, (X, -2, 2, 1)),
    (aten.diagonal.default, (filled(5, 2), -1)),
    (aten.diagonal.default, (X, 9, 0, 1)),
    (aten.view.dtype, (X, torch.int32)),
    (aten.view.dtype, (filled(4, 8, dtype=torch.float32), torch.float64)),
    (aten.view.dtype, (X, torch.float64)),
    (aten.view_as_real.default, (filled(4, 3, dtype=torch.complex128),)),
    (aten.view_as_complex.default, (filled(4, 3, 2, dtype=torch.float32),)),
    (aten.as_strided.default, (X, (3, 2), (5, 30), 1)),
    (aten.as_strided_scatter.default, (X, filled(3, 2), (3, 2), (5, 30), 1)),
    (aten.unsafe_split_with_sizes.default, (X, [1, 5], 1)),
    (aten.diagonal_backward.default, (filled(6, 4), (4, 6, 5), 1, 0, 2)),
    (aten.unfold_backward.default, (filled(4, 3, 2, dtype=torch.float64), (8, 3), 0, 2, 2)),
    (aten.unfold_backward.default, (filled(6, 3, 3, dtype=torch.float64), (8, 3), 0, 3, 1)),
    (aten.slice.Tensor, (X, 1, 1, 5)),
    (aten.slice.Tensor, (X, 1, -5, 9**9, 2)),
    (aten.slice.Tensor, (X, 0, 3, 2)),
    (aten.slice.Tensor, (X, -1, None, None, 3)),
    (aten.split.Tensor, (X, 4, 1)),
    (aten.split_with_sizes.default, (X, [1, 0, 5], 1)),
    (aten.unsafe_split.Tensor, (X, 2, 0)),
    (aten.select.int, (X, 0, 2)),
    (aten.select.int, (X, 1, -1)),
    (aten.select.int, (filled(4), 0, 1)),
    (aten.unbind.int, (X, 1)),
    (aten.unbind.int, (filled(4), 0)),
    (aten.slice_backward.default, (filled(4, 4, 5), (4, 6, 5), 1, 1, 5, 1)),
    (aten.slice_backward.default, (filled(4, 3, 5), (4, 6, 5), 1, 0, 6, 2)),
    (aten.slice_backward.default, (filled(4, 0, 5), (4, 6, 5), 1, 3, 3, 1)),
    (aten.select_backward.default, (filled(4, 5), (4, 6, 5), 1, 3)),
    (aten.select_backward.default, (filled(4), (4, 6), -1, -1)),
]


@pytest.mark.parametrize(
    ("op", "args"), CASES, ids=[f"{i}-{op}" for i, (op, _) in enumerate(CASES)]
)
def test_every_row_gives_what_the_unsharded_tensor_gives(op: Any, args: tuple[Any, ...]) -> None:
    report = validate(op, *args)
    assert report.wrong == []
    assert report.checked


def test_every_operator_of_the_tables_has_a_case() -> None:
    assert set(TABLE) == {op for op, _ in CASES}


SHAPES = st.lists(st.integers(1, 6), max_size=4)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(SHAPES, st.data())
def test_reshapes_of_random_shapes(shape: list[int], data: st.DataObject) -> None:
    target, rest = [], prod(shape)
    for _ in range(data.draw(st.integers(0, 4))):
        size = data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        target.append(size)
        rest //= size
    target += [rest] if rest != 1 else []
    assert (
        validate(aten.view.default, filled(*shape), tuple(target), ways=(3,), pairs=False).wrong
        == []
    )
    assert [i for dims, _ in groups(shape, target) for i in dims] == list(range(len(shape)))


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        ((8, 6), (48,), {0}),
        ((48,), (8, 6), {0}),
        ((8, 4, 6), (32, 6), {0, 2}),
        ((2, 8, 6), (2, 2, 4, 6), {0, 1, 2}),
    ],
)
def test_which_dims_survive_a_reshape_as_plain_cuts(
    source: tuple[int, ...], target: tuple[int, ...], kept: set[int]
) -> None:
    plain = [
        before
        for before, after in reshape_mappings(source, target)
        if before.runs == after.runs == 1
    ]
    assert {entry.dim for entry in plain} == kept


CUTS = st.lists(st.integers(0, 5), min_size=4, max_size=4).map(
    lambda sizes: DimSharding((0, 1), (2, 2), tuple(sizes))
)


@given(CUTS, st.integers(0, 12), st.integers(0, 12), st.integers(1, 3))
def test_a_window_keeps_what_each_piece_has(
    cut: DimSharding, start: int, stop: int, step: int
) -> None:
    chosen = range(cut.length)[start : max(start, stop) : step]
    window = SliceMap(min(start, cut.length), min(max(start, stop), cut.length), step)
    for size, kept, offset in zip(cut.sizes, window(cut).sizes, cut.offsets, strict=True):
        assert kept == sum(offset <= i < offset + size for i in chosen)


@given(CUTS, st.integers(0, 3), st.integers(1, 3), st.integers(0, 4))
def test_embedding_is_the_inverse_of_a_window(
    cut: DimSharding, start: int, step: int, behind: int
) -> None:
    length = start + cut.length * step + behind
    embedded = SliceGradMap(length, start, step)(cut)
    assert embedded.length == length
    assert SliceMap(start, start + cut.length * step, step)(embedded).sizes == cut.sizes


@given(CUTS.filter(lambda cut: cut.length > 0), st.integers(1, 4), st.data())
def test_one_piece_owns_an_element(cut: DimSharding, width: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, cut.length - 1))
    owned = SliceMap(index, index + 1, unit=width)(cut)
    assert sorted(owned.sizes) == [0, 0, 0, width]
    piece = owned.sizes.index(width)
    assert cut.offsets[piece] <= index < cut.offsets[piece] + cut.sizes[piece]
    around = SliceGradMap(cut.length, index)(SliceMap(index, index + 1)(cut))
    assert around.offsets[piece] <= index < around.offsets[piece] + around.sizes[piece]
    assert around.length == cut.length


@given(CUTS, st.integers(-3, 3), st.integers(-3, 3))
def test_the_end_shards_take_in_what_is_added(cut: DimSharding, before: int, after: int) -> None:
    if cut.length + min(before, 0) + min(after, 0) >= 0:
        padded = SliceMap(-before, cut.length + after, exclusive=True)(cut)
        assert padded.length == cut.length + before + after
        assert padded.sizes[1:3] == cut.sizes[1:3] or min(before, after) < 0
