"""Planning of a checkpoint of 64 ranks beside torch's DTensor, in one run.

Run: ``python benchmarks/checkpoint_planning.py``.

torch's own planner plans both: 160 parameters, even, uneven and replicated. Local: the plans of all
64 ranks, one after the other. Global: the plan that the coordinator makes of the local plans. Fake
process groups; processor time, the best of rounds.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor as theirs
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _timing import Case, keep_cases, report

import shoal_dtensor
import shoal_mesh
from shoal_mesh.testing import fake_world

RANKS, PARAMETERS, ROUNDS = 64, 160, 5
# rounds of each: torch does the same with the same plans, so differences are noise
GLOBAL_ROUNDS = 4
BAR = 1.0


def state_dict(library: Any, mesh: Any) -> dict[str, Any]:
    """Make the parameters of this rank: 512 rows, and 500 rows for every fourth parameter."""

    def made(i: int) -> Any:
        placements = ([library.Replicate()], [library.Shard(0)], [library.Shard(1)])[i % 3]
        start = torch.empty(500 if i % 4 == 0 else 512, 64)
        return library.distribute_tensor(start, mesh, placements, src_data_rank=None)

    return {f"layers.{i}.weight": made(i) for i in range(PARAMETERS)}


def local_plans(library: Any, make_mesh: Any) -> tuple[float, list[SavePlan]]:
    """Milliseconds and plans of all ranks."""
    plans, spent = [], 0.0
    for rank in range(RANKS):
        with fake_world(RANKS, rank):
            tensors, planner = state_dict(library, make_mesh("cpu", (RANKS,))), DefaultSavePlanner()
            planner.set_up_planner(tensors, is_coordinator=rank == 0)
            begin = time.process_time()
            plans.append(planner.create_local_plan())
            spent += time.process_time() - begin
    return spent * 1e3, plans


def global_plan(plans: Sequence[SavePlan]) -> float:
    """Milliseconds of the coordinator."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    took = []
    for _ in range(GLOBAL_ROUNDS):
        gc.collect()
        begin = time.process_time()
        planner.create_global_plan([*plans])
        took.append(time.process_time() - begin)
    return min(took) * 1e3


def main() -> None:
    """Two rows and the bar."""
    libraries = {
        "torch": (theirs, init_device_mesh),
        "shoal": (shoal_dtensor, shoal_mesh.init_device_mesh),
    }
    best = {name: [float("inf")] * 2 for name in libraries}
    for _ in range(ROUNDS):
        for name, (library, make_mesh) in libraries.items():
            took, plans = local_plans(library, make_mesh)
            best[name] = [
                min(old, new)
                for old, new in zip(best[name], (took, global_plan(plans)), strict=True)
            ]
    rows = [
        (what, best["torch"][i], best["shoal"][i], best["shoal"][i] / best["torch"][i])
        for i, what in enumerate(("local, all ranks", "global"))
    ]
    report(
        "checkpoint_planning", ["plan of 64 ranks", "torch (ms)", "shoal (ms)", "shoal/torch"], rows
    )
    plans = [
        Case(f"checkpoint of 64 ranks: plan, {what}", "ms", ms, torch=torchs)
        for what, torchs, ms, _ in rows
    ]
    keep_cases("checkpoint_planning", plans)
    over = [what for what, *_, ratio in rows if ratio > BAR]
    print(f"bar: {BAR} x torch each: {'met' if not over else 'MISSED by ' + ', '.join(over)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
