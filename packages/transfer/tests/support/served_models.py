"""Servers of language models with the layouts and loaders of inference engines, re-made in small.

They have the parts that copy weights in vLLM and SGLang: q, k and v fused by rank, with key and
value heads replicated over ranks where there are fewer heads; gate and up fused by rank; experts
stacked, by their inner features or by number; a vocabulary that is padded with zeros; a tied head.
Names of parameters are the engines' names. The models compute, with collectives of c10d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

Weights = Iterable[tuple[str, Tensor]]
PADDING = 8


class Seat(NamedTuple):
    """A rank among the ranks of a server; experts are divided by number or by features."""

    rank: int
    size: int
    by_number: bool = False

    def total(self, summand: Tensor) -> Tensor:
        """The sum of all ranks."""
        if self.size > 1:
            dist.all_reduce(summand)
        return summand

    def joined(self, part: Tensor) -> Tensor:
        """The parts of all ranks along the last dim."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1)


def parameter(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """A parameter that carries its module's loader, as engines do."""
    value: Any = nn.Parameter(torch.full(shape, -7.0, dtype=torch.float64), requires_grad=False)
    value.weight_loader = module.load
    module.register_parameter(name, value)


class Columns(nn.Module):
    """Blocks of rows, of each of which a rank has its share."""

    weight: Tensor

    def __init__(self, seat: Seat, sizes: tuple[int, ...], features: int) -> None:
        super().__init__()
        self.seat = seat
        self.shares = [size // seat.size for size in sizes]
        parameter(self, "weight", (sum(self.shares), features))

    def load(self, param: Tensor, value: Tensor, block: int) -> None:
        share = self.shares[block]
        place = param.data.narrow(0, sum(self.shares[:block]), share)
        place.copy_(value.narrow(0, self.seat.rank * share, share))


class QueryKeyValue(nn.Module):
    """Heads of this rank; a key and value head that several ranks need is on each of them."""

    weight: Tensor
    bias: Tensor

    def __init__(self, seat: Seat, config: Any, width: int, has_bias: bool) -> None:
        super().__init__()
        self.heads = config.num_attention_heads // seat.size
        self.kv_heads = max(1, config.num_key_value_heads // seat.size)
        self.width = width
        replicas = max(1, seat.size // config.num_key_value_heads)
        self.ranks = {"q": seat.rank, "k": seat.rank // replicas, "v": seat.rank // replicas}
        self.rows = {
            "q": self.heads * width,
            "k": self.kv_heads * width,
            "v": self.kv_heads * width,
        }
        parameter(self, "weight", (sum(self.rows.values()), config.hidden_size))
        if has_bias:
            parameter(self, "bias", (sum(self.rows.values()),))

    def load(self, param: Tensor, value: Tensor, kind: str) -> None:
        first = sum(self.rows[other] for other in "qkv"[: "qkv".index(kind)])
        rows = self.rows[kind]
        place = param.data.narrow(0, first, rows)
        place.copy_(value.narrow(0, self.ranks[kind] * rows, rows))


class Rows(nn.Module):
    """A share of the columns of a weight."""

    weight: Tensor

    def __init__(self, seat: Seat, features: int, outputs: int) -> None:
        super().__init__()
        self.seat = seat
        parameter(self, "weight", (outputs, features // seat.size))

    def load(self, param: Tensor, value: Tensor) -> None:
        columns = param.shape[1]
        param.data.copy_(value[:, self.seat.rank * columns : (self.seat.rank + 1) * columns])


class Whole(nn.Module):
    """A weight that each rank has."""

    weight: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        parameter(self, "weight", shape)

    def load(self, param: Tensor, value: Tensor) -> None:
        param.data.copy_(value)


class Vocabulary(nn.Module):
    """A share of the rows of a vocabulary that is padded to a multiple of 8 rows a rank."""

    weight: Tensor

    def __init__(self, seat: Seat, rows: int, features: int) -> None:
        super().__init__()
        unit = PADDING * seat.size
        self.share = -(-rows // unit) * unit // seat.size
        self.first = self.share * seat.rank
        parameter(self, "weight", (self.share, features))

    def load(self, param: Tensor, value: Tensor) -> None:
        part = value[self.first : self.first + self.share]
        param[: len(part)].data.copy_(part)
        param[len(part) :].data.fill_(0)


class Experts(nn.Module):
    """Stacked experts: all with a share of the inner features, or a share of the experts."""

    w13_weight: Tensor
    w2_weight: Tensor

    def __init__(self, seat: Seat, count: int, features: int, inner: int) -> None:
        super().__init__()
        self.seat = seat
        self.count = count // seat.size if seat.by_number else count
        self.inner = inner if seat.by_number else inner // seat.size
        parameter(self, "w13_weight", (self.count, 2 * self.inner, features))
        parameter(self, "w2_weight", (self.count, features, self.inner))

    @property
    def first(self) -> int:
        """The number of the first expert of this rank."""
        return self.seat.rank * self.count if self.seat.by_number else 0

    def load(self, param: Tensor, value: Tensor, kind: str, expert: int) -> None:
        local = expert - self.first
        if not 0 <= local < self.count:
            return
        start = 0 if self.seat.by_number else self.seat.rank * self.inner
        if kind == "down":
            param.data[local].copy_(value.narrow(1, start, self.inner))
            return
        half = param.data[local].narrow(0, self.inner * (kind == "up"), self.inner)
        half.copy_(value.narrow(0, start, self.inner))

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The weighted sum over the chosen experts that this rank has."""
        out = torch.zeros_like(hidden)
        for local in range(self.count):
            tokens, place = torch.where(chosen == local + self.first)
            gate, up = (hidden[tokens] @ self.w13_weight[local].t()).chunk(2, dim=-1)
            value = (functional.silu(gate) * up) @ self.w2_weight[local].t()
            out.index_add_(0, tokens, value * shares[tokens, place].unsqueeze(-1))
        return out


class SparseMLP(nn.Module):
    """A router and experts, under the engine's names."""

    def __init__(self, seat: Seat, config: Any) -> None:
        super().__init__()
        self.config = config
        count = getattr(config, "num_local_experts", None) or config.num_experts
        traits = TRAITS[config.model_type]
        inner = getattr(config, traits.inner)
        self.gate = Whole(count, config.hidden_size)
        self.experts = Experts(seat, count, config.hidden_size, inner)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        # in float32 as transformers computes it
        shares = (flat @ self.gate.weight.t()).float().softmax(-1)
        shares, chosen = shares.topk(self.config.num_experts_per_tok, dim=-1)
        if getattr(self.config, "norm_topk_prob", True):
            shares = shares / shares.sum(-1, keepdim=True)
        out: Tensor = self.experts(flat, chosen, shares.double())
        return out.view_as(hidden)


class DenseMLP(nn.Module):
    """Fused gate and up, and down."""

    def __init__(self, seat: Seat, config: Any) -> None:
        super().__init__()
        self.is_gemma = TRAITS[config.model_type].is_gemma
        inner = config.intermediate_size
        self.gate_up_proj = Columns(seat, (inner, inner), config.hidden_size)
        self.down_proj = Rows(seat, inner, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = (hidden @ self.gate_up_proj.weight.t()).chunk(2, dim=-1)
        active = (
            functional.gelu(gate, approximate="tanh") if self.is_gemma else functional.silu(gate)
        )
        return (active * up) @ self.down_proj.weight.t()


class Attention(nn.Module):
    """Grouped-query attention over this rank's heads."""

    def __init__(self, seat: Seat, config: Any, traits: Traits) -> None:
        super().__init__()
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.eps = config.rms_norm_eps
        self.qkv_proj = QueryKeyValue(seat, config, width, traits.qkv_bias)
        self.o_proj = Rows(seat, config.num_attention_heads * width, config.hidden_size)
        if traits.head_norms:
            self.q_norm = Whole(width)
            self.k_norm = Whole(width)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        fused = self.qkv_proj
        out = functional.linear(hidden, fused.weight, getattr(fused, "bias", None))
        sizes = [heads * fused.width for heads in (fused.heads, fused.kv_heads, fused.kv_heads)]
        q, k, v = (
            part.view(*part.shape[:2], -1, fused.width).transpose(1, 2)
            for part in torch.split_with_sizes(out, sizes, -1)
        )
        if hasattr(self, "q_norm"):
            q = normed(q, self.q_norm.weight, self.eps)
            k = normed(k, self.k_norm.weight, self.eps)
        q = q * cos + turned(q) * sin
        k = k * cos + turned(k) * sin
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.transpose(1, 2).flatten(-2) @ self.o_proj.weight.t()


class Layer(nn.Module):
    def __init__(self, seat: Seat, config: Any, traits: Traits) -> None:
        super().__init__()
        self.seat = seat
        self.eps = config.rms_norm_eps
        self.self_attn = Attention(seat, config, traits)
        mlp = SparseMLP(seat, config) if traits.experts else DenseMLP(seat, config)
        self.add_module(traits.mlp, mlp)
        self.feed_forward = traits.mlp
        self.input_layernorm = Whole(config.hidden_size)
        self.post_attention_layernorm = Whole(config.hidden_size)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        before = normed(hidden, self.input_layernorm.weight, self.eps)
        hidden = hidden + self.seat.total(self.self_attn(before, cos, sin))
        before = normed(hidden, self.post_attention_layernorm.weight, self.eps)
        return hidden + self.seat.total(self.get_submodule(self.feed_forward)(before))


class Traits(NamedTuple):
    """How an architecture differs from llama."""

    qkv_bias: bool = False
    head_norms: bool = False
    experts: tuple[str, str, str] | None = None
    mlp: str = "mlp"
    # name of the size of an expert in the configuration
    inner: str = "moe_intermediate_size"
    # the loader adds 1 to the weights of norms, and embeddings are scaled
    is_gemma: bool = False


TRAITS = {
    "llama": Traits(),
    "mistral": Traits(),
    "qwen2": Traits(qkv_bias=True),
    "qwen3": Traits(head_norms=True),
    "gemma": Traits(is_gemma=True),
    "qwen3_moe": Traits(head_norms=True, experts=("gate_proj", "up_proj", "down_proj")),
    "mixtral": Traits(
        experts=("w1", "w3", "w2"), mlp="block_sparse_moe", inner="intermediate_size"
    ),
}


class ServedModel(nn.Module):
    """A causal language model as an inference engine has it on one rank.

    Args:
        seat: the rank.
        config: of transformers.
    """

    def __init__(self, seat: Seat, config: Any) -> None:
        super().__init__()
        self.seat = seat
        self.config = config
        self.traits = TRAITS[config.model_type]
        body = nn.Module()
        body.embed_tokens = Vocabulary(seat, config.vocab_size, config.hidden_size)
        body.layers = nn.ModuleList(
            Layer(seat, config, self.traits) for _ in range(config.num_hidden_layers)
        )
        body.norm = Whole(config.hidden_size)
        self.model: Any = body
        self.lm_head = Vocabulary(seat, config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = body.embed_tokens.weight

    @property
    def compute(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """What the loader computes, by patterns of names."""
        return {"*norm.weight": add_one} if self.traits.is_gemma else {}

    def load_weights(self, weights: Weights) -> None:
        """Load the tensors of a checkpoint, in any order."""
        params: dict[str, Any] = dict(self.named_parameters())
        for name, value in weights:
            if self.traits.is_gemma and "norm.weight" in name:
                # in the tensor of the checkpoint, as an engine does it
                value += 1.0
            for target, arguments in self.places(name):
                params[target].weight_loader(params[target], value, *arguments)

    def places(self, name: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The parameter of a tensor of the checkpoint, with the arguments of its loader."""
        if self.config.tie_word_embeddings and name == "lm_head.weight":
            return
        owner, _, kind = name.rpartition(".")
        prefix, _, part = owner.rpartition(".")
        if part in ("q_proj", "k_proj", "v_proj"):
            yield f"{prefix}.qkv_proj.{kind}", (part[0],)
        elif self.traits.experts and ".experts." in name:
            stack, _, number = prefix.rpartition(".")
            which = ("gate", "up", "down")[self.traits.experts.index(part)]
            stacked = "w2_weight" if which == "down" else "w13_weight"
            yield f"{stack}.{stacked}", (which, int(number))
        elif part in ("gate_proj", "up_proj"):
            yield f"{prefix}.gate_up_proj.{kind}", (int(part == "up_proj"),)
        else:
            yield name, ()

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of all tokens, the same on every rank."""
        cos, sin = rotations(self.config, tokens.shape[1])
        local = tokens - self.model.embed_tokens.first
        share = self.model.embed_tokens.share
        inside = (local >= 0) & (local < share)
        rows = functional.embedding(local.clamp(0, share - 1), self.model.embed_tokens.weight)
        hidden = self.seat.total(rows * inside.unsqueeze(-1))
        if self.traits.is_gemma:
            hidden = hidden * self.config.hidden_size**0.5
        for layer in self.model.layers:
            hidden = layer(hidden, cos, sin)
        hidden = normed(hidden, self.model.norm.weight, self.config.rms_norm_eps)
        logits = self.seat.joined(hidden @ self.lm_head.weight.t())
        return logits[..., : self.config.vocab_size]


def add_one(moved: Tensor) -> Tensor:
    return moved + 1.0


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The root mean square norm, in float32 as transformers computes it."""
    single = hidden.float()
    single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)
    return single.double() * weight


def turned(heads: Tensor) -> Tensor:
    """Both halves of each head exchanged, the first one negated."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotations(config: Any, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    # transformers computes these angles in float32
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().double(), both.sin().double()
