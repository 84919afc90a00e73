"""Linear layers with low-rank adapters, on local tensors: base and adapter share every collective."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from shoal_dtensor import DTensor, Partial, Replicate

from .boundary import arrive_local, leave, leave_local
from .enter import enter
from .forward import Lowered, spec_of
from .partial import leave_partial
from .regions import axis_dim, copy, gather, gather_partial, split

__all__ = ["AdapterColumn", "AdapterRow"]


class AdapterColumn(Lowered):
    """x: R | S(d), W: S(0), A: R, B: S(0) -> y: S(-1)."""

    __slots__ = ("where",)

    def resolve(self) -> None:
        port = self.port_in
        self.where = axis_dim(port.layout, self.comm)

    def __call__(self, input: Tensor) -> Tensor:
        port, out_port = self.port_in, self.port_out
        if isinstance(input, DTensor) or (self.where is None and port.layout != Replicate()):
            input = arrive_local(input, port, self.mesh, grad=Partial())
        elif self.where is not None:
            input = gather_partial(input, *self.where)
        else:
            input = copy(input, self.comm)
        p: Any = {
            **enter({"weight": self.params["weight"], "bias": self.params["bias"], "lora_B": self.params["lora_B"]}),
            # Every rank's columns see all of A, so its gradients are partial sums.
            **enter({"lora_A": self.params["lora_A"]}, self.comm),
        }
        scale: Any = self.sharding.options["scale"]
        out: Tensor = linear(input, p["weight"], p["bias"]) + scale * linear(linear(input, p["lora_A"]), p["lora_B"])
        if out_port.layout == out_port.desired and self.sharding.local_outputs:
            return out
        spec = spec_of(self.params["weight"], "weight")
        if self.sharding.local_outputs and out_port.desired == Replicate():
            return gather(out, self.comm, out.ndim - 1, spec.cut(0).sizes)
        left = leave(out, out_port, self.mesh, (*out.shape[:-1], spec.shape[0]))
        return leave_local(left) if self.sharding.local_outputs else left


class AdapterRow(Lowered):
    """x: S(-1), W: S(1), A: S(1), B: R -> y: R | S(d); the partial sums of base and adapter are reduced together."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        port = self.port_in
        spec = spec_of(self.params["weight"], "weight")
        if isinstance(input, DTensor) or (port.layout not in (Replicate(), port.desired)):
            input = arrive_local(input, port, self.mesh, grad=port.desired)
        elif port.layout == Replicate():
            input = split(input, self.comm, input.ndim - 1, spec.cut(1).sizes)
        p: Any = {
            **enter({"weight": self.params["weight"], "lora_A": self.params["lora_A"]}),
            # B meets only this rank's part of A x, so its gradients are partial sums.
            **enter({"lora_B": self.params["lora_B"]}, self.comm),
        }
        scale: Any = self.sharding.options["scale"]
        partial = linear(input, p["weight"]) + scale * linear(linear(input, p["lora_A"]), p["lora_B"])
        return leave_partial(self, partial, self.params["bias"])
