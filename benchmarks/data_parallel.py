"""Training steps of data-parallel ranks over gloo: `fully_shard` and `replicate` of torch and of shoal, in one run.

    python benchmarks/data_parallel.py [--rounds 8] [--json FILE]

Four ranks, as 4 data-parallel ones and as 2 x 2 with tensor parallelism; every block is a unit, and what is around them
the outermost one. Replicas, on the 4: torch's DistributedDataParallel, one all-reduce by hand, and `replicate` with the
optimizer's state replicated and sharded. A step is zero_grad, forward, loss, backward, AdamW. The candidates take turns
within a round; the ratio is that of the best rounds, in brackets the median of the rounds' own.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_mesh
import torch.distributed.tensor.parallel as torch_tp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from tp_modules import Block, block_plan
from tp_training import SIZES, in_turns, peak_bytes

from shoal_dtensor import local_step
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import rank_pool
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

LAYOUTS = {"data 4": (4, 1), "data 2 x tensor 2": (2, 2), "replicas 4": (4, 1)}
BARS = {"data 4": 0.9, "data 2 x tensor 2": 0.7, "replicas 4": 1.1}  # time of a step at most, as a multiple of torch's


def stack(size: str) -> nn.Sequential:
    """The same plain blocks every time."""
    dim, hidden, heads, layers, *_ = SIZES[size]
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nn.Linear, nn.Linear, dim, hidden, heads) for _ in range(layers)))


def sharded(size: str, layout: tuple[int, int]) -> dict[str, nn.Module]:
    """The stack, sharded by torch and by shoal."""
    sides = {
        "torch": (torch_mesh.init_device_mesh, torch_fully_shard, torch_tp),
        "shoal": (init_device_mesh, fully_shard, None),
    }
    found: dict[str, nn.Module] = {}
    for name, (make, shard, styles) in sides.items():
        mesh: Any = make("cpu", layout, mesh_dim_names=("data", "tensor"))
        model = stack(size)
        if layout[1] > 1:
            column, row = (
                (torch_tp.ColwiseParallel, torch_tp.RowwiseParallel) if styles else (ColwiseParallel, RowwiseParallel)
            )
            plan = {f"{i}.{key}": style for i in range(len(model)) for key, style in block_plan(column, row).items()}
            (torch_tp.parallelize_module if styles else parallelize_module)(model, mesh["tensor"], plan)
        for block in model:
            shard(block, mesh=mesh["data"])
        found[name] = shard(model, mesh=mesh["data"])
    return found


def replicas(size: str, layout: tuple[int, int]) -> dict[str, nn.Module]:
    """The stack, replicated by torch, by hand (after backward), and by shoal, with sharded optimizer state too."""
    data = init_device_mesh("cpu", layout, mesh_dim_names=("data", "tensor"))["data"]
    return {
        "torch": DistributedDataParallel(stack(size), process_group=data.get_group()),
        "by hand": stack(size),
        "shoal": replicate(stack(size), data),
        "shoal, state sharded": replicate(stack(size), data, shard_optimizer=True),
    }


def reduce_by_hand(parameters: list[nn.Parameter]) -> None:
    """Average all gradients in one collective."""
    grads: list[Any] = [parameter.grad for parameter in parameters]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    torch._foreach_copy_(
        grads, [means.view_as(grad) for grad, means in zip(grads, flat.split([g.numel() for g in grads]), strict=True)]
    )


def phases(name: str, model: nn.Module, x: Tensor) -> dict[str, Any]:
    """What a step consists of."""
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    adam = local_step(adam) if "shoal" in name else adam
    held: dict[str, Tensor] = {}

    def forward() -> None:
        held["loss"] = model(x).square().mean()

    def backward() -> None:
        held.pop("loss").backward()
        if name == "by hand":
            reduce_by_hand(parameters)

    return {"zero_grad": adam.zero_grad, "forward": forward, "backward": backward, "step": adam.step}


def run(size: str, title: str, rounds: int) -> dict[str, dict[str, Any]]:
    """On every rank: seconds of a step in all rounds, peak bytes and collectives of each candidate."""
    dim, _, _, _, batch, length, steps = SIZES[size]
    torch.set_num_threads(1)
    x = torch.randn(batch, length, dim)
    found: dict[str, dict[str, Any]] = {}
    works = {}
    for name, model in (replicas if title == "replicas 4" else sharded)(size, LAYOUTS[title]).items():
        work = works[name] = phases(name, model, x)
        for _ in range(3):
            for each in work.values():
                each()
        found[name] = {"peak": min(peak_bytes(work) for _ in range(3))}
        with CommDebugMode() as counted:
            for each in work.values():
                each()
        found[name]["collectives"] = {str(op).rpartition(".")[2]: n for op, n in counted.get_comm_counts().items()}
    for name, seconds in in_turns(works, steps, rounds).items():
        found[name]["seconds"] = seconds
    return found


def main() -> None:
    """Print every size and layout; exit with 1 if shoal is over a bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    missed = []
    for title in LAYOUTS:
        for size in SIZES:
            found = figures[f"{title}, {size}"] = rank_pool(4).run(run, size, title, options.rounds, timeout=900)[0]
            ours, theirs = found["shoal"]["seconds"], found["torch"]["seconds"]
            best = min(ours) / min(theirs)
            median = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            print(f"{title}, {size}: shoal {best:.2f} ({median:.2f}) x torch's time")
            for name, row in found.items():
                described = f"{min(row['seconds']) * 1e3:8.1f} ms  peak {row['peak'] / 2**20:7.2f} MiB"
                print(f"  {name:20}{described}  {row['collectives'] if 'shoal' in name else ''}")
            if best > BARS[title]:
                missed.append(f"{title}, {size}")
    rank_pool(4).close()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)
    if missed:
        raise SystemExit(f"over the bar: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
