"""Linear layers that are composed of ports: low-rank adapters, and projections to a latent.

adapter   y = x W^T + scale * x A^T B^T    base and adapter run every collective together
    columns   x: R | S(d), W: S(0), A: R, B: S(0) -> y: S(-1)
    rows      x: S(-1), W: S(1), A: S(1), B: R -> y: R | S(d)
latent    x: R, W: R -> y: R               the gradient of the last features is summed over the ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..lowering.collective_functions import copy
from ..lowering.lowered import Lowered
from ..lowering.ports import (
    declare_partial_output,
    declare_replicated_input,
    declare_sharded_input,
    declare_sharded_output,
    own_input,
    partial_output,
    replicated_input,
    sharded_input,
    sharded_output,
)
from ..sharding.module_sharding import Adapter, Collective, LatentFeatures, ModuleCall


class AdapterLinear(Lowered):
    """A Linear with a low-rank adapter, by columns or by rows as its base."""

    __slots__ = ("rows",)

    def resolve(self) -> None:
        self.rows: bool = self.sharding.shards("lora_A")

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        adapter, weight = call.sharding.options_of(Adapter), call.module.get_parameter("weight")
        if call.sharding.shards("lora_A"):
            yield from declare_sharded_input(call)
            yield from declare_partial_output(call, "bias" if adapter.train_base else None)
            width = weight.shape[0]  # B is (out, rank)
        else:
            yield from declare_replicated_input(call)
            yield from declare_sharded_output(call)
            width = weight.shape[1]  # A is (rank, in)
        yield Collective("all_reduce", adapter.rank * width * weight.element_size(), backward=True)

    def __call__(self, input: Tensor) -> Tensor:
        spec = self.spec("weight")
        sharded: tuple[str, ...]
        if self.rows:
            x, sharded, whole = (
                sharded_input(self, input, input.ndim - 1, spec.sizes(1)),
                ("weight", "lora_A"),
                "lora_B",
            )
        else:
            x, sharded, whole = replicated_input(self, input), ("weight", "bias", "lora_B"), "lora_A"
        # Each rank multiplies the replicated factor with what it holds, so the factor's gradients are partial sums.
        p: Any = {**self.local(*sharded), **self.local(whole, comm=self.comm)}
        scale = self.sharding.options_of(Adapter).scale
        out: Tensor = linear(x, p["weight"], p.get("bias")) + scale * linear(linear(x, p["lora_A"]), p["lora_B"])
        if self.rows:
            return partial_output(self, out, "bias")
        return sharded_output(self, out, out.ndim - 1, spec.shape[0], spec.sizes(0))


class LatentLinear(Lowered):
    """A Linear of multi-head latent attention: the latent, then features that each head reads (of rotary positions)."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        out = call.output
        if out.requires_grad:
            read = out.numel() // out.shape[-1] * call.sharding.options_of(LatentFeatures).rotary
            yield Collective("all_reduce", read * out.element_size(), backward=True)

    def __call__(self, input: Tensor) -> Tensor:
        local: Any = self.local("weight", "bias")
        out = linear(own_input(self, input), local["weight"], local["bias"])
        rotary = self.sharding.options_of(LatentFeatures).rotary
        latent, read = torch.split_with_sizes(out, [out.shape[-1] - rotary, rotary], -1)
        return torch.cat([latent, copy(read, self.comm)], -1)
