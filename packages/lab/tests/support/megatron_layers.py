"""Megatron-style layers by hand.

They have autograd functions over collectives, sequence and vocabulary parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallel_state


def _all_gather(shard: Tensor) -> Tensor:
    """Concatenate the tensor-parallel ranks' shards of dim 0."""
    size = parallel_state.tensor_size()
    whole = shard.new_empty(size * shard.shape[0], *shard.shape[1:])
    group = parallel_state.tensor_group()
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=group)
    return whole


def _reduce_scatter(whole: Tensor) -> Tensor:
    """Sum over the tensor-parallel ranks, and keep this rank's shard of dim 0."""
    size = parallel_state.tensor_size()
    shard = whole.new_empty(whole.shape[0] // size, *whole.shape[1:])
    group = parallel_state.tensor_group()
    dist.reduce_scatter_tensor(shard, whole.contiguous(), group=group)
    return shard


class GatherSequence(torch.autograd.Function):
    """The input of a column-parallel layer: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _reduce_scatter(gradient)


class ScatterSumOfSequence(torch.autograd.Function):
    """The output of a row-parallel layer: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _all_gather(gradient)


class VocabularyCrossEntropy(torch.autograd.Function):
    """Each token's loss, from logits whose last dim is sharded over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        group = parallel_state.tensor_group()
        largest = logits.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[..., None]
        exponentials = shifted.exp()
        total = exponentials.sum(-1)
        dist.all_reduce(total, group=group)
        count = logits.shape[-1]
        local = target - parallel_state.tensor_rank() * count
        is_elsewhere = (local < 0) | (local >= count)
        local = local.masked_fill(is_elsewhere, 0)
        predicted = shifted.gather(-1, local[..., None])[..., 0].masked_fill(is_elsewhere, 0.0)
        dist.all_reduce(predicted, group=group)
        ctx.save_for_backward(exponentials / total[..., None], local, is_elsewhere)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        probabilities, local, is_elsewhere = ctx.saved_tensors
        ones = (~is_elsewhere).to(probabilities.dtype)[..., None]
        result = probabilities.scatter_add(-1, local[..., None], -ones)
        return result * gradient[..., None], None


def _sharded(whole: Tensor, dim: int) -> nn.Parameter:
    """Return this rank's chunk of a parameter that all ranks have drawn alike."""
    chunk = whole.chunk(parallel_state.tensor_size(), dim)[parallel_state.tensor_rank()]
    parameter = nn.Parameter(chunk.clone())
    parameter.is_sharded = True  # type: ignore[attr-defined]  # as Megatron marks parameters
    return parameter


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are sharded; its output is a shard of the sequence."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = _sharded(torch.randn(vocabulary, width), 0)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the tokens of whole sequences."""
        local = ids - parallel_state.tensor_rank() * len(self.weight)
        is_elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        partial = rows.masked_fill(is_elsewhere[..., None], 0.0)
        apply: Any = ScatterSumOfSequence.apply
        scattered: Tensor = apply(partial)
        return scattered


class ColumnParallelLinear(nn.Module):
    """A linear layer with sharded output features, whose input is a shard of the sequence."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.weight = _sharded(torch.randn(features, width) / width**0.5, 0)
        self.bias = _sharded(torch.randn(features), 0)

    def forward(self, x: Tensor) -> Tensor:
        """Apply this rank's features to the whole sequence."""
        whole = GatherSequence.apply(x)  # type: ignore[no-untyped-call]  # of torch
        return F.linear(whole, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer with sharded input features, whose output is a shard of the sequence."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.weight = _sharded(torch.randn(width, features) / features**0.5, 1)
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        """Sum over the ranks' features, and add the whole bias once."""
        apply: Any = ScatterSumOfSequence.apply
        total: Tensor = apply(F.linear(x, self.weight))
        return total + self.bias


class Block(nn.Module):
    """A transformer block in which norms see shards of the sequence.

    Its inputs begin with the sequence.

    Args:
        width: of the residual stream.
        heads: of all ranks together.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads // parallel_state.tensor_size()
        self.input_norm = nn.LayerNorm(width)
        self.qkv = ColumnParallelLinear(width, 3 * width)
        self.projection = RowParallelLinear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = ColumnParallelLinear(width, 4 * width)
        self.down = RowParallelLinear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and the MLP."""
        qkv = self.qkv(self.input_norm(x))
        sequence, batch, features = qkv.shape
        # The rows of the fused weight are ordered by head, so that a chunk has whole heads.
        by_head = qkv.view(sequence, batch, self.heads, features // self.heads).permute(1, 2, 0, 3)
        query, key, value = by_head.chunk(3, -1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.permute(2, 0, 1, 3).reshape(sequence, batch, features // 3)
        x = x + self.projection(attended)
        result: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return result


class LanguageModel(nn.Module):
    """Blocks between a vocabulary-parallel embedding and a head that is tied to it."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = VocabularyEmbedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each token; ids and target begin with the sequence."""
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        normed = self.final_norm(hidden)
        whole = GatherSequence.apply(normed)  # type: ignore[no-untyped-call]  # of torch
        logits = F.linear(whole, self.embedding.weight)
        loss: Any = VocabularyCrossEntropy.apply
        losses: Tensor = loss(logits, target)
        return losses
