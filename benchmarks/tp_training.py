"""Training steps of a small transformer on real gloo ranks: by hand, torch and shoal in one run.

Ranks of one process each hold their part of every block; a step is zero_grad, forward, loss,
backward, AdamW (foreach). Two sizes: one whose time is software overhead and latency, one whose
time is matrix products.

    python benchmarks/tp_training.py [--ranks 2 4] [--rounds 12] [--json FILE]

Beside tokens per second it prints, per rank, the bytes of the distinct storages that autograd saves
for the backward, the peak of the allocations of a step (gradients, activations, temporaries; from
torch's profiler), and the milliseconds of processor time of every phase on rank 0.

By hand: plain tensors, all-reduces in `autograd.Function`s. shoal: `parallelize_module`.
overlapped: the same, with the reductions of row-wise layers in two chunks beside their products.
invariant: the same bits on any number of ranks.

The candidates take turns within a round. The ratio is that of the best rounds; in brackets the
median of the rounds' own ratios. Compare ratios of one run only, and look at the load: four ranks
on two cores wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_mesh
import torch.distributed.tensor as torch_dtensor
import torch.distributed.tensor.parallel as torch_tp
from _timing import Case, keep_cases
from torch import Tensor, nn
from tp_modules import Block, block_plan, hand_block

from shoal_mesh import init_device_mesh
from shoal_mesh.testing import rank_pool
from shoal_same_bits import invariant_arithmetic
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

# name -> dim, hidden, heads, layers, batch, length, steps in a round
SIZES = {
    "overhead": (64, 256, 4, 4, 2, 16, 6),
    "compute": (512, 2048, 8, 2, 4, 128, 2),
}
# tokens per second of shoal, at least, as a multiple of by hand
BAR = 0.95
Phases = dict[str, Callable[[], None]]


def models(dim: int, hidden: int, heads: int, layers: int) -> dict[str, nn.Module]:
    """The same stack of blocks, once for each candidate."""
    ranks = dist.get_world_size()
    hand = nn.Sequential(*(hand_block(dim, hidden, heads) for _ in range(layers)))

    def plain() -> nn.Sequential:
        return nn.Sequential(
            *(Block(nn.Linear, nn.Linear, dim, hidden, heads) for _ in range(layers))
        )

    def plan(column: Any, row: Any) -> dict[str, Any]:
        return {
            f"{i}.{name}": style
            for i in range(layers)
            for name, style in block_plan(column, row).items()
        }

    theirs = torch_mesh.init_device_mesh("cpu", (ranks,))
    ours = init_device_mesh("cpu", (ranks,))
    torch_plan, our_plan = (
        plan(torch_tp.ColwiseParallel, torch_tp.RowwiseParallel),
        plan(ColwiseParallel, RowwiseParallel),
    )
    with mode("invariant"):
        invariant = parallelize_module(plain(), ours, our_plan)
    return {
        "by hand": hand,
        "torch": torch_tp.parallelize_module(plain(), theirs, torch_plan),
        "shoal": parallelize_module(plain(), ours, our_plan),
        "overlapped": parallelize_module(
            plain(), ours, plan(ColwiseParallel, lambda: RowwiseParallel().overlapped(2))
        ),
        "invariant": invariant,
    }


def mode(name: str) -> AbstractContextManager[Any]:
    """Return the context of a candidate's program."""
    return invariant_arithmetic() if name == "invariant" else nullcontext()


def optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Make the AdamW optimizers.

    There is one for each kind of parameters where DTensors and plain tensors do not go into one
    foreach call.
    """
    if name in ("shoal", "overlapped", "invariant"):
        return [torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)]
    kinds: dict[bool, list[nn.Parameter]] = {}
    for param in model.parameters():
        kinds.setdefault(type(param.data) is Tensor, []).append(param)
    return [torch.optim.AdamW(params, lr=1e-4, foreach=True) for params in kinds.values()]


def phases(name: str, model: nn.Module, x: Tensor) -> Phases:
    """Return the phases of a training step, in order."""
    adam = optimizers(name, model)
    held: dict[str, Tensor] = {}

    def zero() -> None:
        for optimizer in adam:
            optimizer.zero_grad()

    def forward() -> None:
        held["out"] = model(x)

    def loss() -> None:
        held["loss"] = held.pop("out").square().mean()

    def backward() -> None:
        held.pop("loss").backward()

    def step() -> None:
        for optimizer in adam:
            optimizer.step()

    def within(run: Callable[[], None]) -> Callable[[], None]:
        def in_mode() -> None:
            with mode(name):
                run()

        return in_mode

    parts = {
        "zero_grad": zero,
        "forward": forward,
        "loss": loss,
        "backward": backward,
        "step": step,
    }
    return {part: within(run) for part, run in parts.items()} if name == "invariant" else parts


def local_parameters(model: nn.Module) -> list[Tensor]:
    """This rank's part of every parameter."""
    return [getattr(param, "_local_tensor", param) for param in model.parameters()]


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that a forward keeps for its backward, without parameters."""
    params = {local.untyped_storage().data_ptr() for local in local_parameters(model)}
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


def peak_bytes(work: Phases) -> int:
    """Return a training step's peak beyond the memory before: parameters and optimizer state."""
    work["zero_grad"]()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        for run in work.values():
            run()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def by_phase(works: dict[str, Phases], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of processor time of each phase.

    They are the lower quartile over many steps, with candidates in turns.
    """
    taken: dict[str, dict[str, list[float]]] = {
        name: {phase: [] for phase in work} for name, work in works.items()
    }
    for _ in range(rounds):
        for name, work in works.items():
            for phase, run in work.items():
                start = time.process_time()
                run()
                taken[name][phase].append(time.process_time() - start)
    return {
        name: {phase: sorted(times)[len(times) // 4] * 1e3 for phase, times in found.items()}
        for name, found in taken.items()
    }


def in_turns(works: dict[str, Phases], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each candidate in all rounds; within a round they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                for each in work.values():
                    each()
            dist.barrier()
            seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def run(size: str, rounds: int) -> dict[str, dict[str, Any]]:
    """On every rank: rates of all rounds, bytes and phases of each candidate."""
    dim, hidden, heads, layers, batch, length, steps = SIZES[size]
    torch.set_num_threads(1)
    x = torch.randn(batch, length, dim)
    found: dict[str, dict[str, Any]] = {}
    works = {}
    for name, model in models(dim, hidden, heads, layers).items():
        work = works[name] = phases(name, model, x)
        with mode(name):
            found[name] = {"saved": saved_bytes(model, x)}
        found[name]["parameters"] = sum(
            p.numel() * p.element_size() for p in local_parameters(model)
        )
        for _ in range(3):
            for each in work.values():
                each()
        # The memory that the threads of gloo still hold differs from run to run: take the least of
        # some runs.
        found[name]["peak"] = min(peak_bytes(work) for _ in range(4))
    for name, seconds in in_turns(works, steps, rounds).items():
        found[name]["rates"] = [batch * length / each for each in seconds]
    for name, times in by_phase(works, rounds).items():
        found[name]["phases"] = times
    return found


def ratio(found: dict[str, dict[str, Any]], name: str, peer: str) -> tuple[float, float]:
    """Return a candidate's rate over a peer's: by the best rounds, and the median of all rounds."""
    mine, other = found[name]["rates"], found[peer]["rates"]
    return max(mine) / max(other), statistics.median(
        a / b for a, b in zip(mine, other, strict=True)
    )


def show(found: dict[str, dict[str, Any]]) -> None:
    """Two tables: rates and bytes, and phases."""
    print(
        f"  {'':11}{'tokens/s':>9}{'x by hand':>16}{'x torch':>16}"
        f"{'saved KiB':>11}{'peak KiB':>10}{'params KiB':>12}"
    )
    for name, row in found.items():
        (best, middle), (over, median) = ratio(found, name, "by hand"), ratio(found, name, "torch")
        print(
            f"  {name:11}{max(row['rates']):9.0f}{best:9.2f} ({middle:4.2f}){over:9.2f} "
            f"({median:4.2f})"
            f"{row['saved'] / 1024:11.1f}{row['peak'] / 1024:10.1f}{row['parameters'] / 1024:12.1f}"
        )
    names = list(found["by hand"]["phases"])
    print("  ms on rank 0" + "".join(f"{name:>11}" for name in (*names, "sum")))
    for name, row in found.items():
        times = [row["phases"][phase] for phase in names]
        print(f"  {name:11} " + "".join(f"{value:11.2f}" for value in (*times, sum(times))))


def cases(title: str, found: dict[str, Any]) -> list[Case]:
    """Time and memory of a step."""
    dim, _, _, layers, batch, length, _ = SIZES["compute"]
    what = f"tensor-parallel step, width {dim}, {layers} blocks, {title.split(', ')[1]}"
    ms = {name: batch * length / max(row["rates"]) * 1e3 for name, row in found.items()}
    peaks = {name: row["peak"] / 2**20 for name, row in found.items()}
    return [
        Case(what, "ms", ms["shoal"], ms["by hand"], ms["torch"]),
        Case(f"{what}: peak", "MiB", peaks["shoal"], peaks["by hand"], peaks["torch"]),
    ]


def main() -> None:
    """Print every size for every number of ranks.

    Exit with 1 if shoal is below its bar, or below torch.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    missed = []
    for ranks in options.ranks:
        for size, (dim, _, _, layers, batch, length, _) in SIZES.items():
            title = f"{size}, {ranks} ranks"
            before = os.getloadavg()[0]
            found = figures[title] = rank_pool(ranks).run(run, size, options.rounds, timeout=900)[0]
            load = f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after"
            print(f"{title}: dim {dim}, {layers} blocks, {batch} x {length} tokens; {load}")
            show(found)
            if ratio(found, "shoal", "by hand")[0] < BAR or ratio(found, "shoal", "torch")[0] <= 1:
                missed.append(title)
        rank_pool(ranks).close()
    large = {title: found for title, found in figures.items() if title.startswith("compute")}
    keep_cases(
        "tp_training", [case for title, found in large.items() for case in cases(title, found)]
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)
    if missed:
        raise SystemExit(f"below {BAR} of by hand, or below torch: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
