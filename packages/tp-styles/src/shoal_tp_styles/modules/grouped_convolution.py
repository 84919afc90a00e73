"""Convolutions of several groups, depthwise ones among them, whose groups are sharded.

x: R | S(channels), W: S(groups), b: S(groups) -> y: S(channels) | R | S(d)        no communication inside

A rank holds complete groups: it reads their input channels alone and computes their output channels alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import Any, Self

import torch
from torch import Tensor

from shoal_dtensor import Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import shard_sizes
from shoal_mesh.internal import dataclass

from ..lowering.lowered import Lowered
from ..lowering.ports import declare_sharded_input, declare_sharded_output, sharded_input, sharded_output
from ..sharding.collective import Collective
from ..sharding.module_sharding import ModuleCall, OwnOptions
from .convolution import convolved


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

    def held(self, ranks: int) -> list[int]:
        """Groups of each rank.

        Example:
            >>> ChannelsOfGroups.of(torch.nn.Conv1d(6, 12, 3, groups=6), 4).held(4)
            [2, 2, 2, 0]
        """
        return shard_sizes(self.groups, Shard(0, multiple_of=self.unit), ranks)


class GroupedChannels(Lowered):
    """A convolution of which each rank holds some groups."""

    __slots__ = ("held",)

    def resolve(self) -> None:
        self.held: list[int] = self.options.held(self.comm.size)

    @property
    def options(self) -> ChannelsOfGroups:
        """What the style declared."""
        options = self.sharding.options
        assert isinstance(options, ChannelsOfGroups), "the style declares them"
        return options

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from declare_sharded_input(call)
        yield from declare_sharded_output(call)

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options, groups = self.options, self.held[self.comm.rank]
        into, out_of = ([count * size for count in self.held] for size in (options.into, options.out_of))
        x = sharded_input(self, input, input.ndim + options.dim, tuple(into))
        if x.shape[options.dim] != into[self.comm.rank]:
            raise LayoutError(
                f"{self.sharding.style}: {self.module} holds {groups} complete groups here, of "
                f"{into[self.comm.rank]} input channels, but {x.shape[options.dim]} arrived; shard the module before "
                f"it by ColwiseParallel().aligned({options.unit * options.into})"
            )
        local: Any = self.local("weight", "bias")
        out = self.computed(x, local["weight"], local["bias"], groups, *args, **kwargs)
        channels = out.ndim + options.dim
        return sharded_output(self, out, channels, sum(out_of), tuple(out_of))

    def computed(  # what a convolution is made of
        self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, output_size: Any = None
    ) -> Tensor:
        """The output channels of so many groups; of none, which kernels refuse, by way of a group of zeros."""
        if groups:
            return convolved(self.module, x, weight, bias, groups, output_size)
        options, dim = self.options, x.ndim + self.options.dim
        zeros = weight.new_zeros
        x = torch.cat([x, zeros(*x.shape[:dim], options.into, *x.shape[dim + 1 :])], dim)
        weight = torch.cat([weight, zeros(options.rows, *weight.shape[1:])])
        bias = None if bias is None else torch.cat([bias, zeros(options.out_of)])
        return convolved(self.module, x, weight, bias, 1, output_size).narrow(dim, 0, 0)
