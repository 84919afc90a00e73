"""Programs of training, with accumulation, against one CPU process.

They are tensor parallelism, data parallelism and both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .libraries import Library
from .programs import Part, assert_same, device

STEPS, ROWS, LENGTH = 3, 4, 6
PLAN = {
    "*.q": "colwise",
    "*.k": "colwise",
    "*.v": "colwise",
    "*.o": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
}


class Block(nn.Module):
    """Attention and a feed-forward network with residuals."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        q, k, v = (
            made(normed).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for made in (self.q, self.k, self.v)
        )
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(read.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return out


Build = Callable[[Library, nn.Module, Any], object]


@dataclass(frozen=True)
class Training:
    """How a model is made parallel and trained.

    Attributes:
        build: makes it parallel over a mesh with the axes "data" and "tensor".
        shape: of the mesh.
        data_axes: how many of the first axes have rows of their own.
        width: of the model.
        tolerance: of weights after three steps.
        optimizer: arguments of AdamW.
    """

    build: Build
    shape: tuple[int, int] = (4, 1)
    data_axes: int = 1
    width: int = 32
    tolerance: float = 1e-5
    optimizer: dict[str, Any] = field(default_factory=lambda: {"foreach": True})

    def __call__(self, lib: Library) -> Generator[Part, Any, None]:
        """Three steps of two microbatches each, of which the first keeps its gradients."""
        mesh = lib.init_device_mesh(device().type, self.shape, mesh_dim_names=("data", "tensor"))
        torch.manual_seed(0)
        plain = nn.Sequential(*(Block(self.width) for _ in range(3)))
        model: Any = copy.deepcopy(plain).to(device())
        self.build(lib, model, mesh)
        ours = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, **self.optimizer)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-3)
        for step in range(STEPS):
            for last in (False, True):
                x = torch.randn(
                    ROWS,
                    LENGTH,
                    self.width,
                    generator=torch.Generator().manual_seed(2 * step + last),
                )
                _loss(plain, x).backward()
                mine = self.own_rows(x, mesh).to(device())
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(last)
                loss = yield "forward", partial(_loss, model, mine)
                yield (
                    "backward" if last else "backward that keeps",
                    loss.backward if loss is not None else _nothing,
                )
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            yield "clip", partial(lib.clip_grad_norm_, model.parameters(), 1.0)
            yield "step", ours.step
            reference.step()
            for each in (ours, reference):
                each.zero_grad()
        if lib.ours:
            for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert_same(got, expected, self.tolerance)

    def own_rows(self, x: Tensor, mesh: Any) -> Tensor:
        """This rank's part of a batch."""
        if self.data_axes == 0:
            return x
        if self.data_axes == 2:
            return x.chunk(dist.get_world_size())[dist.get_rank()]
        rank: int = mesh.get_local_rank("data")
        return x.chunk(self.shape[0])[rank]


def _loss(model: nn.Module, x: Tensor) -> Any:
    return model(x).float().square().mean()


def _nothing() -> None:
    """In place of a backward whose forward has raised."""


def styles(lib: Library, model: nn.Module, mesh: Any) -> None:
    made = {"colwise": lib.styles.ColwiseParallel, "rowwise": lib.styles.RowwiseParallel}
    lib.styles.parallelize_module(
        model, mesh["tensor"], {name: made[style]() for name, style in PLAN.items()}
    )


def sharded(lib: Library, model: Any, mesh: Any, **options: Any) -> None:
    """Each block a unit, over the data axis."""
    for block in model:
        lib.data.fully_shard(block, mesh=mesh["data"], **options)
    lib.data.fully_shard(model, mesh=mesh["data"], **options)


def hybrid(lib: Library, model: Any, mesh: Any) -> None:
    """Sharded over the second axis, replicated over the first."""
    for module in (*model, model):
        lib.data.fully_shard(module, mesh=mesh)


def styled_and_sharded(lib: Library, model: Any, mesh: Any) -> None:
    styles(lib, model, mesh)
    sharded(lib, model, mesh)


def in_bfloat16(lib: Library, model: Any, mesh: Any) -> None:
    policy = lib.data.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded(lib, model, mesh, mp_policy=policy)


def offloaded(lib: Library, model: Any, mesh: Any) -> None:
    sharded(lib, model, mesh, offload_policy=lib.data.CPUOffloadPolicy())


def replicated(lib: Library, model: Any, mesh: Any) -> None:
    lib.replicate(model, mesh["data"])


TRAININGS = {
    "tensor parallel": Training(styles, (1, 4), data_axes=0),
    "fully_shard": Training(sharded),
    "fully_shard, uneven": Training(sharded, width=36, tolerance=2e-5),
    "fully_shard, kept after forward": Training(partial(sharded, reshard_after_forward=False)),
    "fully_shard, fused step": Training(sharded, optimizer={"fused": True}),
    "fully_shard, bfloat16": Training(in_bfloat16, tolerance=1e-2),
    "fully_shard, offloaded": Training(offloaded),
    "hybrid": Training(hybrid, (2, 2), data_axes=2),
    "tensor parallel x fully_shard": Training(styled_and_sharded, (2, 2)),
    "replicate": Training(replicated),
}
