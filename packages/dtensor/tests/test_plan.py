"""Covers: redistribute/plan.py, redistribute/search/{space,edges}.py."""

from __future__ import annotations

import pytest
import torch

from shoal_dtensor import Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.errors import RedistributeError
from shoal_dtensor.internal import Plan
from shoal_dtensor.redistribute.plan import _plan, alternatives, cache_clear, plan, price
from shoal_mesh import Link, abstract_mesh, set_topology
from shoal_mesh.internal import Topology

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
BIG, SMALL = (8192, 8192), (8, 8)


def spec(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], shape: tuple[int, ...] = BIG
) -> Spec:
    return Spec(abstract_mesh(mesh_shape), placements, shape)


def names(found: Plan) -> list[str]:
    return [step.name for step in found.steps]


ONE_AXIS = [
    (S0, R, ["AllGather"]),
    (S1, R, ["AllGather"]),
    (R, S0, ["Slice"]),
    (P, R, ["AllReduce"]),
    (P, S1, ["ReduceScatter"]),
    (S0, S1, ["AllToAll"]),
    (S0, Shard(0, sizes=(8192, 0, 0, 0)), ["Exchange"]),
    (R, P, ["MakePartial"]),
    (S0, P, ["MakePartial"]),
    (P, Partial("avg"), ["Scale"]),
    (P, Partial("max"), ["ReduceScatter", "MakePartial"]),
    (R, R, []),
]


@pytest.mark.parametrize(
    ("src", "dst", "expected"), ONE_AXIS, ids=[f"{a}->{b}" for a, b, _ in ONE_AXIS]
)
def test_one_axis_takes_one_step(src: Placement, dst: Placement, expected: list[str]) -> None:
    assert names(plan(spec((4,), (src,)), spec((4,), (dst,)))) == expected


TWO_AXES = [
    ((S0, S0), (R, R), BIG, ["AllGather"]),
    ((S0, S1), (R, R), SMALL, ["AllGather"]),
    ((S0, S1), (R, R), BIG, ["AllGather", "AllGather"]),
    ((P, P), (R, R), BIG, ["AllReduce"]),
    ((P, P), (S0, S1), SMALL, ["ReduceScatter"]),
    ((P, P), (S0, S0), BIG, ["ReduceScatter"]),
    ((S0, R), (R, S0), BIG, ["Exchange"]),
    ((P, S0), (S0, S0), BIG, ["ReduceScatter", "Exchange"]),
    ((P, R), (R, R), BIG, ["Slice", "AllReduce", "AllGather"]),
    ((P, R), (R, R), SMALL, ["AllReduce"]),
    ((R, S1), (S0, R), BIG, ["Slice", "AllGather"]),
    ((P, Partial("avg")), (R, R), BIG, ["AllReduce"]),
]


@pytest.mark.parametrize(("src", "dst", "shape", "expected"), TWO_AXES)
def test_axes_that_change_together_are_fused(
    src: tuple[Placement, ...],
    dst: tuple[Placement, ...],
    shape: tuple[int, ...],
    expected: list[str],
) -> None:
    assert names(plan(spec((4, 4), src, shape), spec((4, 4), dst, shape))) == expected


def test_a_tensor_without_dims() -> None:
    assert names(plan(spec((4, 4), (P, P), ()), spec((4, 4), (R, R), ()))) == ["AllReduce"]
    assert names(plan(spec((2, 2, 2), (P, R, R), ()), spec((2, 2, 2), (R, P, R), ()))) == [
        "AllReduce",
        "MakePartial",
    ]


def test_sum_and_average_are_reduced_together() -> None:
    step = plan(spec((4, 2), (P, Partial("avg"))), spec((4, 2), (R, R))).steps[0]
    assert (step.op, step.divisor, step.axes) == ("sum", 2, (0, 1))


def test_an_order_alone_is_a_change() -> None:
    src = spec((2, 2), (S0, S0))
    dst = Spec(src.mesh, src.placements, src.shape, shard_order=((0, (1, 0)),))
    assert names(plan(src, dst)) == ["Exchange"]


def test_axes_of_size_one_cost_nothing() -> None:
    found = plan(spec((1, 4), (P, S0)), spec((1, 4), (S1, S0)))
    assert found.steps == ()
    assert price(found.src, found.dst) == 0.0


def test_hierarchy_where_one_axis_is_slow() -> None:
    links = Topology((Link(10e-6, 5e9), Link(10e-6, 400e9)))
    src, dst = spec((4, 4), (P, P)), spec((4, 4), (R, R))
    found = plan(src, dst, topology=links)
    assert [(step.name, step.axes) for step in found.steps] == [
        ("ReduceScatter", (1,)),
        ("AllReduce", (0,)),
        ("AllGather", (1,)),
    ]
    flat = links.over((0, 1)).seconds(2 * 8192 * 8192 * 4 * 15 / 16)
    assert found.seconds < flat / 3


def test_the_topology_of_the_mesh_counts() -> None:
    src, dst = spec((4, 4), (P, P)), spec((4, 4), (R, R))
    before = plan(src, dst)
    set_topology(src.mesh, (Link(10e-6, 5e9), Link(10e-6, 400e9)))
    try:
        assert names(plan(src, dst)) != names(before)
    finally:
        set_topology(src.mesh, None)
    assert names(plan(src, dst)) == names(before)


def test_gather_settles_the_slow_axis_while_shards_are_small() -> None:
    links = Topology((Link(10e-6, 5e9), Link(10e-6, 400e9)))
    found = plan(spec((4, 4), (S0, S0)), spec((4, 4), (R, R)), topology=links)
    assert names(found)[-1] == "AllGather"
    assert found.steps[-1].axes == (1,)
    assert found.seconds < links.over((0, 1)).seconds(8192 * 8192 * 4 * 15 / 16) / 2


def test_a_fast_axis_does_what_a_slow_one_need_not() -> None:
    links = Topology((Link(10e-6, 5e9), Link(10e-6, 400e9)))
    found = plan(spec((4, 4), (R, S0)), spec((4, 4), (S0, S0)), topology=links)
    assert [step.axes for step in found.steps if step.communicates] == [(1,)]
    parked = plan(spec((4, 4), (P, S0)), spec((4, 4), (S0, S0)), topology=links)
    slow = [step for step in parked.steps if step.communicates and 0 in step.axes]
    assert [step.name for step in slow] == ["ReduceScatter"]


def test_memory_limit_picks_a_leaner_plan_or_says_what_is_needed() -> None:
    src, dst = spec((4, 4), (P, R)), spec((4, 4), (R, R))
    free = plan(src, dst)
    lean = plan(src, dst, memory_limit=free.peak_bytes - 1)
    assert lean.peak_bytes < free.peak_bytes
    assert lean.seconds >= free.seconds
    with pytest.raises(
        RedistributeError, match="memory_limit=1000 bytes: the leanest plan found needs"
    ):
        plan(src, dst, memory_limit=1000)


def test_mixed_reductions_are_refused() -> None:
    src = spec((2, 2), (P, Partial("max")))
    with pytest.raises(RedistributeError, match=r"mixes the reductions \['max', 'sum'\]"):
        plan(src, spec((2, 2), (R, R)))
    assert plan(src, src).steps == ()


def test_mixed_reductions_that_stay_are_not_in_the_way() -> None:
    mixed = P, Partial("max")
    assert names(plan(spec((2, 2, 2), (*mixed, S0)), spec((2, 2, 2), (*mixed, R)))) == ["AllGather"]


def test_different_tensors_are_refused() -> None:
    src = spec((4,), (S0,))
    with pytest.raises(RedistributeError, match="shape and dtype must be equal"):
        plan(src, spec((4,), (R,), SMALL))
    with pytest.raises(RedistributeError, match="shape and dtype must be equal"):
        plan(src, src.with_(dtype=torch.float64))


def test_alternatives_are_sorted_and_different() -> None:
    found = alternatives(spec((4, 4), (P, R)), spec((4, 4), (R, R)), 4)
    assert len(found) == 4
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    assert len({str(p) for p in found}) == 4


def test_plans_do_not_depend_on_history() -> None:
    pairs = [((P, S0), (S0, R)), ((S0, S0), (P, S1)), ((Partial("max"), R), (S0, P))]
    specs = [(spec((2, 4), a), spec((2, 4), b)) for a, b in pairs]
    cache_clear()
    forward = [str(plan(*pair)) for pair in specs]
    cache_clear()
    backward = [str(plan(*pair)) for pair in reversed(specs)]
    assert forward == backward[::-1]


def test_cache_is_bounded_and_used() -> None:
    cache_clear()
    src, dst = spec((4,), (S0,)), spec((4,), (R,))
    assert plan(src, dst) is plan(src, dst)
    info = _plan.cache_info()
    assert info.maxsize is not None
    assert (info.hits, info.misses) == (1, 1)


def test_a_plan_prints_one_line_a_step() -> None:
    mesh = abstract_mesh((4, 2), ("dp", "tp"))
    src = Spec(mesh, (P, S0), (1024, 1024))
    text = str(plan(src, src.with_(placements=(S0, R))))
    assert text.splitlines()[0].startswith("[P(sum), S(0)] -> [S(0), R]: ")
    assert "ReduceScatter over (dp) sum dims [0]" in text
    assert str(plan(src, src)).endswith("nothing to do")
