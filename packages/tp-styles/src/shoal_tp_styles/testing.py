"""Small models with fixed seeds, how each is made parallel, and how one is compared: for own and downstream tests.

`MLP` (10-16-10), `StackedMLP`, and `Transformer`, a toy GPT with learned positions, that knows its own plan
with and without sequence parallelism.  `assert_same_parameters` holds a parallel module against the single one;
`HandCopy` and `HandReduce` are what costs are held against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shoal_dtensor import Replicate, Shard, distribute_tensor
from shoal_mesh import DeviceMesh, init_device_mesh

from .linear import ColwiseParallel, RowwiseParallel
from .parallelize import parallelize_module, unparallelize_module
from .sequence import SequenceParallel
from .style import ParallelStyle

__all__ = [
    "MLP",
    "HandCopy",
    "HandReduce",
    "ModelArgs",
    "StackedMLP",
    "Transformer",
    "all_ranks",
    "assert_same_parameters",
    "own_part",
    "told",
    "transformer_plan",
]


@cache
def all_ranks() -> DeviceMesh:
    """All ranks of the pool on one axis; every call gives the mesh of the first."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def own_part(full: Tensor, dim: int) -> Tensor:
    """The detached part of `full` that this rank of `all_ranks` has, as torch.chunk cuts."""
    placements = (Shard(dim % full.ndim),)
    return distribute_tensor(full.detach(), all_ranks(), placements, src_data_rank=None).to_local()


def told(name: str) -> Callable[[str], str]:
    """What makes `torch.testing.assert_close(..., msg=)` say which of several tensors differs."""
    return lambda message: f"{name}: {message}"


def assert_same_parameters(module: nn.Module, single: nn.Module, **how: Any) -> None:
    """A parallel module, made plain again, has the single one's parameters, gradients and buffers.

    Args:
        module: a parallel module that took no step; plain afterwards.
        single: the module that it was made of.
        how: `rtol` and `atol` for gradients and buffers; values must be equal.
    """
    unparallelize_module(module)
    expected, buffers = dict(single.named_parameters()), dict(single.named_buffers())
    assert dict(module.named_parameters()).keys() == expected.keys()
    for name, param in module.named_parameters():
        torch.testing.assert_close(param, expected[name], rtol=0, atol=0, msg=told(name))
        torch.testing.assert_close(param.grad, expected[name].grad, msg=told(f"{name}.grad"), **how)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], msg=told(name), **how)


class HandCopy(Function):
    """Identity, as one writes it by hand: the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """`x` itself."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The sum of the ranks' gradients."""
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad)
        return grad


class HandReduce(Function):
    """Sum over the ranks in place, as one writes it by hand: the gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors."""
        torch.distributed.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """`grad` itself."""
        return grad


class MLP(nn.Module):
    """Linear 10-16, ReLU, Linear 16-10, with parameters from seed 5."""

    plan: ClassVar[dict[str, ParallelStyle]] = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}

    def __init__(self, device: str | torch.device = "cpu", bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net1 = nn.Linear(10, 16, bias=bias, device=device)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 10, bias=bias, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`: `(..., 10)`."""
        out: Tensor = self.net2(self.relu(self.net1(x)))
        return out

    def reset_parameters(self) -> None:
        """New values for both layers."""
        self.net1.reset_parameters()
        self.net2.reset_parameters()


class StackedMLP(nn.Module):
    """Several `MLP`s, one after the other."""

    def __init__(self, device: str | torch.device = "cpu", n_layers: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(device, bias) for _ in range(n_layers)])

    @property
    def plan(self) -> dict[str, ParallelStyle]:
        """Columns, then rows, in every layer."""
        return {f"layers.*.{name}": style for name, style in MLP.plan.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`: `(..., 10)`."""
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Sizes and options of `Transformer`."""

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
    """Multi-head attention over whatever heads the projections give (all of them, or the rank's own)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.causal = args.use_attn_mask
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.dim, bias=False)
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        self.resid_dropout = nn.Dropout(args.dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, sequence, dim)` in and out."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.resid_dropout(self.wo(heads.transpose(1, 2).flatten(-2)))
        return out


class FeedForward(nn.Module):
    """Linear, GELU, Linear, Dropout."""

    def __init__(self, dim: int, hidden_dim: int, dropout_p: float) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.gelu = nn.GELU()
        self.w2 = nn.Linear(hidden_dim, dim)
        self.resid_dropout = nn.Dropout(dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, sequence, dim)` in and out."""
        out: Tensor = self.resid_dropout(self.w2(self.gelu(self.w1(x))))
        return out


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim)
        self.attention = Attention(args)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.feed_forward = FeedForward(args.dim, 4 * args.dim, args.dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, sequence, dim)` in and out."""
        hidden = x + self.attention(self.attention_norm(x))
        out: Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return out


class Transformer(nn.Module):
    """Tokens `(batch, sequence)` -> logits `(batch, sequence, vocab)`.

    Example:
        >>> Transformer(ModelArgs(n_layers=1))(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.dropout = nn.Dropout(args.dropout_p)
        self.layers = nn.ModuleList([TransformerBlock(args) for _ in range(args.n_layers)])
        self.norm = nn.LayerNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions.expand_as(tokens)))
        for layer in self.layers:
            if self.args.checkpoint_activations:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        logits: Tensor = self.output(self.norm(hidden))
        return logits

    @staticmethod
    def parallelize(module: Transformer, device_mesh: DeviceMesh, use_seq_parallel: bool = False) -> nn.Module:
        """The module on a one-axis mesh; with `use_seq_parallel` norms and residuals hold a part of the sequence.

        Loss and gradients equal the single-device model's; the embedding and a tied output stay one parameter.
        """
        return parallelize_module(module, device_mesh, transformer_plan(use_seq_parallel))


def transformer_plan(sequence: bool = False) -> dict[str, ParallelStyle]:
    """The plan of `Transformer`, with or without sequence parallelism."""
    return _sequence_plan() if sequence else _plan()


def _plan() -> dict[str, ParallelStyle]:
    whole = RowwiseParallel(input_layouts=Replicate())
    return {
        "tok_embeddings": whole,
        "pos_embeddings": whole,
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }


def _sequence_plan() -> dict[str, ParallelStyle]:
    cut = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    norm, dropout = SequenceParallel(use_local_output=True), SequenceParallel(use_local_output=True)
    return {
        "tok_embeddings": cut,
        "pos_embeddings": cut,
        "dropout": dropout,
        "layers.*.attention_norm": norm,
        "layers.*.attention.w[qkv]": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.attention.resid_dropout": dropout,
        "layers.*.ffn_norm": norm,
        "layers.*.feed_forward.w1": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward.resid_dropout": dropout,
        "norm": norm,
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
