"""Covers: testing/{validate,simulate}.py, on calls of every family of rules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from missed_rows import missed_rows
from shoal_dtensor import DTensor, Shard
from shoal_dtensor.errors import NoRuleError
from shoal_dtensor.rules import LocalCall, OpCall, P, R, Row, Rule, S, pointwise, product
from shoal_dtensor.testing import validate
from shoal_mesh import all_reduce, init_device_mesh
from shoal_mesh.testing import fake_world

aten = torch.ops.aten


def real(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def positive(*shape: int) -> Tensor:
    return real(*shape).abs() + 0.5


def index(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def attention() -> tuple[Tensor, ...]:
    return tuple(real(2, 3, 5, 4) for _ in range(3))


ADAM = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
LISTS = [real(3, 2), real(4, 1)]
CASES: list[tuple[Any, ...]] = [
    (aten.relu.default, real(5, 2)),
    (aten.add.Tensor, real(5, 2), real(2)),
    (aten.add.Tensor, real(5, 2), 3),
    (aten.add_.Tensor, real(5, 2), real(5, 1)),
    (aten.add_.Scalar, real(5, 2), 3),
    (aten.sub.Tensor, real(5, 1), real(5, 2), {"alpha": 2}),
    (aten.fill_.Scalar, real(5, 2), 3.0),
    (aten.mul.Tensor, real(5, 2), real(5, 2)),
    (aten.div.Tensor_mode, real(5, 2), real(5, 2), {"rounding_mode": "floor"}),
    (aten.where.self, real(5, 2) > 0, real(5, 2), real(2)),
    (aten.masked_fill.Scalar, real(5, 2), real(5, 2) > 0, 0.5),
    (aten.masked_fill_.Scalar, real(5, 2), real(5, 2) > 0, 0.5),
    (aten.add.Tensor, real(5, 2), real(5, 2), {"alpha": 2}),
    (aten.clamp.default, real(5, 2), -0.5, 0.5),
    (aten._to_copy.default, real(5, 2), {"dtype": torch.int64}),
    (aten._to_copy.default, real(5, 2), {"dtype": torch.float32}),
    (aten._to_copy.default, real(5, 2).float(), {"dtype": torch.float64}),
    (aten.div.Tensor, index(9, 5, 2), index(7, 2) + 1),
    (aten.mul.Tensor, index(9, 5, 2), 0.3),
    (aten.mul.Tensor, index(9, 5, 2), real(5, 2).float()),
    (aten.infinitely_differentiable_gelu_backward.default, index(9, 5, 2), index(3, 5, 2)),
    (aten.sum.dim_IntList, index(9, 5, 4), [0], False, {"dtype": torch.float32}),
    (aten.sum.dim_IntList, real(5, 4), [0], False, {"dtype": torch.float32}),
    (aten.mean.dim, index(9, 5, 4), [0], False, {"dtype": torch.float32}),
    (aten.bitwise_and.Tensor, index(9, 5, 2), index(7, 5, 2)),
    (aten.mm.default, real(4, 3), real(3, 5)),
    (aten.mm.out, real(4, 3), real(3, 5), {"out": real(4, 5)}),
    (aten.bmm.default, real(3, 4, 2), real(3, 2, 5)),
    (aten.addmm.default, real(5), real(4, 3), real(3, 5), {"beta": 0.5, "alpha": 2}),
    (aten.baddbmm.default, real(3, 1, 5), real(3, 4, 2), real(3, 2, 5)),
    (aten.linear.default, real(2, 3, 4), real(5, 4), real(5)),
    (aten.matmul.default, real(2, 3, 4), real(4)),
    (aten.sum.dim_IntList, real(4, 5), [0]),
    (aten.mean.dim, real(5, 4), [0], True),
    (aten.mean.out, real(5, 4), [0], {"out": real(4)}),
    (aten.var.correction, real(5, 4), [0]),
    (aten.var_mean.correction, real(5, 4), [0, 1], {"correction": 0}),
    (aten.std.correction, real(5, 4), [1]),
    (aten.amax.default, real(3, 4), [0]),
    (aten.prod.dim_int, real(5, 2), 0),
    (aten.all.dim, real(5, 4) > -1, 0),
    (aten.linalg_vector_norm.default, real(5, 4), 3, [1]),
    (aten.linalg_vector_norm.default, real(5, 4), float("inf")),
    *(
        (aten.linalg_vector_norm.default, real(5, 4), p, [0], True)
        for p in (-1.5, -float("inf"), 0, 1)
    ),
    (aten.linalg_vector_norm.default, real(5, 4), 2, [1], False, {"dtype": torch.float64}),
    (aten.norm.ScalarOpt_dim, real(5, 4), 3.5, [0]),
    (aten.stack.default, [real(3), real(3), positive(3)], 1),
    (aten.cat.default, [real(3, 2), real(3, 1)], 1),
    (aten.copy_.default, real(3), real(3)),
    (aten.logsumexp.default, real(4, 5), [1]),
    (aten._softmax.default, real(4, 5), 1, False),
    (aten._log_softmax.default, real(4, 5), 1, False),
    (aten._softmax_backward_data.default, real(4, 5), positive(4, 5), 1, torch.float64),
    (aten._log_softmax_backward_data.default, real(4, 5), real(4, 5), 1, torch.float64),
    (aten.native_layer_norm.default, real(3, 4, 5), [4, 5], real(4, 5), real(4, 5), 1e-5),
    (aten._fused_rms_norm.default, real(4, 5), [5], real(5), 1e-5),
    (aten.native_group_norm.default, real(3, 6, 4), real(6), real(6), 3, 6, 4, 3, 1e-5),
    (
        aten.native_batch_norm.default,
        real(5, 4, 3),
        real(4),
        real(4),
        real(4),
        positive(4),
        True,
        0.1,
        1e-5,
    ),
    (
        aten.native_batch_norm.default,
        real(5, 4, 3),
        real(4),
        real(4),
        real(4),
        positive(4),
        False,
        0.1,
        1e-5,
    ),
    (aten.embedding.default, real(7, 4), index(7, 3, 2)),
    (aten.embedding_dense_backward.default, real(3, 2, 4), index(7, 3, 2), 7, 2, False),
    (aten._embedding_bag.default, real(7, 4), index(7, 6), torch.tensor([0, 2, 5]), False, 1),
    (aten.nll_loss_forward.default, real(4, 5), index(5, 4), positive(5), 1, 2),
    (
        aten.nll_loss_backward.default,
        positive(),
        real(4, 5),
        index(5, 4),
        positive(5),
        1,
        2,
        positive(),
    ),
    (aten.nll_loss2d_forward.default, real(2, 5, 3, 2), index(5, 2, 3, 2), None, 1, -100),
    (aten.mse_loss.default, real(4, 5), real(4, 5), 1),
    (aten.mse_loss_backward.default, real(), real(4, 5), real(4, 5), 1),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, *attention()),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, *attention(), 0.0, True),
    (aten.convolution.default, real(3, 4, 6), real(5, 4, 3), real(5), [1], [1], [1], False, [0], 1),
    (aten.convolution.default, real(3, 4, 6), real(6, 2, 3), real(6), [1], [1], [1], False, [0], 2),
    (aten.convolution.default, real(3, 4, 6), real(4, 3, 3), None, [2], [1], [1], True, [1], 2),
    (aten.add.Scalar, index(5, 4), 1.5),
    (aten.sub.Scalar, real(4), 1j),
    (
        aten._cdist_backward.default,
        real(2, 1, 3, 4),
        real(1, 3, 2),
        real(2, 1, 4, 2),
        1.5,
        positive(2, 1, 3, 4),
    ),
    (
        aten._cdist_backward.default,
        real(2, 3, 4),
        real(2, 3, 2),
        real(4, 2),
        1.0,
        positive(2, 3, 4),
    ),
    (aten._foreach_add.List, LISTS, LISTS),
    (aten._foreach_add.Scalar, LISTS, 1.5),
    (aten._foreach_add_.Scalar, LISTS, 1.5),
    (aten._foreach_mul_.Scalar, LISTS, 2.0),
    (aten._foreach_norm.Scalar, LISTS, 2.0),
    (aten._foreach_norm.Scalar, LISTS, float("inf")),
    (aten._foreach_norm.Scalar, LISTS, -2.0),
    (aten._foreach_norm.Scalar, LISTS, 3.5),
    (aten._foreach_addcdiv_.ScalarList, LISTS, LISTS, LISTS, [2.0, 3.0]),
    (
        aten._fused_adamw_.default,
        LISTS,
        LISTS,
        LISTS,
        [t.abs() for t in LISTS],
        [],
        [torch.tensor(1.0)] * 2,
        ADAM,
    ),
    (
        aten._amp_foreach_non_finite_check_and_unscale_.default,
        [torch.tensor([1.0, 2.0, float("inf")]), torch.ones(4)],
        torch.zeros(1),
        torch.ones(1),
    ),
]


IDS = [f"{i}-{str(case[0]).removeprefix('aten.')}" for i, case in enumerate(CASES)]


# torch 2.15, of empty shards
@pytest.mark.filterwarnings(r"ignore:(var|std)\(\). degrees of freedom:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_row_is_right(case: tuple[Any, ...]) -> None:
    op, *args = case
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    report = validate(op, *args, **kwargs)
    assert report.checked
    assert not report.wrong, "\n".join(report.wrong[:5])


WRONG = {
    "a sum said to be replicated": (
        aten.sum.default,
        [real(4, 3)],
        Rule(lambda call: [Row((S(0),), (R,))]),
    ),
    "a mean of means": (
        aten.mean.default,
        [real(5)],
        Rule(lambda call: [Row((S(0),), (P("avg"),))]),
    ),
    "not linear": (aten.exp.default, [real(4)], pointwise(linear=(0,))),
    "not increasing": (aten.neg.default, [real(4)], pointwise(monotone=True)),
    "swapped dims": (aten.mm.default, [real(4, 4), real(4, 4)], product("m k, k n -> n m")),
    "softmax sharded along its dim": (
        aten._softmax.default,
        [real(4), 0, False],
        Rule(lambda call: [Row((S(0),), (S(0),))]),
    ),
    "a bias added by every rank": (
        aten.addmm.default,
        [real(5), real(4, 3), real(3, 5)],
        Rule(lambda call: [Row((R, S(1), S(0)), (P("sum"),))]),
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_rule_is_found(case: tuple[Any, list[Any], Rule]) -> None:
    op, args, rule = case
    report = validate(op, *args, rule=rule)
    assert report.wrong
    assert str(op) in report.wrong[0]


def test_a_local_function_that_raises_is_a_finding() -> None:
    def local(local_call: LocalCall) -> Any:
        def run(x: Tensor) -> Tensor:
            raise ValueError("broken")

        return run

    report = validate(
        aten.relu.default, real(4), rule=Rule(lambda call: [Row((S(0),), (S(0),))], local)
    )
    assert report.wrong
    assert "ValueError: broken" in report.wrong[0]


def reducing(local_call: LocalCall) -> Any:
    """A local function that communicates."""
    spec = local_call.inputs[0]
    return lambda x: torch.relu(x) + all_reduce(x.new_zeros(()), spec.mesh.comm((0,)))


def test_a_collective_that_no_row_declares_is_a_finding() -> None:
    rule = Rule(lambda call: [call.row(self=S(0), out=S(0))], reducing)
    report = validate(aten.relu.default, real(4), rule=rule, ways=(2,), pairs=False)
    assert "communicates over axes [0], whose rows do not declare traffic" in report.wrong[0]
    declared = Rule(
        lambda call: [call.row(self=S(0), out=S(0), traffic=lambda ranks: 8 * ranks)], reducing
    )
    report = validate(aten.relu.default, real(4), rule=declared, ways=(2, 4), pairs=False)
    assert (report.wrong, report.idle) == ([], [])


def test_cases_are_judged_by_themselves() -> None:
    """They share meshes: one rank raises where the other waits for it, then both meet.

    One row never meets.
    """

    def local(local_call: LocalCall) -> Any:
        if local_call.inputs[0].local_shape == (3, 4):
            raise ValueError("broken")
        return reducing(local_call) if local_call.inputs[0].placements[0].is_shard() else torch.relu

    def rows(call: OpCall) -> list[Row]:
        return [
            call.row(self=at, out=at, traffic=lambda ranks: 8 * ranks)
            for at in (S(0), S(1), P("max"))
        ]

    report = validate(aten.relu.default, real(4, 4), rule=Rule(rows, local), ways=(2,), pairs=False)
    assert len(report.wrong) == 1 and report.wrong[0].endswith("ValueError: broken"), report.wrong
    assert [
        line.endswith("P(max): declares traffic but does not start a collective")
        for line in report.idle
    ] == [True]


def test_traffic_without_a_collective_is_a_finding() -> None:
    rule = Rule(lambda call: [call.row(self=S(0), out=S(0), traffic=lambda ranks: 8)])
    report = validate(aten.relu.default, real(4), rule=rule, ways=(2,), pairs=False)
    assert report.wrong == []
    assert [
        line.endswith("S(0) -> S(0): declares traffic but does not start a collective")
        for line in report.idle
    ] == [True]


def test_missed_rows_are_listed() -> None:
    def products(call: OpCall) -> list[Row]:
        return [
            call.row(self=S(0), out=S(0)),
            call.row(mat2=S(1), out=S(1)),
            call.row(self=S(1), mat2=S(0), out=P("sum")),
        ]

    def all_but(i: int, call: OpCall) -> list[Row]:
        return [row for k, row in enumerate(products(call)) if k != i]

    for i in range(3):
        rule = Rule(partial(all_but, i))
        missed = missed_rows(aten.mm.default, real(4, 4), real(4, 4), rule=rule)
        assert [
            row for row in missed if P("sum") not in row.inputs and P("avg") not in row.inputs
        ] == [
            MATRIX_ROWS[i],
        ]
    assert missed_rows(aten.mm.default, real(4, 4), real(4, 4)) == []


MATRIX_ROWS = (Row((S(0), R), (S(0),)), Row((R, S(1)), (S(1),)), Row((S(1), S(0)), (P("sum"),)))


@pytest.mark.filterwarnings("ignore:aten._foreach_abs.out does not have a sharding rule")
def test_sharded_targets_that_are_not_returned_are_refused() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        x, target = (DTensor.from_local(real(2, 3), mesh, [Shard(0)]) for _ in range(2))
        with pytest.raises(NoRuleError, match="does not return it"):
            aten._foreach_abs.out([x], out=[target])
