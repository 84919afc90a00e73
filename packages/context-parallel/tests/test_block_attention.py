"""Covers: attention_kernels.py, block_attention.py, _torch.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shoal_context_parallel import _torch
from shoal_context_parallel.attention import attention_kernels
from shoal_context_parallel.attention.attention_kernels import (
    BlockKernel,
    kernel_of,
    plain_attention,
)
from shoal_context_parallel.attention.block_attention import merge
from shoal_context_parallel.attention.tiles import Tile, TileKind

KINDS = pytest.mark.parametrize("kind", list(TileKind))
MASKED = pytest.mark.parametrize("masked", [False, True])


class Case:
    """A tile of two heads of keys with three query heads each, and its attention in float64."""

    def __init__(
        self, kind: TileKind, masked: bool, width: int, queries: int, keys: int, values: int
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = (3, queries, width), (1, keys, width), (1, keys, values)
        self.inputs = [
            torch.randn(2, *size, dtype=torch.double, generator=generator) for size in sizes
        ]
        self.tile = Tile(
            None, slice(0, queries), slice(0, keys), kind, 1 if kind is TileKind.BAND else 0, 0
        )
        behind = torch.arange(queries).unsqueeze(-1) + self.tile.offset - torch.arange(keys)
        reads = {
            TileKind.FULL: behind > -keys - 9,
            TileKind.CAUSAL: behind >= 0,
            TileKind.BAND: (behind <= 2) & (behind >= -1),
        }
        self.added: Tensor | None = None
        if masked:
            self.added = torch.randn(1, 1, queries, keys, dtype=torch.double, generator=generator)
            self.added[..., 2, :] = -math.inf  # a query that reads nothing
        q, k, v = (x.requires_grad_() for x in self.inputs)
        scores = (
            q @ k.transpose(-1, -2) * 0.3 + (0 if self.added is None else self.added)
        ).masked_fill(~reads[kind], -math.inf)
        reading = scores.amax(-1, keepdim=True) > -math.inf
        self.out = (torch.where(reading, scores, 0).softmax(-1) * reading) @ v
        self.sums = scores.logsumexp(-1)
        self.seed = torch.randn(self.out.shape, dtype=torch.double, generator=generator)
        self.grads = torch.autograd.grad(self.out, (q, k, v), self.seed)

    @torch.no_grad()
    def run(self, device: str, dtype: torch.dtype) -> list[Tensor]:
        """Output, log-sums and gradients by the kernels for a device and a dtype."""
        q, k, v, seed = (x.detach().to(device, dtype) for x in (*self.inputs, self.seed))
        added = None if self.added is None else self.added.to(device, dtype)
        kernel = BlockKernel(
            0.3, (2, 1), added, *(kernel_of(q, v, masked=masked) for masked in (False, True))
        )
        out, sums = kernel.forward(q, k, v, self.tile)
        return [
            out,
            sums,
            *kernel.backward(seed, q, k, v, out, sums.masked_fill(sums == -math.inf, 0), self.tile),
        ]


@KINDS
@MASKED
# of values: with another width than keys no fused kernel runs
@pytest.mark.parametrize("width", [8, 5])
def test_a_tile_is_softmax(
    kind: TileKind, masked: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        attention_kernels, "_MOST_SCORES_ON_CPU", 2 * 3 * 6 * 2
    )  # two queries at a time
    case = Case(kind, masked, 8, 5, 6, width)
    for got, want in zip(
        case.run("cpu", torch.double), (case.out, case.sums, *case.grads), strict=True
    ):
        torch.testing.assert_close(got, want)


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
# of norms
ERRORS = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-10}


@pytest.mark.parametrize("device", DEVICES)
@KINDS
@MASKED
@pytest.mark.parametrize("width", [64, 24, 5])  # of values; with 5 plain operators
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_a_tile_by_dtype(
    device: str, kind: TileKind, masked: bool, width: int, dtype: torch.dtype
) -> None:
    case = Case(kind, masked, 64, 72, 72, width)
    for got, want in zip(case.run(device, dtype), (case.out, case.sums, *case.grads), strict=True):
        assert torch.equal(got.cpu() == -math.inf, want == -math.inf)
        error = (got.cpu().double() - want).nan_to_num(nan=0.0)
        assert error.norm() < ERRORS[dtype] * want.nan_to_num(neginf=0.0).norm()


def _runs(name: str, q: Tensor, v: Tensor) -> bool:
    """What torch says on a device of today."""
    return q.dtype in (torch.bfloat16, torch.float16) or (
        name == "efficient" and q.dtype is torch.float32
    )


def _chosen(dtype: torch.dtype, widths: tuple[int, int], device: str) -> list[str]:
    q, v = (torch.empty(2, 3, 9, width, dtype=dtype, device=device) for width in widths)
    return [kernel_of(q, v, masked=masked).forward.__name__ for masked in (False, True)]


def test_the_kernel_follows_from_device_dtype_and_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "can_use", _runs)
    flash, efficient, plain = "cuda_flash_attention", "efficient_attention", "plain_attention"
    with FakeTensorMode():  # a CUDA device without one
        assert _chosen(torch.bfloat16, (64, 64), "cuda") == [flash, efficient]
        assert _chosen(torch.bfloat16, (64, 32), "cuda") == [efficient, efficient]
        assert _chosen(torch.float32, (64, 64), "cuda") == [efficient, efficient]
        assert (
            _chosen(torch.float64, (64, 64), "cuda")
            == _chosen(torch.float16, (64, 5), "cuda")
            == [plain, plain]
        )
    assert _chosen(torch.float64, (5, 5), "cpu") == ["flash_attention"] * 2
    assert (
        _chosen(torch.float32, (64, 32), "cpu")
        == _chosen(torch.float32, (64, 64), "meta")
        == [plain, plain]
    )


@MASKED
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [(64, 64), (64, 32)])
def test_kernels_of_cuda_take_what_they_are_given(
    causal: bool, masked: bool, widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the signatures and the shape functions of torch; no number is computed."""
    monkeypatch.setattr(_torch, "can_use", _runs)
    like: Any = {"device": "cuda", "dtype": torch.bfloat16}
    with FakeTensorMode():
        q, out = (torch.empty(2, 3, 40, width, **like) for width in widths)
        # shared by a group of query heads
        k, v = (torch.empty(2, 1, 40, width, **like) for width in widths)
        mask = torch.empty(1, 3, 40, 40, **like) if masked else None
        kernel = kernel_of(q, v, masked=masked)
        assert kernel.forward is not plain_attention
        if not kernel.shares_key_heads:
            k, v = (x.expand(2, 3, 40, -1) for x in (k, v))
        found, sums = kernel.forward(q, k, v, causal and not masked, mask, 0.3)
        assert (found.shape, found.dtype) == (out.shape, out.dtype)
        assert (sums.shape, sums.dtype) == ((2, 3, 40), torch.float32)
        total = torch.empty(2, 3, 40, device="cuda")
        grads = kernel.backward(
            out, q, k, v, out, total, causal=causal and not masked, mask=mask, scale=0.3
        )
        assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v)]


def test_merging_blocks_is_one_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, values = (
        torch.randn(2, 3, 8, generator=generator),
        torch.randn(2, 8, 4, generator=generator),
    )
    scores[0, 1] = -torch.inf  # reads nothing
    scores[0, 2, :4] = -torch.inf  # reads nothing of the first block
    out, lse = torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf)
    for keys in (slice(0, 4), slice(4, 8)):
        block = scores[..., keys]
        merge(out, lse, block.softmax(-1).nan_to_num() @ values[:, keys], block.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1).nan_to_num() @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
