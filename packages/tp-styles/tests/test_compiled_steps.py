"""Training with compiled forward, loss, backward, clipping and optimizer, on real ranks.

Covers: lowering/parameters.py.  Losses, norms and weights are those of one device,
whose optimizer is compiled too: a compiled Adam corrects its bias in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_marks import COMPILED
from shoal_dtensor import clip_grad_norm_, full_tensor
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = COMPILED
STEPS, MAX_NORM = 5, 0.05


class UnevenColumnsAndNorm(nn.Module):
    """Rows behind columns that two ranks share unevenly, and a norm whose parameters are plain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 5), nn.LayerNorm(4), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        out: Tensor = self.norm(x + self.second(F.gelu(self.first(x))))
        return out


def start(seed: int) -> UnevenColumnsAndNorm:
    torch.manual_seed(seed)
    return UnevenColumnsAndNorm().double()


def parallel(seed: int) -> Any:
    return parallelize_module(
        start(seed), all_ranks(), {"first": ColwiseParallel(), "second": RowwiseParallel()}
    )


def training(model: Any, loss_of: Any, clip: Any, *, compiles: str) -> Iterator[tuple[Tensor, ...]]:
    """Loss, norm and weights of every step."""
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = torch.compile(adam.step, backend=compiles)
    x = torch.linspace(-2, 2, 24, dtype=torch.double).view(6, 4)
    for _ in range(STEPS):
        adam.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        norm = clip(list(model.parameters()), MAX_NORM)
        step()
        weights = [full_tensor(p) for p in model.parameters()]
        yield loss.detach(), norm, *(weight.detach().clone() for weight in weights)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2, timeout=280)
def test_the_steps_of_two_models_are_those_of_one_device(backend: str) -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x.cos())

    torch._dynamo.reset()
    loss = torch.compile(loss_of, backend=backend, fullgraph=True)
    clip = torch.compile(clip_grad_norm_, backend=backend, fullgraph=True)
    for seed in (0, 1):
        expected = training(start(seed), loss_of, nn.utils.clip_grad_norm_, compiles=backend)
        got = training(parallel(seed), loss, clip, compiles=backend)
        for mine, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, wanted)
            assert wanted[1] > MAX_NORM, "gradients are clipped"
