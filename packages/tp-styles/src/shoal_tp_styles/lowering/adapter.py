"""Linear layers with low-rank adapters, on local tensors: base and adapter share every collective."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from .enter import enter
from .forward import Lowered, spec_of
from .ports import arrive_cut, arrive_whole, leave_cut, leave_partial

__all__ = ["AdapterColumn", "AdapterRow"]


class AdapterColumn(Lowered):
    """x: R | S(d), W: S(0), A: R, B: S(0) -> y: S(-1)."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        input = arrive_whole(self, input)
        p: Any = {
            **enter({"weight": self.params["weight"], "bias": self.params["bias"], "lora_B": self.params["lora_B"]}),
            # Every rank's columns see all of A, so its gradients are partial sums.
            **enter({"lora_A": self.params["lora_A"]}, self.comm),
        }
        scale: Any = self.sharding.options["scale"]
        out: Tensor = linear(input, p["weight"], p["bias"]) + scale * linear(linear(input, p["lora_A"]), p["lora_B"])
        spec = spec_of(self.params["weight"], "weight")
        return leave_cut(self, out, out.ndim - 1, spec.shape[0], spec.sizes(0))


class AdapterRow(Lowered):
    """x: S(-1), W: S(1), A: S(1), B: R -> y: R | S(d); the partial sums of base and adapter are reduced together."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        spec = spec_of(self.params["weight"], "weight")
        input = arrive_cut(self, input, input.ndim - 1, spec.sizes(1))
        p: Any = {
            **enter({"weight": self.params["weight"], "lora_A": self.params["lora_A"]}),
            # B meets only this rank's part of A x, so its gradients are partial sums.
            **enter({"lora_B": self.params["lora_B"]}, self.comm),
        }
        scale: Any = self.sharding.options["scale"]
        partial = linear(input, p["weight"]) + scale * linear(linear(input, p["lora_A"]), p["lora_B"])
        return leave_partial(self, partial, self.params["bias"])
