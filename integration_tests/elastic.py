"""Training that goes on while ranks are killed: survivors form a smaller mesh and resume from the last checkpoint.

    python integration_tests/elastic.py [--steps N] [--kills N] [--minutes M] [--plot FILE]

Every run trains one model on one sequence of global batches. A rank of it kills itself at a random step, anywhere in
the step; the launcher starts the others again, as torchrun does, on a mesh that is smaller by one, and from one rank on
a mesh of four. With `--minutes`, runs follow one another; memory, descriptors and threads go to a plot.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal_dtensor.api.state_dicts import get_state_dict, set_state_dict
from shoal_dtensor.checkpoint import Checkpointer
from shoal_mesh import RankError, all_reduce, init_device_mesh
from shoal_mesh.local_ranks.pool import RankPool
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

MESHES = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2)}
ROWS, WIDTH = 12, 8  # rows divide by every data-parallel size
MOMENTS = ("before the forward pass", "before the backward pass", "before the step", "before the save")


@dataclass(frozen=True)
class Kill:
    """Which rank kills itself, in which step and at which moment of it."""

    rank: int
    step: int
    moment: str


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        losses: of every step, by number.
        sizes: ranks of each start.
        pauses: seconds from each kill until the next step had its loss on all ranks.
        usage: time, and MiB, descriptors and threads of the launcher and of rank 0, after every start.
    """

    losses: dict[int, float] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    usage: list[tuple[float, ...]] = field(default_factory=list)


def usage() -> tuple[int, int, int]:
    """MiB, descriptors and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def train(folder: str, steps: int, kill: Kill | None) -> None:
    """What every rank runs: from the newest checkpoint, if there is one, to the last step."""
    shape = MESHES[torch.distributed.get_world_size()]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)).double()
    model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = fully_shard(model, mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def die(step: int, moment: str) -> None:
        if kill == Kill(torch.distributed.get_rank(), step, moment):
            Path(folder, "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    with Checkpointer(Path(folder, "steps")) as checkpoints:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        done = checkpoints.load(state)
        if done is not None:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for step in range(0 if done is None else done + 1, steps):
            batch = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            rows = batch.chunk(shape[0])[mesh.get_local_rank("dp")]
            die(step, MOMENTS[0])
            optimizer.zero_grad()
            loss = (model(rows) - rows.flip(1)).square().mean()
            die(step, MOMENTS[1])
            loss.backward()
            die(step, MOMENTS[2])
            optimizer.step()
            total = all_reduce(loss.detach(), mesh.comm("dp")).item() / shape[0]
            if torch.distributed.get_rank() == 0:
                with Path(folder, "log").open("a") as log:
                    log.write(f"{time.time()} {step} {total.hex()} {' '.join(map(str, usage()))}\n")
            die(step, MOMENTS[3])
            model_state, optimizer_state = get_state_dict(model, optimizer)
            checkpoints.save(step, {"model": model_state, "optimizer": optimizer_state})


def run(folder: str, steps: int, kills: int, seed: int = 0) -> Outcome:
    """Train to the end, starting again after every kill.

    Args:
        folder: of this run alone.
        steps: how many there are in all.
        kills: how many ranks are killed, each at a random moment of a step that is still to come.
        seed: of the random choices.
    """
    choices, size, outcome = random.Random(seed), 4, Outcome()
    log, killed = Path(folder, "log"), Path(folder, "killed")
    read, waiting, finished = 0, list[float](), False
    while not finished:
        begin = min(1 + max(outcome.losses, default=-1), steps - 1)
        last = max(begin + 1, steps - kills + 1)  # leaves a step for each kill that follows
        kill = Kill(choices.randrange(size), choices.randrange(begin, last), choices.choice(MOMENTS)) if kills else None
        outcome.sizes.append(size)
        finished = _started(size, folder, steps, kill)
        if not finished and not killed.exists():
            raise RuntimeError(f"the run in {folder} failed, but not by {kill}")
        fresh = [line.split() for line in log.read_text().splitlines()[read:]] if log.exists() else []
        if fresh:
            read += len(fresh)
            outcome.pauses += [float(fresh[0][0]) - moment for moment in waiting]
            waiting.clear()
            outcome.losses.update({int(step): float.fromhex(loss) for _, step, loss, *_ in fresh})
            outcome.usage.append((time.time(), *usage(), *map(float, fresh[-1][3:])))
        if not finished:
            waiting.append(float(killed.read_text()))
            killed.unlink()
        kills, size = max(kills - 1, 0), size - 1 if size > 1 else 4
    return outcome


def _started(size: int, folder: str, steps: int, kill: Kill | None) -> bool:
    """Whether ranks that are started come to the end."""
    try:
        with RankPool(size) as pool:
            pool.run(train, folder, steps, kill, timeout=120.0)
    except RankError:
        if kill is None:
            raise
        return False
    return True


def soak(minutes: float, steps: int, kills: int) -> list[tuple[float, ...]]:
    """Usage over one run after the other, each compared with the undisturbed one."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = run(folder, steps, 0).losses
    end, points, seed = time.time() + 60 * minutes, [], 0
    while time.time() < end:
        seed += 1
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(folder, steps, kills, seed)
        compare(outcome.losses, undisturbed)
        points += outcome.usage
    print(f"{seed} runs with {seed * kills} kills, every loss as in the undisturbed run")
    return points


def compare(losses: dict[int, float], undisturbed: dict[int, float]) -> float:
    """The largest difference of two runs; raises if it is above 1e-9 or a step is missing."""
    worst = max(abs(losses[step] - loss) for step, loss in undisturbed.items())
    if worst > 1e-9:
        raise AssertionError(f"losses differ by {worst}: {losses} and {undisturbed}")
    return worst


def plot(points: list[tuple[float, ...]], path: Path) -> None:
    """Write six curves over time as an SVG picture, each scaled from 0 to its largest value."""
    titles = [f"{what} of {whose}" for whose in ("launcher", "rank 0") for what in ("MiB", "descriptors", "threads")]
    span, parts = max(points[-1][0] - points[0][0], 1e-9), []
    for row, (title, values) in enumerate(zip(titles, list(zip(*points, strict=True))[1:], strict=True)):
        top, low = 90 * row, max(*values, 1)
        line = " ".join(
            f"{10 + 580 * (at[0] - points[0][0]) / span:.1f},{top + 85 - 60 * value / low:.1f}"
            for at, value in zip(points, values, strict=True)
        )
        said = f"{title}: first {values[0]:g}, last {values[-1]:g}, most {max(values):g}, in {span / 60:.1f} minutes"
        parts.append(f'<text x="10" y="{top + 18}">{said}</text><polyline points="{line}"/>')
        print(said)
    style = "text{font:12px sans-serif} polyline{fill:none;stroke:steelblue}"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="545"><style>{style}</style>{"".join(parts)}</svg>'
    )


def main() -> None:
    """Print one disturbed run beside an undisturbed one, or soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--plot", type=Path, default=Path("soak.svg"))
    asked = parser.parse_args()
    if asked.minutes:
        plot(soak(asked.minutes, asked.steps, asked.kills), asked.plot)
        return
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        undisturbed, disturbed = run(one, asked.steps, 0), run(other, asked.steps, asked.kills)
    worst = compare(disturbed.losses, undisturbed.losses)
    print(f"ranks of each start: {disturbed.sizes}; last loss {disturbed.losses[asked.steps - 1]!r}")
    print(f"largest difference of a loss to the undisturbed run: {worst:.1e}")
    print("seconds from a kill until the next step has its loss:", *(f"{pause:.1f}" for pause in disturbed.pauses))


if __name__ == "__main__":
    main()
