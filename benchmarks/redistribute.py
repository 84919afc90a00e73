"""Redistribution beside torch's DTensor.

Compared are the quality of plans, planning time, real transfers and software overhead.

    python benchmarks/redistribute.py [plans] [planning] [overhead] [real] [async]

plans     all placement pairs on meshes of 1 to 3 axes, equally fast or the outer one ten times
          slower: modelled time, bytes and collectives of shoal, of torch's greedy (its default) and
          min-cost planners (with every flattened mesh made beforehand), the least that must move,
          pairs without reductions that send more than that, and pairs in which shoal's plan sends
          more than one of torch's
planning  seconds per fresh plan
overhead  a redistribute of a tiny DTensor on the fake process group
real      64 MiB tensors between four gloo ranks: time and peak memory
async     10 MiB tensors between four ranks, `async_op=True` and not: until the call returns,
          until the result is here
"""

from __future__ import annotations

import logging
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import exp, log
from typing import Any

import torch
import torch.distributed as dist
from _timing import Case, keep_cases, race, report
from _torch_plans import price, to_torch, torch_meshes, torch_steps

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from shoal_dtensor.layout.spec import Spec
from shoal_dtensor.redistribute.execution.execute import run_plan
from shoal_dtensor.redistribute.plan import cache_clear, links_of, plan
from shoal_dtensor.redistribute.traffic import least_bytes, plan_traffic
from shoal_mesh import Link, abstract_mesh, init_device_mesh, launch
from shoal_mesh.internal import Topology
from shoal_mesh.testing import fake_world

PLAN_MESHES = ((4,), (2, 2), (4, 4), (2, 2, 2))
SIZES = {"large": (8192, 8192), "small": (64, 64)}
FAST, SLOW = Link(12e-6, 180e9), Link(25e-6, 18e9)  # inside a host, between hosts
TURNS = 5
UNEVEN = (61, 67, 70, 59)
# of a mesh, a quarter where axes differ in speed; torch's min-cost search takes 40 ms on three axes
PAIRS = 1200


# --- 1. plans -------------------------------------------------------------------------------------


def topologies(axes: int) -> dict[str, Topology]:
    """Links to plan for: all alike, and where there are several axes also a slow outer one."""
    alike = {"equal": Topology((FAST,) * axes)}
    return alike if axes == 1 else alike | {"outer slow": Topology((SLOW, *(FAST,) * (axes - 1)))}


def pairs(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], most: int = PAIRS
) -> Iterator[tuple[Spec, Spec]]:
    """All pairs of R, P, S(0), S(1) per axis.

    `dst` is partial only where `src` is, because torch refuses other pairs.
    """
    mesh = abstract_mesh(mesh_shape)
    options = (Replicate(), Partial(), Shard(0), Shard(1))
    found = []
    for old in product(options, repeat=len(mesh_shape)):
        for new in product(options, repeat=len(mesh_shape)):
            fresh = any(
                n.is_partial() and not o.is_partial() for o, n in zip(old, new, strict=True)
            )
            if old != new and not fresh:
                found.append((Spec(mesh, old, shape), Spec(mesh, new, shape)))
    if len(found) > most:
        found = random.Random(0).sample(found, most)
    yield from found


def compare_plans() -> None:
    """Must show 1 of issue 5."""
    meshes, rows = torch_meshes(PLAN_MESHES), []
    cases = [
        (mesh_shape, *size, *links)
        for mesh_shape, size in product(PLAN_MESHES, SIZES.items())
        for links in topologies(len(mesh_shape)).items()
    ]
    for mesh_shape, label, shape, speeds, topology in cases:
        ratios: dict[str, list[float]] = {"greedy": [], "min-cost": [], "bytes": []}
        totals = dict.fromkeys(
            ("shoal", "greedy", "min-cost", "least", "n shoal", "n greedy", "n min-cost"), 0.0
        )
        above, count, heavier = 0, 0, 0
        for src, dst in pairs(mesh_shape, shape, PAIRS if speeds == "equal" else PAIRS // 4):
            ours, links = plan(src, dst, topology=topology), links_of(src.mesh, topology)
            count += 1
            sent = sum(plan_traffic(ours).values()) / src.mesh.size()
            least = least_bytes(src, dst)
            totals["shoal"] += sent
            totals["least"] += least
            totals["n shoal"] += ours.collectives
            resharding = not src.partials or src.partials == dst.partials
            above += speeds == "equal" and resharding and sent > least + 1e-6
            for name in ("greedy", "min-cost"):
                steps = torch_steps(meshes[mesh_shape], src, dst, min_cost=name == "min-cost")
                seconds, received, collectives = price(steps, src, links)
                totals[name] += received
                totals[f"n {name}"] += collectives
                heavier += sent > received * (1 + 1e-9) + 1e-6
                if ours.seconds > 0 and seconds > 0:
                    ratios[name].append(seconds / ours.seconds)
        mib = {k: v / count / 2**20 for k, v in totals.items() if not k.startswith("n ")}
        rows.append([
            "x".join(map(str, mesh_shape)), label, speeds, count,
            geometric_mean(ratios["greedy"]), geometric_mean(ratios["min-cost"]),
            max(ratios["greedy"]), max(ratios["min-cost"]),
            sum(r < 1 - 1e-9 for name in ("greedy", "min-cost") for r in ratios[name]),
            mib["shoal"], mib["greedy"], mib["min-cost"], mib["least"], above, heavier,
            totals["n shoal"] / count, totals["n greedy"] / count, totals["n min-cost"] / count,
        ])  # fmt: skip
    header = [
        "mesh", "size", "axes", "pairs", "greedy/shoal time", "min-cost/shoal", "worst greedy",
        "worst min-cost", "shoal slower", "MiB shoal", "MiB greedy", "MiB min-cost", "MiB least",
        "S/R above least", "more bytes", "calls shoal", "calls greedy", "calls min-cost",
    ]  # fmt: skip
    report("redistribute_plans", header, rows)
    bar("never slower than torch's plans (modelled)", sum(row[8] for row in rows) == 0)
    # Plans minimise time: one collective that sends more may be faster than two, above all
    # for small tensors.
    large = [row for row in rows if row[1:3] == ["large", "equal"]]
    bar(
        "fewer bytes than torch's plans on equal axes, large",
        all(row[9] <= min(row[10:12]) * 1.001 for row in large),
    )


def leave_world() -> None:
    """Forget the fake process group of torch's meshes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return exp(sum(map(log, values)) / len(values))


def bar(text: str, met: bool) -> None:
    """Print whether a bar is met."""
    print(f"{'met' if met else 'MISSED'}: {text}")


# --- 2. planning time -----------------------------------------------------------------------------


def time_planning() -> None:
    """Must show 2 of issue 5."""
    meshes, rows = torch_meshes((*PLAN_MESHES, (2, 2, 2, 2))), []
    cases = (
        ((4,), 2, 1.0), ((4, 4), 2, 1.0), ((2, 2, 2), 3, 5.0), ((2, 2, 2, 2), 4, 10.0),
        ((16, 16), 2, 1.0), ((4, 8, 8), 3, 5.0), ((4, 8, 4, 2), 4, 10.0),
    )  # fmt: skip
    for (mesh_shape, ndim, limit_ms), slow, uneven in product(cases, (False, True), (False, True)):
        if slow and len(mesh_shape) == 1:
            continue
        rng, mesh = random.Random(1), abstract_mesh(mesh_shape)
        options: list[Placement] = [Replicate(), Partial(), *(Shard(d) for d in range(ndim))]
        shape = UNEVEN[:ndim] if uneven else (64,) * ndim
        specs = [Spec(mesh, rng.choices(options, k=len(mesh_shape)), shape) for _ in range(200)]
        speeds = topologies(len(mesh_shape))["outer slow" if slow else "equal"]
        ours = clock(lambda a, b, links=speeds: plan(a, b, topology=links), specs)
        axes = "outer slow" if slow else "equal"
        row = [
            "x".join(map(str, mesh_shape)),
            "uneven" if uneven else "even",
            axes,
            ours[0],
            ours[1],
            limit_ms,
        ]
        for min_cost in (False, True):
            theirs = (float("nan"), float("nan"))
            if mesh_shape in meshes and not slow and not uneven:
                torch_mesh = meshes[mesh_shape]
                known = [s for s in specs if not s.partials][: 6 if ndim == 4 else 40]
                theirs = clock(
                    lambda a, b, m=torch_mesh, c=min_cost: torch_steps(m, a, b, min_cost=c), known
                )
            row += list(theirs)
        rows.append(row)
        cache_clear()
    header = [
        "mesh",
        "shards",
        "axes",
        "shoal ms",
        "worst",
        "limit",
        "greedy ms",
        "worst",
        "min-cost ms",
        "worst",
    ]
    report("redistribute_planning", header, rows)
    bar("planning within the limits (median)", all(row[3] < row[5] for row in rows))
    large = [row for row in rows if row[0] in ("16x16", "4x8x8", "4x8x4x2")]
    bar("planning within the limits (worst, 256 ranks)", all(row[4] < row[5] for row in large))


def clock(work: Any, specs: Sequence[Spec]) -> tuple[float, float]:
    """Median and worst milliseconds of CPU time over neighbouring pairs, nothing cached.

    Each is that of the best turn. The worst is then a pair that takes long, not one during which
    the machine was busy: a turn goes over all pairs.
    """
    import gc

    spent = [float("inf")] * (len(specs) - 1)
    gc.collect()
    gc.disable()
    for _ in range(TURNS):
        for i, (src, dst) in enumerate(pairwise(specs)):
            cache_clear()
            start = time.thread_time()
            work(src, dst)
            spent[i] = min(spent[i], (time.thread_time() - start) * 1e3)
    gc.enable()
    return statistics.median(spent), max(spent)


# --- 3. real ranks --------------------------------------------------------------------------------

REAL = (
    ((4,), (Shard(0),), (Shard(1),)),
    ((4,), (Partial(),), (Shard(0),)),
    ((2, 2), (Shard(0), Shard(0)), (Replicate(), Replicate())),
    ((2, 2), (Shard(0), Replicate()), (Replicate(), Shard(0))),
)
REAL_SHAPE = (4096, 4096)  # 64 MiB of float32


def on_real_ranks() -> None:
    """Must show 3 of issue 5, and the uneven nested gather of 5."""
    leave_world()
    measured = launch(rank_body, 4)
    rows = []
    for i, (mesh_shape, old, new) in enumerate(REAL):
        by_rank = [rank[0][i] for rank in measured]
        slowest = {name: max(r[name] for r in by_rank) for name in by_rank[0]}
        move = f"{', '.join(map(str, old))} -> {', '.join(map(str, new))}"
        rows.append([
            "x".join(map(str, mesh_shape)), move,
            slowest["shoal s"] * 1e3, slowest["torch s"] * 1e3,
            slowest["torch s"] / slowest["shoal s"],
            slowest["shoal MiB"], slowest["torch MiB"],
        ])  # fmt: skip
    keep_cases("redistribute", [
        Case(f"redistribute 64 MiB on {mesh}, {move}", "ms", ours, torch=torchs)
        for mesh, move, ours, torchs, *_ in rows
    ])  # fmt: skip
    header = [
        "mesh",
        "64 MiB",
        "shoal ms",
        "torch ms",
        "torch/shoal",
        "shoal peak MiB",
        "torch peak MiB",
    ]
    report("redistribute_real", header, rows)
    right = {name: all(rank[1][name] for rank in measured) for name in measured[0][1]}
    print(
        "(5, 3) from S(0), S(0) to R, R on 2x2 with the mesh flattened before: right on all "
        f"ranks: {right}"
    )
    bar("the uneven nested gather is right", right["shoal"])


def rank_body() -> tuple[list[dict[str, float]], dict[str, bool]]:
    """Measure on one rank."""
    from torch.distributed import tensor as theirs
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = []
    for mesh_shape, old, new in REAL:
        names = tuple(f"a{i}" for i in range(len(mesh_shape)))
        mesh, other = (
            init_device_mesh("cpu", mesh_shape),
            torch_mesh("cpu", mesh_shape, mesh_dim_names=names),
        )
        local = torch.randn(Spec(mesh, old, REAL_SHAPE).local_shape)
        ours = DTensor.from_local(local, mesh, old)
        peer = theirs.DTensor.from_local(local, other, tuple(map(to_torch, old)), run_check=False)
        target = tuple(map(to_torch, new))
        rivals = {
            "shoal": lambda t=ours, p=new: t.redistribute(placements=p).to_local(),
            "torch": lambda t=peer, p=target: t.redistribute(placements=p).to_local(),
        }
        found.append(measure(rivals))
    other = torch_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    other._flatten("ab")
    full = torch.arange(15.0).reshape(5, 3)
    both = (theirs.Shard(0),) * 2
    peer = theirs.distribute_tensor(full, other, both).redistribute(
        placements=(theirs.Replicate(),) * 2
    )
    ours = distribute_tensor(full, init_device_mesh("cpu", (2, 2)), (Shard(0), Shard(0)))
    whole = ours.redistribute(placements=(Replicate(), Replicate()))
    return found, {
        "shoal": torch.equal(whole.to_local(), full),
        "torch": torch.equal(peer.to_local(), full),
    }


def measure(rivals: dict[str, Any]) -> dict[str, float]:
    """Best time of five, in turns, and the growth of this rank's memory at its worst, in MiB."""
    found: dict[str, float] = {}
    for name, work in rivals.items():
        work()
        dist.barrier()
        before = reset_peak()
        work()
        found[f"{name} MiB"] = (peak() - before) / 2**20
    for _ in range(5):
        for name, work in rivals.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            found[f"{name} s"] = min(found.get(f"{name} s", 1e9), time.perf_counter() - start)
    return found


def reset_peak() -> int:
    """Forget the process's memory peak (Linux); bytes resident now."""
    from pathlib import Path

    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Bytes that the process had resident at its worst since the last reset."""
    from pathlib import Path

    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


# --- 4. software overhead -------------------------------------------------------------------------


def overhead() -> None:
    """Must show 4 of issue 5: tiny tensors on a fake process group of 4."""
    from torch.distributed import tensor as theirs
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh

    cases = (
        (Shard(0), Replicate()),
        (Replicate(), Shard(0)),
        (Partial(), Replicate()),
        (Partial(), Shard(0)),
    )
    leave_world()
    rows = []
    with fake_world(4):
        mesh, other = init_device_mesh("cpu", (4,)), torch_mesh("cpu", (4,))
        for old, new in cases:
            local = torch.randn(Spec(mesh, (old,), (8, 8)).local_shape)
            ours = DTensor.from_local(local, mesh, (old,))
            peer = theirs.DTensor.from_local(local, other, (to_torch(old),), run_check=False)
            way, target = plan(ours.spec, Spec(mesh, (new,), (8, 8))), (to_torch(new),)
            times = race({
                "torch": lambda t=peer, p=target: t.redistribute(placements=p),
                "shoal": lambda t=ours, p=(new,): t.redistribute(placements=p),
                "run": lambda w=way, t=local: run_plan(w, t),
            })  # fmt: skip
            ratio = times["shoal"].best / times["torch"].best
            rows.append(
                [
                    f"{old} -> {new}",
                    times["torch"].us,
                    times["shoal"].us,
                    times["run"].us,
                    ratio,
                    0.25,
                ]
            )
    report(
        "redistribute_overhead",
        ["redistribute", "torch us", "shoal us", "plan alone us", "ratio", "bar"],
        rows,
    )
    bar("overhead within 0.25 x torch", all(row[4] <= row[5] for row in rows))


# --- 5. asynchronous ------------------------------------------------------------------------------

ASYNC_SHAPE, ASYNC_ROUNDS = (1620, 1620), 15  # 10 MiB of float32
ASYNC = (
    ((4,), (Shard(0),), (Replicate(),)),
    ((4,), (Shard(1),), (Replicate(),)),
    ((4,), (Partial(),), (Replicate(),)),
    ((4,), (Partial(),), (Shard(0),)),
    ((4,), (Shard(0),), (Shard(1),)),
    ((2, 2), (Partial(), Shard(0)), (Replicate(), Replicate())),
    ((2, 2), (Partial(), Shard(0)), (Shard(1), Replicate())),
)


def asynchronous() -> None:
    """Medians on the slowest rank."""
    leave_world()
    measured = launch(async_rank, 4)
    rows = []
    for i, (mesh_shape, old, new) in enumerate(ASYNC):
        waits, returns, arrives = (max(rank[i][k] for rank in measured) * 1e3 for k in range(3))
        way = f"{', '.join(map(str, old))} -> {', '.join(map(str, new))}"
        rows.append(["x".join(map(str, mesh_shape)), way, waits, returns, arrives, arrives / waits])
    report(
        "redistribute_async",
        ["mesh", "10 MiB", "synchronous ms", "returns ms", "is here ms", "ratio"],
        rows,
    )
    bar("no slower than synchronous (within 15 %)", all(row[5] <= 1.15 for row in rows))


def async_rank() -> list[tuple[float, float, float]]:
    """Time each case: the synchronous call, the return of the asynchronous one, and its result."""
    torch.set_num_threads(1)
    found = []
    for mesh_shape, old, new in ASYNC:
        mesh, times = init_device_mesh("cpu", mesh_shape), []
        local = torch.randn(Spec(mesh, old, ASYNC_SHAPE).local_shape)
        tensor = DTensor.from_local(local, mesh, old, shape=ASYNC_SHAPE, stride=(ASYNC_SHAPE[1], 1))
        for _ in range(ASYNC_ROUNDS):
            dist.barrier()
            start = time.perf_counter()
            tensor.redistribute(placements=new)
            waited = time.perf_counter() - start
            dist.barrier()
            start = time.perf_counter()
            moved = tensor.redistribute(placements=new, async_op=True)
            returned = time.perf_counter() - start
            moved.to_local()
            times.append((waited, returned, time.perf_counter() - start))
        waits, returns, arrives = map(statistics.median, zip(*times, strict=True))
        found.append((waits, returns, arrives))
    return found


SECTIONS = {
    "plans": compare_plans,
    "planning": time_planning,
    "overhead": overhead,
    "real": on_real_ranks,
    "async": asynchronous,
}


def main(asked: Sequence[str]) -> None:
    """Run the sections asked for; all by default."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in asked or SECTIONS:
        SECTIONS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
