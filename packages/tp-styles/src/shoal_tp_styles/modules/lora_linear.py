"""Linear layers with low-rank adapters, on local tensors: base and adapter run every collective together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

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
from ..sharding.module_sharding import Adapter, ModuleCall


def _adapter(options: object) -> Adapter:
    assert isinstance(options, Adapter), "the style gave rank and scale"
    return options


class AdapterColumn(Lowered):
    """x: R | S(d), W: S(0), A: R, B: S(0) -> y: S(-1)."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from declare_replicated_input(call)
        yield from declare_sharded_output(call)
        weight: Any = call.module.weight
        nbytes = _adapter(call.sharding.options).rank * weight.shape[1] * weight.element_size()
        yield Collective("all_reduce", nbytes, backward=True)  # the gradient of A

    def __call__(self, input: Tensor) -> Tensor:
        input = replicated_input(self, input)
        p: Any = {
            **self.local("weight", "bias", "lora_B"),
            # Every rank's columns read all of A, so its gradients are partial sums.
            **self.local("lora_A", comm=self.comm),
        }
        scale = _adapter(self.sharding.options).scale
        out: Tensor = linear(input, p["weight"], p["bias"]) + scale * linear(linear(input, p["lora_A"]), p["lora_B"])
        spec = self.spec("weight")
        return sharded_output(self, out, out.ndim - 1, spec.shape[0], spec.sizes(0))


class AdapterRow(Lowered):
    """x: S(-1), W: S(1), A: S(1), B: R -> y: R | S(d); the partial sums of base and adapter are reduced together."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from declare_sharded_input(call)
        yield from declare_partial_output(call, "bias" if _adapter(call.sharding.options).train_base else None)
        weight: Any = call.module.weight
        nbytes = weight.shape[0] * _adapter(call.sharding.options).rank * weight.element_size()
        yield Collective("all_reduce", nbytes, backward=True)  # the gradient of B

    def __call__(self, input: Tensor) -> Tensor:
        spec = self.spec("weight")
        input = sharded_input(self, input, input.ndim - 1, spec.sizes(1))
        p: Any = {
            **self.local("weight", "lora_A"),
            # B is multiplied with this rank's summand of A x, so its gradients are partial sums.
            **self.local("lora_B", comm=self.comm),
        }
        scale = _adapter(self.sharding.options).scale
        partial = linear(input, p["weight"]) + scale * linear(linear(input, p["lora_A"]), p["lora_B"])
        return partial_output(self, partial, "bias")
