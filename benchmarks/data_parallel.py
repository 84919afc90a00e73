"""Training steps of data-parallel ranks over gloo, in one run.

The candidates are `fully_shard` and `replicate` of torch and of shoal.

    python benchmarks/data_parallel.py [--rounds 8] [--only "data 4"] [--json FILE] [--trace]

Four ranks, as 4 data-parallel ones and as 2 x 2 with tensor parallelism; every block is a unit, and
the rest of the model is the outermost unit. By hand, on the 4: a flat tensor per block and c10d
(`_hand_fsdp`). Replicas, on the 4: torch's DistributedDataParallel, one all-reduce by hand, and
`replicate` with the optimizer's state replicated and sharded. A step is zero_grad, forward, loss,
backward, AdamW. The candidates take turns within a round; the ratio is that of the best rounds, in
brackets the median of the rounds' own. Beside wall time: processor time of all ranks together,
which other load on the machine changes less.

Memory of rank 0, in MiB: its parameters, gradients and optimizer state; the peak of a
step beside parameters and state, from torch's profiler; and of the memory that the ranks share, its
part. With a model of P bytes in units of U, A bytes of saved activations and n ranks, the peak of
`fully_shard` is at most A + 2 U + P / n: the last unit's gathered parameters and gradients, and
reduced gradients. Collectives in flight use shared memory: U / n, and at most 8 MiB for gradients.

`--trace` prints when units were gathered, computed and reduced in one step on rank 0, and fails
unless every collective but the first of forward and backward was under way while another unit
computed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_mesh
import torch.distributed.tensor.parallel as torch_tp
from _hand_fsdp import HandSharded
from _timing import Case, keep_cases
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from tp_modules import Block, block_plan
from tp_training import SIZES, peak_bytes, saved_bytes

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor.internal import redistribute_shards
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import rank_pool
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

LAYOUTS = {"data 4": (4, 1), "data 2 x tensor 2": (2, 2), "replicas 4": (4, 1)}
# time of a step at most, as a multiple of torch's
BARS = {"data 4": 0.9, "data 2 x tensor 2": 0.7, "replicas 4": 1.1}
HAND_BAR = 1.1  # and of that by hand
MIB = 2**20


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
                (torch_tp.ColwiseParallel, torch_tp.RowwiseParallel)
                if styles
                else (ColwiseParallel, RowwiseParallel)
            )
            plan = {
                f"{i}.{key}": style
                for i in range(len(model))
                for key, style in block_plan(column, row).items()
            }
            (torch_tp.parallelize_module if styles else parallelize_module)(
                model, mesh["tensor"], plan
            )
        for block in model:
            shard(block, mesh=mesh["data"])
        found[name] = shard(model, mesh=mesh["data"])
    if layout[1] == 1:
        found["by hand"] = HandSharded(stack(size), dist.group.WORLD)
    return found


def replicas(size: str, layout: tuple[int, int]) -> dict[str, nn.Module]:
    """The stack, replicated by torch, by hand (after backward), and by shoal.

    Shoal's is measured with sharded optimizer state too.
    """
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
        grads,
        [
            means.view_as(grad)
            for grad, means in zip(grads, flat.split([g.numel() for g in grads]), strict=True)
        ],
    )


def phases(
    name: str, model: nn.Module, x: Tensor
) -> tuple[dict[str, Any], Callable[[], dict[str, int]]]:
    """Return the parts of a step, and a function that returns the memory of this rank."""
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    held: dict[str, Tensor] = {}

    def forward() -> None:
        held["loss"] = model(x).square().mean()

    def backward() -> None:
        held.pop("loss").backward()
        if isinstance(model, HandSharded):
            model.finish()
        elif name == "by hand":
            reduce_by_hand(parameters)

    steps = {
        "zero_grad": adam.zero_grad,
        "forward": forward,
        "backward": backward,
        "step": adam.step,
    }
    return steps, lambda: held_bytes(parameters, adam)


def nbytes(tensor: Any) -> int:
    """Count the bytes of the local tensor of this rank."""
    local = getattr(tensor, "_local_tensor", tensor)
    return 0 if local is None else local.numel() * local.element_size()


def held_bytes(parameters: list[nn.Parameter], adam: torch.optim.Optimizer) -> dict[str, int]:
    """Return the memory of this rank between steps."""
    state = [
        value
        for of_one in adam.state.values()
        for value in of_one.values()
        if isinstance(value, Tensor)
    ]
    return {
        "parameters": sum(map(nbytes, parameters)),
        "gradients": sum(nbytes(parameter.grad) for parameter in parameters),
        "state": sum(nbytes(value) for value in state if value.ndim),
    }


def shared_bytes() -> int:
    """This rank's part of the memory that the ranks share."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "memfd:shoal_mesh" in line
        elif ours and line.startswith("Pss:"):
            found += int(line.split()[1]) * 1024
    return found


def run(size: str, title: str, rounds: int) -> dict[str, dict[str, Any]]:
    """On every rank: seconds of a step in all rounds, memory and collectives of each candidate."""
    dim, _, _, _, batch, length, steps = SIZES[size]
    torch.set_num_threads(1)
    x = torch.randn(batch, length, dim)
    found: dict[str, dict[str, Any]] = {}
    works = {}
    for name, model in (replicas if title == "replicas 4" else sharded)(
        size, LAYOUTS[title]
    ).items():
        shared = shared_bytes()
        work, held = phases(name, model, x)
        works[name] = work
        for _ in range(3):
            for each in work.values():
                each()
        found[name] = {"peak": min(peak_bytes(work) for _ in range(3))} | held()
        found[name]["shared"] = shared_bytes() - shared
        with CommDebugMode() as counted:
            for each in work.values():
                each()
        found[name]["collectives"] = {
            str(op).rpartition(".")[2]: n for op, n in counted.get_comm_counts().items()
        }
    plain = stack(size)
    found["one device"] = {
        "parameters": sum(map(nbytes, plain.parameters())),
        "saved": saved_bytes(plain, x),
    }
    for name, rows in in_turns(works, steps, rounds).items():
        found[name]["seconds"], found[name]["processor"] = zip(*rows, strict=True)
    return found


def in_turns(
    works: dict[str, Any], steps: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step of each candidate in all rounds: clock, and processors of all ranks."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                for each in work.values():
                    each()
            spent = torch.tensor([time.process_time() - used])
            dist.barrier()
            taken = time.perf_counter() - start
            dist.all_reduce(spent)
            seconds[name].append((taken / steps, spent.item() / steps))
    return seconds


class Timeline:
    """When collectives of units were under way and modules computed, in order of beginning."""

    def __init__(self) -> None:
        self.spans: list[list[Any]] = []  # label, begin, end

    def redistribute(self, shards: Any, moves: Any) -> Any:
        """`redistribute_shards`, on the record."""
        kind = (
            "gather"
            if len(moves) and moves[0][1].placements[0] != moves[0][0].placements[0]
            else "move"
        )
        kind = "reduce" if moves[0][0].partials else kind
        span = [kind, time.perf_counter(), None]
        self.spans.append(span)
        flight = redistribute_shards(shards, moves)

        def wait(*args: Any) -> Any:
            result = flight.wait(*args)
            span[2] = span[2] or time.perf_counter()
            return result

        return mock.Mock(wait=wait, poll=flight.poll)

    def watch(self, name: str, block: nn.Module) -> None:
        """Have a block's computation on the record."""
        block.register_forward_pre_hook(lambda *_: self.begin(f"forward {name}"))
        block.register_forward_hook(lambda *_: self.end(f"forward {name}"))
        block.register_full_backward_pre_hook(lambda *_: self.begin(f"backward {name}"))
        block.register_full_backward_hook(lambda *_: self.end(f"backward {name}"))

    def begin(self, what: str) -> None:
        """Something begins."""
        self.spans.append([what, time.perf_counter(), None])

    def end(self, what: str) -> None:
        """It ends."""
        next(span for span in reversed(self.spans) if span[0] == what)[2] = time.perf_counter()

    def overlapped(self) -> list[tuple[str, str]]:
        """For each collective, the computation from begin to end while it was under way."""
        computing = [span for span in self.spans if "ward" in span[0]]
        return [
            (kind, ", ".join(what for what, a, b in computing if begin <= a and b <= end))
            for kind, begin, end in self.spans
            if "ward" not in kind
        ]


def trace(size: str) -> tuple[list[list[Any]], list[tuple[str, str]]]:
    """On every rank: the timeline of the third step of 4 data-parallel ranks."""
    dim, _, _, _, batch, length, _ = SIZES[size]
    model = sharded(size, (4, 1))["shoal"]
    work, _ = phases("shoal", model, torch.randn(batch, length, dim, requires_grad=True))
    timeline = Timeline()
    for i, block in enumerate(model):
        timeline.watch(str(i), block)
    where = "shoal_data_parallel"
    with (
        mock.patch(f"{where}.unit.redistribute_shards", timeline.redistribute),
        mock.patch(f"{where}.reduction.redistribute_shards", timeline.redistribute),
    ):
        for _ in range(3):
            timeline.spans.clear()
            for each in work.values():
                each()
    return timeline.spans, timeline.overlapped()


def show_trace(size: str) -> list[str]:
    """Print the timeline; return the collectives that should have overlapped and did not."""
    spans, overlapped = rank_pool(4).run(trace, size, timeout=900)[0]
    first, last = spans[0][1], max(end for _, _, end in spans)
    scale = 80 / (last - first)
    print(f"one step of data 4, {size}, on rank 0: {(last - first) * 1e3:.1f} ms")
    for what, begin, end in spans:
        line = " " * round((begin - first) * scale) + "=" * max(1, round((end - begin) * scale))
        print(
            f"  {what:12}|{line:81}| {(begin - first) * 1e3:8.1f} to {(end - first) * 1e3:8.1f} ms"
        )
    alone = [kind for kind, during in overlapped if not during]
    layers = SIZES[size][3]
    print(
        f"  under way beside computation: {len(overlapped) - len(alone)} of {len(overlapped)} "
        "collectives"
    )
    # Nothing precedes the first gather of forward and backward, and nothing follows the last
    # reduction.
    expected = ["gather", "gather", "reduce"]
    counted = [kind for kind, _ in overlapped]
    right = (
        sorted(alone) == expected
        and counted.count("gather") == 2 * layers
        and counted.count("reduce") == layers
    )
    return [] if right else [f"trace, {size}: alone {alone} of {counted}"]


def show(title: str, size: str, found: dict[str, dict[str, Any]]) -> list[str]:
    """Print one run; return the figures over a bar."""
    rows = {name: row for name, row in found.items() if "seconds" in row}
    missed = []
    for peer, bar in (("torch", BARS[title]), ("by hand", HAND_BAR)):
        if peer not in rows:
            continue
        ours, theirs = rows["shoal"], rows[peer]
        best = min(ours["seconds"]) / min(theirs["seconds"])
        median = statistics.median(
            a / b for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)
        )
        used = min(ours["processor"]) / min(theirs["processor"])
        print(
            f"{title}, {size}: shoal {best:.2f} ({median:.2f}) x {peer}, processor time {used:.2f} "
            f"x; bar {bar}"
        )
        if best > bar:
            missed.append(f"{title}, {size}, {peer}")
    print(
        f"  {'':20}{'ms':>9}{'processor':>11}"
        f"{'params':>9}{'grads':>8}{'state':>8}{'peak':>8}{'shared':>8}  MiB"
    )
    for name, row in rows.items():
        memory = "".join(
            f"{row[key] / MIB:8.2f}"
            for key in ("parameters", "gradients", "state", "peak", "shared")
        )
        times = f"{min(row['seconds']) * 1e3:9.1f}{min(row['processor']) * 1e3:11.1f} "
        print(f"  {name:20}{times}{memory}  {row['collectives'] if 'shoal' in name else ''}")
    if rows["shoal"]["peak"] > rows["torch"]["peak"]:
        missed.append(f"{title}, {size}: peak")
    if title == "data 4":
        whole, saved = found["one device"]["parameters"], found["one device"]["saved"]
        unit, shard = whole / SIZES[size][3], whole / 4
        peak, shared = saved + 2 * unit + shard, min(unit, 8 * MIB) + unit / 4
        figures = "".join(f"{n / MIB:8.2f}" for n in (shard, shard, 2 * shard, peak, shared))
        print(f"  {'formula, at most':41}{figures}")
        if rows["shoal"]["peak"] > peak:
            missed.append(f"{title}, {size}: peak above the formula")
        if rows["shoal"]["peak"] + rows["shoal"]["shared"] > rows["torch"]["peak"]:
            missed.append(f"{title}, {size}: peak with shared memory")
    return missed


def cases(title: str, figures: dict[str, Any]) -> list[Case]:
    """Time and memory of a step at the large size."""
    found = figures.get(f"{title}, compute")
    if found is None:
        return []
    times = {name: min(row["seconds"]) * 1e3 for name, row in found.items() if "seconds" in row}
    what = f"step of {title}, width {SIZES['compute'][0]}"
    return [
        Case(what, "ms", times["shoal"], times.get("by hand"), times["torch"]),
        Case(
            f"{what}: peak", "MiB", found["shoal"]["peak"] / MIB, torch=found["torch"]["peak"] / MIB
        ),
    ]


def main() -> None:
    """Print every size and layout; exit with 1 if shoal is over a bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", choices=list(LAYOUTS))
    parser.add_argument(
        "--trace", action="store_true", help="print the overlaps in a step, instead of times"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    missed = []
    for title in [options.only] if options.only else LAYOUTS:
        for size in SIZES:
            if options.trace:
                missed += show_trace(size)
                continue
            found = figures[f"{title}, {size}"] = rank_pool(4).run(
                run, size, title, options.rounds, timeout=900
            )[0]
            missed += show(title, size, found)
        if options.trace:
            break
    rank_pool(4).close()
    if figures:
        keep_cases("data_parallel", [case for title in LAYOUTS for case in cases(title, figures)])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)
    if missed:
        raise SystemExit(f"over the bar: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
