"""The declared collectives of each lowering equal the counts of CommDebugMode.

This holds forward and backward, on real ranks.

Covers: sharding/module_sharding.py, the `collectives` of every lowering in modules/.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowering_cases import CASES
from shoal_dtensor import Replicate
from shoal_dtensor.random_layouts.region import DrawRegion
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    Lowered,
    parallelize_module,
    preview,
)
from shoal_tp_styles.experts.expert_forward import OverlappedBlock
from shoal_tp_styles.internal import DTensorForward
from shoal_tp_styles.lowering.lowered import OnLocalTokens
from shoal_tp_styles.modules.composed_linear import FusedLowering
from toy_modules import BehindOperation

OPS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def counted(mode: CommDebugMode) -> Counter[str]:
    return Counter({OPS[record.op]: 0 for record in mode.trace}) + Counter(
        OPS[record.op] for record in mode.trace
    )


def shard_of(full: Tensor, layout: Any) -> Tensor:
    """This rank's shard of equal ones."""
    if layout is None or layout == Replicate():
        return full.clone()
    return full.chunk(4, layout.dim)[torch.distributed.get_rank()].clone()


def train(module: nn.Module, x: Tensor) -> tuple[Counter[str], Counter[str]]:
    """Collectives of one forward and of one backward."""
    # the first random number on a mesh checks once that the generators agree
    module(x.detach())
    x = x * 1 if x.is_floating_point() else x  # an activation, not a leaf
    with CommDebugMode() as forward:
        out = module(x)
        out = out[0] if isinstance(out, tuple) else out
    out = out.to_local() if hasattr(out, "to_local") else out
    with CommDebugMode() as backward:
        if out.requires_grad:
            out.square().sum().backward()
    return counted(forward), counted(backward)


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_declared_collectives_are_those_that_run(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    module = case.make()
    full = torch.randn(case.input) if isinstance(case.input, tuple) else case.input
    if full.is_floating_point():
        full.requires_grad_()

    path = f"module.{case.path}" if case.path else "module"
    costs = preview(BehindOperation(module), {path: case.style}, all_ranks(), full)
    assert not any(row.by_dispatch for row in costs.rows)
    parallelize_module(BehindOperation(module), all_ranks(), {path: case.style})
    forward, backward = train(
        module, shard_of(full.detach(), case.layout).requires_grad_(full.requires_grad)
    )
    assert Counter(cost.op for row in costs.rows for cost in row.forward) == forward
    assert Counter(cost.op for row in costs.rows for cost in row.backward) == backward


def test_every_lowering_has_a_case() -> None:
    covered = set()
    for case in CASES.values():
        module = case.make().get_submodule(case.path)
        style: Any = case.style
        covered.add(style.sharding(module).lowering)
    # Forms of the invariant arithmetic stand in for lowerings that have cases.
    lowerings = {kind for kind in subclasses(Lowered) if ".invariant." not in kind.__module__}
    # these declare none of their own
    known = lowerings - {DTensorForward, FusedLowering, OnLocalTokens, DrawRegion, OverlappedBlock}
    assert {kind.__name__ for kind in known if not kind.__name__.startswith("_")} == {
        kind.__name__ for kind in covered if kind is not None
    }


def subclasses(kind: type[Any]) -> list[type[Any]]:
    return [each for direct in kind.__subclasses__() for each in (direct, *subclasses(direct))]


@on_ranks(4)
def test_readers_of_one_activation_share_its_reduction() -> None:
    class ReadersOfViews(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.conv = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            out: Tensor = self.q(x).sum() + self.k(x).sum() + self.conv(x.view(1, 8, 4)).sum()
            return out

    plan = dict.fromkeys(("q", "k", "conv"), ColwiseParallel())
    x = torch.randn(4, 8, requires_grad=True)
    costs = preview(ReadersOfViews(), plan, all_ranks(), x)
    module = parallelize_module(ReadersOfViews(), all_ranks(), plan)
    _, backward = train(module, x.detach().requires_grad_())
    assert backward == {"all_reduce": 2}  # a view is another activation
    assert costs.count("all_reduce") == (0, 2)
