"""Meshes and collectives beside torch, in one run.

Run: ``python benchmarks/mesh.py [shared|create|groups|overhead|import]``.

Tables of torch, shoal and their ratio; times are the best of several, because this is about
software overhead.
"""

from __future__ import annotations

import gc
import sys
import time
import timeit
import tracemalloc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _timing import Case, fresh_processes, keep_cases, report

import shoal_mesh
from shoal_mesh import comm_over
from shoal_mesh.internal import all_reduce_
from shoal_mesh.testing import RankPool, fake_world

SHAPES = [(4, 4, 4), (8, 8, 8), (8, 32, 8), (16, 128, 8)]
NAMES = ("pp", "dp", "tp")


def peak(run: Callable[[], object]) -> int:
    """Bytes that Python allocated at most while running."""
    gc.collect()
    tracemalloc.start()
    run()
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def in_world(size: int, run: Callable[[], Any]) -> Any:
    with fake_world(size):
        return run()


def measure_creation(make: Callable[..., Any], shape: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of creation, slice and flatten, and KiB of creation, each in its own world."""
    size = shape[0] * shape[1] * shape[2]
    found: dict[str, float] = {
        "create": float("inf"),
        "slice": float("inf"),
        "flatten": float("inf"),
    }
    for _ in range(5):
        with fake_world(size):
            begin = time.perf_counter()
            mesh = make("cpu", shape, mesh_dim_names=NAMES)
            made = time.perf_counter()
            part = mesh["dp", "tp"]
            cut = time.perf_counter()
            flat = part._flatten("dp_tp")
            flat.get_group()
            end = time.perf_counter()
        for name, seconds in (
            ("create", made - begin),
            ("slice", cut - made),
            ("flatten", end - cut),
        ):
            found[name] = min(found[name], seconds * 1e3)
    found["memory"] = (
        in_world(size, lambda: peak(lambda: make("cpu", shape, mesh_dim_names=NAMES))) / 1024
    )
    return found


def bar(what: str, met: bool) -> None:
    """Print a bar and whether it was met."""
    print(f"bar: {what}: {'met' if met else 'MISSED'}", flush=True)


def creation() -> None:
    """Must show 1: at most half of torch at 16,384 ranks."""
    from torch.distributed.device_mesh import init_device_mesh as torchs

    units = {"create": "ms", "slice": "ms", "flatten": "ms", "memory": "KiB"}
    rows: list[tuple[int, str, float, float, float]] = []
    for shape in SHAPES:
        ours, theirs = (
            measure_creation(shoal_mesh.init_device_mesh, shape),
            measure_creation(torchs, shape),
        )
        for name, unit in units.items():
            ranks, a, b = shape[0] * shape[1] * shape[2], theirs[name], ours[name]
            rows.append((ranks, f"{name} ({unit})", a, b, b / a))
    report("mesh_create", ["ranks", "what", "torch", "shoal", "shoal/torch"], rows)
    bar(
        "at most half of torch at 16,384 ranks",
        all(row[-1] <= 0.5 for row in rows if row[0] == 16384),
    )


def _count_groups(whose: str) -> tuple[int, int, int, float]:
    """On a rank: groups after one mesh and after an equal second one, collectives, seconds.

    The collectives are the calls that make the groups.
    """
    import torch.distributed.distributed_c10d as c10d

    if whose == "torch":
        from torch.distributed.device_mesh import init_device_mesh as make
    else:
        make = shoal_mesh.init_device_mesh  # type: ignore[assignment]  # the same signature
    world = dist.group.WORLD
    assert world is not None
    before, calls = len(c10d._world.pg_names), world._get_sequence_number_for_group()
    begin = time.perf_counter()
    make("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    took = time.perf_counter() - begin
    first = len(c10d._world.pg_names) - before
    make("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    second = len(c10d._world.pg_names) - before - first
    return first, second, world._get_sequence_number_for_group() - calls, took * 1e3


def groups() -> None:
    """Must show 2: two equal meshes create no second group."""
    rows: list[tuple[str, int, int, int, float]] = []
    for whose in ("torch", "shoal"):
        with RankPool(4) as pool:
            rows.append((whose, *pool.run(_count_groups, whose)[0]))
    report(
        "mesh_groups",
        ["2x2 mesh", "groups", "of an equal mesh", "collectives of both", "first mesh (ms)"],
        rows,
    )
    bar("an equal mesh makes no group", rows[1][2] == 0)


def per_call(run: Callable[[], object], number: int = 5_000) -> float:
    """Microseconds of processor time of one call: other programs on the machine do not count."""
    return min(timeit.repeat(run, number=number, repeat=9, timer=time.process_time)) / number * 1e6


def _cases(mesh: Any) -> list[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Name, bare process-group call with the tensors it needs, our call."""
    from torch._C._distributed_c10d import (
        AllgatherOptions,
        AllreduceOptions,
        AllToAllOptions,
        ReduceScatterOptions,
    )

    comm, group, x = mesh.comm(0), mesh.get_group(), torch.ones(64)
    gather, reduce, scatter, a2a = (
        AllgatherOptions(),
        AllreduceOptions(),
        ReduceScatterOptions(),
        AllToAllOptions(),
    )
    whole: list[int] = []
    split = [16] * 4

    def bare_reduce() -> object:
        out = x.clone()
        return group.allreduce([out], reduce).wait()

    def bare_gather() -> object:
        out = x.new_empty((256,))
        return group._allgather_base(out, x, gather).wait()

    def bare_scatter() -> object:
        out = x.new_empty((16,))
        return group._reduce_scatter_base(out, x, scatter).wait()

    def bare_a2a() -> object:
        out = torch.empty_like(x)
        return group.alltoall_base(out, x, whole, whole, a2a).wait()

    def bare_a2a_v() -> object:
        out = x.new_empty((64,))
        return group.alltoall_base(out, x, split, split, a2a).wait()

    def bare_broadcast() -> object:
        out = x.clone()
        return group.broadcast(out, 0).wait()

    return [
        ("all_reduce_", lambda: group.allreduce([x], reduce).wait(), lambda: all_reduce_(x, comm)),
        ("all_reduce", bare_reduce, lambda: shoal_mesh.all_reduce(x, comm)),
        ("all_gather", bare_gather, lambda: shoal_mesh.all_gather(x, comm)),
        ("reduce_scatter", bare_scatter, lambda: shoal_mesh.reduce_scatter(x, comm)),
        ("all_to_all", bare_a2a, lambda: shoal_mesh.all_to_all(x, comm, 0, 0)),
        ("all_to_all_v", bare_a2a_v, lambda: shoal_mesh.all_to_all_v(x, comm, split, split)),
        ("broadcast", bare_broadcast, lambda: shoal_mesh.broadcast(x, comm)),
    ]


def overhead() -> None:
    """Must show 3: at most 2 us over the bare call on the fake backend."""
    rows: list[tuple[str, float, float, float]] = []
    with fake_world(4):
        mesh = shoal_mesh.init_device_mesh("cpu", (4,))
        for name, bare, ours in _cases(mesh):
            turns = [(per_call(bare), per_call(ours)) for _ in range(3)]
            a, b = (min(column) for column in zip(*turns, strict=True))
            rows.append((name, a, b, b - a))
    report("mesh_overhead", ["us per call", "bare", "shoal", "added"], rows)
    bar("at most 2 us over the bare call", all(row[-1] <= 2 for row in rows))


def import_time() -> None:
    """Must show 4: at most 60 ms above `import torch`."""
    clock = "time.process_time()"
    code = f"import time, torch; a = {clock}; import shoal_mesh; print({clock} - a)"
    took = min(fresh_processes(code, 5)) * 1e3
    report(
        "mesh_import", ["import shoal_mesh above import torch", "ms"], [("processor time", took)]
    )
    bar("at most 60 ms", took <= 60)


def _both_ways() -> list[tuple[str, int, float, float]]:
    """On a rank: name, bytes, and microseconds through gloo and as shoal does it."""
    torch.set_num_threads(1)
    size = dist.get_world_size()
    comm, rows = comm_over(tuple(range(size))), []
    for nbytes, calls in ((1 << 10, 100), (1 << 20, 20), (16 << 20, 5)):
        x, out = torch.ones(nbytes // 4), torch.empty(nbytes // 4 * size)
        small, parts = torch.empty(nbytes // 4 // size), list(torch.ones(nbytes // 4).chunk(size))
        into = list(torch.empty(nbytes // 4).chunk(size))
        for name, gloo, ours in (
            ("all_reduce", partial(dist.all_reduce, x), partial(all_reduce_, x, comm)),
            (
                "all_gather",
                partial(dist.all_gather_into_tensor, out, x),
                partial(shoal_mesh.all_gather, x, comm),
            ),
            (
                "reduce_scatter",
                partial(dist.reduce_scatter_tensor, small, x),
                partial(shoal_mesh.reduce_scatter, x, comm),
            ),
            (
                "all_to_all",
                partial(dist.all_to_all, into, parts),
                partial(shoal_mesh.all_to_all, x, comm, 0, 0),
            ),
        ):
            best = [float("inf")] * 2
            for _ in range(7):
                for i, run in enumerate((gloo, ours)):
                    x.fill_(1.0)
                    dist.barrier()
                    begin = time.perf_counter()
                    # many of what is short: ranks leave the barrier 100 us apart
                    for _ in range(calls):
                        run()
                    best[i] = min(best[i], (time.perf_counter() - begin) / calls * 1e6)
            rows.append((name, nbytes, *best))
    return rows


def shared() -> None:
    """Ranks of one host: at least 10x gloo at 1 KiB, 5x at 1 MiB, 2x at 16 MiB."""
    rows: list[tuple[int, str, str, float, float, float]] = []
    for size in (2, 4):
        with RankPool(size) as pool:
            for name, nbytes, gloo, ours in pool.run(_both_ways)[0]:
                rows.append((size, name, f"{nbytes >> 10} KiB", gloo, ours, gloo / ours))
    keep_cases("mesh", [
        Case(f"{name} of 16 MiB, {ranks} ranks of a host", "ms", ours / 1e3, by_hand=gloo / 1e3)
        for ranks, name, nbytes, gloo, ours, _ in rows if ranks == 4 and nbytes == "16384 KiB"
    ])  # fmt: skip
    report(
        "mesh_shared",
        ["ranks", "collective", "bytes", "gloo (us)", "shoal (us)", "gloo/shoal"],
        rows,
    )
    for kib, least in (("1 KiB", 10), ("1024 KiB", 5), ("16384 KiB", 2)):
        bar(
            f"at least {least}x gloo at {kib}",
            all(row[-1] >= least for row in rows if row[2] == kib),
        )


TABLES = {
    "shared": shared,
    "create": creation,
    "groups": groups,
    "overhead": overhead,
    "import": import_time,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for asked in sys.argv[1:] or TABLES:
        TABLES[asked]()
