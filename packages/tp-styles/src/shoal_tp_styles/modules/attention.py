"""Multi-head attention on the rank's own heads.

query, key, value: R -> output: R | S(d), by one reduction; the averaged attention weights by another, where
`need_weights` asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import DTensor
from shoal_dtensor.errors import UnsupportedModuleError

from ..lowering.collective_functions import copy, reduce
from ..lowering.parameters import local_parameters
from ..lowering.ports import declare_partial_output, declare_replicated_input, partial_output
from ..sharding.dim_shards import Heads, HeadShard
from ..sharding.module_sharding import Collective, ModuleCall
from .fused_linear import FusedLowering

OWN_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class AttentionHeads(FusedLowering):
    """nn.MultiheadAttention on this rank's heads."""

    __slots__ = ()
    one_axis = True

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        for index in range(3):
            yield from declare_replicated_input(call, index)
        yield from declare_partial_output(call, "out_proj.bias")
        weights = call.outputs[1]
        if weights is not None:
            yield Collective("all_reduce", weights.numel() * weights.element_size())

    def __call__(  # noqa: PLR0913  # the signature of nn.MultiheadAttention
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self.module
        if need_weights and not average_attn_weights:
            raise UnsupportedModuleError(
                "HeadParallel: the weights of single heads are on different ranks; average them"
            )
        batched = query.ndim == 3
        inputs = [x if batched else x.unsqueeze(0) for x in (query, key, value)]
        if batched and not module.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        q, k, v = self.project(inputs, same=(query is key and key is value))
        mask = _mask(q, k, key_padding_mask, attn_mask, causal=is_causal and attn_mask is None)
        drops = module.training and module.dropout > 0
        attention = None
        if need_weights or drops:
            scores = torch.matmul(q, k.transpose(-2, -1)) * module.head_dim**-0.5
            attention = (scores if mask is None else scores + mask).softmax(-1)
            attention = self.dropped(attention, self.heads()) if drops else attention
            mixed = attention @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        weight: Any = local_parameters({"weight": module.out_proj.weight})["weight"]
        # As in nn.MultiheadAttention positions come first in memory; in which order a dropout that follows draws.
        partial = functional.linear(mixed.permute(2, 0, 1, 3).flatten(-2), weight)
        # The output's layout refers to the dims of the caller's tensors.
        partial = partial.squeeze(1) if not batched else partial.transpose(0, 1) if module.batch_first else partial
        out = partial_output(self, partial, module.out_proj.bias)
        if attention is None or not need_weights:
            return out, None
        weights = reduce(attention.sum(1), self.comm) / module.num_heads
        return out, weights if batched else weights.squeeze(0)

    def heads(self) -> Heads:
        """All heads of the module."""
        module: Any = self.module
        return Heads(module.num_heads, module.head_dim)

    def project(self, inputs: list[Tensor], *, same: bool) -> list[Tensor]:
        """Queries, keys and values of this rank's heads: `(batch, heads, length, head_dim)`."""
        bias = self.concatenate("in_proj_bias")
        weight, separate = self.concatenate("in_proj_weight"), self.local(*OWN_PROJECTIONS)
        weights: Any = [*separate.values()]  # one each where keys or values have dims of their own
        width = len(weights[0] if weight is None else weight) // (1 if weight is None else 3)
        if same and weight is not None:
            packed = functional.linear(copy(inputs[0], self.comm), weight, bias)
            projected = list(torch.split_with_sizes(packed, [width] * 3, -1))
        else:
            weights = weights if weight is None else torch.split_with_sizes(weight, [width] * 3)
            biases: Any = [None] * 3 if bias is None else torch.split_with_sizes(bias, [width] * 3)
            projected = [
                functional.linear(copy(x, self.comm), w, b) for x, w, b in zip(inputs, weights, biases, strict=True)
            ]
        head: Any = self.module.head_dim
        return [x.view(*x.shape[:-1], width // head, head).transpose(1, 2) for x in projected]

    def dropped(self, attention: Tensor, heads: Heads) -> Tensor:
        """Attention weights after dropout, which draws the values that one device with all heads would draw."""
        module: Any = self.module
        batch, _, queries, keys = attention.shape
        shape = torch.Size((batch, heads.count, queries, keys))
        placement = HeadShard(1, Heads(heads.count, 1)).on(self.comm.size)
        stride = torch.empty(shape, device="meta").stride()
        every = DTensor.from_local(attention, self.mesh, (placement,), run_check=False, shape=shape, stride=stride)
        out: Any = functional.dropout(every, module.dropout)
        local: Tensor = out.to_local(grad_placements=(placement,))
        return local


def _mask(q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None, *, causal: bool) -> Tensor | None:
    """What is added to the scores, broadcast over `(batch, heads, queries, keys)`."""
    total: Tensor | None = None
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    for given, view in ((mask, None), (padding, (-1, 1, 1, k.shape[-2]))):
        if given is None:
            continue
        added = (
            torch.zeros_like(given, dtype=q.dtype).masked_fill_(given, -torch.inf)
            if given.dtype == torch.bool
            else given
        )
        if view is not None:
            added = added.view(view)
        elif added.ndim == 3:
            raise UnsupportedModuleError(
                "HeadParallel: a mask per head would have to be sharded by heads; use one mask for all heads"
            )
        total = added if total is None else total + added
    return total
