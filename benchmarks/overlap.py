"""Asynchronous tensor parallelism on two gloo ranks, in one run.

`overlapped(n)` is measured beside the same styles without it.

    python benchmarks/overlap.py [--ranks 2] [--rounds 12]

The activations between blocks are sharded along the sequence. Columns: the gather of a chunk beside
the product of the one before; rows: the reduce-scatter likewise; both, forward and backward. On CPU
ranks that share two cores nothing can overlap, so the results must be right and the step not
slower. The best round counts; the candidates take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from _timing import Case, keep_cases, report
from torch import nn

from shoal_dtensor import Shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import rank_pool
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

DIM, HIDDEN, BATCH, LENGTH, STEPS = 512, 2048, 8, 64, 3
BAR = 1.05


def models() -> dict[str, nn.Module]:
    """Columns and rows, each overlapped or not."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = (
        ColwiseParallel(input_layouts=Shard(0)),
        RowwiseParallel(output_layouts=Shard(0)),
    )
    plans: dict[str, tuple[Any, Any]] = {
        "plain": (columns, rows),
        "columns": (columns.overlapped(2), rows),
        "rows": (columns, rows.overlapped(2)),
        "both": (columns.overlapped(2), rows.overlapped(2)),
    }
    return {
        name: parallelize_module(deepcopy(start), mesh, {"0": first, "2": second})
        for name, (first, second) in plans.items()
    }


def step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def run() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return run


def run(rounds: int) -> dict[str, float]:
    """On every rank: milliseconds of a step of each."""
    torch.set_num_threads(1)
    every = models()
    x = torch.randn(BATCH, LENGTH, DIM, requires_grad=True)
    with torch.no_grad():
        expected = every["plain"](x)
        for model in every.values():
            torch.testing.assert_close(model(x), expected)
    rivals = {name: step(model, x) for name, model in every.items()}
    best = dict.fromkeys(rivals, float("inf"))
    for _ in range(rounds):
        for name, rival in rivals.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                rival()
            best[name] = min(best[name], (time.perf_counter() - begin) / STEPS * 1e3)
    return best


def main() -> None:
    """One row each, and the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    found = rank_pool(options.ranks).run(run, options.rounds, timeout=600)[0]
    rank_pool(options.ranks).close()
    keep_cases("overlap", [
        Case(f"asynchronous tensor parallelism, width {DIM}: {n}", "ms", ms, by_hand=found["plain"])
        for n, ms in found.items() if n != "plain"
    ])  # fmt: skip
    report(
        "overlap",
        ["overlapped", "ms", "over plain"],
        [(n, ms, ms / found["plain"]) for n, ms in found.items()],
    )
    over = [name for name, ms in found.items() if ms > BAR * found["plain"]]
    print(f"bar: at most {BAR} x plain: {'met' if not over else 'MISSED by ' + ', '.join(over)}")


if __name__ == "__main__":
    main()
