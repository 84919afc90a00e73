"""Convolutions sharded by output or input channels, Bilinear by output features, Linears with a weight of (in, out).

columns   x: R | S(d), W: S(out), b: S(0) -> y: S(channels)
rows      x: S(channels), W: S(in), b: R -> y: R | S(d), the bias once, after the reduction
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..lowering.collective_functions import Sizes
from ..lowering.lowered import Lowered
from ..lowering.ports import (
    declare_partial_output,
    declare_replicated_input,
    declare_sharded_input,
    declare_sharded_output,
    partial_output,
    replicated_input,
    sharded_input,
    sharded_output,
)
from ..sharding.collective import Collective
from ..sharding.module_kinds import TransposedLinear, kinds_of
from ..sharding.module_sharding import ModuleCall

__all__ = ["ColumnChannels", "RowChannels"]

Compute = Callable[[Any, list[Tensor], Any, Any], Tensor]


def _conv(module: Any, inputs: list[Tensor], weight: Any, bias: Any) -> Tensor:
    if 0 in weight.shape[:2]:
        return _without_channels(module, inputs[0], weight, bias)
    out: Tensor = module._conv_forward(inputs[0], weight, bias)
    return out


def _without_channels(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution of an empty shard, which kernels refuse, by way of a channel of zeros.

    So a rank without channels takes part in every collective, forward and backward.
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


def _computation(module: Any) -> Compute:
    return next(_COMPUTE[known] for known in kinds_of(module) if known in _COMPUTE)


class _Channels(Lowered):
    """Base of both directions: the computation, and the sharded dim of the weight."""

    __slots__ = ("compute",)

    compute: Compute

    def resolve(self) -> None:
        self.compute = _computation(self.module)

    def sharded(self) -> tuple[int, Sizes]:
        """Size of the sharded dim of the weight, and of its shards."""
        spec = self.spec("weight")
        ((dim, _),) = spec.shard_order
        return spec.shape[dim], spec.sizes(dim)


class ColumnChannels(_Channels):
    """A Conv, Bilinear or transposed Linear whose output channels are sharded."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        for index in range(len(call.sharding.inputs or ())):
            yield from declare_replicated_input(call, index)
        yield from declare_sharded_output(call)

    def __call__(self, *inputs: Tensor) -> Tensor:
        arrived = [replicated_input(self, x, port) for x, port in zip(inputs, self.sharding.inputs or (), strict=True)]
        local: Any = self.local("weight", "bias")
        out = self.compute(self.module, arrived, local["weight"], local["bias"])
        channels = out.ndim + getattr(self.port_out.layout, "dim", -1)
        return sharded_output(self, out, channels, *self.sharded())


class RowChannels(_Channels):
    """A Conv or transposed Linear whose input channels are sharded."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from declare_sharded_input(call)
        yield from declare_partial_output(call, "bias", getattr(call.sharding.input_port().desired, "dim", -1))

    def __call__(self, input: Tensor) -> Tensor:
        channels = input.ndim + getattr(self.port_in.desired, "dim", 0)
        input = sharded_input(self, input, channels, self.sharded()[1])
        weight: Any = self.local("weight")["weight"]
        partial = self.compute(self.module, [input], weight, None)
        return partial_output(self, partial, "bias", channels)
