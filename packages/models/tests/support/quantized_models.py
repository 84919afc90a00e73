"""Models whose weights are tensors of tensors: of a class like torchao's, and of torchao itself."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

__all__ = ["X", "model", "quantize", "quantized", "ways"]

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
        run: Any = super().__torch_function__
        return run(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has three arguments
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].data8, args[0].scale)
        # torchao's can be copied to float64, and have no views
        if func is torch.ops.aten._to_copy.default:
            return cls(args[0].data8, args[0].scale.to(**(kwargs or {})))
        kinds = {type(leaf).__name__ for leaf in _pytree.tree_leaves(args)}
        raise NotImplementedError(f"{func} of {kinds}")


def by_rows(model: nn.Module) -> None:
    """Quantize the weights of all Linears."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scale = weight.abs().amax(1, keepdim=True) / 127
            module.weight = nn.Parameter(
                RowScaled((weight / scale).round().to(torch.int8), scale), requires_grad=False
            )


def quantize(model: nn.Module, how: str) -> None:
    """By the class above, or a configuration of torchao."""
    if how == "RowScaled":
        by_rows(model)
    else:
        # not while this file is collected: it takes seconds
        torchao = import_module("torchao.quantization")
        torchao.quantize_(model, getattr(torchao, how)())


TORCHAO = (
    "Int8WeightOnly",
    "Int8DynamicActivationInt8Weight",
    "IntxWeightOnly",
    "Float8WeightOnly",
)
needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao: run by nox -s hugging_face"
)
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
