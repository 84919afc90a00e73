"""Software overhead of tensor-parallel modules: by hand, torch and shoal in one run.

Tiny tensors, one thread and a fake process group of four: communication costs nothing, so the
time is the cost of the software. By hand means plain tensors, `autograd.Function`s and
`dist.all_reduce`, as one would write it after Megatron-LM (one gradient reduction for q, k and v).

    python benchmarks/tp_modules.py [--repeats 15] [--json FILE]

Ratios of one run compare; microseconds of different machines do not. Every figure is the best of
several rounds, and the three candidates take turns within a round, so a noisy neighbour hits all of
them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_mesh
import torch.distributed.tensor as torch_dtensor
import torch.distributed.tensor.parallel as torch_tp
from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import DTensor, clip_grad_norm_
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "packages" / "tp-styles" / "tests" / "support")
)
# the same by hand as in the tests of memory
from by_hand import HandCopy, HandReduce

WORLD = 4
DIM, HIDDEN, HEADS = 16, 32, 4

# Row -> the most that shoal may take, as a multiple of by hand.
BARS = {
    "mlp forward": 1.15,
    "mlp forward+backward": 1.4,
    "block forward": 1.15,
    "block forward+backward": 1.3,
    "adamw step": 1.3,
    "adamw step, fused": 1.3,
    "clip_grad_norm_": 1.3,
    # the same through dispatch: for information
    "torch.nn.utils clip": math.inf,
}


Layer = Callable[[int, int], nn.Module]


class HandColumn(nn.Module):
    """Some columns of a linear layer."""

    def __init__(self, inner: int, outer: int, copies: bool = True) -> None:
        super().__init__()
        ways = dist.get_world_size()
        self.weight = nn.Parameter(torch.randn(outer // ways, inner))
        self.bias = nn.Parameter(torch.randn(outer // ways))
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(HandCopy.apply(x) if self.copies else x, self.weight, self.bias)


class HandRow(nn.Module):
    """Some rows of a linear layer."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner // dist.get_world_size()))
        self.bias = nn.Parameter(torch.randn(outer))

    def forward(self, x: Tensor) -> Tensor:
        return HandReduce.apply(functional.linear(x, self.weight)) + self.bias


class MLP(nn.Module):
    """Linear, ReLU, Linear."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.act, self.second = first, nn.ReLU(), second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


class Block(nn.Module):
    """A transformer block of nine modules."""

    def __init__(
        self, column: Layer, row: Layer, dim: int = DIM, hidden: int = HIDDEN, heads: int = HEADS
    ) -> None:
        super().__init__()
        self.head = dim // heads
        self.norm1, self.norm2, self.act = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.ReLU()
        self.wq, self.wk, self.wv = column(dim, dim), column(dim, dim), column(dim, dim)
        self.wo, self.w1, self.w2 = row(dim, dim), column(dim, hidden), row(hidden, dim)
        self.shared_copy = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        if self.shared_copy:
            h = HandCopy.apply(h)
        batch, length, _ = x.shape
        q = self.wq(h).view(batch, length, -1, self.head).transpose(1, 2)
        k = self.wk(h).view(batch, length, -1, self.head).transpose(1, 2)
        v = self.wv(h).view(batch, length, -1, self.head).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        return x + self.w2(self.act(self.w1(self.norm2(x))))


def hand_block(dim: int = DIM, hidden: int = HIDDEN, heads: int = HEADS) -> Block:
    """The block by hand, with one gradient reduction for q, k and v."""
    block = Block(HandColumn, HandRow, dim, hidden, heads)
    block.shared_copy = True
    for name in ("wq", "wk", "wv"):
        getattr(block, name).copies = False
    return block


def block_plan(column: Any, row: Any) -> dict[str, Any]:
    """The styles of the block."""
    return {
        "wq": column(),
        "wk": column(),
        "wv": column(),
        "wo": row(),
        "w1": column(),
        "w2": row(),
    }


def candidates(dim: int = DIM) -> dict[str, tuple[nn.Module, nn.Module]]:
    """(MLP, block) of each of the three, of so many features."""
    torch_axis = torch_mesh.init_device_mesh("cpu", (WORLD,))
    axis, hidden = init_device_mesh("cpu", (WORLD,)), 2 * dim
    hand = MLP(HandColumn(dim, hidden), HandRow(hidden, dim)), hand_block(dim, hidden)

    def plain() -> tuple[MLP, Block]:
        return MLP(nn.Linear(dim, hidden), nn.Linear(hidden, dim)), Block(
            nn.Linear, nn.Linear, dim, hidden
        )

    theirs, ours = plain(), plain()
    mlp = {"first": torch_tp.ColwiseParallel(), "second": torch_tp.RowwiseParallel()}
    torch_tp.parallelize_module(theirs[0], torch_axis, mlp)
    plan = block_plan(torch_tp.ColwiseParallel, torch_tp.RowwiseParallel)
    torch_tp.parallelize_module(theirs[1], torch_axis, plan)
    parallelize_module(ours[0], axis, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    parallelize_module(ours[1], axis, block_plan(ColwiseParallel, RowwiseParallel))
    return {"by hand": hand, "torch": theirs, "shoal": ours}


def forward(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    """One forward, with gradients recorded."""
    return lambda: model(x)


def step(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    """One forward and backward into fresh gradients."""
    params = list(model.parameters())
    seed = torch.ones_like(x)

    def run() -> None:
        for param in params:
            param.grad = None
        x.grad = None
        torch.autograd.backward(model(x), seed)

    return run


def parallel_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the linear layers."""
    linears = [module for name, module in model.named_modules() if name.startswith("w")]
    return [param for linear in linears for param in linear.parameters()]


def optimizer_step(model: nn.Module, *, fused: bool = False) -> Callable[[], Any]:
    """One AdamW step (foreach, or fused) of the parallel parameters."""
    params = parallel_parameters(model)
    adam = torch.optim.AdamW(params, lr=1e-3, fused=fused, foreach=not fused)
    adam.step()
    return adam.step


def clip(model: nn.Module, *, dispatched: bool = False) -> Callable[[], Any]:
    """Gradient clipping of the parallel parameters; shoal's by its function unless `dispatched`.

    By hand the norm is that of the whole model too: one reduction for the sharded gradients; the
    biases of row-wise layers count once.
    """
    params = parallel_parameters(model)
    if isinstance(params[0], DTensor) and not dispatched:
        return lambda: clip_grad_norm_(params, 1e9)
    if hasattr(params[0], "placements"):
        return lambda: nn.utils.clip_grad_norm_(params, 1e9, foreach=True)
    whole = [module.bias for module in model.modules() if isinstance(module, HandRow)]
    sharded = [param for param in params if not any(param is bias for bias in whole)]

    def by_hand() -> None:
        square = nn.utils.get_total_norm([param.grad for param in sharded], foreach=True) ** 2
        dist.all_reduce(square)
        total = (
            square + nn.utils.get_total_norm([bias.grad for bias in whole], foreach=True) ** 2
        ).sqrt()
        nn.utils.clip_grads_with_norm_(params, 1e9, total, foreach=True)

    return by_hand


def seconds(run: Callable[[], Any], least: float = 0.01) -> float:
    """Seconds per call, over as many calls as fill `least` seconds."""
    start = time.perf_counter()
    run()
    calls = max(3, int(least / max(time.perf_counter() - start, 1e-7)))
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def measure(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Best microseconds of each candidate; they take turns."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        for _ in range(20):
            run()
    for _ in range(repeats):
        for name, run in runs.items():
            best[name] = min(best[name], seconds(run) * 1e6)
    return best


def rows(repeats: int) -> dict[str, dict[str, float]]:
    """Every row of the table."""
    models = candidates()
    x_mlp = torch.randn(8, DIM, requires_grad=True)
    x_block = torch.randn(2, 4, DIM, requires_grad=True)
    table = {
        "mlp forward": {name: forward(mlp, x_mlp) for name, (mlp, _) in models.items()},
        "mlp forward+backward": {name: step(mlp, x_mlp) for name, (mlp, _) in models.items()},
        "block forward": {name: forward(block, x_block) for name, (_, block) in models.items()},
        "block forward+backward": {
            name: step(block, x_block) for name, (_, block) in models.items()
        },
        "adamw step": {name: optimizer_step(block) for name, (_, block) in models.items()},
        "adamw step, fused": {
            name: optimizer_step(block, fused=True) for name, (_, block) in models.items()
        },
        "clip_grad_norm_": {name: clip(block) for name, (_, block) in models.items()},
        "torch.nn.utils clip": {
            name: clip(block, dispatched=True) for name, (_, block) in models.items()
        },
    }
    found = {}
    for name, runs in table.items():
        if name == "adamw step":
            for _, block in models.values():
                step(block, x_block)()
        found[name] = measure(runs, repeats)
    assert isinstance(models["shoal"][1].wq.weight, DTensor), "shoal's parameters are DTensors"
    assert isinstance(models["torch"][1].wq.weight, torch_dtensor.DTensor), (
        "torch's parameters are DTensors"
    )
    return found


def main() -> None:
    """Print the table; exit with 1 if shoal misses a bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fake_world(WORLD):
        found = rows(options.repeats)
    print(
        f"{'microseconds':26}{'by hand':>10}{'torch':>10}{'shoal':>10}"
        f"{'shoal/hand':>12}{'bar':>6}{'torch/shoal':>13}"
    )
    missed = []
    for name, best in found.items():
        ratio = best["shoal"] / best["by hand"]
        print(
            f"{name:26}{best['by hand']:10.1f}{best['torch']:10.1f}{best['shoal']:10.1f}"
            f"{ratio:12.2f}{BARS[name]:6.2f}{best['torch'] / best['shoal']:13.1f}"
        )
        if ratio > BARS[name]:
            missed.append(name)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=2)
    if missed:
        raise SystemExit(f"over the bar: {', '.join(missed)}")


if __name__ == "__main__":
    main()
