"""Modules with sharded channels: convolutions, norms, activations, and others of their shape.

columns   x: R | S(d), W: S(out), b: S(0) -> y: S(channels)
rows      x: S(channels), W: S(in), b: R -> y: R | S(d), the bias once, after the reduction
groups    x: R | S(channels), W: S(groups), b: S(groups) -> y: S(channels) | R | S(d), no communication inside

Transposed convolutions are convolutions whose weight is (in, out, ...). Bilinear is sharded by
columns too, a Linear with a weight of (in, out) by columns or by rows. Norms, PReLU and
convolutions of several groups treat every group of channels alone: a rank holds complete groups,
reads their input channels and computes their output channels. Ranks may hold different numbers of
groups, also none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import Partial, Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import shard_sizes

from ..lowering import ports
from ..lowering.lowered import Lowered
from ..lowering.parameters import local_parameters, own_forward
from ..lowering.ports import from_local, local_input
from ..sharding.module_kinds import CONVOLUTIONS, TransposedLinear, keeps_forward, kinds_of

Compute = Callable[..., Tensor]


def _convolved(
    module: Any,
    inputs: Sequence[Tensor],
    weight: Any,
    bias: Any,
    output_size: Any = None,
    *,
    groups: int = 1,
) -> Tensor:
    """Compute the convolution of a module with other channels, in `groups` groups or in none.

    x: (*batch, in, *spatial), weight: (out, in / groups, *kernel), of a transposed one (in, out /
    groups, *kernel). Kernels refuse an empty shard; a channel of zeros takes its place, so that a
    rank without channels takes part in every collective, forward and backward.
    """
    (x,) = inputs
    spatial = weight.ndim - 2
    into, out_of = (0, 1) if module.transposed else (1, 0)  # dims of the weight
    # there may be no batch dim
    channels = x.ndim - spatial - 1
    empty = not groups or not weight.shape[out_of]
    if empty or not weight.shape[into]:
        # No groups of 2 input and 3 output channels, x (4, 0, 9), W (0, 2, 5): as (4, 2, 9) and (1,
        # 2, 5).
        held = weight.shape[into] * groups
        weight = with_zeros(
            with_zeros(weight, 0, int(len(weight) == 0)), 1, int(weight.shape[1] == 0)
        )
        bias = None if bias is None else with_zeros(bias, 0, weight.shape[out_of] - len(bias))
        groups = max(groups, 1)
        x = with_zeros(x, channels, weight.shape[into] * groups - held)
    if module.transposed:
        padding = module.padding
        extra = (output_size, module.stride, module.padding, module.kernel_size, spatial)
        more: tuple[Any, ...] = (
            module._output_padding(x, *extra, module.dilation),
            groups,
            module.dilation,
        )
    else:
        padding = module.padding
        more = (module.dilation, groups)
        if module.padding_mode != "zeros":
            x = functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            padding = 0
    function = getattr(functional, f"conv{'_transpose' * module.transposed}{spatial}d")
    out: Tensor = function(x, weight, bias, module.stride, padding, *more)
    return out.narrow(channels, 0, 0) if empty else out


def with_zeros(tensor: Tensor, dim: int, more: int) -> Tensor:
    """Append so many indices of zeros to a dim of a tensor."""
    shape = list(tensor.shape)
    shape[dim] = more
    return torch.cat([tensor, tensor.new_zeros(shape)], dim) if more else tensor


_COMPUTE: dict[type[nn.Module], Compute] = {
    **dict.fromkeys(CONVOLUTIONS, _convolved),
    nn.Bilinear: lambda module, inputs, weight, bias: functional.bilinear(
        inputs[0], inputs[1], weight, bias
    ),
    TransposedLinear: lambda module, inputs, weight, bias: functional.linear(
        inputs[0], weight.t(), bias
    ),
}


class Channels(Lowered):
    """A Conv, ConvTranspose, Bilinear or transposed Linear with sharded output or input dims."""

    __slots__ = ("compute", "rows")

    def resolve(self) -> None:
        self.compute: Compute = next(
            _COMPUTE[known] for known in kinds_of(self.module) if known in _COMPUTE
        )
        self.rows: bool = isinstance(self.port_out.layout, Partial)

    def __call__(self, input: Tensor, *others: Any, **kwargs: Any) -> Tensor:
        # two of Bilinear; what follows is for the computation
        count = len(self.sharding.inputs or ())
        if self.rows:
            arrived = [ports.sharded_input(self, input)]
            local = self.local("weight")
        else:
            arrived = [ports.replicated_input(self, x) for x in (input, *others[: count - 1])]
            local = self.local("weight", "bias")
        out = self.compute(
            self.module, arrived, local["weight"], local.get("bias"), *others[count - 1 :], **kwargs
        )
        return (
            ports.partial_output(self, out, "bias")
            if self.rows
            else ports.sharded_output(self, out)
        )


class ChannelsOfGroups(NamedTuple):
    """The sharding of the groups of channels of a module."""

    groups: int  # number of groups
    unit: int  # groups that stay together
    into: int  # input and output channels of a group
    out_of: int
    rows: int  # of a group in the weight, along dim 0
    dim: int = 1  # the dim of the channels

    @classmethod
    def of(cls, module: Any, multiple_of: int) -> Self:
        """Return the groups of a module whose ranks hold multiples of so many output channels.

        Ranks of a group norm hold any complete groups.
        """
        if isinstance(module, CONVOLUTIONS):
            # 6, 12 by 6: 1, 2
            into = module.in_channels // module.groups
            out_of = module.out_channels // module.groups
            # groups of 2 channels, multiples of 4: 2 groups
            unit = lcm(out_of, multiple_of) // out_of
            rows = into if module.transposed else out_of
            # (N, C, H, W): dim -3
            return cls(module.groups, unit, into, out_of, rows, -1 - len(module.kernel_size))
        if isinstance(module, nn.GroupNorm):
            size = module.num_channels // module.num_groups  # 6 channels in 3 groups: 2
            return cls(module.num_groups, 1, size, size, size)
        channels = module.num_parameters if isinstance(module, nn.PReLU) else module.num_features
        return cls(channels, multiple_of, 1, 1, 1)


class GroupedChannels(Lowered):
    """A module of which each rank holds some groups.

    A module with a forward of its own runs on DTensors.
    """

    __slots__ = ("groups", "into", "options", "out_of", "runs_locally")

    def resolve(self) -> None:
        self.options: ChannelsOfGroups = self.sharding.options_of(ChannelsOfGroups)
        # 6 groups of 2 output channels, multiples of 4, on 4 ranks: 2, 2, 2, 0
        groups = shard_sizes(
            self.options.groups, Shard(0, multiple_of=self.options.unit), self.comm.size
        )
        self.groups: int = groups[self.comm.rank]
        # 5 groups of 2 input and 3 output channels on 4 ranks: 4 4 2 0 and 6 6 3 0.
        self.into: tuple[int, ...] = tuple(count * self.options.into for count in groups)
        self.out_of: tuple[int, ...] = tuple(count * self.options.out_of for count in groups)
        # whose forward all batch norms have
        kinds = (*CONVOLUTIONS, nn.PReLU, nn.GroupNorm, nn.BatchNorm1d)
        self.runs_locally: bool = any(keeps_forward(self.module, kind) for kind in kinds)

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dim = self.options.dim
        x = ports.sharded_input(self, input, self.into)
        if x.shape[dim] != self.into[self.comm.rank]:
            raise LayoutError(
                f"{self.sharding.style}: {self.module} holds {self.groups} complete groups here, "
                f"of {self.into[self.comm.rank]} input channels, but {x.shape[dim]} arrived; shard "
                "the module before it by the same channels: "
                f"ColwiseParallel().aligned({self.options.unit * self.options.into})"
            )
        out = self.computed(x, *args, **kwargs) if self.runs_locally else self.on_dtensors(x)
        return ports.sharded_output(self, out, self.out_of)

    def computed(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output channels of this rank's groups.

        A rank without groups computes a group of zeros, because kernels refuse empty groups.
        """
        module = self.module
        options = self.options
        if isinstance(module, CONVOLUTIONS):
            p = self.local("weight", "bias")
            return _convolved(
                module, [x], p["weight"], p["bias"], *args, groups=self.groups, **kwargs
            )
        values: dict[str, Any] = {**self.local(*self.params), **local_parameters(module._buffers)}
        if not self.groups:
            for name, tensor in values.items():
                if tensor is not None and tensor.ndim:  # of a batch norm one is a number
                    values[name] = with_zeros(tensor, 0, options.out_of)
            x = with_zeros(x, options.dim, options.into)
        out: Tensor = own_forward(module, {**values, "num_groups": max(self.groups, 1)}, x)
        return out if self.groups else out.narrow(options.dim, 0, 0)

    def on_dtensors(self, x: Tensor) -> Tensor:
        """Run the module's own forward on the channels of all ranks, as DTensors."""
        layout = self.port_in.desired
        shape = [*x.shape]
        shape[self.options.dim] = sum(self.into)
        out = type(self.module).forward(self.module, from_local(x, layout, self.mesh, shape))
        return local_input(out, self.port_in, self.mesh, grad=layout)
