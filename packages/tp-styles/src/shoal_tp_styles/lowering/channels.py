"""Convolutions cut by output or input channels, and Bilinear cut by output features.

columns   x: R | S(d), W: S(0), b: S(0) -> y: S(channels)
rows      x: S(channels), W: S(1), b: R -> y: R | S(d), the bias once, after the reduction
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import DTensor, Partial, Replicate

from ..errors import UnsupportedModuleError
from ..sharding import Port
from .boundary import arrive_local, leave, leave_local, wrap_like
from .enter import enter
from .forward import Lowered, spec_of
from .regions import axis_dim, copy, gather, gather_partial, reduce, scatter, split, uneven

__all__ = ["ColumnChannels", "RowChannels"]


def _conv(module: Any, inputs: list[Tensor], weight: Any, bias: Any) -> Tensor:
    out: Tensor = module._conv_forward(inputs[0], weight, bias)
    return out


def _bilinear(module: Any, inputs: list[Tensor], weight: Any, bias: Any) -> Tensor:
    return functional.bilinear(inputs[0], inputs[1], weight, bias)


_COMPUTE: dict[type[nn.Module], Callable[[Any, list[Tensor], Any, Any], Tensor]] = {
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
    nn.Bilinear: _bilinear,
}


def _check(module: Any, kind: str) -> None:
    if getattr(module, "groups", 1) != 1:
        raise UnsupportedModuleError(
            f"{kind}: {module} has groups={module.groups}; only convolutions of one group are cut"
        )


class ColumnChannels(Lowered):
    """Stand-in for a Conv or Bilinear whose output channels are cut."""

    __slots__ = ("compute",)

    def resolve(self) -> None:
        _check(self.module, self.sharding.kind)
        self.compute = next(_COMPUTE[kind] for kind in type(self.module).__mro__ if kind in _COMPUTE)

    def __call__(self, *inputs: Tensor) -> Tensor:
        arrived = [self.arrive(x, port) for x, port in zip(inputs, self.sharding.inputs or (), strict=True)]
        local: Any = enter({"weight": self.params["weight"], "bias": self.params["bias"]})
        out = self.compute(self.module, arrived, local["weight"], local["bias"])
        port = self.port_out
        if port.layout == port.desired and self.sharding.local_outputs:
            return out
        spec = spec_of(self.params["weight"], "weight")
        dim = out.ndim + getattr(port.layout, "dim", -1)
        if self.sharding.local_outputs and port.desired == Replicate():
            return gather(out, self.comm, dim, spec.cuts[0].sizes)
        left = leave(out, port, self.mesh, (*out.shape[:dim], spec.shape[0], *out.shape[dim + 1 :]))
        return leave_local(left) if self.sharding.local_outputs else left

    def arrive(self, x: Tensor, port: Port | None) -> Tensor:
        """One replicated input, whose gradient is partial here."""
        port = port or self.port_in
        where = axis_dim(port.layout, self.comm)
        if isinstance(x, DTensor) or (where is None and port.layout != Replicate()):
            return arrive_local(x, port, self.mesh, grad=Partial())
        return copy(x, self.comm) if where is None else gather_partial(x, *where)


class RowChannels(Lowered):
    """Stand-in for a Conv whose input channels are cut."""

    __slots__ = ()

    def resolve(self) -> None:
        _check(self.module, self.sharding.kind)

    def __call__(self, input: Tensor) -> Tensor:
        spec = spec_of(self.params["weight"], "weight")
        port = self.port_in
        channels = input.ndim + getattr(port.desired, "dim", 0)
        if isinstance(input, DTensor) or port.layout not in (Replicate(), port.desired):
            input = arrive_local(input, port, self.mesh, grad=port.desired)
        elif port.layout == Replicate():
            input = split(input, self.comm, channels, spec.cuts[1].sizes)
        local: Any = enter({"weight": self.params["weight"], "bias": self.params["bias"]})
        partial = _conv(self.module, [input], local["weight"], None)
        bias = local["bias"]
        if bias is not None:
            bias = bias.view(-1, *(1,) * (partial.ndim - channels - 1))
        return self.summed(partial, bias, channels)

    def summed(self, partial: Tensor, bias: Tensor | None, channels: int) -> Tensor:
        """The partial output brought where it is wanted, with the bias."""
        port = self.port_out
        local = self.sharding.local_outputs
        where = axis_dim(port.desired, self.comm)
        dim = -1 if where is None else where[1] % partial.ndim
        if port.desired == Replicate():
            out = reduce(partial, self.comm)
        elif where is not None and dim != channels:
            if where[2] is None and partial.shape[dim] % self.comm.size:
                raise uneven(self.sharding.kind, partial.shape[dim], dim, self.comm)
            out = scatter(partial, self.comm, dim, where[2])
        else:
            whole = reduce(partial, self.comm)
            left = leave(whole if bias is None else whole + bias, Port(Replicate(), port.desired), self.mesh)
            return leave_local(left) if local else left
        out = out if bias is None else out + bias
        return out if local else wrap_like(out, port.desired, self.mesh, None)
