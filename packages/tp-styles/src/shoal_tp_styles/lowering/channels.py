"""Convolutions cut by output or input channels, Bilinear cut by output features, Linears that lie as (in, out).

columns   x: R | S(d), W: S(out), b: S(0) -> y: S(channels)
rows      x: S(channels), W: S(in), b: R -> y: R | S(d), the bias once, after the reduction
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import DTensor, Partial, Replicate

from ..errors import UnsupportedModuleError
from ..sharding import Port
from ..structure import TransposedLinear, kinds_of
from .boundary import arrive_local, leave, leave_local
from .enter import enter
from .forward import Lowered, spec_of
from .partial import leave_partial
from .regions import Sizes, axis_dim, copy, gather, gather_partial, split

__all__ = ["ColumnChannels", "RowChannels"]

Compute = Callable[[Any, list[Tensor], Any, Any], Tensor]


def _conv(module: Any, inputs: list[Tensor], weight: Any, bias: Any) -> Tensor:
    out: Tensor = module._conv_forward(inputs[0], weight, bias)
    return out


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
        return spec.shape[dim], spec.cut(dim).sizes


class ColumnChannels(_Channels):
    """Stand-in for a Conv, Bilinear or turned Linear whose output channels are cut."""

    __slots__ = ()

    def __call__(self, *inputs: Tensor) -> Tensor:
        arrived = [self.arrive(x, port) for x, port in zip(inputs, self.sharding.inputs or (), strict=True)]
        local: Any = enter({"weight": self.params["weight"], "bias": self.params["bias"]})
        out = self.compute(self.module, arrived, local["weight"], local["bias"])
        port = self.port_out
        if port.layout == port.desired and self.sharding.local_outputs:
            return out
        size, sizes = self.cut()
        dim = out.ndim + getattr(port.layout, "dim", -1)
        if self.sharding.local_outputs and port.desired == Replicate():
            return gather(out, self.comm, dim, sizes)
        left = leave(out, port, self.mesh, (*out.shape[:dim], size, *out.shape[dim + 1 :]))
        return leave_local(left) if self.sharding.local_outputs else left

    def arrive(self, x: Tensor, port: Port | None) -> Tensor:
        """One replicated input, whose gradient is partial here."""
        port = port or self.port_in
        where = axis_dim(port.layout, self.comm)
        if isinstance(x, DTensor) or (where is None and port.layout != Replicate()):
            return arrive_local(x, port, self.mesh, grad=Partial())
        return copy(x, self.comm) if where is None else gather_partial(x, *where)


class RowChannels(_Channels):
    """Stand-in for a Conv or turned Linear whose input channels are cut."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        port = self.port_in
        channels = input.ndim + getattr(port.desired, "dim", 0)
        if isinstance(input, DTensor) or port.layout not in (Replicate(), port.desired):
            input = arrive_local(input, port, self.mesh, grad=port.desired)
        elif port.layout == Replicate():
            input = split(input, self.comm, channels, self.cut()[1])
        weight: Any = enter({"weight": self.params["weight"]})["weight"]
        partial = self.compute(self.module, [input], weight, None)
        return leave_partial(self, partial, self.params["bias"], channels)
