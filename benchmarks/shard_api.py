"""ShardedTensor beside torch's: reshard and gather of 64 MiB between four gloo ranks.

Time and peak memory are measured in one run.

    python benchmarks/shard_api.py

Both libraries wrap the same local tensors (no copy) and reshard; operations that torch does not
have are measured for shoal alone. Times are the best round of the slowest rank, in turns; memory is
how far the rank with the largest growth rose above the resident memory before, the result included,
in a second run whose malloc gives large blocks back at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import Case, keep_cases, report

from shoal_mesh import launch
from shoal_shard_api import ChunkShardingSpec, EnumerableShardingSpec, ShardedTensor, ShardMetadata


def chunk(dim: int, ranks: Sequence[int] = range(4)) -> ChunkShardingSpec:
    """One dim sharded into one chunk per rank."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def enumerable(*shards: tuple[Sequence[int], Sequence[int], int]) -> EnumerableShardingSpec:
    """Shards as (offsets, sizes, rank)."""
    return EnumerableShardingSpec(
        [ShardMetadata(o, s, f"rank:{rank}/cpu") for o, s, rank in shards]
    )


SHAPE = (4096, 4096)  # 64 MiB of float32
ROUNDS = 21
HALF = SHAPE[0] // 2
GRID = enumerable(
    *(([r * HALF, c * HALF], [HALF, HALF], 2 * r + c) for r in (0, 1) for c in (0, 1))
)
# two shards on every rank
SEVERAL = enumerable(*(([i * 512, 0], [512, 4096], i % 4) for i in range(8)))
CASES: dict[str, tuple[Any, Any]] = {
    "rows -> columns": (chunk(0), chunk(1)),
    "columns -> rows": (chunk(1), chunk(0)),
    "rows -> rows, ranks reversed": (chunk(0), chunk(0, (3, 2, 1, 0))),
    "rows -> 2 x 2 grid": (chunk(0), GRID),
    "2 x 2 grid -> columns": (GRID, chunk(1)),
    "rows -> rows, two on a rank": (chunk(0), SEVERAL),
}


def main() -> None:
    """Measure on four ranks, print and keep the table, and state whether the bars are met."""
    timed = launch(rank_body, 4, ROUNDS)
    weighed = memory_of_a_fresh_run()
    rows = []
    for case in timed[0]:
        seconds = {
            name: min(map(max, zip(*(rank[case][name] for rank in timed), strict=True)))
            for name in timed[0][case]
        }
        theirs = "torch" in seconds
        rows.append([
            case,
            seconds["shoal"] * 1e3,
            seconds["torch"] * 1e3 if theirs else "refused",
            seconds["torch"] / seconds["shoal"] if theirs else "-",
            weighed[case]["shoal"],
            weighed[case]["torch"] if theirs else "-",
        ])  # fmt: skip
    keep_cases("shard_api", [
        Case(f"64 MiB: {row[0]}", "ms", row[1], torch=row[2])
        for row in rows if isinstance(row[2], float)
    ][:2])  # fmt: skip
    report(
        "shard_api",
        ["64 MiB", "shoal ms", "torch ms", "torch/shoal", "shoal peak MiB", "torch peak MiB"],
        rows,
    )
    both = [row for row in rows if isinstance(row[3], float)]
    slower = [f"{row[0]} ({row[3]:.2f})" for row in both if row[3] < 0.95]
    larger = [row[0] for row in both if row[4] > row[5] + 1]
    print(
        f"bar: never slower than torch: {'met' if not slower else 'MISSED by ' + ', '.join(slower)}"
    )
    print(
        "bar: never more memory than torch: "
        f"{'met' if not larger else 'MISSED by ' + ', '.join(larger)}"
    )


def memory_of_a_fresh_run() -> dict[str, dict[str, float]]:
    """MiB by case and rival.

    They are from ranks whose malloc gives large blocks back at once, so that a peak is one.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    command = [sys.executable, __file__, "--weigh"]
    told = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, dict[str, float]] = json.loads(told.splitlines()[-1])
    return found


def weigh() -> None:
    """Print, as JSON, the growth of the rank that grew most."""
    measured = launch(rank_body, 4, 0)
    worst = {
        case: {name: max(rank[case][name][0] for rank in measured) for name in measured[0][case]}
        for case in measured[0]
    }
    print(json.dumps(worst))


def rank_body(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measure on one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    full = torch.randn(SHAPE)
    found = {}
    for name, (old, new) in CASES.items():
        shards = [
            each
            for each in old.build_metadata(full.size(), _properties()).shards_metadata
            if each.rank == dist.get_rank()
        ]
        local = full[tuple(slice(*edges) for edges in shards[0].box)].contiguous()
        rivals: dict[str, Callable[[], Any]] = {
            "shoal": lambda local=local, old=old, new=new: ShardedTensor._init_from_local_tensor(
                local, old, *SHAPE
            ).reshard(new)
        }
        if not isinstance(old, EnumerableShardingSpec) and not isinstance(
            new, EnumerableShardingSpec
        ):
            rivals["torch"] = torch_reshard(local, old, new)
            check(rivals)
        found[name] = measure(rivals, rounds)
    mine = full[dist.get_rank() * 1024 : (dist.get_rank() + 1) * 1024].contiguous()
    found["gather rows to rank 0"] = measure(gathers(mine), rounds)
    return found


def _properties() -> Any:
    from shoal_shard_api import TensorProperties

    return TensorProperties()


def torch_spec(spec: Any) -> Any:
    from torch.distributed._shard import sharding_spec as theirs

    return theirs.ChunkShardingSpec(spec.dim, [str(each) for each in spec.placements])


def torch_reshard(local: torch.Tensor, old: Any, new: Any) -> Callable[[], Any]:
    from torch.distributed._shard.sharded_tensor import ShardedTensor as Theirs

    first, second = torch_spec(old), torch_spec(new)
    return lambda: Theirs._init_from_local_tensor(local, first, *SHAPE).reshard(second)


def gathers(local: torch.Tensor) -> dict[str, Callable[[], Any]]:
    from torch.distributed._shard.sharded_tensor import ShardedTensor as Theirs

    out = torch.empty(SHAPE) if dist.get_rank() == 0 else None
    ours = ShardedTensor._init_from_local_tensor(local, chunk(0), *SHAPE)
    theirs = Theirs._init_from_local_tensor(local, torch_spec(chunk(0)), *SHAPE)
    return {"shoal": lambda: ours.gather(0, out), "torch": lambda: theirs.gather(0, out)}


def check(rivals: dict[str, Callable[[], Any]]) -> None:
    """Both hold the same data afterwards."""
    results: Sequence[torch.Tensor] = [work().local_tensor() for work in rivals.values()]
    assert all(torch.equal(results[0], each) for each in results[1:])


def measure(rivals: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, in turns.

    For no rounds it is the growth of this rank's memory at its worst, in MiB.
    """
    found: dict[str, list[float]] = {name: [] for name in rivals}
    for name, work in rivals.items():
        work()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before = _high_water()
        work()
        if rounds == 0:
            found[name].append((_high_water() - before) / 2**20)
    for _ in range(rounds):
        for name, work in rivals.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - start)
    return found


def _high_water() -> int:
    """Bytes that the process had resident at its worst since the last reset (Linux)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    weigh() if "--weigh" in sys.argv else main()
