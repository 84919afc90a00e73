"""Declarations and refusals of styles, without ranks.

Covers: styles/expert.py, module_kinds.py, expert_forward.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_models import KINDS, ListedExperts, PackedExperts, SortedExperts
from shoal_dtensor import Partial, Replicate, Shard, StridedShard
from shoal_tp_styles import (
    ExpertParallel,
    ExpertTensorParallel,
    IdentityExpert,
    LayoutError,
    UnsupportedModuleError,
)
from shoal_tp_styles.experts.expert_forward import forward_of_own_experts
from toy_modules import Scale


def test_hidden_features_of_every_kind() -> None:
    placed = {kind: ExpertTensorParallel().sharding(make(3)) for kind, make in KINDS.items()}
    packed, transposed, listed, rows = (placed[kind].parameters for kind in KINDS)
    assert placed["packed"].placements("gate_up_proj", (4,)) == (
        StridedShard(1, split_factor=2, sizes=(2, 2, 2, 0)),
    )
    assert packed["down_proj"] == Shard(2) and rows == {
        "w1": Shard(1),
        "w3": Shard(1),
        "w2": Shard(2),
    }
    assert transposed["gate_up_proj"] == Shard(2, multiple_of=2) and transposed[
        "down_proj"
    ] == Shard(1)
    assert (
        transposed["gate_up_proj_bias"] == Shard(1, multiple_of=2)
        and "down_proj_bias" not in transposed
    )
    assert listed["0.w1.weight"] == listed["0.w1.bias"] == Shard(0) and listed[
        "2.w2.weight"
    ] == Shard(1)
    assert "2.w2.bias" not in listed


@pytest.mark.parametrize(
    ("layout", "factor", "message"),
    [(Shard(1), None, "Shard"), (Partial(), None, "Partial"), (Shard(0), 0.0, "positive")],
)
def test_layouts_and_factors_that_mean_nothing(
    layout: Any, factor: float | None, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        ExpertParallel(input_layouts=layout, capacity_factor=factor)


def test_modules_that_are_called_otherwise_are_refused() -> None:
    with pytest.raises(
        UnsupportedModuleError, match=r"forward of Linear takes \(input\).*top_k_index"
    ):
        ExpertParallel().sharding(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModuleError, match="sorted already"):
        ExpertParallel(capacity_factor=1.0).sharding(SortedExperts(4))
    with pytest.raises(UnsupportedModuleError, match="parameters must be named gate_up_proj"):
        ExpertTensorParallel().sharding(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModuleError, match="Identity"):
        IdentityExpert().sharding(nn.Linear(2, 2))
    odd = PackedExperts(2)
    odd.down_proj = nn.Parameter(torch.zeros(2, 8, 5))
    with pytest.raises(
        UnsupportedModuleError, match="do not have the same number of hidden features"
    ):
        ExpertTensorParallel().sharding(odd)
    unlike = PackedExperts(2)
    unlike.down_proj = nn.Parameter(torch.zeros(3, 8, 6))
    with pytest.raises(UnsupportedModuleError, match=r"for \[2, 3\] experts"):
        ExpertParallel().sharding(unlike)


def test_a_number_per_expert_has_no_rows() -> None:
    experts = ListedExperts(2)
    experts[1] = Scale()
    with pytest.raises(UnsupportedModuleError, match=r"1\.scale of ListedExperts has 0 dims"):
        ExpertParallel().sharding(experts)


def test_a_module_holds_shards_in_a_block_and_its_own_again_after_an_error() -> None:
    class Failing(ListedExperts):
        def forward(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            assert (self.num_experts, len(self)) == (2, 2) and self[0] is children[2]
            assert self[0].w1.weight is local["2.w1.weight"]
            raise ZeroDivisionError("inside")

    experts: Any = Failing(4)
    before, children = dict(experts.named_parameters()), list(experts)
    local: dict[str, Tensor | None] = {name: param.detach() * 2 for name, param in before.items()}
    with pytest.raises(ZeroDivisionError, match="inside"):
        forward_of_own_experts(experts, local, 4, range(2, 4), *[torch.zeros(0)] * 3)
    assert experts.num_experts == 4 and list(experts) == children
    assert all(param is before[name] for name, param in experts.named_parameters())
    assert Replicate() == ExpertTensorParallel().sharding(PackedExperts(2)).input_port().desired
