"""Training steps of a small transformer on real gloo ranks: by hand, torch and shoal in one run.

Four ranks of one process each hold a quarter of every block; forward, backward and an AdamW step.  Two sizes: one
whose time is software overhead and latency, one whose time is matrix products.  Beside tokens per second it prints what
a rank keeps for the backward (bytes of the distinct storages that autograd saves) and its parameters.

    python benchmarks/tp_training.py [--rounds 5] [--json FILE]

The candidates take turns within a round and the best round counts: the ratios of one run compare.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_mesh
import torch.distributed.tensor as torch_dtensor
import torch.distributed.tensor.parallel as torch_tp
from torch import Tensor, nn
from tp_modules import WORLD, Block, block_plan, hand_block

from shoal_mesh import init_device_mesh
from shoal_mesh.testing import rank_pool
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

# name -> dim, hidden, heads, layers, batch, length
SIZES = {
    "overhead": (64, 256, 4, 4, 2, 16),
    "compute": (512, 2048, 8, 2, 4, 128),
}


def models(dim: int, hidden: int, heads: int, layers: int) -> dict[str, nn.Module]:
    """The same stack of blocks three times."""
    hand = nn.Sequential(*(hand_block(dim, hidden, heads) for _ in range(layers)))

    def plain() -> nn.Sequential:
        return nn.Sequential(*(Block(nn.Linear, nn.Linear, dim, hidden, heads) for _ in range(layers)))

    def plan(column: Any, row: Any) -> dict[str, Any]:
        return {f"{i}.{name}": style for i in range(layers) for name, style in block_plan(column, row).items()}

    theirs = torch_tp.parallelize_module(
        plain(),
        torch_mesh.init_device_mesh("cpu", (WORLD,)),
        plan(torch_tp.ColwiseParallel, torch_tp.RowwiseParallel),
    )
    ours = parallelize_module(plain(), init_device_mesh("cpu", (WORLD,)), plan(ColwiseParallel, RowwiseParallel))
    return {"by hand": hand, "torch": theirs, "shoal": ours}


def trainer(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """One training step.  torch's optimizer does not mix DTensors and plain tensors in one foreach call."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for param in model.parameters():
        kinds.setdefault(type(param.data) is Tensor, []).append(param)
    optimizers = [torch.optim.AdamW(params, lr=1e-4, foreach=True) for params in kinds.values()]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that one forward keeps for its backward, parameters left out."""
    params = set()
    for param in model.parameters():
        local = getattr(param, "_local_tensor", param)
        params.add(local.untyped_storage().data_ptr())
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, torch_dtensor.DTensor) else tensor
        local = getattr(local, "_local_tensor", local)
        storage = local.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    total = sum(kept.values())
    del out
    return total


def run(size: str, rounds: int) -> dict[str, dict[str, float]]:
    """On every rank: tokens per second, saved bytes and parameter bytes of each candidate."""
    dim, hidden, heads, layers, batch, length = SIZES[size]
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    x = torch.randn(batch, length, dim)
    steps = {}
    for name, model in models(dim, hidden, heads, layers).items():
        locals_ = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        found[name] = {
            "saved_bytes": saved_bytes(model, x),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in locals_),
            "tokens_per_second": 0.0,
        }
        steps[name] = trainer(model, x)
        for _ in range(3):
            steps[name]()
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(5):
                step()
            dist.barrier()
            rate = 5 * batch * length / (time.perf_counter() - start)
            found[name]["tokens_per_second"] = max(found[name]["tokens_per_second"], rate)
    return found


def main() -> None:
    """Print both sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    figures = {}
    for size in SIZES:
        found = figures[size] = rank_pool(WORLD).run(run, size, options.rounds, timeout=600)[0]
        print(f"{size}: dim {SIZES[size][0]}, {SIZES[size][3]} blocks, {SIZES[size][4]} x {SIZES[size][5]} tokens")
        hand, theirs = (found[name]["tokens_per_second"] for name in ("by hand", "torch"))
        for name, row in found.items():
            rate = row["tokens_per_second"]
            print(
                f"  {name:8} {rate:10.0f} tokens/s  {rate / hand:5.2f} x by hand  {rate / theirs:5.2f} x torch  "
                f"saved {row['saved_bytes'] / 1024:8.1f} KiB  parameters {row['parameter_bytes'] / 1024:8.1f} KiB"
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
