"""Decisions for an operator and given specs, before it runs.

Covers: dispatch/propagate.py, dispatch/input_moves.py, dispatch/global_call.py,
dispatch/results.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from textwrap import dedent
from typing import Any

import pytest
import torch

from shoal_dtensor import CommunicationForbiddenError, Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.dispatch.propagate import decide, rule_of
from shoal_dtensor.dispatch.results import ResultKind
from shoal_dtensor.errors import (
    InPlaceError,
    MixedTensorError,
    NoRuleError,
    OperatorArgumentError,
    OperatorIndexError,
)
from shoal_dtensor.rules import overlay, pointwise
from shoal_dtensor.scopes import DEFAULT, current
from shoal_mesh import abstract_mesh

aten = torch.ops.aten
MESH = abstract_mesh((2,))
NO_RULE = aten._test_functorch_fallback.default  # neither rule nor decomposition


def spec(placement: Placement, *shape: int) -> Spec:
    return Spec(MESH, (placement,), shape or (4, 4))


def test_a_call_whose_inputs_fit_is_simple() -> None:
    decision = decide(aten.add.Tensor, [spec(Shard(0)), spec(Shard(0))], {}, DEFAULT)
    assert not decision.slow_path
    assert decision.result_kind is ResultKind.ONE and decision.outputs == (spec(Shard(0)),)


def test_an_input_that_does_not_fit_is_moved() -> None:
    decision = decide(aten.add.Tensor, [spec(Shard(0)), spec(Shard(1))], {}, DEFAULT)
    assert decision.slow_path
    (((place, item), way),) = decision.moves.items()
    assert place in (0, 1) and item is None and way.collectives == 1 and not decision.write_backs


def test_an_input_behind_a_number_is_moved() -> None:
    decision = decide(aten.polygamma.default, [4, spec(Partial())], {}, DEFAULT)
    assert decision.slow_path
    assert [*decision.moves] == [(1, None)]


def test_a_tensor_behind_none_in_a_list_is_moved() -> None:
    index = Spec(MESH, (Partial(),), (3,), dtype=torch.int64)
    decision = decide(aten.index.Tensor, [spec(Shard(0)), [None, index]], {}, DEFAULT)
    assert [*decision.moves] == [(1, 1)]


def test_a_written_input_keeps_its_layout_and_others_move_to_it() -> None:
    decision = decide(aten.add_.Tensor, [spec(Shard(0)), spec(Shard(1))], {}, DEFAULT)
    assert decision.result_kind is ResultKind.FIRST
    assert [*decision.moves] == [(1, None)] and decision.outputs == (spec(Shard(0)),)
    # relu of a partial value needs the value: it is reduced, and the result given back as a partial
    # value.
    decision = decide(aten.relu_.default, [spec(Partial())], {}, DEFAULT)
    assert decision.slow_path
    assert [plan.dst.placements for plan in decision.write_backs.values()] == [(Partial(),)]


@pytest.mark.parametrize(
    ("op", "args", "kind"),
    [
        (aten.split.Tensor, [spec(Shard(0)), 2, 1], ResultKind.VIEWS),
        (aten.t.default, [spec(Shard(0))], ResultKind.VIEW),
        (aten.topk.default, [spec(Shard(0)), 2], ResultKind.LIST),
        (aten.mul_.Tensor, [spec(Shard(0)), 2.0], ResultKind.FIRST),
        (aten._foreach_add_.Scalar, [[spec(Shard(0)), spec(Shard(1))], 1.0], ResultKind.NONE),
    ],
    ids=str,
)
def test_result_kinds(op: Any, args: list[Any], kind: ResultKind) -> None:
    decision = decide(op, args, {}, DEFAULT)
    assert decision.result_kind is kind


def kind_of(op: Any) -> ResultKind:
    return decide(op, [spec(Shard(0))], {}, DEFAULT).result_kind


def test_data_dependent_results_are_dynamic() -> None:
    assert kind_of(aten.nonzero.default) is ResultKind.DYNAMIC


def test_composite_operators_run_on_the_tensors_themselves() -> None:
    assert kind_of(aten.hardshrink.default) is ResultKind.ONE
    assert kind_of(aten.trapezoid.dx) is ResultKind.COMPOSITE


def test_views_whose_storage_is_not_their_bases_are_not_written_to() -> None:
    with pytest.raises(InPlaceError, match="the write would not reach the base"):
        decide(aten.add_.Scalar, [spec(Shard(0)), 1], {}, DEFAULT, frozenset({0}))


@pytest.mark.parametrize(
    ("error", "op", "args"),
    [
        (
            MixedTensorError,
            aten.add.Tensor,
            [spec(Shard(0)), Spec(abstract_mesh((4,)), (Shard(0),), (4, 4))],
        ),
        (OperatorArgumentError, aten.mm.default, [spec(Shard(0)), spec(Shard(0), 3, 3)]),
        (OperatorIndexError, aten.sum.dim_IntList, [spec(Shard(0)), [2]]),
    ],
    ids=str,
)
def test_errors_come_before_anything_runs(error: type[Exception], op: Any, args: list[Any]) -> None:
    with pytest.raises(error, match=r"different meshes|same reduction dim|out of range"):
        decide(op, args, {}, DEFAULT)


def test_policies() -> None:
    forbidding = replace(DEFAULT, communication="forbid", siblings={}, decisions={})
    assert decide(aten.relu.default, [spec(Shard(0))], {}, forbidding).watched
    with pytest.raises(CommunicationForbiddenError, match=r"relu[\s\S]*AllReduce"):
        decide(aten.relu.default, [spec(Partial())], {}, forbidding)
    strict = replace(DEFAULT, unknown="error", siblings={}, decisions={})
    with pytest.raises(NoRuleError, match="_test_functorch_fallback"):
        decide(NO_RULE, [spec(Shard(0)), spec(Shard(0))], {}, strict)
    with pytest.warns(UserWarning, match="does not have a sharding rule"):
        decision = decide(NO_RULE, [spec(Shard(0)), spec(Shard(0))], {}, DEFAULT)
    assert decision.moves and decision.outputs == (spec(Replicate()),)


def test_an_overlays_rule_comes_before_the_tables() -> None:
    rule = pointwise()
    standing = rule_of(aten.relu.default, current())
    with overlay({aten.relu.default: rule}):
        assert rule_of(aten.relu.default, current()) is rule
    assert rule_of(aten.relu.default, current()) is standing is not rule


def test_the_first_call_of_a_process_keeps_no_arguments() -> None:
    script = """
        import gc, weakref
        import torch
        from shoal_dtensor import DTensor, Shard
        from shoal_mesh import init_device_mesh
        from shoal_mesh.testing import fake_world

        gc.disable()
        with fake_world(2):
            mesh = init_device_mesh("cpu", (2,))
            for call in (torch.cat, torch.stack, lambda pair: torch.special.zeta(*pair)):
                pair = [DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]) for _ in range(2)]
                alive = [weakref.ref(x) for x in (*pair, *(x.to_local() for x in pair))]
                call(pair)
                del pair
                print([ref() is None for ref in alive])
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str([True] * 4)] * 3
