"""The modules that random models are built of: (batch, sequence, features) in and out.

They are deterministic in eval mode.

Each is written as its users write it, with views by `-1` where a head count may be local under a
style.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

__all__ = ["BLOCKS"]

ACTS: dict[str, Any] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "square": lambda x: x * x,
}


class Mlp(nn.Module):
    """Linear, activation, dropout, Linear."""

    def __init__(self, dim: int, hidden: int, act: str, bias: bool, drop: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias), nn.Linear(hidden, dim, bias)
        self.act, self.drop = act, nn.Dropout(drop)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.drop(ACTS[self.act](self.up(x))))


class Gated(nn.Module):
    """Two projections that read one activation, or one fused projection that is chunked."""

    def __init__(self, dim: int, hidden: int, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.up = nn.Linear(dim, 2 * hidden)
        else:
            self.gate, self.up = nn.Linear(dim, hidden), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Any:
        gate, up = self.up(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Norm(nn.Module):
    """A norm of the features (layer, rms), of groups of channels, or of the batch."""

    def __init__(self, dim: int, kind: str, affine: bool) -> None:
        super().__init__()
        made: dict[str, Any] = {
            "layer": lambda: nn.LayerNorm(dim, elementwise_affine=affine),
            "rms": lambda: nn.RMSNorm(dim, elementwise_affine=affine),
            "group": lambda: nn.GroupNorm(2, dim, affine=affine),
            "batch": lambda: nn.BatchNorm1d(dim, affine=affine),
            "instance": lambda: nn.InstanceNorm1d(dim, affine=affine),
        }
        self.norm, self.channels = made[kind](), kind in ("group", "batch", "instance")

    def forward(self, x: Tensor) -> Any:
        return self.norm(x.transpose(1, 2)).transpose(1, 2) if self.channels else self.norm(x)


class Attention(nn.Module):
    """Grouped-query attention, by torch's function or by hand."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, size: int, by: str, normed: bool
    ) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(dim, heads * size, bias=False), nn.Linear(heads * size, dim)
        self.k, self.v = nn.Linear(dim, kv_heads * size), nn.Linear(dim, kv_heads * size)
        self.size, self.by = size, by
        self.q_norm = nn.RMSNorm(size) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = self.q_norm(q)
        if self.by == "sdpa":
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            k, v = (z.repeat_interleave(q.shape[1] // k.shape[1], 1) for z in (k, v))
            y = (q @ k.transpose(-1, -2) / self.size**0.5).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class MultiHead(nn.Module):
    """torch's own attention module."""

    def __init__(self, dim: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, heads, bias=bias, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x, need_weights=False)[0]


class Encoder(nn.Module):
    """torch's own layer, with the batch or the sequence first."""

    def __init__(
        self, dim: int, heads: int, batch_first: bool, norm_first: bool, drop: float
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.inner = nn.TransformerEncoderLayer(
            dim, heads, 8, drop, batch_first=batch_first, norm_first=norm_first
        )

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if self.batch_first else self.inner(x.transpose(0, 1)).transpose(0, 1)


class Conv(nn.Module):
    """Two convolutions over the sequence, or over (sequence, features) as a picture."""

    def __init__(self, dim: int, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.a: nn.Module
        self.b: nn.Module
        if kind == "picture":
            self.a, self.b = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 1)
        elif kind == "transposed":
            self.a, self.b = (
                nn.Conv1d(dim, width, 3, padding=1),
                nn.ConvTranspose1d(width, dim, 3, padding=1),
            )
        else:
            self.a = nn.Conv1d(
                dim, width, 3, padding=1, padding_mode="circular" if kind == "circular" else "zeros"
            )
            self.b = nn.Conv1d(width, dim, 1)

    def forward(self, x: Tensor) -> Any:
        if self.kind == "picture":
            return self.b(self.a(x.unsqueeze(1)).relu()).squeeze(1)
        return self.b(self.a(x.transpose(1, 2)).relu()).transpose(1, 2)


class Average(nn.Module):
    """Buffers that forward updates in place."""

    mean: Tensor
    count: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
                self.count += 1
        return x - self.mean


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x + x.round().sub(x) * 0.25

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 0.5


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        y = torch.exp(-x * x)
        ctx.save_for_backward(x, y, scale)
        return y * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y, scale = ctx.saved_tensors
        return -2 * x * y * scale * grads[0], (grads[0] * y).sum((0, 1))


class Custom(nn.Module):
    """Autograd functions of a user's own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Any:
        straight: Any = _Straight.apply
        exp: Any = _Exp.apply
        return straight(x) + exp(x, self.scale)


class Views(nn.Module):
    """Chunks, flattened dims, transposes, rolls, pads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        b, t, d = x.shape
        if self.kind == "flatten":
            return x.flatten(0, 1).reshape(b * t, 2, -1).transpose(1, 2).reshape(b, t, d)
        if self.kind == "chunk":
            return torch.cat([c.flip(-1) for c in x.chunk(2, -1)], -1)
        if self.kind == "roll":
            return x.roll(1, 1) + F.pad(x, (0, 0, 1, 0))[:, :-1]
        if self.kind == "write":
            y = x.clone()
            y[:, 1:] += x[:, :-1]
            y[..., 0].mul_(2)
            return y
        if self.kind == "stack":
            return torch.stack(x.unbind(1), 1).view(b, t, 2, -1).flatten(-2)
        return x.permute(2, 0, 1).contiguous().permute(1, 2, 0) * x.mean((0, 1), keepdim=True)


class Einsum(nn.Module):
    """Bare parameters, a product in Einstein's notation, positions from a buffer of indices."""

    positions: Tensor

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.w, self.table = nn.Parameter(torch.rand(dim, dim) / dim), nn.Embedding(length + 1, dim)
        self.register_buffer("positions", torch.arange(length), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return torch.einsum("btd,de->bte", x, self.w) + self.table(self.positions)


class Twice(nn.Module):
    """One Linear that is applied twice, under two names."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = self.first

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).tanh())


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Any:
        return w.triu() + w.triu(1).transpose(-1, -2)


class Parametrized(nn.Module):
    """A Linear with a parametrization."""

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        if kind == "weight_norm":
            parametrizations.weight_norm(self.inner)
        elif kind == "spectral_norm":
            parametrizations.spectral_norm(self.inner)
        else:
            parametrize.register_parametrization(self.inner, "weight", _Symmetric())

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Experts(nn.Module):
    """A dense mixture of experts, their weights stacked."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(dim, count), nn.Parameter(torch.rand(count, dim, dim) / dim)

    def forward(self, x: Tensor) -> Any:
        share = self.gate(x).softmax(-1)
        return (torch.einsum("btd,edf->btef", x, self.w) * share.unsqueeze(-1)).sum(2)


class Pool(nn.Module):
    """Pooling over the sequence, resampled to its length."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = x.transpose(1, 2)
        if self.kind == "adaptive":
            y = F.adaptive_avg_pool1d(y, 2).mean(-1, keepdim=True)
        elif self.kind == "max":
            y = F.max_pool1d(y, 3, 1, 1)
        else:
            y = F.avg_pool1d(y, 3, 1, 1)
        return x + y.transpose(1, 2)


class Drop(nn.Module):
    """Dropout of elements or of channels, an activation with a parameter."""

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.drop = {"alpha": nn.AlphaDropout, "channels": nn.Dropout1d}.get(kind, nn.Dropout)(0.3)
        self.act = nn.PReLU(dim if kind == "channels" else 1)

    def forward(self, x: Tensor) -> Any:
        return self.act(self.drop(x).transpose(1, 2)).transpose(1, 2)


BLOCKS: dict[str, type[nn.Module]] = {
    block.__name__: block
    for block in (
        Mlp,
        Gated,
        Norm,
        Attention,
        MultiHead,
        Encoder,
        Conv,
        Average,
        Custom,
        Views,
        Einsum,
        Twice,
        Parametrized,
        Experts,
        Pool,
        Drop,
    )
}
