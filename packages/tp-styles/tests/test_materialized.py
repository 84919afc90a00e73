"""Forwards of parallel modules whose parameters are on the meta device.

Covers: plan/materialized.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import Replicate
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    StyleError,
    parallelize_module,
    unparallelize_module,
)

PLANS: dict[str, Any] = {"linear": "colwise", "embedding": "colwise", "norm": "replicate"}


def layer(kind: str) -> nn.Module:
    if kind == "embedding":
        return nn.Embedding(12, 8)
    return nn.LayerNorm(8) if kind == "norm" else nn.Linear(8, 12)


def example(kind: str) -> torch.Tensor:
    return torch.arange(8) if kind == "embedding" else torch.ones(3, 8)


@pytest.mark.parametrize("kind", PLANS)
@on_ranks(2)
def test_parameters_without_values_are_named(kind: str) -> None:
    """Linear layers failed without a name; embeddings returned results on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(layer(kind))
    parallelize_module(model, all_ranks(), {"0": PLANS[kind]})
    for one in (model, copy.deepcopy(model)):
        for _ in range(2):
            with pytest.raises(StyleError, match=r"^parallelize_module: .*'0.weight'.*to_empty"):
                one(example(kind))
    assert model(example(kind).to("meta")).is_meta
    model.to_empty(device="cpu")
    if kind != "norm":
        with pytest.raises(StyleError, match=r"'0.weight'.* have memory but no values"):
            model(example(kind))
    torch.manual_seed(0)
    model[0].reset_parameters()  # type: ignore[operator]  # each of these layers has it
    torch.manual_seed(0)
    single = layer(kind)
    expected = single(example(kind))
    if kind != "norm":
        expected = expected.chunk(2, -1)[all_ranks().get_local_rank()]
    torch.testing.assert_close(model(example(kind)), expected)
    assert not model._forward_pre_hooks


class ScaledByUnsavedBuffer(nn.Module):
    """A layer with a buffer that no state dict has."""

    factor: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 12)
        self.register_buffer("factor", torch.ones(12), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * self.factor


@on_ranks(2)
def test_buffers_without_values_are_named() -> None:
    with torch.device("meta"):
        model = ScaledByUnsavedBuffer()
    plan = {"layer": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, all_ranks(), plan)
    model.layer.to_empty(device="cpu")
    nn.init.ones_(model.layer.weight)
    nn.init.zeros_(model.layer.bias)
    with pytest.raises(StyleError, match=r"^parallelize_module: .*\['factor'\].*to_empty"):
        model(torch.ones(3, 8))
    model.factor = torch.full((12,), 2.0)
    assert torch.equal(model(torch.ones(3, 8)), torch.full((3, 12), 16.0))


@on_ranks(2)
def test_the_check_is_only_there_while_it_may_fail() -> None:
    model = parallelize_module(nn.Linear(8, 12), all_ranks(), "colwise")
    assert not model._forward_pre_hooks
    with torch.device("meta"):
        model = nn.Linear(8, 12)
    parallelize_module(model, all_ranks(), "colwise")
    assert model._forward_pre_hooks
    unparallelize_module(model)
    assert not model._forward_pre_hooks


@on_ranks(2)
def test_a_compiled_model_keeps_one_graph() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 12)
    parallelize_module(model, all_ranks(), "colwise")
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3, 8)), torch.full((3, 6), 8.0))
