"""Which reductions a dtype has, and averages of half types.

Covers: reductions.py, on real gloo ranks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rank_values import EVERY, INTS, ORDERS, assert_near, comm_of, over_gloo, values_of_all
from shoal_mesh import (
    CollectiveError,
    all_reduce,
    all_reduce_coalesced,
    reduce_scatter,
    reduce_scatter_coalesced,
    reduce_scatter_v,
    sums_in_tree,
)
from shoal_mesh.collectives.c10d_transport import C10dTransport
from shoal_mesh.collectives.reductions import tree_mean, tree_sum
from shoal_mesh.internal import all_reduce_
from shoal_mesh.testing import on_ranks
from shoal_mesh.transport import split_divisor

WANT: dict[str, Any] = {
    "sum": lambda s: s.sum(0),
    "avg": lambda s: s.sum(0) / s.shape[0],
    "min": lambda s: s.amin(0),
    "max": lambda s: s.amax(0),
    "product": lambda s: s.prod(0),
    "band": lambda s: _fold(s, torch.bitwise_and),
    "bor": lambda s: _fold(s, torch.bitwise_or),
    "bxor": lambda s: _fold(s, torch.bitwise_xor),
}


def _fold(stack: Tensor, op: Any) -> Tensor:
    total = stack[0]
    for row in stack[1:]:
        total = op(total, row)
    return total


def _legal(op: str, dtype: torch.dtype) -> bool:
    if op in {"band", "bor", "bxor"}:
        return dtype in INTS or dtype is torch.bool or dtype is torch.uint16
    if op == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return not (dtype.is_complex and op != "sum")


@pytest.mark.parametrize("order", list(ORDERS))
@on_ranks(4)
def test_reductions_of_every_dtype(order: str) -> None:
    comm = comm_of(order)
    for dtype in EVERY:
        for op, want_of in WANT.items():
            every = values_of_all(comm, (4, 4), dtype)
            if not _legal(op, dtype):
                with pytest.raises(CollectiveError, match=r"reduction '|the average of"):
                    all_reduce(every[comm.rank], comm, op)
                with pytest.raises(CollectiveError, match=r"reduction '|the average of"):
                    reduce_scatter(every[comm.rank], comm, 0, op)
                continue
            wide = (
                torch.float32 if dtype.is_floating_point and dtype is not torch.float64 else dtype
            )
            wide = torch.int32 if dtype is torch.uint16 else wide
            want = want_of(torch.stack([x.to(wide) for x in every])).to(dtype)
            if dtype is torch.bool and op in {"sum", "product"}:
                want = want_of(torch.stack(every).to(torch.int32)).to(torch.bool)
            assert_near(all_reduce(every[comm.rank], comm, op), want)
            assert_near(all_reduce(every[comm.rank].t(), comm, op), want.t())
            for dim in (0, 1):
                assert_near(
                    reduce_scatter(every[comm.rank], comm, dim, op),
                    want.chunk(comm.size, dim)[comm.rank],
                )
            for view in (
                every[comm.rank].clone(),
                every[comm.rank].repeat(1, 2)[:, ::2].clone().t(),
            ):
                expected = want if view.stride() == (4, 1) else None
                got = all_reduce_(view, comm, op)
                assert got is view
                if expected is not None:
                    assert_near(got, expected)
    with pytest.raises(CollectiveError, match="unknown reduction 'median'"):
        all_reduce(torch.ones(1), comm, "median")


# Near both ends of the range of float16: 4 times the first is infinite, a quarter of the other is
# rounded to zero or to half of it.
EXTREMES = [
    (torch.float16, 60_000.0),
    (torch.float16, 1e-7),
    (torch.bfloat16, 3e38),
    (torch.bfloat16, 1e-38),
]


@on_ranks(4)
@pytest.mark.parametrize("count", [0, 5, 100_003])
@pytest.mark.parametrize(("dtype", "value"), EXTREMES, ids=str)
def test_averages_of_half_types_near_the_ends_of_their_range(
    count: int, dtype: torch.dtype, value: float
) -> None:
    # The sum was taken in the half type: infinite where the mean is not.
    comm = comm_of("straight")
    want = torch.full((count,), value, dtype=dtype)
    for result in _averages(want, comm):
        assert torch.equal(result, want)
    one_rank_has_it = want if comm.rank == 0 else torch.zeros_like(want)
    mean = (want.double() / 4).to(dtype)
    assert torch.equal(all_reduce(one_rank_has_it, comm, "avg"), mean)


def _averages(want: Tensor, comm: Any) -> list[Tensor]:
    """Averages of equal tensors in every form, each of which is that tensor."""
    blocks, sizes = want.repeat(comm.size), [len(want)] + [0] * (comm.size - 1)
    whole = reduce_scatter_v(want, comm, sizes, 0, "avg")
    results = [
        all_reduce(want, comm, "avg"),
        all_reduce_(want.clone(), comm, "avg"),
        all_reduce(want, comm, "avg", async_op=True).wait(),
        reduce_scatter(blocks, comm, 0, "avg"),
        reduce_scatter(blocks, comm, 0, "avg", async_op=True).wait(),
        whole if comm.rank == 0 else want,
        *all_reduce_coalesced([want, want], comm, "avg"),
        *reduce_scatter_coalesced([blocks, blocks], comm, 0, "avg"),
    ]
    with sums_in_tree():
        results += [all_reduce(want, comm, "avg"), reduce_scatter(blocks, comm, 0, "avg")]
    return results


@on_ranks(4)
@pytest.mark.parametrize(("dtype", "value"), EXTREMES, ids=str)
def test_averages_of_half_types_by_gloo(dtype: torch.dtype, value: float) -> None:
    comm = over_gloo(comm_of("straight"))
    for count in (5, 100_003):
        want = torch.full((count,), value, dtype=dtype)
        blocks = want.repeat(4)
        assert torch.equal(all_reduce(want, comm, "avg"), want)
        assert torch.equal(reduce_scatter(blocks, comm, 0, "avg"), want)
        assert torch.equal(reduce_scatter(blocks, comm, 0, "avg", async_op=True).wait(), want)
        # In the background gloo sums in the half type, with the divisor in two parts.
        half = torch.full((count,), value / (2 if value < 1e5 else 8), dtype=dtype)
        mean = all_reduce(half, comm, "avg", async_op=True).wait()
        torch.testing.assert_close(mean, half, rtol=0.01, atol=6e-8)
    assert type(comm.transport) is C10dTransport


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 64, 1000])
def test_a_divisor_in_two_parts(ranks: int) -> None:
    before, after = split_divisor(torch.float16, ranks)
    assert before * after * ranks == pytest.approx(1)
    assert math.frexp(before)[0] == 0.5
    assert 1 / 2.1 <= before * ranks**0.5 <= 2.1 or ranks <= 3
    assert split_divisor(torch.bfloat16, ranks) == (1.0, 1 / ranks)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_the_mean_of_a_tree_has_the_digits_of_its_sum(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    terms = torch.randn(count, 1000, generator=generator).bfloat16()
    mean = (tree_sum(terms).float() / count).bfloat16()
    assert torch.equal(tree_mean(terms), mean)
