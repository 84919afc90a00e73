"""Losses and norms of a model whose sequence is sharded, against one device.

The sequence is sharded alone and times tensor parallelism.

Covers: shoal_context_parallel/sequence_layout.py, losses/linear_cross_entropy.py,
modules/own_forward.py.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_context_parallel import SequenceLayout
from shoal_data_parallel import replicate
from shoal_dtensor import DTensor, Shard, clip_grad_norm_, full_tensor
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    ContextParallel,
    RowwiseParallel,
    losses,
    parallelize_module,
)

WIDTH, WORDS = 16, 10


class HiddenAndLogits(nn.Module):
    """Tokens, causal attention, norms and a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens, self.norm, self.last = (
            nn.Embedding(WORDS, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.RMSNorm(WIDTH),
        )
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.double()

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the vocabulary reads."""
        x = self.tokens(tokens)
        normed = self.norm(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.last(x + self.o(mixed.transpose(1, 2).flatten(-2))))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(tokens)
        return hidden, self.head(hidden)


def z_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of all but ignored rows with a tenth of their squared log-sum-exp, averaged."""
    counted = target != -100
    each = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(
        target.shape
    )
    return ((each + 0.1 * logits.logsumexp(-1).square()) * counted).sum() / counted.sum()


def layout_of(kind: str, length: int, ranks: int) -> SequenceLayout:
    """Of a length that the ranks need not divide."""
    return getattr(SequenceLayout, kind)(length, ranks)  # type: ignore[no-any-return]  # by name


def on_mesh(
    shape: tuple[int, int], layout: SequenceLayout, more: Any = None
) -> tuple[Any, DeviceMesh]:
    """The model on a mesh of context and tensor ranks."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("context", "tensor"))
    plan: dict[str, Any] = {"": ContextParallel(method="ring", layout=layout).on("context")} | (
        more or {}
    )
    if shape[1] > 1:
        plan |= {name: ColwiseParallel().on("tensor") for name in "qkv"} | {
            "o": RowwiseParallel().on("tensor")
        }
    module: Any = parallelize_module(HiddenAndLogits(), mesh, plan)
    replicate(module, mesh["context"])
    # losses are divided by numbers of all positions
    module.set_gradient_divide_factor(1)
    return module, mesh


def assert_same_gradients(module: Any, single: HiddenAndLogits, expected: Tensor) -> None:
    """Gradients of all parameters, and their norm."""
    theirs = dict(single.named_parameters())
    for name, param in module.named_parameters():
        got = full_tensor(param.grad)
        torch.testing.assert_close(got, theirs[name].grad, msg=name)
    torch.testing.assert_close(clip_grad_norm_(module.parameters(), 0.5), expected)


MESHES = pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
LAYOUTS = pytest.mark.parametrize(
    ("kind", "length"), [("head_tail", 11), ("contiguous", 13), ("head_tail", 3)]
)


def data(length: int) -> tuple[Tensor, Tensor]:
    """Tokens, and targets of which one sample has few: means of ranks are not the mean."""
    generator = torch.Generator().manual_seed(length)
    tokens, target = (torch.randint(WORDS, (2, length), generator=generator) for _ in range(2))
    target[0, 1:] = -100
    return tokens, target


def on_one_device(single: nn.Module, tokens: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the norm of the gradients."""
    expected = z_loss(single(tokens)[1], target)
    expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    norm = nn.utils.get_total_norm(
        [param.grad for param in single.parameters() if param.grad is not None]
    )
    return expected, norm


@MESHES
@LAYOUTS
@on_ranks(4)
def test_a_mean_over_global_tokens(shape: tuple[int, int], kind: str, length: int) -> None:
    tokens, target = data(length)
    single, layout = HiddenAndLogits(), layout_of(kind, length, shape[0])
    expected, norm = on_one_device(single, tokens, target)
    module, mesh = on_mesh(shape, layout)
    rank = mesh.get_local_rank("context")
    mine, own = layout.shard(tokens, 1, rank), layout.shard(target, 1, rank)
    logits, counted = module(mine)[1], own != -100
    rows = functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
    penalty = (0.1 * logits.logsumexp(-1).square() * counted).sum()
    loss = (rows + penalty) / (target != -100).sum()
    loss.backward()
    torch.testing.assert_close(all_reduce(loss.detach(), (mesh, "context")), expected)
    assert_same_gradients(module, single, norm)


@MESHES
@LAYOUTS
@on_ranks(4)
def test_a_fused_loss_of_a_sharded_vocabulary(
    shape: tuple[int, int], kind: str, length: int
) -> None:
    tokens, target = data(length)
    single, layout = HiddenAndLogits(), layout_of(kind, length, shape[0])
    expected, norm = on_one_device(single, tokens, target)
    module, mesh = on_mesh(shape, layout, {"head": ColwiseParallel().on("tensor")})
    rank = mesh.get_local_rank("context")
    mine, own = layout.shard(tokens, 1, rank), layout.shard(target, 1, rank)
    hidden = module(mine)[0]
    total = losses.linear_cross_entropy(
        hidden, module.head.weight, own, z_loss=0.1, reduction="sum"
    )
    loss = total / (target != -100).sum()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.testing.assert_close(all_reduce(loss.detach(), (mesh, "context")), expected)
    assert_same_gradients(module, single, norm)


@MESHES
@LAYOUTS
@on_ranks(4)
def test_statistics_along_the_sequence(shape: tuple[int, int], kind: str, length: int) -> None:
    layout = layout_of(kind, length, shape[0])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("context", "tensor"))
    x = torch.randn(2, length, WIDTH, dtype=torch.double, requires_grad=True)
    rank, seed = mesh.get_local_rank("context"), torch.randn(2, length, WIDTH, dtype=torch.double)

    def normalized(x: Any) -> Any:
        """An instance norm, a norm of length and a mean along the sequence."""
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True)
        return (x - mean) * (var + 1e-5).rsqrt() / torch.linalg.vector_norm(x, dim=1, keepdim=True)

    expected = normalized(x)
    (expected * seed).sum().backward()
    local = layout.shard(x.detach(), 1, rank).requires_grad_()
    sharded = DTensor.from_local(
        local,
        mesh["context"],
        [Shard(1, sizes=tuple(layout.sizes))],
        shape=x.shape,
        stride=x.stride(),
    )
    got = normalized(sharded).to_local()
    torch.testing.assert_close(got, layout.shard(expected.detach(), 1, rank))
    (got * layout.shard(seed, 1, rank)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(local.grad, layout.shard(x.grad, 1, rank))
