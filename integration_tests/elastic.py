"""Training that continues while ranks are killed.

Survivors keep their processes, newcomers join them.

    python integration_tests/elastic.py [--steps N] [--kills N] [--data WAY] [--torchrun] [--minutes
    M] [--plot FILE]

Every run trains one model on one sequence of global batches. Processes kill themselves at random
steps, anywhere in the step. The others form a smaller world in place, make a mesh over it, take
over what they still hold, and read the last checkpoint only where shards are lost. Once three of
four are gone, three new processes start and are let in; with `--torchrun` each process has an agent
of torchrun's, which starts it again whenever it is killed. With `--minutes`, runs follow one
another; memory, descriptors and threads go to a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

# the optimizer needs it: processes that are started find it imported
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import get_state_dict, set_state_dict
from shoal_dtensor.checkpoint import Checkpointer, HeldState
from shoal_mesh import DeviceMesh, ElasticWorld, all_reduce, init_device_mesh
from shoal_mesh.errors import RankError
from shoal_mesh.testing import RankPool
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

MESHES = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2)}
# rows divide by every data-parallel size
ROWS, WIDTH = 12, 8
MOMENTS = (
    "before the forward pass",
    "before the backward pass",
    "before the step",
    "before the save",
)
WAYS: dict[str, Any] = {"replicate": replicate, "fully_shard": fully_shard}


@dataclass(frozen=True)
class Kill:
    """In which step and at which moment a rank kills itself, and which rank (modulo the world)."""

    step: int
    moment: str
    rank: int


@dataclass(frozen=True)
class Job:
    """What every process is given.

    Attributes:
        folder: of this run alone.
        port: of the launcher's store.
        steps: how many there are in all.
        kills: each happens once.
        data: whether data-parallel ranks hold replicas of the state, or shards.
        pause: seconds before each step, in which a process that starts again may catch up.
    """

    folder: str
    port: int
    steps: int
    kills: tuple[Kill, ...]
    data: str
    pause: float = 0.0


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        losses: of every step, by number.
        worlds: of each world its number of ranks and where its state came from.
        pauses: seconds from each kill until the next step had its loss on all ranks.
        usage: time, and MiB, descriptors and threads of the launcher and of rank 0, once a world.
    """

    losses: dict[int, float] = field(default_factory=dict)
    worlds: list[tuple[int, str]] = field(default_factory=list)
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


class Trainer:
    """One process of a run, over all worlds that it is in."""

    def __init__(self, job: Job) -> None:
        self.job, self.held = job, HeldState()
        self.store = TCPStore("127.0.0.1", job.port, is_master=False)
        self.world = ElasticWorld(self.store, 4)

    def die(self, step: int, moment: str) -> None:
        """Kill this process, if that is planned and has not happened yet."""
        for number, kill in enumerate(self.job.kills):
            planned = (kill.step, kill.moment, kill.rank % dist.get_world_size()) == (
                step,
                moment,
                dist.get_rank(),
            )
            if planned and self.store.add(f"kill/{number}", 1) == 1:
                with Path(self.job.folder, "killed").open("a") as file:
                    file.write(f"{self.world.round} {time.time()}\n")
                os.kill(os.getpid(), signal.SIGKILL)

    def log(self, name: str, *facts: object) -> None:
        """A line in a file of the run, of rank 0."""
        if dist.get_rank() == 0:
            with Path(self.job.folder, name).open("a") as file:
                file.write(f"{self.world.round} {' '.join(map(str, facts))}\n")

    def steps(self) -> None:
        """In one world: from what is held, or the newest checkpoint, to the last step."""
        mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()], mesh_dim_names=("dp", "tp"))
        model = built(mesh, self.job.data)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with Checkpointer(Path(self.job.folder, "steps")) as checkpoints:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            done, source = self.held.recover(state), "memory"
            if done is None:
                done, source = checkpoints.load(state), "checkpoint"
            if done is not None:
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                )
                self.held.keep(done, state)
            self.log(
                "worlds", dist.get_world_size(), source if done is not None else "nothing", *usage()
            )
            for step in range(0 if done is None else done + 1, self.job.steps):
                time.sleep(self.job.pause)
                self.world.admit()
                self.step(step, mesh, model, optimizer, checkpoints)

    def step(
        self, step: int, mesh: DeviceMesh, model: Any, optimizer: Any, checkpoints: Checkpointer
    ) -> None:
        """One step; every second one is saved."""
        ranks = mesh.size(0)
        batch = torch.randn(
            ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
        )
        rows = batch.chunk(ranks)[mesh.get_local_rank("dp")]
        self.die(step, MOMENTS[0])
        optimizer.zero_grad()
        loss = (model(rows) - rows.flip(1)).square().mean()
        self.die(step, MOMENTS[1])
        loss.backward()
        self.die(step, MOMENTS[2])
        # all update, or none does
        total = all_reduce(loss.detach(), mesh.comm(("dp", "tp"))).item() / mesh.size()
        self.log("losses", time.time(), step, total.hex())
        self.held.forget()
        optimizer.step()
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        self.held.keep(step, state)
        self.die(step, MOMENTS[3])
        if step % 2:
            checkpoints.save(step, state)


def built(mesh: DeviceMesh, data: str) -> Any:
    """The model, with the values that it begins with."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)).double()
    model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return WAYS[data](model, mesh["dp"])


def train(job: Job) -> None:
    """What every process runs."""
    trainer = Trainer(job)
    trainer.world.run(trainer.steps, wait=120.0)


def train_from(path: str) -> None:
    """`train` of a job that is in a file."""
    said = json.loads(Path(path).read_text())
    train(Job(**{**said, "kills": tuple(Kill(**kill) for kill in said["kills"])}))


def planned(steps: int, kills: int, seed: int) -> tuple[Kill, ...]:
    """Kills at random moments of distinct steps, the first step left out."""
    choices = random.Random(seed)
    at = sorted(choices.sample(range(1, steps), kills))
    return tuple(Kill(step, choices.choice(MOMENTS), choices.randrange(12)) for step in at)


def in_pool(job: Job) -> None:
    """One process, in a pool of its own, so that its end ends no other."""
    with RankPool(1) as pool:
        pool.run(train, job, timeout=900.0)


def under_torchrun(job: Job) -> None:
    """One process with an agent of its own, which starts it again after each end but the last."""
    path = Path(job.folder, "job.json")
    path.write_text(json.dumps(asdict(job)))
    agent = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "--monitor-interval=0.1",
    ]
    rank = [
        f"--max-restarts={len(job.kills)}",
        "-m",
        "integration_tests.elastic",
        "--job",
        str(path),
    ]
    subprocess.run(
        [sys.executable, *agent, *rank], check=True, cwd=Path(__file__).parents[1], timeout=900
    )


def run(
    folder: str,
    steps: int,
    kills: tuple[Kill, ...] = (),
    data: str = "replicate",
    torchrun: bool = False,
) -> Outcome:
    """Train to the end: four processes, and as many new ones as are needed.

    Args:
        folder, steps, kills, data: see `Job`.
        torchrun: whether agents of torchrun's start a process again when it has ended; otherwise
            three new ones start whenever three are gone and the others go on.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job, outcome = Job(folder, store.port, steps, kills, data, 0.5 if torchrun else 0.0), Outcome()
    gone, threads, unseen = list[BaseException](), list[threading.Thread](), 0

    def one() -> None:
        try:
            (under_torchrun if torchrun else in_pool)(job)
        except BaseException as error:
            gone.append(error)

    def start(count: int) -> None:
        threads.extend(threading.Thread(target=one) for _ in range(count))
        for thread in threads[-count:]:
            thread.start()

    start(4)
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
        worlds = read(folder, "worlds")
        outcome.usage += [
            (time.time(), *usage(), *map(float, world[3:]))
            for world in worlds[len(outcome.usage) :]
        ]
        # Newcomers that start while the last survivor still learns of the loss might be let into
        # its next world.
        killed = read(folder, "killed")
        if len(gone) >= unseen + 3 and int(worlds[-1][0]) > int(killed[unseen + 2][0]):
            unseen += 3
            start(3)
    ends = 0 if torchrun else len(read(folder, "killed"))
    if len(gone) != ends or not all(isinstance(error, RankError) for error in gone):
        raise RuntimeError(f"processes of the run in {folder} ended that nobody killed: {gone}")
    outcome.worlds = [(int(world[1]), world[2]) for world in read(folder, "worlds")]
    losses = read(folder, "losses")
    outcome.losses = {int(step): float.fromhex(loss) for _, _, step, loss in losses}
    for number, moment in read(folder, "killed"):
        after = (float(at) for world, at, *_ in losses if int(world) > int(number))
        outcome.pauses.append(next(after, time.time()) - float(moment))
    return outcome


def read(folder: str, name: str) -> list[list[str]]:
    """The lines of a file of a run, as words."""
    with suppress(FileNotFoundError):
        return [line.split() for line in Path(folder, name).read_text().splitlines()]
    return []


def soak(minutes: float, steps: int, kills: int) -> list[tuple[float, ...]]:
    """Usage over one run after the other, each compared with the undisturbed one."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = run(folder, steps).losses
    end, seed = time.time() + 60 * minutes, 0
    points, pauses, sources = list[tuple[float, ...]](), list[float](), Counter[str]()
    while time.time() < end:
        seed += 1
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(folder, steps, planned(steps, kills, seed), [*WAYS][seed % 2])
        compare(outcome.losses, undisturbed)
        points += outcome.usage
        pauses += outcome.pauses
        sources.update(source for _, source in outcome.worlds)
        spent = f"{min(pauses):.1f} to {max(pauses):.1f} s from a kill to a loss"
        print(
            f"{seed} runs, {seed * kills} kills, worlds with state from {dict(sources)}, {spent}",
            flush=True,
        )
    print("every loss as in the undisturbed run")
    return points


def compare(losses: dict[int, float], undisturbed: dict[int, float]) -> float:
    """The largest difference of two runs; raises if it is above 1e-9 or a step is missing."""
    worst = max(abs(losses[step] - loss) for step, loss in undisturbed.items())
    if worst > 1e-9:
        raise AssertionError(f"losses differ by {worst}: {losses} and {undisturbed}")
    return worst


def plot(points: list[tuple[float, ...]], path: Path) -> None:
    """Write six curves over time as an SVG picture, each scaled from 0 to its largest value."""
    titles = [
        f"{what} of {whose}"
        for whose in ("launcher", "rank 0")
        for what in ("MiB", "descriptors", "threads")
    ]
    span, parts = max(points[-1][0] - points[0][0], 1e-9), []
    for row, (title, values) in enumerate(
        zip(titles, list(zip(*points, strict=True))[1:], strict=True)
    ):
        top, low = 90 * row, max(*values, 1)
        line = " ".join(
            f"{10 + 580 * (at[0] - points[0][0]) / span:.1f},{top + 85 - 60 * value / low:.1f}"
            for at, value in zip(points, values, strict=True)
        )
        extremes = f"first {values[0]:g}, last {values[-1]:g}, most {max(values):g}"
        said = f"{title}: {extremes}, in {span / 60:.1f} minutes"
        parts.append(f'<text x="10" y="{top + 18}">{said}</text><polyline points="{line}"/>')
        print(said)
    # ink that is readable on white and on the dark scheme's background
    style = "text{font:12px sans-serif;fill:#7a7a7a} polyline{fill:none;stroke:steelblue}"
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="600" '
        f'height="545"><style>{style}</style>{"".join(parts)}</svg>'
    )


def main() -> None:
    """Print one disturbed run beside an undisturbed one, or soak."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--data", choices=WAYS, default="replicate")
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # of a process that torchrun has started
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--plot", type=Path, default=Path("soak.svg"))
    asked = parser.parse_args()
    if asked.job:
        train_from(asked.job)
        return
    if asked.minutes:
        plot(soak(asked.minutes, asked.steps, asked.kills), asked.plot)
        return
    kills = planned(asked.steps, asked.kills, 0)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        undisturbed, disturbed = (
            run(one, asked.steps),
            run(other, asked.steps, kills, asked.data, asked.torchrun),
        )
    worst = compare(disturbed.losses, undisturbed.losses)
    print(
        "worlds, and where their state came from:",
        *(f"{size} ({source})" for size, source in disturbed.worlds),
    )
    print(f"largest difference of a loss to the undisturbed run: {worst:.1e}")
    print(
        "seconds from a kill until the next step has its loss:",
        *(f"{pause:.1f}" for pause in disturbed.pauses),
    )


if __name__ == "__main__":
    main()
