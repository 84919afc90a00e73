"""A transformer trained through DTensors alone.

Covers: dispatch, propagation, rules and redistribution together.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_dtensor import Placement, Replicate, Shard, distribute_module, distribute_tensor
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks

WIDTH, HEADS, VOCABULARY = 16, 4, 31


class SeparateProjectionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.norm_1(x)
        q, k, v = (
            f(y).view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        a = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(b, t, WIDTH)
        )
        x = x + self.o(a)
        y = self.down(F.silu(self.up(self.norm_2(x))))
        return x + y  # type: ignore[no-any-return]  # modules return Any


class SmallLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([SeparateProjectionBlock(), SeparateProjectionBlock()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))  # type: ignore[no-any-return]  # modules return Any


COLUMN: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
ROW: dict[str, Placement] = {"weight": Shard(1), "bias": Replicate()}
LAYOUT = {
    "q": COLUMN,
    "k": COLUMN,
    "v": COLUMN,
    "up": COLUMN,
    "o": ROW,
    "down": ROW,
    "embed": COLUMN,
    "head": COLUMN,
}


def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    outer = [Replicate()] * (mesh.ndim - 1)
    for key, placement in LAYOUT.get(name.rpartition(".")[2], {}).items():
        parameter = module._parameters.get(key)
        if parameter is not None:
            module._parameters[key] = nn.Parameter(
                distribute_tensor(parameter, mesh, [*outer, placement])
            )


def train(
    model: nn.Module, ids: Tensor, target: Tensor, options: dict[str, bool]
) -> list[tuple[float, float]]:
    flags: Any = options
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **flags)
    seen = []
    for _ in range(3):
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=options.get("foreach"))
        optimizer.step()
        seen.append((loss.item(), float(norm)))
    return seen


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@on_ranks(4)
def test_training_equals_one_device(shape: tuple[int, ...], options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    alone = SmallLanguageModel().double()
    torch.manual_seed(0)
    model = SmallLanguageModel().double()
    ids = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(3))
    expected = train(alone, ids, ids.roll(1, 1), options)

    mesh = init_device_mesh("cpu", shape)
    distribute_module(model, mesh, shard)
    data: list[Placement] = [*([Shard(0)] if len(shape) == 2 else []), Replicate()]
    got = train(
        model,
        distribute_tensor(ids, mesh, data),
        distribute_tensor(ids.roll(1, 1), mesh, data),
        options,
    )

    # float64, three steps: what is left is the order of summation, a few units in the last place.
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-12, atol=1e-12)
    for one, many in zip(alone.parameters(), model.parameters(), strict=True):
        whole: Any = many.detach()
        torch.testing.assert_close(whole.full_tensor(), one.detach(), rtol=1e-11, atol=1e-12)
