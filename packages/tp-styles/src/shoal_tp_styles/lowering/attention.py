"""Multi-head attention on the rank's own heads.

query, key, value: R -> output: R | S(d), by one reduction; the averaged attention weights by another, where they
are asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import Replicate

from ..errors import UnsupportedModuleError
from .enter import enter
from .packed import Blocks
from .regions import axis_dim, copy, reduce, scatter, uneven

__all__ = ["AttentionHeads"]


class AttentionHeads(Blocks):
    """Stand-in for the forward of nn.MultiheadAttention."""

    __slots__ = ()

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
        if module.training and module.dropout > 0:
            raise UnsupportedModuleError(
                "HeadParallel: dropout of attention weights on cut heads; set dropout=0 or eval()"
            )
        if need_weights and not average_attn_weights:
            raise UnsupportedModuleError(
                "HeadParallel: the weights of single heads lie on different ranks; average them"
            )
        batched = query.ndim == 3
        inputs = [x if batched else x.unsqueeze(0) for x in (query, key, value)]
        if batched and not module.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        q, k, v = self.project(inputs, same=(query is key and key is value))
        mask = _mask(q, k, key_padding_mask, attn_mask, causal=is_causal and attn_mask is None)
        scores = torch.matmul(q, k.transpose(-2, -1)) * module.head_dim**-0.5 if need_weights else None
        if scores is not None:
            attention = (scores if mask is None else scores + mask).softmax(-1)
            mixed = attention @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = self.output(mixed.transpose(1, 2).flatten(-2))
        if batched and not module.batch_first:
            out = out.transpose(0, 1)
        out = out if batched else out.squeeze(0)
        if scores is None:
            return out, None
        weights = reduce(attention.sum(1), self.comm) / module.num_heads
        return out, weights if batched else weights.squeeze(0)

    def project(self, inputs: list[Tensor], *, same: bool) -> list[Tensor]:
        """Queries, keys and values of the own heads: `(batch, heads, length, head_dim)`."""
        weight, bias = self.join("in_proj_weight"), self.join("in_proj_bias")
        assert weight is not None, "the projections have a weight"
        width = weight.shape[0] // 3
        if same:
            packed = functional.linear(copy(inputs[0], self.comm), weight, bias)
            parts = list(torch.split_with_sizes(packed, [width] * 3, -1))
        else:
            weights = torch.split_with_sizes(weight, [width] * 3)
            biases: Any = [None] * 3 if bias is None else torch.split_with_sizes(bias, [width] * 3)
            parts = [
                functional.linear(copy(x, self.comm), w, b) for x, w, b in zip(inputs, weights, biases, strict=True)
            ]
        head: Any = self.module.head_dim
        return [part.view(*part.shape[:-1], width // head, head).transpose(1, 2) for part in parts]

    def output(self, mixed: Tensor) -> Tensor:
        """The output projection by rows; batch first."""
        module: Any = self.module
        local: Any = enter(dict(module.out_proj._parameters))
        partial = functional.linear(mixed, local["weight"])
        where = axis_dim(self.port_out.desired, self.comm)
        if where is None and self.port_out.desired != Replicate():
            raise UnsupportedModuleError(f"HeadParallel: the output cannot leave as {self.port_out.desired}")
        if where is None:
            out = reduce(partial, self.comm)
        else:
            # The layout names dims as the caller sees them: undo batch-first for the sequence and batch dims.
            dim = where[1] % partial.ndim
            dim = dim if module.batch_first or dim > 1 else 1 - dim
            if where[2] is None and partial.shape[dim] % self.comm.size:
                raise uneven(self.sharding.kind, partial.shape[dim], dim, self.comm)
            out = scatter(partial, self.comm, dim, where[2])
        return out if local["bias"] is None else out + local["bias"]


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
                "HeadParallel: an attention mask per head lies on different ranks; use one for all"
            )
        total = added if total is None else total + added
    return total
