"""Convolutions cut by output or input channels, Bilinear cut by output features, Linears that lie as (in, out).

columns   x: R | S(d), W: S(out), b: S(0) -> y: S(channels)
rows      x: S(channels), W: S(in), b: R -> y: R | S(d), the bias once, after the reduction
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UnsupportedModuleError
from ..structure import TransposedLinear, kinds_of
from .enter import enter
from .forward import Lowered, spec_of
from .ports import arrive_cut, arrive_whole, leave_cut, leave_partial
from .regions import Sizes

__all__ = ["ColumnChannels", "RowChannels"]

Compute = Callable[[Any, list[Tensor], Any, Any], Tensor]


def _conv(module: Any, inputs: list[Tensor], weight: Any, bias: Any) -> Tensor:
    if 0 in weight.shape[:2]:
        return _of_none(module, inputs[0], weight, bias)
    out: Tensor = module._conv_forward(inputs[0], weight, bias)
    return out


def _of_none(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution from or to no channels, which kernels refuse, by way of a channel of zeros.

    So a rank that holds none takes part in every collective, forward and backward.
    """
    out_channels, in_channels = weight.shape[:2]
    dim = x.ndim - weight.ndim + 1  # of the channels; there may be no batch dim
    if in_channels == 0:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :])], dim)
        weight = torch.cat([weight, weight.new_zeros(out_channels, 1, *weight.shape[2:])], 1)
    if out_channels == 0:
        weight = torch.cat([weight, weight.new_zeros(1, *weight.shape[1:])])
        bias = None if bias is None else torch.cat([bias, bias.new_zeros(1)])
    out: Tensor = module._conv_forward(x, weight, bias)
    return out if out_channels else out.narrow(dim, 0, 0)


def _bilinear(module: Any, inputs: list[Tensor], weight: Any, bias: Any) -> Tensor:
    return functional.bilinear(inputs[0], inputs[1], weight, bias)


def _transposed(module: Any, inputs: list[Tensor], weight: Any, bias: Any) -> Tensor:
    return functional.linear(inputs[0], weight.t(), bias)


_COMPUTE: dict[type[nn.Module], Compute] = {
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
    nn.Bilinear: _bilinear,
    TransposedLinear: _transposed,
}


def _computation(module: Any, kind: str) -> Compute:
    if getattr(module, "groups", 1) != 1:
        raise UnsupportedModuleError(
            f"{kind}: {module} has groups={module.groups}; only convolutions of one group are cut"
        )
    return next(_COMPUTE[known] for known in kinds_of(module) if known in _COMPUTE)


class _Channels(Lowered):
    """What both directions share: the computation, and how the weight is cut."""

    __slots__ = ("compute",)

    compute: Compute

    def resolve(self) -> None:
        self.compute = _computation(self.module, self.sharding.kind)

    def cut(self) -> tuple[int, Sizes]:
        """Size of the cut dim of the weight, and of its parts."""
        spec = spec_of(self.params["weight"], "weight")
        ((dim, _),) = spec.shard_order
        return spec.shape[dim], spec.sizes(dim)


class ColumnChannels(_Channels):
    """Stand-in for a Conv, Bilinear or turned Linear whose output channels are cut."""

    __slots__ = ()

    def __call__(self, *inputs: Tensor) -> Tensor:
        arrived = [arrive_whole(self, x, port) for x, port in zip(inputs, self.sharding.inputs or (), strict=True)]
        local: Any = enter({"weight": self.params["weight"], "bias": self.params["bias"]})
        out = self.compute(self.module, arrived, local["weight"], local["bias"])
        channels = out.ndim + getattr(self.port_out.layout, "dim", -1)
        return leave_cut(self, out, channels, *self.cut())


class RowChannels(_Channels):
    """Stand-in for a Conv or turned Linear whose input channels are cut."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        channels = input.ndim + getattr(self.port_in.desired, "dim", 0)
        input = arrive_cut(self, input, channels, self.cut()[1])
        weight: Any = enter({"weight": self.params["weight"]})["weight"]
        partial = self.compute(self.module, [input], weight, None)
        return leave_partial(self, partial, self.params["bias"], channels)
