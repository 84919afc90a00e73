"""First uses, of a shape and of the library, beside torch, in one run.

Run: ``python benchmarks/cold.py [FILTER]``.

Every call gets a new shape of a known kind: even shards, the same placements. The inputs exist
already, so one call measures the decision. Each case has small shapes of its own: the shapes of a
case differ in the number of rows, the cases in the number of columns. The process group is fake, so
the time is that of software. The figure is the best round's median of the thread's own time, which
other load on the machine does not change.

The last row is a fresh process beyond `import torch, torch.distributed`: the import, a mesh, and
four operators.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _timing import fresh_processes, report

import shoal_dtensor
import shoal_mesh
from shoal_mesh.testing import fake_world

SHAPES, ROUNDS, SEEN = 24, 5, 3
BAR_MS = 0.5  # for one decision
# of three dims: view, addmm, view; others take one
DECISIONS = {"linear": 3}
MESHES = ((2,), (4,), (2, 2))
ROWS = 16  # of the first shape, in units of 8


def cases(
    make: Callable[..., Any], shard: Sequence[Any], ones: Sequence[Any]
) -> dict[str, Callable[[int], Any]]:
    """By name: from a number to a call on tensors whose shapes are that number's own.

    Args:
        make: from a shape and placements to a DTensor.
        shard: placements that shard the first dim; ones: placements of a replicated tensor.
    """

    def of(
        shape: Sequence[int], places: Sequence[Any], run: Callable[..., Any]
    ) -> Callable[[], object]:
        tensor = make(shape, places)
        return lambda: run(tensor)

    def add(n: int) -> Callable[[], object]:
        x, y = make((8 * n, 6), shard), make((8 * n, 6), shard)
        return lambda: x + y

    def mm(n: int) -> Callable[[], object]:
        x, w = make((8 * n, 7), shard), make((7, 10), ones)
        return lambda: x @ w

    def linear(n: int) -> Callable[[], object]:
        x, w, b = make((8 * n, 2, 6), shard), make((10, 6), ones), make((10,), ones)
        return lambda: F.linear(x, w, b)

    def layer_norm(n: int) -> Callable[[], object]:
        x, w, b = make((8 * n, 2, 5), shard), make((5,), ones), make((5,), ones)
        return lambda: F.layer_norm(x, (5,), w, b)

    return {
        "add": add,
        "mm": mm,
        "linear": linear,
        "view": lambda n: of((8 * n, 12), shard, lambda x: x.view(-1, 2, 6)),
        "sum": lambda n: of((8 * n, 8), shard, lambda x: x.sum(0)),
        "softmax": lambda n: of((8 * n, 9), shard, lambda x: x.softmax(-1)),
        "layer_norm": layer_norm,
        "slice": lambda n: of((8 * n, 11), shard, lambda x: x[1:]),
    }


def measure(lib: Any, mesh: Any) -> dict[str, float]:
    """Milliseconds of the first call on a new shape, per case."""
    shard, ones = (
        [lib.Shard(0), *[lib.Replicate()] * (mesh.ndim - 1)],
        [lib.Replicate()] * mesh.ndim,
    )
    if mesh.ndim == 2:
        shard = [lib.Shard(0), lib.Shard(0)]

    def make(shape: Sequence[int], placements: Sequence[Any]) -> Any:
        local = [
            n // mesh.size() if d == 0 and placements is shard else n for d, n in enumerate(shape)
        ]
        return lib.DTensor.from_local(torch.ones(local), mesh, placements, run_check=False)

    best: dict[str, float] = {}
    for number in range(ROWS, ROWS + ROUNDS * (SHAPES + SEEN), SHAPES + SEEN):
        for name, case in cases(make, shard, ones).items():
            if len(sys.argv) > 1 and sys.argv[1] not in name:
                continue
            times = []
            gc.collect()
            for turn in range(SHAPES + SEEN):
                run = case(number + turn)
                begin = time.thread_time()
                run()
                if turn >= SEEN:
                    times.append((time.thread_time() - begin) * 1e3)
            best[name] = min(best.get(name, 1e9), statistics.median(times))
    return best


FRESH = """
import time, torch, torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
begin = time.process_time()
from {mesh} import init_device_mesh
from {library} import DTensor, Replicate, Shard
mesh = init_device_mesh("cpu", (4,))
x = DTensor.from_local(torch.ones(4, 6), mesh, [Shard(0)])
w = DTensor.from_local(torch.ones(6, 6), mesh, [Replicate()])
x + x, x @ w, x.sum(0), x.softmax(-1)
print((time.process_time() - begin) * 1e3)
"""


def fresh(library: str, mesh: str) -> float:
    """Milliseconds of a process's own time from the import on.

    It is the best of several processes, after a first one.
    """
    return min(fresh_processes(FRESH.format(library=library, mesh=mesh), ROUNDS + 1)[1:])


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] != "import":
        new_shapes()
    torchs, ours = (
        fresh("torch.distributed.tensor", "torch.distributed.device_mesh"),
        fresh("shoal_dtensor", "shoal_mesh"),
    )
    header = ["a process", "torch (ms)", "shoal (ms)", "shoal/torch"]
    report("cold_import", header, [("import and four operators", torchs, ours, ours / torchs)])
    print(f"bar: no slower than torch: {'met' if ours <= torchs else 'MISSED'}")


def new_shapes() -> None:
    """Every call on a shape of its own."""
    import torch.distributed.tensor as theirs
    from torch.distributed.device_mesh import init_device_mesh

    rows: list[tuple[str, str, float, float, float]] = []
    for shape in MESHES:
        size = torch.Size(shape).numel()
        with fake_world(size):
            torchs = measure(theirs, init_device_mesh("cpu", shape))
        with fake_world(size):
            ours = measure(shoal_dtensor, shoal_mesh.init_device_mesh("cpu", shape))
        rows += [
            (name, "x".join(map(str, shape)), torchs[name], ms, ms / torchs[name])
            for name, ms in ours.items()
        ]
    names = [*dict.fromkeys(name for name, *_ in rows)]
    rows.sort(key=lambda row: names.index(row[0]))
    report("cold", ["new shape", "mesh", "torch (ms)", "shoal (ms)", "shoal/torch"], rows)
    over = [
        f"{name} on {mesh}" for name, mesh, _, ms, _ in rows if ms > BAR_MS * DECISIONS.get(name, 1)
    ]
    print(f"bar: {BAR_MS} ms a decision: {'met' if not over else 'MISSED by ' + ', '.join(over)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
