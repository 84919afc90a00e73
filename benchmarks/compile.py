"""Compiled tensor-parallel modules: by hand, torch's DTensor and shoal in one run.

Run: ``python benchmarks/compile.py``.

One thread and a fake process group of four: the time is that of guards, of wrapping parameters and
gradients, and of superfluous kernels of a graph; the larger size is a realistic one. By
hand means plain tensors, functional collectives in `autograd.Function`s and one gradient reduction
for q, k and v. CPU time of the thread, which other load does not add to.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tp_modules
from _timing import Case, keep_cases, report
from tp_modules import WORLD, candidates, forward, step

from shoal_mesh.testing import fake_world

# Features, tokens, calls in a round: for overhead alone, and for modules of a realistic size for
# four ranks.
OVERHEAD, COMPUTE = (tp_modules.DIM, 8, 25), (512, 256, 1)
SIZES = {"inductor": (OVERHEAD, COMPUTE), "aot_eager": (OVERHEAD,)}
BAR = 1.1  # of the modules of COMPUTE
functional = torch.ops._c10d_functional


def _sum(x: Tensor) -> Tensor:
    summed: Tensor = functional.wait_tensor(
        functional.all_reduce(x.contiguous(), "sum", dist.group.WORLD.group_name)
    )
    return summed


class TracedCopy(Function):
    """Identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _sum(grad)


class TracedReduce(Function):
    """Sum over the ranks; the gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def compiled(backend: str, dim: int, tokens: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Row -> who -> one call."""
    torch._dynamo.reset()
    models = candidates(dim)
    inputs = (
        torch.randn(tokens, dim, requires_grad=True),
        torch.randn(2, tokens // 2, dim, requires_grad=True),
    )
    rows: dict[str, dict[str, Callable[[], Any]]] = {}
    for name, pair in models.items():
        for what, model, x in zip(("mlp", "block"), pair, inputs, strict=True):
            fast: Any = torch.compile(model, backend=backend, fullgraph=True)
            rows.setdefault(f"{what} forward", {})[name] = forward(fast, x)
            rows.setdefault(f"{what} forward+backward", {})[name] = step(fast, x)
    return rows


def best_us(rivals: dict[str, Callable[[], Any]], calls: int, rounds: int = 40) -> dict[str, float]:
    """CPU microseconds per call of the best round of each; they take turns."""
    best = dict.fromkeys(rivals, float("inf"))
    for run in rivals.values():
        for _ in range(20):
            run()
    for _ in range(rounds):
        for name, run in rivals.items():
            begin = time.thread_time()
            for _ in range(calls):
                run()
            best[name] = min(best[name], (time.thread_time() - begin) / calls * 1e6)
    return best


def main() -> None:
    """Print the table and which bars are met."""
    tp_modules.HandCopy, tp_modules.HandReduce = TracedCopy, TracedReduce  # type: ignore[misc]
    found = []
    with fake_world(WORLD):
        for backend, sizes in SIZES.items():
            for dim, tokens, calls in sizes:
                for row, rivals in compiled(backend, dim, tokens).items():
                    us = best_us(rivals, calls)
                    found.append((backend, row, dim, *us.values(), us["shoal"] / us["by hand"]))
    columns = [
        "backend",
        "row",
        "features",
        "by hand (us)",
        "torch (us)",
        "shoal (us)",
        "shoal/hand",
    ]
    report("compile", columns, found)
    large = [case for case in found if case[2] == COMPUTE[0] and case[0] == "inductor"]
    keep_cases("compile", [
        Case(f"compiled {row}, width {dim}", "us", ours, by_hand=hand, torch=torchs)
        for _, row, dim, hand, torchs, ours, _ in large
    ])  # fmt: skip
    missed = [
        f"{backend} {row}"
        for backend, row, dim, *_, ratio in found
        if dim == COMPUTE[0] and ratio > BAR
    ]
    print(
        f"bar of {BAR} at {COMPUTE[0]} features: "
        f"{'met' if not missed else 'MISSED: ' + ', '.join(missed)}"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
