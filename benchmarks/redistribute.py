"""Redistribution: quality of plans, planning time, real transfers and software overhead, beside torch's DTensor.

    python benchmarks/redistribute.py [plans] [planning] [overhead] [real]

plans     all placement pairs on meshes of 1 to 3 axes: modelled time, bytes and collectives of shoal, of torch's greedy
          (its default) and min-cost planners (with every flattened mesh made beforehand), and the least that must move
planning  seconds per fresh plan
overhead  a redistribute of a tiny DTensor on the fake process group
real      64 MiB tensors between four gloo ranks: time and peak memory
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from math import exp, log, prod
from typing import Any

import torch
import torch.distributed as dist
from _timing import report

from shoal_dtensor import Partial, Placement, Replicate, Shard
from shoal_dtensor.redistribute import plan
from shoal_dtensor.redistribute.plan import cache_clear, links_of
from shoal_dtensor.redistribute.pricing import Links
from shoal_dtensor.redistribute.traffic import least_bytes, plan_traffic
from shoal_dtensor.spec import Spec
from shoal_mesh import abstract_mesh

PLAN_MESHES = ((4,), (2, 2), (4, 4), (2, 2, 2))
SIZES = {"large": (8192, 8192), "small": (64, 64)}
PAIRS = 1200  # of a mesh; torch's min-cost search takes 40 ms a plan on three axes


# --- what torch would do ----------------------------------------------------------------------------------------------


def torch_meshes() -> dict[tuple[int, ...], Any]:
    """Torch's meshes, with every flattened sub-mesh made, on a fake process group of 16."""
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    found = {}
    for shape in PLAN_MESHES:
        names = tuple(f"a{i}" for i in range(len(shape)))
        mesh = TorchMesh("cpu", torch.arange(prod(shape)).reshape(shape), mesh_dim_names=names)
        for count in range(2, len(shape) + 1):
            for axes in combinations(names, count):
                (mesh if count == len(names) else mesh[axes])._flatten("_".join(axes) + "_flat")
        found[shape] = mesh
    return found


def to_torch(placement: Placement) -> Any:
    """The same placement as torch's class."""
    from torch.distributed import tensor as theirs

    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim)
    return theirs.Partial(placement.reduce_op) if isinstance(placement, Partial) else theirs.Replicate()


def torch_steps(mesh: Any, src: Spec, dst: Spec, *, min_cost: bool) -> list[Any]:
    """The transforms that torch would run, fused where it can."""
    from torch.distributed.tensor import _redistribute as theirs
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(src.shape), src.stride, src.dtype)
    specs = [DTensorSpec(mesh, tuple(map(to_torch, s.placements)), tensor_meta=meta) for s in (src, dst)]
    infos = theirs._gen_transform_infos_non_cached(*specs, use_graph_based_transform=min_cost)
    return list(theirs._optimize_transform_infos(infos, mesh, specs[0].placements, specs[1].placements))


def price(steps: Sequence[Any], src: Spec, links: Links) -> tuple[float, float, int]:
    """Seconds, bytes received by a rank and collectives of torch's steps, under shoal's model (even shapes)."""
    whole = prod(src.shape) * src.dtype.itemsize
    cuts = {axis for cut in src.cuts for axis in cut.axes}
    seconds, received, collectives = 0.0, 0.0, 0
    for info in steps:
        axes = tuple(getattr(info, "original_mesh_dims", (info.mesh_dim,)))
        before = whole / links.group(tuple(cuts))
        old, new = info.src_dst_placements
        cuts = (cuts | set(axes)) if new.is_shard() else (cuts - set(axes))
        after = whole / links.group(tuple(cuts))
        ways = links.group(axes)
        if old.is_replicate():
            seconds += links.copy(after)
            continue
        collectives += 1
        if old.is_partial():
            moved = (1 if new.is_shard() else 2) * before * (ways - 1) / ways
            copied = before if new.is_shard() and new.dim != 0 else 0.0
        elif new.is_replicate():
            moved, copied = after - before, after if old.dim != 0 else 0.0
        else:
            moved, copied = after * (ways - 1) / ways, before + after
        received += moved
        seconds += links.seconds(axes, moved) + links.copy(copied)
    return seconds, received, collectives


# --- 1. plans ---------------------------------------------------------------------------------------------------------


def pairs(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[tuple[Spec, Spec]]:
    """All pairs of R, P, S(0), S(1) per axis; `dst` is partial only where `src` is (torch refuses the others)."""
    mesh = abstract_mesh(mesh_shape)
    options = (Replicate(), Partial(), Shard(0), Shard(1))
    found = []
    for old in product(options, repeat=len(mesh_shape)):
        for new in product(options, repeat=len(mesh_shape)):
            fresh = any(n.is_partial() and not o.is_partial() for o, n in zip(old, new, strict=True))
            if old != new and not fresh:
                found.append((Spec(mesh, old, shape), Spec(mesh, new, shape)))
    if len(found) > PAIRS:
        found = random.Random(0).sample(found, PAIRS)
    yield from found


def compare_plans() -> None:
    """Must show 1 of issue 5."""
    meshes, rows = torch_meshes(), []
    for mesh_shape, (label, shape) in product(PLAN_MESHES, SIZES.items()):
        ratios: dict[str, list[float]] = {"greedy": [], "min-cost": [], "bytes": []}
        totals = dict.fromkeys(("shoal", "greedy", "min-cost", "least", "n shoal", "n greedy", "n min-cost"), 0.0)
        above, count = 0, 0
        for src, dst in pairs(mesh_shape, shape):
            ours, links = plan(src, dst), links_of(src.mesh)
            count += 1
            sent = sum(plan_traffic(ours).values()) / src.mesh.size()
            least = least_bytes(src, dst)
            totals["shoal"] += sent
            totals["least"] += least
            totals["n shoal"] += ours.collectives
            resharding = not src.partials or src.partials == dst.partials
            above += resharding and sent > least + 1e-6
            for name in ("greedy", "min-cost"):
                steps = torch_steps(meshes[mesh_shape], src, dst, min_cost=name == "min-cost")
                seconds, received, collectives = price(steps, src, links)
                totals[name] += received
                totals[f"n {name}"] += collectives
                if ours.seconds > 0 and seconds > 0:
                    ratios[name].append(seconds / ours.seconds)
        mib = {k: v / count / 2**20 for k, v in totals.items() if not k.startswith("n ")}
        rows.append([
            "x".join(map(str, mesh_shape)), label, count,
            geometric_mean(ratios["greedy"]), geometric_mean(ratios["min-cost"]),
            max(ratios["greedy"]), max(ratios["min-cost"]),
            sum(r < 1 - 1e-9 for name in ("greedy", "min-cost") for r in ratios[name]),
            mib["shoal"], mib["greedy"], mib["min-cost"], mib["least"], above,
            totals["n shoal"] / count, totals["n greedy"] / count, totals["n min-cost"] / count,
        ])  # fmt: skip
    header = [
        "mesh", "size", "pairs", "greedy/shoal time", "min-cost/shoal", "worst greedy", "worst min-cost",
        "shoal slower", "MiB shoal", "MiB greedy", "MiB min-cost", "MiB least", "S/R above least",
        "calls shoal", "calls greedy", "calls min-cost",
    ]  # fmt: skip
    report("redistribute_plans", header, rows)
    bar("never slower than torch's plans (modelled)", sum(row[7] for row in rows) == 0)
    bar("sharding to sharding moves the least possible", sum(row[12] for row in rows) == 0)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return exp(sum(map(log, values)) / len(values))


def bar(text: str, met: bool) -> None:
    """Print whether a bar is met."""
    print(f"{'met' if met else 'MISSED'}: {text}")


# --- 2. planning time -------------------------------------------------------------------------------------------------


def time_planning() -> None:
    """Must show 2 of issue 5."""
    meshes, rows = torch_meshes(), []
    cases = (((4,), 2, 1.0), ((4, 4), 2, 1.0), ((2, 2, 2), 3, 3.0), ((2, 2, 2, 2), 4, 10.0), ((4, 8, 4, 2), 4, 10.0))
    for mesh_shape, ndim, limit_ms in cases:
        rng, mesh = random.Random(1), abstract_mesh(mesh_shape)
        options: list[Placement] = [Replicate(), Partial(), *(Shard(d) for d in range(ndim))]
        specs = [Spec(mesh, rng.choices(options, k=len(mesh_shape)), (64,) * ndim) for _ in range(400)]
        ours = clock(lambda a, b: plan(a, b), specs)
        row = ["x".join(map(str, mesh_shape)), ndim, ours[0], ours[1], limit_ms]
        for min_cost in (False, True):
            theirs = (float("nan"), float("nan"))
            if mesh_shape in meshes:
                torch_mesh = meshes[mesh_shape]
                known = [s for s in specs if not s.partials][:40]
                theirs = clock(lambda a, b, m=torch_mesh, c=min_cost: torch_steps(m, a, b, min_cost=c), known)
            row += list(theirs)
        rows.append(row)
        cache_clear()
    header = ["mesh", "tensor dims", "shoal ms", "worst", "limit", "greedy ms", "worst", "min-cost ms", "worst"]
    report("redistribute_planning", header, rows)
    bar("planning within the limits (median)", all(row[2] < row[4] for row in rows))
    bar("planning within the limits (worst)", all(row[3] < row[4] for row in rows))


def clock(work: Any, specs: Sequence[Spec]) -> tuple[float, float]:
    """Median and worst milliseconds over neighbouring pairs."""
    import gc

    spent = []
    gc.collect()
    gc.disable()
    for src, dst in pairwise(specs):
        start = time.perf_counter()
        work(src, dst)
        spent.append((time.perf_counter() - start) * 1e3)
    gc.enable()
    return statistics.median(spent), max(spent)


SECTIONS = {"plans": compare_plans, "planning": time_planning}


def main(asked: Sequence[str]) -> None:
    """Run the sections asked for; all by default."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in asked or SECTIONS:
        SECTIONS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
