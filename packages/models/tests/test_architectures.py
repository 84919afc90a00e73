"""Whole architectures on 2 and 4 ranks, in float64: T5, BERT, GPT-2 and MLP stacks.

They are compared with one device.

Covers: shoal_tp_styles as a whole, weights/loading.py (of transposed Linears). Outputs and all
gradients are equal, with and without sequence parallelism, with even and uneven heads, and
vocabularies that divide nowhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_models import assert_same_parameters, tensor_axis
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh.testing import on_ranks
from shoal_models import load_sharded
from shoal_tp_styles import (
    ColwiseParallel,
    Heads,
    PackedColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    losses,
    parallelize_module,
    unparallelize_module,
)

# neither the vocabulary nor the inner features divide by 4
DIM, HEAD, VOCAB, INNER = 12, 4, 29, 22
WAYS = pytest.mark.parametrize("ways", [2, 4])
SEQUENCE = pytest.mark.parametrize("sequence", [False, True])
HEADS = pytest.mark.parametrize("heads", [8, 6])  # six heads on four ranks: 2, 2, 1, 1


def build(make: Callable[[], nn.Module]) -> Any:
    """A module with weights that are all in use, also those that start as zeros or ones."""
    torch.manual_seed(3)
    module = make().double()
    for param in module.parameters():
        nn.init.normal_(param, std=0.3)
    return module


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attention over whatever heads there are; `(batch, length, heads * HEAD)` in and out."""
    q, k, v = (x.view(*x.shape[:-1], -1, HEAD).transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
    return out.transpose(1, 2).flatten(-2)


def assert_same(module: nn.Module, single: nn.Module, got: Any, expected: Any) -> None:
    """Outputs, then values and gradients of every parameter once the module is plain again."""
    torch.testing.assert_close(got, expected)
    seed = torch.randn_like(expected)
    expected.backward(seed)
    got.backward(seed)
    assert_same_parameters(module, single)


# --- T5: relative bias, RMS norms without bias, gated feed-forward, cross attention ---------------


class Relative(nn.Module):
    """A learned bias per head and clipped distance, as an embedding with one feature per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = nn.Embedding(9, heads)

    def forward(self, queries: int, keys: int) -> Tensor:
        """`(1, heads, queries, keys)`."""
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        out: Tensor = self.table(distance.clamp(-4, 4) + 4).permute(2, 0, 1)[None]
        return out


class T5Attention(nn.Module):
    """Pre-norm attention to itself or to a memory; no biases anywhere."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, heads * HEAD, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * HEAD, DIM, bias=False)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Same shape as x."""
        h = self.norm(x)
        read = h if memory is None else memory
        out: Tensor = x + self.o(attend(self.q(h), self.k(read), self.v(read), bias))
        return out


class T5FeedForward(nn.Module):
    """T5's feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.wi_0, self.wi_1 = nn.Linear(DIM, INNER, bias=False), nn.Linear(DIM, INNER, bias=False)
        self.wo = nn.Linear(INNER, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        h = self.norm(x)
        out: Tensor = x + self.wo(functional.gelu(self.wi_0(h)) * self.wi_1(h))
        return out


class T5(nn.Module):
    """One encoder and one decoder layer; embeddings of both and the output are one parameter."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, DIM)
        self.bias, self.decoder_bias = Relative(heads), Relative(heads)
        self.encoder, self.encoder_ff, self.final_norm = (
            T5Attention(heads),
            T5FeedForward(),
            nn.RMSNorm(DIM),
        )
        self.decoder, self.cross, self.decoder_ff = (
            T5Attention(heads),
            T5Attention(heads),
            T5FeedForward(),
        )
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the target."""
        n, m = source.shape[1], target.shape[1]
        memory = self.final_norm(
            self.encoder_ff(self.encoder(self.shared(source), bias=self.bias(n, n)))
        )
        causal = torch.full((m, m), -torch.inf, dtype=torch.double).triu(1)
        h = self.decoder(self.shared(target), bias=self.decoder_bias(m, m) + causal)
        logits: Tensor = self.head(self.norm(self.decoder_ff(self.cross(h, memory))))
        return logits


def t5_plan(heads: int, sequence: bool) -> dict[str, Any]:
    """Heads of the bias are sharded like those of the projections."""
    layout = Shard(1) if sequence else Replicate()
    columns, rows = ColwiseParallel(input_layouts=layout), RowwiseParallel(output_layouts=layout)
    plan: dict[str, Any] = {
        "shared": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
        "*.table": ColwiseParallel().heads(heads, 1),
        "*.[qkv]": columns.heads(heads, HEAD),
        "*.o": rows.heads(heads, HEAD),
        "*.wi_?": columns,
        "*.wo": rows,
        "head": ColwiseParallel(input_layouts=layout, output_layouts=Replicate()),
    }
    if sequence:
        plan |= dict.fromkeys(("*norm", "*.norm"), SequenceParallel(use_local_output=True))
    return plan


@on_ranks(4)
@WAYS
@SEQUENCE
@HEADS
def test_t5(ways: int, sequence: bool, heads: int) -> None:
    single = build(lambda: T5(heads))
    module = parallelize_module(
        copy.deepcopy(single), tensor_axis(ways), t5_plan(heads, sequence), on_unmatched="error"
    )
    source, target = torch.randint(VOCAB, (3, 8)), torch.randint(VOCAB, (3, 4))
    assert_same(module, single, module(source, target), single(source, target))


# --- BERT: post-norm, token types, pooler, tied masked-token head with a bias of its own ----------


class BertLayer(nn.Module):
    """Attention and feed-forward, the norms after the sums."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, heads * HEAD) for _ in range(3))
        self.out, self.norm1 = nn.Linear(heads * HEAD, DIM), nn.LayerNorm(DIM)
        self.up, self.down, self.norm2 = (
            nn.Linear(DIM, INNER),
            nn.Linear(INNER, DIM),
            nn.LayerNorm(DIM),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Same shape as x."""
        h = self.norm1(x + self.out(attend(self.query(x), self.key(x), self.value(x), mask)))
        out: Tensor = self.norm2(h + self.down(functional.gelu(self.up(h))))
        return out


class Pooler(nn.Module):
    """The first token, through a layer and tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(batch, DIM)` of `(batch, length, DIM)`."""
        return torch.tanh(self.dense(hidden[:, 0]))


class BertWithHeads(nn.Module):
    """Two layers with both pre-training heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.words, self.positions, self.types = (
            nn.Embedding(VOCAB, DIM),
            nn.Embedding(8, DIM),
            nn.Embedding(2, DIM),
        )
        self.norm = nn.LayerNorm(DIM)
        self.layers = nn.ModuleList([BertLayer(heads) for _ in range(2)])
        self.pooler, self.relation = Pooler(), nn.Linear(DIM, 2)
        self.transform, self.transform_norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.decoder = nn.Linear(DIM, VOCAB)
        self.decoder.weight = self.words.weight

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        """Masked-token logits and, beside them for every position, the sentence relation."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        h = self.norm(self.words(tokens) + self.positions(positions) + self.types(types))
        for layer in self.layers:
            h = layer(h, mask)
        logits = self.decoder(self.transform_norm(functional.gelu(self.transform(h))))
        relation = self.relation(self.pooler(h))
        return torch.cat([logits, relation[:, None].expand(-1, logits.shape[1], -1)], -1)


def bert_plan(heads: int, sequence: bool) -> dict[str, Any]:
    """The pooler reads one token, so under sequence parallelism its input is gathered."""
    layout = Shard(1) if sequence else Replicate()
    columns, rows = ColwiseParallel(input_layouts=layout), RowwiseParallel(output_layouts=layout)
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
    plan: dict[str, Any] = {
        **dict.fromkeys(("words", "positions", "types"), table),
        **dict.fromkeys(
            ("layers.*.query", "layers.*.key", "layers.*.value"), columns.heads(heads, HEAD)
        ),
        "layers.*.out": rows.heads(heads, HEAD),
        "layers.*.up": columns,
        "layers.*.down": rows,
        "pooler.dense": ColwiseParallel(output_layouts=Replicate()),
        "decoder": ColwiseParallel(input_layouts=layout, output_layouts=Replicate()),
    }
    if sequence:
        alone = SequenceParallel(use_local_output=True)
        plan |= dict.fromkeys(("norm", "layers.*.norm?", "transform", "transform_norm"), alone)
        plan["pooler"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
    return plan


@on_ranks(4)
@WAYS
@SEQUENCE
@HEADS
def test_bert(ways: int, sequence: bool, heads: int) -> None:
    single = build(lambda: BertWithHeads(heads))
    module: Any = parallelize_module(
        copy.deepcopy(single), tensor_axis(ways), bert_plan(heads, sequence), on_unmatched="error"
    )
    assert module.decoder.weight is module.words.weight and isinstance(module.decoder.bias, DTensor)
    tokens, types = torch.randint(VOCAB, (3, 8)), torch.randint(2, (3, 8))
    mask = torch.ones(3, 1, 1, 8, dtype=torch.bool)
    mask[0, ..., -3:] = False
    assert_same(module, single, module(tokens, types, mask), single(tokens, types, mask))


# --- GPT-2: fused projections with weights of shape (in, out) -------------------------------------


class Conv1D(nn.Module):
    """x W + b with W as (in, out), as GPT-2's checkpoints have it."""

    def __init__(self, nf: int, nx: int, bias: bool = True) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`(..., nf)` of `(..., nx)`."""
        out = x @ self.weight
        return out if self.bias is None else out + self.bias


class Gpt2Block(nn.Module):
    """Causal attention and feed-forward."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.c_attn, self.attn_proj = Conv1D(3 * heads * HEAD, DIM), Conv1D(DIM, heads * HEAD)
        self.c_fc, self.c_proj = Conv1D(INNER, DIM), Conv1D(DIM, INNER)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, -1)
        h = x + self.attn_proj(attend(q, k, v, causal=True))
        out: Tensor = h + self.c_proj(functional.gelu(self.c_fc(self.ln_2(h)), approximate="tanh"))
        return out


class Gpt2(nn.Module):
    """Two blocks, tied output; hidden states only, the loss reads sharded logits."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(10, DIM)
        self.h, self.ln_f = nn.ModuleList([Gpt2Block(heads) for _ in range(2)]), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        h = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]).expand_as(tokens))
        for block in self.h:
            h = block(h)
        logits: Tensor = self.head(self.ln_f(h))
        return logits


def gpt_plan(heads: int, sequence: bool) -> dict[str, Any]:
    """The logits stay sharded over the vocabulary, for a loss that never gathers them."""
    layout = Shard(1) if sequence else Replicate()
    of = Heads(heads, HEAD)
    rows = RowwiseParallel(output_layouts=layout)
    plan: dict[str, Any] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
        "wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
        "h.*.c_attn": PackedColwiseParallel(
            blocks={"q": of, "k": of, "v": of}, input_layouts=layout
        ),
        "h.*.attn_proj": rows.heads(heads, HEAD),
        "h.*.c_fc": ColwiseParallel(input_layouts=layout),
        "h.*.c_proj": rows,
        "head": ColwiseParallel(input_layouts=layout, use_local_output=False),
    }
    if sequence:
        plan |= dict.fromkeys(("h.*.ln_?", "ln_f"), SequenceParallel(use_local_output=True))
    return plan


@on_ranks(4)
@WAYS
@SEQUENCE
@HEADS
def test_gpt2(ways: int, sequence: bool, heads: int) -> None:
    single = build(lambda: Gpt2(heads))
    module: Any = copy.deepcopy(single)
    parallelize_module(module, tensor_axis(ways), gpt_plan(heads, sequence), on_unmatched="error")
    tokens = torch.randint(VOCAB, (3, 8))
    logits, expected = module(tokens), single(tokens)
    torch.testing.assert_close(logits.full_tensor(), expected)
    target = torch.randint(VOCAB, (3, 8))
    got = losses.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    loss = functional.cross_entropy(expected.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    assert_same(module, single, got, loss)


@on_ranks(4)
def test_transposed_weights_are_loaded_in_every_way() -> None:
    single, other = build(lambda: Gpt2(6)), build(lambda: Gpt2(6))
    tokens = torch.randint(VOCAB, (2, 5))
    with torch.no_grad():
        for param in other.parameters():
            param.add_(0.1)
        expected = other(tokens)
    module: Any = parallelize_module(single, tensor_axis(4), gpt_plan(6, sequence=False))
    assert module.h[0].c_attn.weight.shape == (DIM, 18 * HEAD)
    before = module(tokens).full_tensor()
    module.h[0].c_attn.load_state_dict(other.h[0].c_attn.state_dict())  # plain entries
    assert not torch.allclose(module(tokens).full_tensor(), before)
    load_sharded(module, other.state_dict())
    torch.testing.assert_close(module(tokens).full_tensor(), expected)
    with torch.device("meta"):
        empty: Any = Gpt2(6).double()
    parallelize_module(empty, tensor_axis(4), gpt_plan(6, sequence=False), src_data_rank=None)
    load_sharded(empty, other.state_dict())
    torch.testing.assert_close(empty(tokens).full_tensor(), expected)
    torch.testing.assert_close(unparallelize_module(module).state_dict(), other.state_dict())


# --- MLP stacks -----------------------------------------------------------------------------------


class Stack(nn.Module):
    """Gated layers over a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM) for _ in range(3)])
        self.gates = nn.ModuleList([nn.Linear(DIM, INNER) for _ in range(3)])
        self.ups = nn.ModuleList([nn.Linear(DIM, INNER) for _ in range(3)])
        self.downs = nn.ModuleList([nn.Linear(INNER, DIM) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        for norm, gate, up, down in zip(self.norms, self.gates, self.ups, self.downs, strict=True):
            h = norm(x)
            x = x + down(functional.silu(gate(h)) * up(h))
        return x


@on_ranks(4)
@WAYS
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_gated_stack(ways: int, dim: int | None) -> None:
    axis = tensor_axis(ways)
    layout = Replicate() if dim is None else Shard(dim)
    columns = ColwiseParallel(input_layouts=layout)
    plan: dict[str, Any] = {
        "gates.*": columns,
        "ups.*": columns,
        "downs.*": RowwiseParallel(output_layouts=layout),
    }
    if dim is not None:
        plan["norms.*"] = SequenceParallel(sequence_dim=dim, use_local_output=True)
    single = build(Stack)
    module: Any = parallelize_module(copy.deepcopy(single), axis, plan)
    full = torch.randn(4, 8, DIM, dtype=torch.double)
    rank = axis.get_local_rank()
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    mine = y if dim is None else y.chunk(ways, dim)[rank]
    expected, got = single(x), module(mine)
    seed = torch.randn_like(full)
    expected.backward(seed)
    got.backward(seed if dim is None else seed.chunk(ways, dim)[rank])
    assert x.grad is not None and y.grad is not None
    for full, shard in (
        (expected, got),
        (x.grad, y.grad if dim is None else y.grad.chunk(ways, dim)[rank]),
    ):
        torch.testing.assert_close(shard, full if dim is None else full.chunk(ways, dim)[rank])
    assert_same_parameters(module, single)
