"""Planners; plans that do not fit a module: refused on all ranks, nothing changed.

Covers: module/shard_module.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sharded_modules import MLP, Doubled, megatron, snapshot
from sharding_cases import chunk, on_rank
from shoal_mesh.testing import on_ranks
from shoal_shard_api import Sharder, ShardingPlan, ShardingPlanner, shard_module
from shoal_shard_api.errors import (
    ArgumentTypeError,
    PlanConflictError,
    SharderPathError,
    ShardingSpecError,
)


class _Raises(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        if dist.get_rank() == 2:
            raise ZeroDivisionError("no way")
        return nn.Identity()


class _Nothing(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return None  # type: ignore[return-value]  # the mistake under test


def _plan(entries: dict[str, Any], **more: Any) -> ShardingPlan:
    return ShardingPlan(plan={"up.bias": chunk(0), **entries}, **more)


MODULE_FAILURES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no plan": (lambda: {"up.weight": chunk(0)}, TypeError, "plan is a ShardingPlan, got dict"),
    "entry of another type": (
        lambda: _plan({"up.weight": 3}),
        TypeError,
        r"plan\['up.weight'\] .* got int",
    ),
    "output of another type": (
        lambda: _plan({}, output_plan={"": Doubled()}),
        TypeError,
        r"output_plan\[''\] is a ShardingSpec, got .*Doubled",
    ),
    "no such parameter": (
        lambda: _plan({"up.weigth": chunk(0)}),
        AttributeError,
        "Linear has no attribute 'weigth'",
    ),
    "no such module": (
        lambda: _plan({"upp.weight": chunk(0)}),
        AttributeError,
        "no sub-module 'upp'",
    ),
    "a module for a parameter": (
        lambda: _plan({"up": chunk(0)}),
        ValueError,
        "up must be a Tensor, got torch.nn.modules.linear.Linear",
    ),
    "a spec that does not fit": (
        lambda: _plan({"up.weight": chunk(4)}),
        ValueError,
        "up.weight: dim 4",
    ),
    "a Sharder for the root": (
        lambda: _plan({"": Doubled()}),
        KeyError,
        "a Sharder needs the path",
    ),
    "a Sharder for nothing": (
        lambda: _plan({"middle": Doubled()}),
        AttributeError,
        "no sub-module 'middle'",
    ),
    "a parameter below a Sharder": (
        lambda: _plan({"down": Doubled(), "down.weight": chunk(0)}),
        RuntimeError,
        "'down.weight' is in .*Sharder of 'down'",
    ),
    "no such output": (
        lambda: _plan({}, output_plan={"middle": chunk(0)}),
        AttributeError,
        "output_plan.*'middle'",
    ),
    "no such local": (
        lambda: _plan({}, return_local_tensor=["middle"]),
        AttributeError,
        "'middle'",
    ),
    "an error on one rank": (
        lambda: _plan(on_rank(1, {"up.weight": chunk(7)}, {"up.weight": chunk(0)})),
        ValueError,
        r"^rank 1: up.weight: dim 7",
    ),
    "different entries": (
        lambda: _plan(on_rank(3, {}, {"up.weight": chunk(0)})),
        ValueError,
        r"plan entries .*rank 3",
    ),
    "different specs": (
        lambda: _plan({"up.weight": on_rank(3, chunk(1), chunk(0))}),
        ValueError,
        "sharding_spec of up.weight .*dim=0.*dim=1.*rank 3",
    ),
    "different outputs": (
        lambda: _plan({}, output_plan=on_rank(1, {"": chunk(0)}, None)),
        ValueError,
        "output_plan must be equal",
    ),
    "different Sharders": (
        lambda: _plan({"down": on_rank(1, _Nothing(), Doubled())}),
        ValueError,
        "Sharder of down .*Doubled.*_Nothing",
    ),
    "a Sharder that raises": (
        lambda: _plan({"down": _Raises()}),
        ZeroDivisionError,
        "^rank 2: no way$",
    ),
    "a Sharder that returns nothing": (
        lambda: _plan({"down": _Nothing()}),
        TypeError,
        "returned None, not a Module",
    ),
    "an output below a Sharder that is gone": (
        lambda: _plan({"down": Doubled()}, output_plan={"down.linear": chunk(0)}),
        AttributeError,
        "the module that replaces 'down'",
    ),
}


@on_ranks(4)
@pytest.mark.parametrize("case", MODULE_FAILURES)
def test_shard_module_refuses_on_all_ranks_and_changes_nothing(case: str) -> None:
    plan, kind, text = MODULE_FAILURES[case]
    model = MLP()
    before = snapshot(model)
    with pytest.raises(kind, match=f"(?s){text}") as raised:
        shard_module(model, plan())
    assert snapshot(model) == before
    messages: list[Any] = [None] * 4
    dist.all_gather_object(messages, (type(raised.value).__name__, str(raised.value)))
    assert len(set(messages)) == 1
    shard_module(model, megatron())  # nobody is left in a collective


@on_ranks(4)
def test_tied_parameters_that_a_plan_shards_differently() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(12, 8), "head": nn.Linear(8, 12, bias=False)})
    model["head"].weight = model["embed"].weight
    with pytest.raises(
        PlanConflictError,
        match=r"'embed.weight' and 'head.weight' are one tied parameter.*dim=0.*dim=1",
    ):
        shard_module(model, ShardingPlan(plan={"embed.weight": chunk(0), "head.weight": chunk(1)}))
    with pytest.raises(
        PlanConflictError, match=r"'embed.weight' is tied to 'head.weight'.*Sharder of 'head'"
    ):
        shard_module(model, ShardingPlan(plan={"embed.weight": chunk(0), "head": Doubled()}))
    assert type(model["embed"].weight) is nn.Parameter


@on_ranks(4)
def test_the_errors_of_plans_have_their_own_types() -> None:
    for entries, kind, text in (
        ({"": Doubled()}, SharderPathError, "a Sharder needs the path"),
        ({"up": 3}, ArgumentTypeError, r"plan\['up'\] is a ShardingSpec or a Sharder"),
        ({"up.bias": chunk(3)}, ShardingSpecError, "up.bias: dim 3"),
    ):
        with pytest.raises(kind, match=text):
            shard_module(MLP(), _plan(entries))
    assert str(SharderPathError("text")) == "text"


@on_ranks(4)
def test_nested_modules_and_a_planner() -> None:
    class Rows(ShardingPlanner):
        def build_plan(self, module: nn.Module) -> ShardingPlan:
            return ShardingPlan(
                plan={name: chunk(0) for name, p in module.named_parameters() if p.dim() == 2}
            )

    model = nn.Sequential(MLP(), nn.Sequential(MLP()))
    alone = copy.deepcopy(model)
    shard_module(model, Rows().build_plan(model))
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x).full_tensor(), alone(x))
