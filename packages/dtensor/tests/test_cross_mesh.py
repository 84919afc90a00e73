"""Covers: redistribute/plan.py: from one mesh to another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from random_specs import draw_spec
from shoal_dtensor import Partial, Replicate, Shard, Spec
from shoal_dtensor.errors import RedistributeError
from shoal_dtensor.internal import Plan, ShardsInFlight
from shoal_dtensor.redistribute.execution.execute import run_plan
from shoal_dtensor.redistribute.plan import plan
from shoal_dtensor.testing import coordinates, global_value, local_shards, simulate
from shoal_mesh import DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.testing import on_ranks

R, P, S0 = Replicate(), Partial(), Shard(0)


def half(which: int) -> DeviceMesh:
    """Ranks 0-3 or 4-7."""
    return abstract_mesh((2, 4), ("a", "b"), rank=4 * which)["b"]


PAIRS: dict[str, tuple[Callable[[], DeviceMesh], Callable[[], DeviceMesh]]] = {
    "other grid": (partial(abstract_mesh, (2, 4)), partial(abstract_mesh, (4, 2))),
    "fewer": (partial(abstract_mesh, (2, 4)), partial(abstract_mesh, (3,))),
    "more": (partial(abstract_mesh, (3,)), partial(abstract_mesh, (2, 4))),
    "disjoint": (partial(half, 0), partial(half, 1)),
    "overlapping": (partial(abstract_mesh, (6,)), partial(half, 1)),
}


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_random_pairs(case: str, op: str) -> None:
    old, new = (make() for make in PAIRS[case])
    rng = Random(3)
    for i in range(60):
        shape = [rng.choice((1, 2, 3, 5, 8)) for _ in range(rng.randint(1, 3))]
        src, dst = draw_spec(rng, old, shape, ops=(op,)), draw_spec(rng, new, shape, ops=(op,))
        generator = torch.Generator().manual_seed(i)
        full = torch.randint(1, 9, shape, generator=generator).to(torch.float64)
        found = plan(src, dst)
        got = global_value(simulate(found, local_shards(full, src, generator)), dst)
        assert torch.equal(got, full), f"{src}\n{dst}\n{found}"


def test_replicas_gather_among_themselves_instead_of_asking_the_source() -> None:
    src = Spec(abstract_mesh((1,)), (R,), (4096, 4096))
    found = plan(src, Spec(half(1), (R,), (4096, 4096)))
    assert [step.name for step in found.steps] == ["Transfer", "AllGather"]


def test_partial_values_are_reduced_before_they_leave() -> None:
    src = Spec(half(0), (P,), (4096, 4096))
    found = plan(src, Spec(half(1), (S0,), (4096, 4096)))
    assert [step.name for step in found.steps] == ["ReduceScatter", "Transfer"]


def test_a_transfer_keeps_within_the_memory_limit() -> None:
    src, dst = Spec(half(0), (S0,), (64, 64)), Spec(half(1), (S0,), (64, 64))
    need = plan(src, dst).peak_bytes
    assert plan(src, dst, memory_limit=need).peak_bytes == need
    with pytest.raises(RedistributeError, match="memory_limit=10 bytes"):
        plan(src, dst, memory_limit=10)


def test_a_transfer_says_how_many_ranks_take_part() -> None:
    (step,) = plan(Spec(half(0), (S0,), (8,)), Spec(half(1), (S0,), (8,))).steps
    assert step.name == "Transfer"
    assert "among 8 ranks" in step.line()


@on_ranks(4)
def test_on_ranks() -> None:
    grid, line, pair = (
        init_device_mesh("cpu", (2, 2)),
        init_device_mesh("cpu", (4,)),
        DeviceMesh("cpu", [3, 1]),
    )
    rng = Random(1)
    plans: list[Plan] = []
    locals_: list[Tensor] = []
    expected: list[Any] = []
    for old, new in ((grid, line), (line, pair), (pair, grid)) * 6:
        shape = [rng.choice((1, 3, 4, 8)) for _ in range(2)]
        src, dst = draw_spec(rng, old, shape, ops=("sum",)), draw_spec(rng, new, shape, ops=())
        generator = torch.Generator().manual_seed(0)
        full = torch.randint(1, 9, shape, generator=generator).to(torch.float64)
        shards = local_shards(full, src, generator)
        mine = torch.empty(0, dtype=torch.float64)
        if src.coordinate is not None:
            mine = shards[coordinates(src).index(src.coordinate)]
        found = plan(src, dst)
        got = run_plan(found, mine)
        if dst.coordinate is not None:
            wanted = local_shards(full, dst)[coordinates(dst).index(dst.coordinate)]
            assert torch.equal(got, wanted), f"{src}\n{dst}\n{found}"
            plans, locals_, expected = [*plans, found], [*locals_, mine], [*expected, wanted]
        else:
            assert got.shape == dst.local_shape
            plans, locals_, expected = [*plans, found], [*locals_, mine], [*expected, None]
    for got, wanted in zip(ShardsInFlight(plans, locals_).wait(), expected, strict=True):
        assert wanted is None or torch.equal(got, wanted)
