"""Modules with sharded channels: convolutions, norms over channels, PReLU, Bilinear.

columns   x: R | S(d), W: S(out), b: S(0) -> y: S(channels)
rows      x: S(channels), W: S(in), b: R -> y: R | S(d), the bias once, after the reduction
groups    x: R | S(channels), W: S(groups), b: S(groups) -> y: S(channels) | R | S(d)

Transposed convolutions are convolutions whose weight is (in, out, ...). The file also has Bilinear,
sharded by columns, and a Linear with a weight of shape (in, out), by columns or by rows. Norms,
PReLU and convolutions of several groups compute every group of channels by itself, without
communication inside: a rank holds complete groups, reads their input channels and computes their
output channels. Ranks may hold different numbers of groups, or none.
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
from ..lowering.parameters import local_parameters, run_own_forward
from ..lowering.ports import from_local, local_input
from ..sharding.module_kinds import CONVOLUTIONS, TransposedLinear, keeps_forward, kinds_of

Compute = Callable[..., Tensor]


def _convolve(
    module: Any,
    inputs: Sequence[Tensor],
    weight: Any,
    bias: Any,
    output_size: Any = None,
    *,
    groups: int = 1,
) -> Tensor:
    """Compute the convolution of a module on this rank's channels, in `groups` groups, perhaps 0.

    x is (*batch, in, *spatial). The weight is (out, in / groups, *kernel), or in a transposed
    convolution (in, out / groups, *kernel). Kernels refuse empty shards. A rank without channels
    computes with channels of zeros, so that it takes part in every collective, forward and
    backward.
    """
    (x,) = inputs
    spatial = weight.ndim - 2
    # dims of the weight
    in_dim = 0 if module.transposed else 1
    out_dim = 1 - in_dim
    # The input may have no batch dim.
    channels = x.ndim - spatial - 1
    is_empty = not groups or not weight.shape[out_dim]
    if is_empty or not weight.shape[in_dim]:
        # Example: this rank has none of the groups, of 2 input and 3 output channels each, so x is
        # (4, 0, 9) and W is (0, 2, 5). It computes with x (4, 2, 9) and W (1, 2, 5).
        in_channels = weight.shape[in_dim] * groups
        for dim in (0, 1):
            weight = append_zeros(weight, dim, int(weight.shape[dim] == 0))
        if bias is not None:
            bias = append_zeros(bias, 0, weight.shape[out_dim] - len(bias))
        groups = max(groups, 1)
        x = append_zeros(x, channels, weight.shape[in_dim] * groups - in_channels)
    padding = module.padding
    options: tuple[Any, ...]
    if module.transposed:
        output_padding = module._output_padding(
            x,
            output_size,
            module.stride,
            module.padding,
            module.kernel_size,
            spatial,
            module.dilation,
        )
        function = getattr(functional, f"conv_transpose{spatial}d")
        options = (output_padding, groups, module.dilation)
    else:
        function = getattr(functional, f"conv{spatial}d")
        options = (module.dilation, groups)
        if module.padding_mode != "zeros":
            x = functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            padding = 0
    out: Tensor = function(x, weight, bias, module.stride, padding, *options)
    return out.narrow(channels, 0, 0) if is_empty else out


def append_zeros(tensor: Tensor, dim: int, count: int) -> Tensor:
    """Append so many indices of zeros to a dim of a tensor."""
    if not count:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = count
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _bilinear(module: Any, inputs: Sequence[Tensor], weight: Any, bias: Any) -> Tensor:
    left, right = inputs
    return functional.bilinear(left, right, weight, bias)


def _transposed_linear(module: Any, inputs: Sequence[Tensor], weight: Any, bias: Any) -> Tensor:
    (x,) = inputs
    return functional.linear(x, weight.t(), bias)


_COMPUTE: dict[type[nn.Module], Compute] = {
    **dict.fromkeys(CONVOLUTIONS, _convolve),
    nn.Bilinear: _bilinear,
    TransposedLinear: _transposed_linear,
}


class Channels(Lowered):
    """A Conv, ConvTranspose, Bilinear or transposed Linear with sharded output or input dims."""

    __slots__ = ("compute", "is_row_sharded")

    def resolve(self) -> None:
        kinds = [cls for cls in kinds_of(self.module) if cls in _COMPUTE]
        self.compute: Compute = _COMPUTE[kinds[0]]
        self.is_row_sharded: bool = isinstance(self.port_out.layout, Partial)

    def __call__(self, input: Tensor, *others: Any, **kwargs: Any) -> Tensor:
        # Bilinear has two inputs; the arguments after the inputs are for the computation.
        count = len(self.sharding.inputs or ())
        second_inputs = others[: count - 1]
        options = others[count - 1 :]
        if self.is_row_sharded:
            inputs = [ports.sharded_input(self, input)]
            local = self.local("weight")
        else:
            inputs = [ports.replicated_input(self, x) for x in (input, *second_inputs)]
            local = self.local("weight", "bias")
        bias = local.get("bias")
        out = self.compute(self.module, inputs, local["weight"], bias, *options, **kwargs)
        if self.is_row_sharded:
            return ports.partial_output(self, out, "bias")
        return ports.sharded_output(self, out)


class ChannelsOfGroups(NamedTuple):
    """The sharding of the groups of channels of a module.

    Attributes:
        groups: number of groups.
        unit: number of groups that stay together.
        into: number of input channels of a group.
        out_of: number of output channels of a group.
        rows: rows of a group in the weight, along dim 0.
        dim: the dim of the channels in the input.
    """

    groups: int
    unit: int
    into: int
    out_of: int
    rows: int
    dim: int = 1

    @classmethod
    def of(cls, module: Any, multiple_of: int) -> Self:
        """Return the groups of a module whose ranks hold multiples of so many output channels.

        Ranks of a group norm hold any complete groups.
        """
        if isinstance(module, CONVOLUTIONS):
            # Example: 6 input and 12 output channels in 6 groups -> 1 and 2 in each group.
            into = module.in_channels // module.groups
            out_of = module.out_channels // module.groups
            # Example: groups of 2 output channels, in multiples of 4 channels -> 2 groups.
            unit = lcm(out_of, multiple_of) // out_of
            rows = into if module.transposed else out_of
            # (N, C, H, W): dim -3
            dim = -1 - len(module.kernel_size)
            return cls(module.groups, unit, into, out_of, rows=rows, dim=dim)
        if isinstance(module, nn.GroupNorm):
            # Example: 6 channels in 3 groups -> 2 in each group.
            size = module.num_channels // module.num_groups
            return cls(module.num_groups, unit=1, into=size, out_of=size, rows=size)
        channels = module.num_parameters if isinstance(module, nn.PReLU) else module.num_features
        return cls(channels, unit=multiple_of, into=1, out_of=1, rows=1)


class GroupedChannels(Lowered):
    """Forward of a module of which each rank holds some complete groups of channels.

    A subclass of torch's modules that has its own forward runs on DTensors.
    """

    __slots__ = ("groups", "into", "options", "out_of", "runs_locally")

    def resolve(self) -> None:
        self.options: ChannelsOfGroups = self.sharding.options_of(ChannelsOfGroups)
        options = self.options
        # Example: 6 groups, of which 2 stay together, on 4 ranks -> 2 2 2 0 groups.
        by_unit = Shard(0, multiple_of=options.unit)
        groups = shard_sizes(options.groups, by_unit, self.comm.size)
        self.groups: int = groups[self.comm.rank]
        # Example: 5 groups of 2 input and 3 output channels on 4 ranks -> 4 4 2 0 and 6 6 3 0.
        self.into: tuple[int, ...] = tuple(count * options.into for count in groups)
        self.out_of: tuple[int, ...] = tuple(count * options.out_of for count in groups)
        # All batch norms have the forward of `BatchNorm1d`.
        kinds = (*CONVOLUTIONS, nn.PReLU, nn.GroupNorm, nn.BatchNorm1d)
        self.runs_locally: bool = any(keeps_forward(self.module, cls) for cls in kinds)

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options = self.options
        x = ports.sharded_input(self, input, self.into)
        channels = self.into[self.comm.rank]
        got = x.shape[options.dim]
        if got != channels:
            multiple = options.unit * options.into
            raise LayoutError(
                f"{self.sharding.style}: {self.module} has {self.groups} complete groups on this "
                f"rank, with {channels} input channels, but the input has {got}; shard the "
                f"preceding module by the same channels: ColwiseParallel().aligned({multiple})"
            )
        if self.runs_locally:
            out = self.run_locally(x, *args, **kwargs)
        else:
            out = self.run_on_dtensors(x)
        return ports.sharded_output(self, out, self.out_of)

    def run_locally(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output channels of this rank's groups.

        A rank without groups computes a group of zeros, because kernels refuse empty groups.
        """
        module = self.module
        options = self.options
        if isinstance(module, CONVOLUTIONS):
            local = self.local("weight", "bias")
            weight = local["weight"]
            bias = local["bias"]
            return _convolve(module, [x], weight, bias, *args, groups=self.groups, **kwargs)
        values: dict[str, Any] = {**self.local(*self.params), **local_parameters(module._buffers)}
        if not self.groups:
            for name, tensor in values.items():
                # `num_batches_tracked` of a batch norm is a number
                if tensor is not None and tensor.ndim:
                    values[name] = append_zeros(tensor, 0, options.out_of)
            x = append_zeros(x, options.dim, options.into)
        values["num_groups"] = max(self.groups, 1)
        out: Tensor = run_own_forward(module, values, x)
        return out if self.groups else out.narrow(options.dim, 0, 0)

    def run_on_dtensors(self, x: Tensor) -> Tensor:
        """Run the module's own forward on the channels of all ranks, as DTensors."""
        layout = self.port_in.desired
        shape = [*x.shape]
        shape[self.options.dim] = sum(self.into)
        out = type(self.module).forward(self.module, from_local(x, layout, self.mesh, shape))
        return local_input(out, self.port_in, self.mesh, grad=layout)
