"""Covers: dispatch/assign.py: which rows the mesh axes get, on abstract meshes."""

from __future__ import annotations

import pytest
import torch

from shoal_dtensor import Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.dispatch.assign import (
    Sharding,
    ShardingProblem,
    assign,
    assign_without_moves,
    is_plain,
)
from shoal_dtensor.rules import P, R, Row, S
from shoal_mesh import abstract_mesh

MESH = abstract_mesh((2, 2))
# (m, k) @ (k, n): the three factors, and a partial left operand.
PRODUCT = [
    Row((S(0), R), (S(0),)),
    Row((R, S(1)), (S(1),)),
    Row((S(1), S(0)), (P("sum"),)),
    Row((P("sum"), R), (P("sum"),)),
]
S0, S1, REP, SUM = Shard(0), Shard(1), Replicate(), Partial()


def spec(placements: list[Placement], shape: tuple[int, ...] = (64, 64)) -> Spec:
    return Spec(MESH, placements, shape)


def product_of(left: list[Placement], right: list[Placement]) -> Sharding:
    problem = ShardingProblem((spec(left), spec(right)), (spec([REP, REP]).tensor_meta,))
    sharding = assign(PRODUCT, problem, MESH)
    assert sharding is not None
    return sharding


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ([S0, REP], [REP, S1], [S0, S1]),  # every input keeps its layout
        ([S1, S0], [S0, REP], [SUM, S0]),
        ([REP, REP], [REP, REP], [REP, REP]),
        # linear in the left operand: it need not be reduced
        ([SUM, REP], [REP, S1], [SUM, S1]),
    ],
)
def test_what_fits_moves_nothing(
    left: list[Placement], right: list[Placement], result: list[Placement]
) -> None:
    sharding = product_of(left, right)
    assert [one.placements for one in sharding.inputs] == [tuple(left), tuple(right)]
    assert sharding.outputs[0].placements == tuple(result)
    assert sharding.communicating == ()


def test_what_fits_is_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(src: Spec, dst: Spec) -> float:
        raise AssertionError(f"a price was asked for {src} -> {dst}")

    monkeypatch.setattr("shoal_dtensor.dispatch.assign.price", refuse)
    assert product_of([S1, S0], [S0, REP]).outputs[0].placements == (SUM, S0)
    with pytest.raises(AssertionError, match="price"):
        product_of([S1, S0], [REP, S1])


@pytest.mark.parametrize("left", [[S0, REP], [S0, S0], [S1, REP], [REP, S1], [S0, S1], [REP, REP]])
@pytest.mark.parametrize("right", [[REP, REP], [REP, S1], [S0, REP], [REP, S0], [S0, S0]])
def test_rows_that_move_nothing_are_what_prices_find(
    left: list[Placement], right: list[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ShardingProblem((spec(left), spec(right)), (spec([REP, REP]).tensor_meta,))
    free = assign_without_moves(PRODUCT, problem, MESH)
    monkeypatch.setattr("shoal_dtensor.dispatch.assign.assign_without_moves", lambda *_: None)
    priced = assign(PRODUCT, problem, MESH)
    assert free == (priced if priced is not None and priced.inputs == problem.specs else None)


def test_a_row_that_communicates_is_not_free() -> None:
    left = spec([S0, REP])
    rows = [Row((S(0),), (R,), traffic=lambda ranks: 1), Row((S(0),), (S(0),))]
    sharding = assign(rows, ShardingProblem((left,), (left.tensor_meta,)), MESH)
    assert sharding is not None and sharding.communicating == () and sharding.outputs == (left,)


def test_the_smaller_operand_moves() -> None:
    left, right = spec([S0, REP], (1024, 64)), spec([S1, REP])
    problem = ShardingProblem((left, right), (Spec(MESH, [REP, REP], (1024, 64)).tensor_meta,))
    sharding = assign(PRODUCT, problem, MESH)
    assert sharding is not None and sharding.inputs[0] is left
    assert sharding.inputs[1].placements == (REP, REP) and sharding.outputs[0].placements == (
        S0,
        REP,
    )


def test_two_axes_never_give_one_dim_two_reductions() -> None:
    rows = [Row((P("max"),), (P("max"),)), Row((P("sum"),), (P("sum"),))]
    mixed = Spec(MESH, [Partial("max"), REP], (4,))
    sharding = assign(rows, ShardingProblem((mixed,), (mixed.tensor_meta,)), MESH)
    assert sharding is not None and sharding.outputs[0].placements == (Partial("max"), REP)


def test_a_written_input_keeps_its_layout_or_nothing_is_assigned() -> None:
    elementwise = [Row((S(0), S(0)), (S(0),)), Row((S(1), S(1)), (S(1),))]
    written, other = spec([S0, REP]), spec([S1, REP])
    problem = ShardingProblem((written, other), (written.tensor_meta,), fixed=((0, 0),))
    sharding = assign(elementwise, problem, MESH)
    assert (
        sharding is not None
        and sharding.inputs[0] is written
        and sharding.outputs[0].same_layout(written)
    )
    reduced = ShardingProblem((spec([SUM, REP]),), (written.tensor_meta,), fixed=((0, 0),))
    assert assign([Row((S(0),), (S(0),))], reduced, MESH) is None


def test_the_axes_of_rows_that_communicate_are_named() -> None:
    rows = [Row((S(0),), (S(0),), traffic=lambda ranks: 8.0 * ranks)]
    one = spec([REP, S0])
    sharding = assign(rows, ShardingProblem((one,), (one.tensor_meta,)), MESH)
    assert sharding is not None and sharding.communicating == (1,)
    # Where the collective costs more than a gather, the input is gathered.
    dear = [Row((S(0),), (S(0),), traffic=lambda ranks: 1e15)]
    sharding = assign(dear, ShardingProblem((one,), (one.tensor_meta,)), MESH)
    assert sharding is not None and sharding.communicating == () and sharding.inputs[0].replicated


def test_an_even_row_takes_even_shards_only() -> None:
    rows = [Row((S(0),), (S(0),), even=True)]
    even, uneven = Spec(MESH, [S0, REP], (4,)), Spec(MESH, [S0, REP], (5,))
    for one, kept in ((even, True), (uneven, False)):
        sharding = assign(rows, ShardingProblem((one,), (one.tensor_meta,)), MESH)
        assert sharding is not None and (sharding.inputs[0] is one) is kept


def test_plain_rows() -> None:
    assert is_plain(Row((S(0), R), (S(1),)))
    assert not is_plain(Row((S(0, 2),), (S(0),)))
    assert not is_plain(Row((S(0),), (S(0),), ordered=True))
    assert torch.Size((64, 64)) == spec([S0, REP]).shape
