"""Weights that are tensors of tensors: right where the plan is applied first, refused with the way out where not.

Covers: sharding/module_kinds.py, data_parallel/sharded_parameters.py.  torchao's classes are tried by
`nox -s hugging_face`, where it is installed; a class like them is tried everywhere.
"""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    LoRA,
    PackedColwiseParallel,
    RowwiseParallel,
    UnsupportedModuleError,
    auto_plan,
    fully_shard,
    parallelize_module,
    replicate,
    verify,
)
from shoal_tp_styles.data_parallel.sharded_parameters import check_plain_tensors
from shoal_tp_styles.testing import all_ranks

PLAN = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}  # DTensors between: shards are uneven
LINEAR = torch.nn.functional.linear


class RowScaled(Tensor):
    """Whole numbers of eight bits, and a scale for each row."""

    data8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: Any, data8: Tensor, scale: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, data8.shape, dtype=scale.dtype)
        made.data8, made.scale = data8, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is LINEAR:
            x, w, bias = args
            return LINEAR(x, w.data8.to(w.scale.dtype) * w.scale, bias)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub has three arguments
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].data8, args[0].scale)
        kinds = {type(leaf).__name__ for leaf in _pytree.tree_leaves(args)}
        raise NotImplementedError(f"{func} of {kinds}")


def by_rows(model: nn.Module) -> None:
    """Quantize the weights of all Linears."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scale = weight.abs().amax(1, keepdim=True) / 127
            module.weight = nn.Parameter(RowScaled((weight / scale).round().to(torch.int8), scale), requires_grad=False)


def quantize(model: nn.Module, how: str) -> None:
    """By the class above, or a configuration of torchao."""
    if how == "RowScaled":
        by_rows(model)
    else:
        torchao = import_module("torchao.quantization")  # not while this file is collected: it takes seconds
        torchao.quantize_(model, getattr(torchao, how)())


TORCHAO = ("Int8WeightOnly", "Int8DynamicActivationInt8Weight", "IntxWeightOnly", "Float8WeightOnly")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao: run by nox -s hugging_face")
ways = pytest.mark.parametrize(
    "how", ["RowScaled", *(pytest.param(f"{name}Config", marks=needs_torchao) for name in TORCHAO)]
)


def model() -> nn.Sequential:
    """In float32: torchao has no kernels for float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 126), nn.ReLU(), nn.Linear(126, 48))


def quantized(how: str) -> Any:
    """The model, quantized on one device."""
    single = model()
    quantize(single, how)
    return single


X = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


@ways
@on_ranks(4)
def test_weights_that_are_quantized_after_their_plan_are_shards_with_the_numbers_of_one_device(how: str) -> None:
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
        with pytest.raises(UnsupportedModuleError, match=r"weight of Linear .* lower=False\) and quantize then"):
            parallelize_module(quantized(how), mesh, {"0": style})
    said = verify(quantized(how), PLAN, mesh, X)
    assert "lower=False" in str(said)
    found = auto_plan(quantized(how), mesh, X)
    assert not found
    assert "tensor of tensors" in found.whole["0.weight"]
    for wrap in (fully_shard, replicate):
        single = quantized(how)
        with pytest.raises(UnsupportedModuleError, match=r"shape \(126, 64\) .* ignored_params: it stays whole"):
            wrap(single, mesh)
        whole = {param for param in single.parameters() if param.ndim == 2}
        expected = copy.deepcopy(single)(X)
        torch.testing.assert_close(wrap(single, mesh, ignored_params=whole)(X), expected)


@ways
@on_ranks(2)
def test_a_plan_that_leaves_quantized_weights_out_takes_the_others(how: str) -> None:
    single = quantized(how)
    single.append(nn.Linear(48, 10))
    expected = single(X)
    module = parallelize_module(copy.deepcopy(single), all_ranks(), {"3": ColwiseParallel(output_layouts=Replicate())})
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
        with torch.set_grad_enabled(grad), pytest.raises(LayoutError, match=r"lower=False\) and quantize then"):
            module(X)


def test_parameters_of_plain_tensors_pass() -> None:
    check_plain_tensors("replicate", model().parameters())
