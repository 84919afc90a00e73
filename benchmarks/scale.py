"""First uses on 4 to 16,384 ranks beside torch, in one run.

Run: ``python benchmarks/scale.py [RANKS...]``.

Each row is a first use: a new mesh, or tensors of a shape that no operator has seen. Process groups
are fake, so the time is that of software. The best of several shapes counts. Only the result of
S(0)->R grows with the ranks: all rows of all ranks, 16,384 of them to allocate and to fill
(`GLOBAL`).
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _timing import Case, keep_cases, report

import shoal_dtensor
import shoal_mesh
from shoal_mesh.testing import fake_world

RANKS = (4, 64, 1024, 16384)
SHAPES = 7
GLOBAL = {"S(0)->R"}  # the result has the rows of all ranks


def uses(
    lib: Any, mesh: Any, rows: int, columns: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and first use of each operation on shards of rows x columns."""
    shard, replicate = [lib.Shard(0)], [lib.Replicate()]
    local, weight = torch.ones(rows, columns), torch.ones(columns, columns)
    yield "from_local", lambda: lib.DTensor.from_local(local, mesh, shard)
    x, w = (
        lib.DTensor.from_local(local, mesh, shard),
        lib.DTensor.from_local(weight, mesh, replicate),
    )
    yield "add", lambda: x + x
    yield "mm", lambda: x @ w
    yield "sum", lambda: x.sum(0)
    yield "view", lambda: x.view(-1, 2, columns // 2)
    partial = lib.DTensor.from_local(weight, mesh, [lib.Partial()])
    yield "P->R", lambda: partial.redistribute(mesh, replicate)
    full = (dist.get_world_size() * rows - 1, columns)  # the last rank has one row less
    yield (
        "uneven from_local",
        lambda: lib.DTensor.from_local(local, mesh, shard, shape=full, stride=(columns, 1)),
    )
    uneven = lib.DTensor.from_local(local, mesh, shard, shape=full, stride=(columns, 1))
    yield "uneven add", lambda: uneven + uneven
    replicated = lib.DTensor.from_local(torch.ones(full), mesh, replicate)
    yield "R->S(0)", lambda: replicated.redistribute(mesh, shard)
    # last: 16,384 rows empty the caches for later rows
    yield "S(0)->R", lambda: x.redistribute(mesh, replicate)


def measure(make: Callable[..., Any], lib: Any, ranks: int) -> dict[str, float]:
    """Milliseconds of every first use; the best of several shapes."""
    best: dict[str, float] = {}
    for _ in range(SHAPES):
        with fake_world(ranks):
            begin = time.perf_counter()
            make("cpu", (ranks,), mesh_dim_names=("tp",))
            best["mesh"] = min(best.get("mesh", 1e9), (time.perf_counter() - begin) * 1e3)
    with fake_world(ranks):
        mesh = make("cpu", (ranks,), mesh_dim_names=("tp",))
        for turn in range(SHAPES + 2):
            gc.collect()
            for name, run in uses(lib, mesh, turn + 2, 2 * turn + 2):
                begin = time.perf_counter()
                run()
                if turn >= 2:  # imports and one-time set-up are over
                    best[name] = min(best.get(name, 1e9), (time.perf_counter() - begin) * 1e3)
    return best


def main(ranks: tuple[int, ...]) -> None:
    import torch.distributed.tensor as theirs
    from torch.distributed.device_mesh import init_device_mesh

    first: dict[str, float] = {}
    rows: list[tuple[str, int, float, float, float, float]] = []
    for size in ranks:
        torchs = measure(init_device_mesh, theirs, size)
        ours = measure(shoal_mesh.init_device_mesh, shoal_dtensor, size)
        for name, ms in ours.items():
            rows.append(
                (name, size, torchs[name], ms, ms / torchs[name], ms / first.setdefault(name, ms))
            )
    rows.sort(key=lambda row: list(first).index(row[0]))
    report(
        "scale",
        ["first", "ranks", "torch (ms)", "shoal (ms)", "shoal/torch", f"of {ranks[0]} ranks"],
        rows,
    )
    keep_cases("scale", [
        Case(f"first {name} on {size} ranks", "ms", ours, torch=theirs)
        for name, size, theirs, ours, *_ in rows if size == 1024 and name in ("mesh", "mm", "P->R")
    ])  # fmt: skip
    mesh = [row[4] for row in rows if row[0] == "mesh" and row[1] == max(ranks)]
    growth = max(row[5] for row in rows if row[0] not in GLOBAL)
    print(
        f"bar: a mesh of {max(ranks)} in half of torch's time: "
        f"{'met' if mesh[0] <= 0.5 else 'MISSED'}"
    )
    print(
        f"bar: first uses at most 1.5 times those of {ranks[0]} ranks: "
        f"{'met' if growth <= 1.5 else 'MISSED'}"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(tuple(map(int, sys.argv[1:])) or RANKS)
