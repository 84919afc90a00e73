"""Weights that are tensors of tensors.

They are right if the plan is applied first, and refused with the way out if not.

Covers: planning/auto.py and the styles. torchao's classes are tried by `nox -s hugging_face`, where
it is installed; a class like them is tried everywhere.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from quantized_models import X, model, quantize, quantized, ways
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_models import auto_plan
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    LoRA,
    PackedColwiseParallel,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
    verify,
)

# DTensors between: shards are uneven
PLAN = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}


@ways
@on_ranks(4)
def test_weights_that_are_quantized_after_their_plan_are_shards_with_the_numbers_of_one_device(
    how: str,
) -> None:
    single = quantized(how)
    module: Any = parallelize_module(model(), all_ranks(), PLAN, lower=False)
    quantize(module, how)
    parts = [getattr(module[0].weight, name) for name in module[0].weight.__tensor_flatten__()[0]]
    rows = [part.placements for part in parts if isinstance(part, DTensor)]
    assert rows
    assert set(rows) == {(Shard(0),)}  # values and scales
    assert parts[0].to_local().shape[0] in (32, 30)  # of 126
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    expected, got = single(x), module(y)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(module(y), single(x), rtol=1e-5, atol=1e-6)
    if expected.requires_grad:
        expected.square().sum().backward()
        got.square().sum().backward()
        if x.grad is not None:
            torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-5)


@ways
@on_ranks(2)
def test_quantized_weights_are_refused_with_the_way_out(how: str) -> None:
    mesh = all_ranks()
    for style in (
        ColwiseParallel(),
        RowwiseParallel(),
        PackedColwiseParallel(blocks=2),
        LoRA(base=ColwiseParallel(), rank=2),
    ):
        with pytest.raises(
            UnsupportedModuleError,
            match=r"weight of Linear .* lower=False\) first and quantize afterwards",
        ):
            parallelize_module(quantized(how), mesh, {"0": style})
    said = verify(quantized(how), PLAN, mesh, X)
    assert "lower=False" in str(said)
    found = auto_plan(quantized(how), mesh, X)
    assert not found
    assert "tensor subclass that holds other tensors" in found.whole["0.weight"]


@ways
@on_ranks(2)
def test_a_plan_that_leaves_quantized_weights_out_takes_the_others(how: str) -> None:
    single = quantized(how)
    single.append(nn.Linear(48, 10))
    expected = single(X)
    module = parallelize_module(
        copy.deepcopy(single), all_ranks(), {"3": ColwiseParallel(output_layouts=Replicate())}
    )
    torch.testing.assert_close(module(X), expected)


@ways
@pytest.mark.parametrize("grad", [True, False])
@on_ranks(2)
def test_lowered_modules_refuse_weights_that_are_quantized_since(how: str, grad: bool) -> None:
    for style in (
        ColwiseParallel(),
        RowwiseParallel(input_layouts=Replicate()),
        ColwiseParallel(input_layouts=Shard(0)),
    ):
        module = parallelize_module(model()[:1], init_device_mesh("cpu", (2,)), {"0": style})
        quantize(module, how)
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(LayoutError, match=r"lower=False\) first and quantize afterwards"),
        ):
            module(X)
