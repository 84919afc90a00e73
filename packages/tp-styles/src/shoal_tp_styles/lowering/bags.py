"""Embedding bags cut along the features (columns) or along the vocabulary (rows).

columns   tokens: R -> y: S(-1)       no communication; every mode, since bags are local
rows      tokens: R -> y: R | S(0)    every rank sums its own tokens of each bag; then the sum over the ranks
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import UnsupportedModuleError
from .embedding import ColumnEmbedding, check_table
from .enter import enter
from .forward import Lowered, spec_of
from .ports import leave_partial

__all__ = ["ColumnEmbeddingBag", "RowEmbeddingBag"]


class ColumnEmbeddingBag(ColumnEmbedding):
    """Stand-in for an embedding bag whose features are cut; every mode works, since bags are local."""

    __slots__ = ()

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        module: Any = self.module
        tokens: Any = getattr(input, "_local_tensor", input)
        offsets = getattr(offsets, "_local_tensor", offsets)
        weight: Any = enter({"weight": self.params["weight"]})["weight"]
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise UnsupportedModuleError(
                "ColwiseParallel: an EmbeddingBag gives no gradient to per_sample_weights; detach them"
            )
        out = functional.embedding_bag(
            tokens,
            weight,
            offsets,
            scale_grad_by_freq=module.scale_grad_by_freq,
            mode=module.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
        )
        return self.finish(out)


class RowEmbeddingBag(Lowered):
    """Stand-in for an embedding bag whose vocabulary is cut; sums and means, which are sums over the ranks."""

    __slots__ = ()

    def resolve(self) -> None:
        module: Any = self.module
        check_table(module, self.sharding)
        if module.mode == "max" or module.scale_grad_by_freq:
            raise UnsupportedModuleError(
                f"RowwiseParallel: {module} is no sum over the ranks (mode='max', scale_grad_by_freq); "
                "use ColwiseParallel"
            )

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        module: Any = self.module
        tokens: Any = getattr(input, "_local_tensor", input)
        starts = getattr(offsets, "_local_tensor", offsets)
        weight: Any = enter({"weight": self.params["weight"]})["weight"]
        rows, first = weight.shape[0], spec_of(self.params["weight"], "weight").offset(0)
        counted = torch.ones_like(tokens, dtype=weight.dtype)
        if module.padding_idx is not None:
            counted = counted * (tokens != module.padding_idx)
        own = tokens - first
        share = counted * ((own >= 0) & (own < rows))
        if per_sample_weights is not None:
            share = share * per_sample_weights
        # A row of zeros stands for the tokens of other ranks, so a rank may also hold no rows at all.
        table = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        own = torch.where(share != 0, own, rows)
        bags = {"mode": "sum", "include_last_offset": module.include_last_offset}
        out = functional.embedding_bag(own, table, starts, per_sample_weights=share, **bags)
        if module.mode == "mean":
            ones = counted.new_ones(1, 1)
            zeros = torch.zeros_like(tokens)
            counts = functional.embedding_bag(zeros, ones, starts, per_sample_weights=counted, **bags)
            out = out / counts.clamp(min=1)
        return leave_partial(self, out, None)
