"""Small models with known plans, and `assert_same_parameters`.

It compares a parallel module with one device's.

`MLP` (10-16-10, seed 5), and `Transformer`, a toy GPT with learned positions and its plan, with and
without sequence parallelism. `own_shard` is this rank's shard of a global tensor on the mesh of
`all_ranks`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shoal_dtensor import Replicate, Shard, distribute_tensor
from shoal_mesh.testing import all_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    unparallelize_module,
)


def own_shard(full: Tensor, dim: int) -> Tensor:
    """This rank's shard of `full` over `all_ranks`, detached; sizes are those of `torch.chunk`.

    Args:
        full: the global tensor, equal on all ranks.
        dim: the dim that is sharded; negative ones count from the end.
    """
    placements = (Shard(dim % full.ndim),)
    return distribute_tensor(full.detach(), all_ranks(), placements, src_data_rank=None).to_local()


def _naming(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def assert_same_parameters(module: nn.Module, single: nn.Module, **tolerance: Any) -> None:
    """Raise unless a parallel module, made plain again, has what the single one has.

    Compared are parameters, gradients and buffers.

    Args:
        module: a parallel module that took no step; plain afterwards.
        single: the single-device module it is a copy of.
        tolerance: `rtol` and `atol` for gradients and buffers; values must be equal.
    """
    unparallelize_module(module)
    expected, buffers = dict(single.named_parameters()), dict(single.named_buffers())
    assert dict(module.named_parameters()).keys() == expected.keys()
    for path, param in module.named_parameters():
        torch.testing.assert_close(param, expected[path], rtol=0, atol=0, msg=_naming(path))
        torch.testing.assert_close(
            param.grad, expected[path].grad, msg=_naming(f"{path}.grad"), **tolerance
        )
    for path, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, buffers[path], msg=_naming(path), **tolerance)


class MLP(nn.Module):
    """Linear 10-16, ReLU, Linear 16-10, with parameters from seed 5.

    Args:
        device: of the parameters.
        bias: whether the layers have biases.
    """

    plan: ClassVar[dict[str, ParallelStyle]] = {
        "net1": ColwiseParallel(),
        "net2": RowwiseParallel(),
    }

    def __init__(self, device: str | torch.device = "cpu", bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net1: nn.Linear = nn.Linear(10, 16, bias, device)
        self.net2: nn.Linear = nn.Linear(16, 10, bias, device)
        self.relu: nn.ReLU = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`: `(..., 10)`."""
        out: Tensor = self.net2(self.relu(self.net1(x)))
        return out

    def reset_parameters(self) -> None:
        """New values for both layers."""
        self.net1.reset_parameters()
        self.net2.reset_parameters()


class StackedMLP(nn.Module):
    """Several modules `MLP`, one after the other.

    Args:
        device: of the parameters.
        n_layers: how many modules `MLP`.
        bias: whether their layers have biases.
    """

    plan: ClassVar[dict[str, ParallelStyle]] = {
        f"layers.*.{name}": style for name, style in MLP.plan.items()
    }

    def __init__(
        self, device: str | torch.device = "cpu", n_layers: int = 2, bias: bool = True
    ) -> None:
        super().__init__()
        self.layers: nn.Sequential = nn.Sequential(*(MLP(device, bias) for _ in range(n_layers)))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`: `(..., 10)`."""
        out: Tensor = self.layers(x)
        return out


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Sizes and options of `Transformer`.

    Attributes:
        n_layers: number of blocks.
        vocab_size: number of tokens.
        max_seq_len: number of positions.
        dim: features of a token; divisible by `n_heads`.
        n_heads: attention heads.
        dropout_p: probability of the dropouts.
        use_attn_mask: whether attention is causal.
        weight_tying: whether the output has the weight of the token embedding.
        checkpoint_activations: whether backward computes the blocks again.
    """

    n_layers: int = 2
    vocab_size: int = 8
    max_seq_len: int = 16
    dim: int = 16
    n_heads: int = 4
    dropout_p: float = 0.1
    use_attn_mask: bool = True
    weight_tying: bool = True
    checkpoint_activations: bool = False


class Attention(nn.Module):
    """Multi-head attention over the heads that the projections return: all, or this rank's."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim: int = args.dim // args.n_heads
        self.causal: bool = args.use_attn_mask
        self.wq: nn.Linear
        self.wk: nn.Linear
        self.wv: nn.Linear
        self.wo: nn.Linear
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(args.dim, args.dim, bias=False) for _ in range(4)
        )
        self.resid_dropout: nn.Dropout = nn.Dropout(p=args.dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, sequence, dim)` in and out."""
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.resid_dropout(self.wo(heads.transpose(1, 2).flatten(-2)))
        return out


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm: nn.LayerNorm = nn.LayerNorm(args.dim)
        self.ffn_norm: nn.LayerNorm = nn.LayerNorm(args.dim)
        self.attention: Attention = Attention(args)
        up, down = nn.Linear(args.dim, 4 * args.dim), nn.Linear(4 * args.dim, args.dim)
        layers = {
            "w1": up,
            "gelu": nn.GELU(),
            "w2": down,
            "resid_dropout": nn.Dropout(p=args.dropout_p),
        }
        self.feed_forward: nn.Sequential = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, sequence, dim)` in and out."""
        hidden = x + self.attention(self.attention_norm(x))
        out: Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return out


class Transformer(nn.Module):
    """Tokens `(batch, sequence)` -> logits `(batch, sequence, vocab)`.

    `transformer_plan` parallelizes it.

    Example:
        >>> Transformer(ModelArgs(n_layers=1))(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.checkpointed: bool = args.checkpoint_activations
        sizes = (args.vocab_size, args.max_seq_len)
        self.tok_embeddings: nn.Embedding
        self.pos_embeddings: nn.Embedding
        self.tok_embeddings, self.pos_embeddings = (nn.Embedding(size, args.dim) for size in sizes)
        self.dropout: nn.Dropout = nn.Dropout(p=args.dropout_p)
        self.layers: nn.ModuleList = nn.ModuleList(
            TransformerBlock(args) for _ in range(args.n_layers)
        )
        self.norm: nn.LayerNorm = nn.LayerNorm(args.dim)
        self.output: nn.Linear = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.weight_tying:
            self.tok_embeddings.weight = self.output.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions))
        for layer in self.layers:
            hidden = (
                checkpoint(layer, hidden, use_reentrant=False)
                if self.checkpointed
                else layer(hidden)
            )
        logits: Tensor = self.output(self.norm(hidden))
        return logits


def transformer_plan(sequence: bool = False) -> dict[str, ParallelStyle]:
    """The plan of `Transformer`; with `sequence`, norms and residuals hold a shard of the sequence.

    Loss and gradients equal the single-device model's; the embedding and a tied output stay one
    parameter.

    Args:
        sequence: whether norms, dropouts and residuals hold a shard of the sequence.
    """
    between = Shard(1) if sequence else Replicate()
    columns, rows = ColwiseParallel(input_layouts=between), RowwiseParallel(output_layouts=between)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": embedding,
        "pos_embeddings": embedding,
        "layers.*.attention.w[qkv]": columns,
        "layers.*.attention.wo": rows,
        "layers.*.feed_forward.w1": columns,
        "layers.*.feed_forward.w2": rows,
        "output": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    norms_and_dropouts = ("dropout", "norm", "layers.*.*_norm", "layers.*.*.resid_dropout")
    return plan | {
        path: SequenceParallel(use_local_output=True) for path in norms_and_dropouts if sequence
    }
