"""Convolutions sharded by output or input channels, Bilinear by output features, Linears with a weight of (in, out).

columns   x: R | S(d), W: S(out), b: S(0) -> y: S(channels)
rows      x: S(channels), W: S(in), b: R -> y: R | S(d), the bias once, after the reduction

Transposed convolutions are convolutions whose weight is (in, out, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..lowering import ports
from ..lowering.collective_functions import Sizes
from ..lowering.lowered import Lowered
from ..sharding.module_kinds import TransposedLinear, kinds_of
from ..sharding.module_sharding import Collective, ModuleCall

Compute = Callable[..., Tensor]


def convolved(  # what a convolution is made of
    module: Any, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int = 1, output_size: Any = None
) -> Tensor:
    """The convolution of a module, with other channels and as many groups.

    Shapes are x: (*batch, in, *spatial), weight: (out, in / groups, *kernel), or (in, out / groups, *kernel) of a
    transposed one, whose spatial output sizes may be given.
    """
    spatial = weight.ndim - 2
    if module.transposed:
        padding, extra = module.padding, (output_size, module.stride, module.padding, module.kernel_size, spatial)
        more: tuple[Any, ...] = (module._output_padding(x, *extra, module.dilation), groups, module.dilation)
    else:
        padding, more = module.padding, (module.dilation, groups)
        if module.padding_mode != "zeros":
            x = functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            padding = 0
    function = getattr(functional, f"conv{'_transpose' * module.transposed}{spatial}d")
    out: Tensor = function(x, weight, bias, module.stride, padding, *more)
    return out


def _conv(module: Any, inputs: list[Tensor], weight: Any, bias: Any, output_size: Any = None) -> Tensor:
    """A convolution of an empty shard, which kernels refuse, goes by way of a channel of zeros.

    So a rank without channels takes part in every collective, forward and backward.
    """
    x, into, out_of = inputs[0], int(not module.transposed), int(module.transposed)  # dims of the weight
    no_output, channels = weight.shape[out_of] == 0, x.ndim - weight.ndim + 1  # there may be no batch dim
    if weight.shape[into] == 0:
        x, weight = with_zeros(x, channels), with_zeros(weight, into)
    if no_output:
        weight, bias = with_zeros(weight, out_of), None if bias is None else with_zeros(bias, 0)
    out = convolved(module, x, weight, bias, output_size=output_size)
    return out.narrow(channels, 0, 0) if no_output else out


def with_zeros(tensor: Tensor, dim: int, more: int = 1) -> Tensor:
    """A tensor with so many more indices of a dim, of zeros."""
    return torch.cat([tensor, tensor.new_zeros(*tensor.shape[:dim], more, *tensor.shape[dim + 1 :])], dim)


_COMPUTE: dict[type[nn.Module], Compute] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _conv),
    nn.Bilinear: lambda module, inputs, weight, bias: functional.bilinear(inputs[0], inputs[1], weight, bias),
    TransposedLinear: lambda module, inputs, weight, bias: functional.linear(inputs[0], weight.t(), bias),
}


class _Channels(Lowered):
    """Base of both directions: the computation, and the sharded dim of the weight."""

    __slots__ = ("compute",)

    compute: Compute

    def resolve(self) -> None:
        self.compute = next(_COMPUTE[known] for known in kinds_of(self.module) if known in _COMPUTE)

    def sharded(self) -> tuple[int, Sizes]:
        """Size of the sharded dim of the weight, and of its shards."""
        spec = self.spec("weight")
        ((dim, _),) = spec.shard_order
        return spec.shape[dim], spec.sizes(dim)


class ColumnChannels(_Channels):
    """A Conv, ConvTranspose, Bilinear or transposed Linear whose output channels are sharded."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        for index in range(len(call.sharding.inputs or ())):
            yield from ports.declare_replicated_input(call, index)
        yield from ports.declare_sharded_output(call)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Tensor:
        declared = self.sharding.inputs or ()
        arrived = [ports.replicated_input(self, x, port) for x, port in zip(inputs, declared, strict=False)]
        local: Any = self.local("weight", "bias")
        out = self.compute(self.module, arrived, local["weight"], local["bias"], *inputs[len(declared) :], **kwargs)
        channels = out.ndim + getattr(self.port_out.layout, "dim", -1)
        return ports.sharded_output(self, out, channels, *self.sharded())


class RowChannels(_Channels):
    """A Conv, ConvTranspose or transposed Linear whose input channels are sharded."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from ports.declare_sharded_input(call)
        yield from ports.declare_partial_output(call, "bias", getattr(call.sharding.input_port().desired, "dim", -1))

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        channels = input.ndim + getattr(self.port_in.desired, "dim", 0)
        input = ports.sharded_input(self, input, channels, self.sharded()[1])
        weight: Any = self.local("weight")["weight"]
        partial = self.compute(self.module, [input], weight, None, *args, **kwargs)
        return ports.partial_output(self, partial, "bias", channels)
