"""Time and memory of many ranks on one machine: the lab beside real gloo ranks.

The lab's ranks are threads and processes.

Every rank trains a transformer of two layers with FSDP over `data` and tensor parallelism of two
ranks over `tensor`: zero_grad, forward, loss, backward, AdamW. Every case runs in a process of its
own, whose descendants are counted too: memory is the peak of the sum of their proportional shares
(PSS), less that of the parent before the ranks start.

    python benchmarks/lab.py [--ranks 8 16 32 64] [--gloo 2 4 8] [--steps 4]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: ranks are forked with it
from _timing import report
from torch import Tensor, nn
from torch.nn import functional

from shoal_data_parallel import fully_shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import lab, rank_pool
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

DIM, HEADS, LENGTH, ROWS = 256, 8, 64, 2
MIB = 1 << 20


class Layer(nn.Module):
    """Attention and a feed-forward part, as linear layers that a plan names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        self.out, self.up, self.down = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 4 * DIM),
            nn.Linear(4 * DIM, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        heads = [
            part(h).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def train(ranks: int, steps: int) -> tuple[float, float]:
    """The loss of the last step, and the seconds of a step after the first."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(Layer(), Layer())
    column = dict.fromkeys(("*.query", "*.key", "*.value", "*.up"), ColwiseParallel())
    row = dict.fromkeys(("*.out", "*.down"), RowwiseParallel())
    parallelize_module(model, mesh["tensor"], {**column, **row})
    for layer in model:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))
    batch = torch.randn(ROWS, LENGTH, DIM, generator=generator)
    started, loss = 0.0, torch.zeros(())
    for step in range(steps):
        if step == 1:
            started = time.perf_counter()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach()), (time.perf_counter() - started) / (steps - 1)


def descendants() -> list[int]:
    """This process and all below it."""
    found, seen = [os.getpid()], 0
    while seen < len(found):
        for task in Path(f"/proc/{found[seen]}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:  # it has ended
                continue
        seen += 1
    return found


def pss() -> float:
    """Return MiB of this process and all below it; shared pages are divided among processes."""
    total = 0
    for pid in descendants():
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


def measure(way: str, ranks: int, steps: int) -> dict[str, float]:
    """Seconds of the world and of a step, and MiB of all processes at most, of one way."""
    run: dict[str, Any] = {
        "threads": lambda: lab(ranks, "thread").run(train, ranks, steps),
        "processes": lambda: lab(ranks, "process").run(train, ranks, steps),
        "gloo": lambda: rank_pool(ranks).run(train, ranks, steps, timeout=600),
    }
    # the fork server, which all runs of a process share, and first imports
    lab(2, "process").run(train, 2, 2) if way != "threads" else lab(2, "thread").run(train, 2, 2)
    before, peak, done = pss(), [0.0], threading.Event()

    def sample() -> None:
        while not done.wait(0.2):
            peak[0] = max(peak[0], pss())

    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    results = run[way]()
    world = time.perf_counter() - started
    done.set()
    sampler.join()
    steps_of_ranks = [seconds for _, seconds in results]
    mean_loss = sum(loss for loss, _ in results) / ranks
    return {"world": world, "step": max(steps_of_ranks), "mib": peak[0] - before, "loss": mean_loss}


def main() -> None:
    """Measure every way in a process of its own, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--gloo", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs=2, help="a way and its ranks, in this process")
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(measure(asked.only[0], int(asked.only[1]), asked.steps)))
        return
    cases = [("gloo", ranks) for ranks in asked.gloo]
    cases += [(way, ranks) for way in ("processes", "threads") for ranks in asked.ranks]
    rows = []
    for way, ranks in cases:
        command = [sys.executable, __file__, "--steps", str(asked.steps), "--only", way, str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        mib = found["mib"]
        rows.append([way, ranks, found["world"], found["step"], mib, mib / ranks, found["loss"]])
        print(rows[-1], flush=True)
    header = ["ranks are", "ranks", "s, all", "s, a step", "MiB, all", "MiB, a rank", "mean loss"]
    report("lab", header, rows)


if __name__ == "__main__":
    main()
