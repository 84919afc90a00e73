"""`parallelize_module` of many layers beside torch's on two ranks.

Run: ``python benchmarks/parallelize.py [WIDTH]``.

Layer by layer, and one call with wildcards for all layers; the best of rounds that take turns.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _timing import report
from torch import nn

from shoal_mesh.testing import rank_pool

RANKS, LAYERS, ROUNDS, WIDTH = 2, 24, 5, 256
BARS = {"layer by layer": 0.8, "by wildcards": 0.5}


def block(width: int) -> nn.ModuleDict:
    """The linear layers of a transformer's block."""
    shapes = {"q": (1, 1), "k": (1, 1), "v": (1, 1), "o": (1, 1), "up": (1, 4), "down": (4, 1)}
    return nn.ModuleDict({name: nn.Linear(a * width, b * width) for name, (a, b) in shapes.items()})


def plan(library: Any, prefix: str = "") -> dict[str, Any]:
    """The styles of a block."""
    column, row = library.ColwiseParallel, library.RowwiseParallel
    return {f"{prefix}{name}": row() if name in ("o", "down") else column() for name in block(1)}


def calls(library: Any, mesh: Any) -> dict[str, Callable[[nn.ModuleList], object]]:
    """Return the measured functions of a library."""
    run = library.parallelize_module
    return {
        "layer by layer": lambda model: [run(layer, mesh, plan(library)) for layer in model],
        "by wildcards": lambda model: run(model, mesh, plan(library, "*.")),
    }


def rank(width: int) -> dict[tuple[str, str], float]:
    """Seconds by call and library."""
    import torch.distributed.tensor.parallel as theirs
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh

    import shoal_tp_styles as ours
    from shoal_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rivals = {
        "torch": calls(theirs, torch_mesh("cpu", (RANKS,))),
        "shoal": calls(ours, init_device_mesh("cpu", (RANKS,))),
    }
    start = nn.ModuleList([block(width) for _ in range(LAYERS)])
    best: dict[tuple[str, str], float] = {}
    for _ in range(ROUNDS):
        for what in BARS:
            for name, of_library in rivals.items():
                model = copy.deepcopy(start)
                gc.collect()
                dist.barrier()
                begin = time.perf_counter()
                of_library[what](model)
                best[what, name] = min(best.get((what, name), 1e9), time.perf_counter() - begin)
    return best


def main() -> None:
    """Two rows and their bars."""
    width = int(sys.argv[1]) if len(sys.argv) > 1 else WIDTH
    best = rank_pool(RANKS).run(rank, width, timeout=600)[0]
    rows = []
    for what, bar in BARS.items():
        torchs, ours = best[what, "torch"] * 1e3, best[what, "shoal"] * 1e3
        rows.append((what, torchs, ours, ours / torchs, bar))
    header = [f"{LAYERS} layers of width {width}", "torch (ms)", "shoal (ms)", "shoal/torch", "bar"]
    report("parallelize", header, rows)
    over = [row[0] for row in rows if row[3] > row[4]]
    print(f"bars: {'met' if not over else 'MISSED by ' + ', '.join(map(str, over))}")


if __name__ == "__main__":
    main()
