"""Covers: dispatch/observed_calls.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.errors import NoRuleError
from shoal_dtensor.internal import Plan, dispatch_observed
from shoal_mesh import abstract_mesh

MESH = abstract_mesh((2,), ("tp",))


class Watcher:
    """An observer that lists what it does."""

    def __init__(self) -> None:
        self.moves: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.layouts: list[tuple[Placement, ...]] = []
        self.composites = 0

    def move(self, local: Tensor, plan: Plan) -> Tensor:
        self.moves += [step.name for step in plan.steps]
        return torch.zeros(plan.dst.local_shape)

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        self.shapes += [tuple(arg.shape) for arg in args if isinstance(arg, Tensor)]
        return function(*args, **kwargs)

    def run_composite(self, function: Callable[[], Any]) -> Any:
        self.composites += 1
        return "composite"

    def place(self, local: Tensor, spec: Spec) -> None:
        self.layouts.append(spec.placements)


def placed(placement: Placement, *shape: int) -> DTensor:
    spec = Spec(MESH, [placement], shape)
    return DTensor(torch.zeros(spec.local_shape), spec)


def test_the_observer_moves_inputs_runs_the_local_call_and_gets_layouts() -> None:
    watcher = Watcher()
    x, weight = placed(Shard(1), 4, 6), placed(Replicate(), 6, 8)
    out = dispatch_observed(DTensor, torch.ops.aten.mm.default, (x, weight), {}, watcher)
    assert watcher.moves == ["Slice"]
    assert watcher.shapes == [(4, 3), (3, 8)]
    assert watcher.layouts == [(Partial(),)]
    assert out.placements == (Partial(),)
    written = dispatch_observed(DTensor, torch.ops.aten.mul_.Scalar, (x, 2.0), {}, watcher)
    assert written is x


def test_other_calls_are_handed_on_or_refused() -> None:
    watcher = Watcher()
    x = placed(Replicate(), 4)
    unsqueeze = torch.ops.aten.unsqueeze_.default
    assert dispatch_observed(DTensor, unsqueeze, (x, 0), {}, watcher) == "composite"
    assert watcher.composites == 1
    with pytest.raises(NoRuleError, match="depends on values"):
        dispatch_observed(DTensor, torch.ops.aten.nonzero.default, (x,), {}, watcher)
