"""Covers: redistribute/execution/reduced_values.py: the effect of a reduction on values."""

from __future__ import annotations

import pytest
import torch

from shoal_dtensor.errors import RedistributeError
from shoal_dtensor.redistribute.execution.reduced_values import identity_of, powers, root
from shoal_dtensor.redistribute.search.space import wire_itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("op", ["min", "max", "band", "bor", "sum", "product"])
def test_the_identity_changes_nothing(op: str, dtype: torch.dtype) -> None:
    if op in ("band", "bor") and dtype.is_floating_point:
        return
    value = torch.tensor([1, 0], dtype=dtype)
    identity = torch.full((2,), identity_of(op, dtype), dtype=dtype)
    combine = {
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "sum": torch.logical_or if dtype is torch.bool else torch.add,
        "product": torch.logical_and if dtype is torch.bool else torch.mul,
    }[op]
    assert torch.equal(combine(value, identity), value)


def test_an_identity_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RedistributeError, match=r"max is not defined for torch\.complex64"):
        identity_of("max", torch.complex64)


@pytest.mark.parametrize("order", [0.5, 2.0, 3.0, -1.0])
def test_the_root_of_summed_powers_is_the_norm(order: float) -> None:
    shards = torch.tensor([1.5, 0.25, 4.0]), torch.tensor([2.0])
    total = powers(torch.linalg.vector_norm(shards[0], order), order) + powers(shards[1][0], order)
    expected = torch.linalg.vector_norm(torch.cat(shards), order)
    torch.testing.assert_close(root(total, order, torch.float32), expected)


@pytest.mark.parametrize("order", [2.0, 3.0])
def test_a_value_that_one_rank_holds_alone_comes_back_with_its_sign(order: float) -> None:
    value = torch.tensor([-2e19, 3.0])  # its square is not a float32
    torch.testing.assert_close(root(powers(value, order), order, torch.float32), value)


def test_norms_are_of_real_numbers_and_travel_as_float64() -> None:
    with pytest.raises(RedistributeError, match=r"floating-point dtype, got torch\.complex64"):
        powers(torch.ones(1, dtype=torch.complex64), 2.0)
    assert wire_itemsize("norm2", torch.float16) == 8 and wire_itemsize("sum", torch.float16) == 2
