"""Covers: row_reductions.py: rows of two and of more ranks, reduced as one tensor would be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal_mesh.shared_memory.row_reductions import elements_between, flat_of, reduce_rows

EXPECTED = {
    "sum": lambda rows: rows.sum(0),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
    "product": lambda rows: rows.prod(0),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", EXPECTED)
def test_rows_are_reduced_into_the_result(op: str, ranks: int) -> None:
    rows = torch.randn(ranks, 7, generator=torch.Generator().manual_seed(ranks))
    out = torch.empty(7)
    reduce_rows(rows, op, out)
    expected: Tensor = EXPECTED[op](rows)
    torch.testing.assert_close(out, expected)


def test_an_average_of_a_half_type_stays_within_its_range() -> None:
    # the sum, 120,000, is beyond float16
    rows = torch.full((2, 3), 60_000, dtype=torch.float16)
    out = torch.empty(3, dtype=torch.float16)
    reduce_rows(rows, "avg", out)
    assert out.tolist() == [60_000] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_average_leaves_the_rows_as_they_are(dtype: torch.dtype) -> None:
    # Regression: rows of float32, which other ranks read too, were divided in place.
    rows = torch.tensor([[1.0, 2.0], [4.0, 8.0], [7.0, 11.0]], dtype=dtype)
    before = rows.clone()
    out = torch.empty(2, dtype=dtype)
    reduce_rows(rows, "avg", out)
    assert out.tolist() == [4.0, 7.0]
    assert torch.equal(rows, before)


def test_an_average_of_float64_has_its_digits() -> None:
    # Regression: it was taken in float32.
    rows = torch.tensor([[1.0 + 2.0**-40], [1.0 + 2.0**-40]], dtype=torch.float64)
    out = torch.empty(1, dtype=torch.float64)
    reduce_rows(rows, "avg", out)
    assert out.item() == 1.0 + 2.0**-40


def test_whole_tensors_are_returned_without_a_view() -> None:
    flat = torch.arange(5)
    assert flat_of(flat) is flat
    assert elements_between(flat, 0, 5) is flat
    assert elements_between(flat, 1, 3).tolist() == [1, 2]
