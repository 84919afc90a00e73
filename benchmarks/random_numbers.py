"""Random numbers: the cost of a rank's part, per mode, and training curves on several meshes.

    python benchmarks/random_numbers.py [cost] [placements] [training]

`cost`: time and peak memory of a normal (4096, 4096) float32 tensor sharded four ways, beside a
plain local draw of the part and of the whole. Ranks are simulated one after another
(`abstract_mesh`): drawing does not communicate.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _timing import Case, keep_cases, race, report

from shoal_dtensor import Replicate, Shard, Spec, distribute_tensor, full_tensor
from shoal_dtensor.rng.draw import draw
from shoal_dtensor.rng.state import random_mode
from shoal_dtensor.rng.streams import Fill
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import rank_pool

SHAPE = (4096, 4096)
WAYS = 4
NORMAL = Fill("normal_", (0.0, 1.0))
MODES: list[tuple[str, Any]] = [("single_device", ()), ("counter", ()), ("per_axis", (0,))]


def drawing(placement: Any, mode: str, axes: Any, rank: int = 1) -> Callable[[], torch.Tensor]:
    spec = Spec(abstract_mesh((WAYS,), rank=rank), (placement,), SHAPE)

    def work() -> torch.Tensor:
        with random_mode(mode, axes):  # type: ignore[arg-type]  # one of MODES
            return draw(spec, NORMAL)

    return work


def works() -> dict[str, Callable[[], torch.Tensor]]:
    part = (SHAPE[0] // WAYS, SHAPE[1])
    found: dict[str, Callable[[], torch.Tensor]] = {
        "torch, the part alone": lambda: torch.randn(part),
        "torch, the whole, then the part": lambda: torch.randn(SHAPE)[: part[0]].clone(),
    }
    for mode, axes in MODES:
        for placement in (Shard(0), Shard(1)):
            found[f"shoal {mode}, {placement}"] = drawing(placement, mode, axes)
    return found


def _growth(name: str, results: Any) -> None:
    """How much the peak resident size of a fresh process grows while it draws, in MiB."""
    torch.set_num_threads(1)
    # the first use touches code and tables, which are not the cost of a draw
    for mode, axes in MODES:
        with random_mode(mode, axes):  # type: ignore[arg-type]  # one of MODES
            draw(Spec(abstract_mesh((2,)), (Shard(0),), (300000,)), NORMAL)
    work = works()[name]
    # the peak starts again from the resident memory of now
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_kib()
    work()
    results.put((_peak_kib() - before) / 1024)


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def peak(name: str) -> float:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_growth, args=(name, results))
    process.start()
    found: float = results.get(timeout=120)
    process.join()
    return found


def cost() -> None:
    timings = race(works(), rounds=5, warmup=1)
    local = timings["torch, the part alone"].best
    rows = [[name, t.best * 1e3, t.best / local, peak(name)] for name, t in timings.items()]
    ours = timings[f"shoal single_device, {Shard(0)}"].best * 1e3
    whole = timings["torch, the whole, then the part"].best * 1e3  # the same numbers by hand
    keep_cases(
        "random_numbers", [Case(f"randn {SHAPE}, a quarter of its rows", "ms", ours, by_hand=whole)]
    )
    report("random", ["randn (4096, 4096), 4 ways", "ms", "x local draw", "peak MiB"], rows)


def placements() -> None:
    """Print the default's cost by the start of the shard.

    Numbers before the shard are skipped, not drawn.
    """
    rivals: dict[str, Callable[[], object]] = {
        "torch, the part alone": lambda: torch.randn(1024, 4096)
    }
    for rank in range(WAYS):
        rivals[f"rows, rank {rank}"] = drawing(Shard(0), "single_device", (), rank)
    rows = [[name, t.best * 1e3] for name, t in race(rivals, rounds=5, warmup=1).items()]
    report("random_placements", ["normal (4096, 4096), 4 ways", "ms"], rows)


def losses(
    parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor, steps: int
) -> list[float]:
    first, bias, second = parameters
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for _ in range(steps):
        hidden = F.dropout(torch.relu(F.dropout(x, 0.1) @ first + bias), 0.5)
        loss = (F.dropout(hidden @ second, 0.2) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.detach()
        found.append(float(full_tensor(value)))
    return found


def train(shape: tuple[int, ...] | None, steps: int) -> list[float]:
    torch.manual_seed(3)
    x, y = torch.randn(24, 32), torch.randn(24, 8)
    start = [torch.randn(32, 64) / 6, torch.zeros(64), torch.randn(64, 8) / 8]
    if shape is None:
        torch.manual_seed(4)
        return losses([p.requires_grad_() for p in start], x, y, steps)
    mesh = init_device_mesh("cpu", shape)
    replicated: list[Any] = [Replicate()] * (len(shape) - 1)
    batch = [*([Shard(0)] * (len(shape) - 1)), Replicate()]
    parts = [[*replicated, Shard(1)], [*replicated, Shard(0)], [*replicated, Shard(0)]]
    weights: list[torch.Tensor] = [
        distribute_tensor(p, mesh, q).requires_grad_() for p, q in zip(start, parts, strict=True)
    ]
    inputs = distribute_tensor(x, mesh, batch), distribute_tensor(y, mesh, batch)
    torch.manual_seed(4)
    return losses(weights, *inputs, steps)


def training() -> None:
    steps = 50
    one = train(None, steps)
    rows: list[list[object]] = [["one device", one[0], one[-1], 0.0]]
    for label, shape in (("tp=2", (2,)), ("tp=4", (4,)), ("dp=2 x tp=2", (2, 2))):
        ranks = 2 if shape == (2,) else 4
        found = rank_pool(ranks).run(train, shape, steps)[0]
        rows.append(
            [
                label,
                found[0],
                found[-1],
                max(abs(a / b - 1) for a, b in zip(found, one, strict=True)),
            ]
        )
    report(
        "random_training",
        ["50 steps with dropout", "first loss", "last loss", "largest relative gap"],
        rows,
    )


SECTIONS = {"cost": cost, "placements": placements, "training": training}


def main(asked: Sequence[str]) -> None:
    """Run the sections asked for; all by default."""
    torch.set_num_threads(1)
    for name in asked or SECTIONS:
        SECTIONS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
