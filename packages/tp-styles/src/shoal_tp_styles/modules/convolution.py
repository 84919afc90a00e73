"""Convolutions sharded by output or input channels, Bilinear by output features, Linears with a weight of (in, out).

columns   x: R | S(d), W: S(out), b: S(0) -> y: S(channels)
rows      x: S(channels), W: S(in), b: R -> y: R | S(d), the bias once, after the reduction
groups    x: R | S(channels), W: S(groups), b: S(groups) -> y: S(channels) | R | S(d), no communication inside

Transposed convolutions are convolutions whose weight is (in, out, ...).  Of a convolution of several groups, depthwise
ones among them, a rank holds complete groups: it reads their input channels and computes their output channels alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import shard_sizes

from ..lowering import ports
from ..lowering.collective_functions import Sizes
from ..lowering.lowered import Lowered
from ..sharding.module_kinds import TransposedLinear, kinds_of
from ..sharding.module_sharding import Collective, ModuleCall, OwnOptions

Compute = Callable[..., Tensor]


def convolved(  # what a convolution is made of
    module: Any, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int = 1, output_size: Any = None
) -> Tensor:
    """The convolution of a module, with other channels and as many groups.

    Args:
        module: a `nn.Conv` or `nn.ConvTranspose` of 1, 2 or 3 spatial dims.
        x: (*batch, in, *spatial).
        weight: (out, in / groups, *kernel), of a transposed one (in, out / groups, *kernel).
        bias: (out,).
        groups: number of groups.
        output_size: of a transposed convolution, the spatial sizes of its output.
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
        x, weight = _with_zeros(x, channels), _with_zeros(weight, into)
    if no_output:
        weight, bias = _with_zeros(weight, out_of), None if bias is None else _with_zeros(bias, 0)
    out = convolved(module, x, weight, bias, output_size=output_size)
    return out.narrow(channels, 0, 0) if no_output else out


def _with_zeros(tensor: Tensor, dim: int, more: int = 1) -> Tensor:
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


@dataclass(frozen=True, slots=True)
class ChannelsOfGroups(OwnOptions):
    """How the groups of a convolution are sharded.

    Attributes:
        groups: number of groups.
        unit: groups that stay together.
        into, out_of: input and output channels of a group.
        rows: of a group in the weight, along dim 0.
        dim: the dim of the channels, from the end.
    """

    groups: int
    unit: int
    into: int
    out_of: int
    rows: int
    dim: int

    @classmethod
    def of(cls, module: Any, multiple_of: int) -> Self:
        """Of a convolution, whose ranks hold multiples of so many output channels."""
        into, out_of = module.in_channels // module.groups, module.out_channels // module.groups
        unit = lcm(out_of, multiple_of) // out_of
        rows = into if module.transposed else out_of
        return cls(module.groups, unit, into, out_of, rows, -1 - len(module.kernel_size))

    @property
    def input(self) -> Shard:
        """The layout of the input."""
        return Shard(self.dim, multiple_of=self.unit * self.into)

    @property
    def output(self) -> Shard:
        """The layout of the output."""
        return Shard(self.dim, multiple_of=self.unit * self.out_of)

    @property
    def parameters(self) -> dict[str, Shard]:
        """The placements of the weight and the bias."""
        weight, bias = self.unit * self.rows, self.unit * self.out_of
        return {"weight": Shard(0, multiple_of=weight), "bias": Shard(0, multiple_of=bias)}

    def per_rank(self, ranks: int) -> list[int]:
        """Groups of each rank.

        Example:
            >>> ChannelsOfGroups.of(torch.nn.Conv1d(6, 12, 3, groups=6), 4).per_rank(4)
            [2, 2, 2, 0]
        """
        return shard_sizes(self.groups, Shard(0, multiple_of=self.unit), ranks)


class GroupedChannels(Lowered):
    """A convolution of which each rank holds some groups."""

    __slots__ = ("groups", "options")
    collectives = ports.declares(ports.declare_sharded_input, ports.declare_sharded_output)

    def resolve(self) -> None:
        self.options: ChannelsOfGroups = self.sharding.options_of(ChannelsOfGroups)
        self.groups: list[int] = self.options.per_rank(self.comm.size)

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options, groups = self.options, self.groups[self.comm.rank]
        into, out_of = ([count * size for count in self.groups] for size in (options.into, options.out_of))
        x = ports.sharded_input(self, input, input.ndim + options.dim, tuple(into))
        if x.shape[options.dim] != into[self.comm.rank]:
            raise LayoutError(
                f"{self.sharding.style}: {self.module} holds {groups} complete groups here, of "
                f"{into[self.comm.rank]} input channels, but {x.shape[options.dim]} arrived; shard the module before "
                f"it by ColwiseParallel().aligned({options.unit * options.into})"
            )
        local: Any = self.local("weight", "bias")
        out = self.computed(x, local["weight"], local["bias"], groups, *args, **kwargs)
        channels = out.ndim + options.dim
        return ports.sharded_output(self, out, channels, sum(out_of), tuple(out_of))

    def computed(  # what a convolution is made of
        self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, output_size: Any = None
    ) -> Tensor:
        """The output channels of so many groups; of none, which kernels refuse, by way of a group of zeros."""
        if groups:
            return convolved(self.module, x, weight, bias, groups, output_size)
        options, dim = self.options, x.ndim + self.options.dim
        x, weight = _with_zeros(x, dim, options.into), _with_zeros(weight, 0, options.rows)
        bias = None if bias is None else _with_zeros(bias, 0, options.out_of)
        return convolved(self.module, x, weight, bias, 1, output_size).narrow(dim, 0, 0)
