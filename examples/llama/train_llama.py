"""Train a small Llama on a mesh of ranks and check it against one process.

The mesh is data-parallel by tensor-parallel.

    # 4 local ranks, a 2x2 mesh
    python examples/llama/train_llama.py
    python examples/llama/train_llama.py --mesh 1x4 --data corpus.txt --steps 300
    # weights sharded over both axes
    python examples/llama/train_llama.py --fsdp
    # on the ranks that torchrun started
    torchrun --nproc-per-node 4 examples/llama/train_llama.py

The text is the source of Python's standard library, byte by byte. `parallelize`, `over_data` and
`Trainer` contain all code for parallel training. The model (llama.py) is an ordinary module, and
the reference is the same `Trainer` with `mesh=None`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from job import Job, JobError, read_job
from llama import Llama
from torch import Tensor, nn
from tqdm import tqdm

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import DTensor, Replicate, Shard, get_state_dict, set_state_dict
from shoal_mesh import CommDebugMode, DeviceMesh, all_reduce, init_device_mesh, launch
from shoal_tp_styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

# Float32 sums in another order differ by 1e-7 relative. Adam divides by the root of the squared
# gradient, so the step of a weight with a gradient near zero may differ by a large part of the
# learning rate. Single weights differ visibly then, losses hardly. The differences grow from step
# to step; in float64 they stay below the tolerances.
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}  # relative, at every step
# norm of the difference / distance from initialisation
WEIGHT_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-8}


def parallelize(model: Llama, mesh: DeviceMesh) -> Llama:
    """Shard the weights along the axis "tensor".

    Between attention and feed-forward, shard the sequence along it.
    """
    split, whole = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        # rows of the vocabulary
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "**.*norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(split, None, None), desired_input_layouts=(whole, None, None)
        ),
        "blocks.*.attention.w[qkv]": ColwiseParallel(),  # whole heads
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=split),
        "blocks.*.feed_forward": PrepareModuleInput(
            input_layouts=split, desired_input_layouts=whole
        ),
        "blocks.*.feed_forward.gate": ColwiseParallel(),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=split),
        "head": ColwiseParallel(
            input_layouts=split, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    return parallelize_module(model, mesh["tensor"], plan)


def over_data(model: Llama, mesh: DeviceMesh, fsdp: bool) -> Llama:
    """Average gradients over the axis "data".

    With `fsdp`, shard the weights along it too, block by block.
    """
    if not fsdp:
        replicate(model, mesh["data"])
        return model
    for module in (*model.blocks, model):
        fully_shard(module, mesh["data"])
    return model


class Trainer:
    """A model, its optimizer and the progress of the run.

    They are on a mesh, or with `mesh=None` on one process.
    """

    def __init__(self, job: Job, mesh: DeviceMesh | None) -> None:
        # the same seed on every rank: the program then draws the numbers of one process
        torch.manual_seed(job.seed)
        model = Llama(job.config).to(job.device, job.dtype)
        self.model = over_data(parallelize(model, mesh), mesh, job.fsdp) if mesh else model
        self.weights = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.job, self.mesh, self.start = job, mesh, 0
        self.losses: list[float] = []

    def step(self, index: int) -> None:
        """Train one step on global batch `index`."""
        tokens = self.job.tokens(index)
        if self.mesh:
            tokens = tokens.chunk(self.job.mesh[0])[self.mesh.get_local_rank("data")]
        # the logits are sharded along the vocabulary, and stay so
        with loss_parallel():
            loss = F.cross_entropy(
                self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )
            loss.backward()
        loss = whole(loss.detach())
        if self.mesh:
            loss = all_reduce(loss, (self.mesh, "data"), op="avg")
        nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.param_groups[0]["lr"] = self.job.lr * min(1, (index + 1) / 10)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def run(self, until: int, title: str, save_at: int | None = None) -> float:
        """Train up to step `until` under a progress bar; return tokens per second."""
        began, first = time.perf_counter(), self.start + len(self.losses)
        quiet = None if is_first_rank() else True  # None: quiet without a terminal
        with tqdm(range(first, until), desc=title, disable=quiet, unit="step") as bar:
            for index in bar:
                if index == save_at:
                    self.save(self.job.out / "checkpoint")
                self.step(index)
                speed = (
                    (index + 1 - first)
                    * self.job.batch
                    * self.job.seq
                    / (time.perf_counter() - began)
                )
                bar.set_postfix_str(f"loss {self.losses[-1]:.3f}, {speed:.0f} tokens/s")
        if is_first_rank():
            print(
                f"{title}: steps {first} to {until}, loss {self.losses[-1]:.3f}, {speed:.0f} "
                "tokens/s",
                flush=True,
            )
        return speed

    def state(self) -> dict[str, Any]:
        """Return the state of the run. DTensors are saved as shards, and load onto other meshes."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        random = (torch.cuda if self.job.device == "cuda" else torch).get_rng_state()
        step = torch.tensor(self.start + len(self.losses))
        return {"model": model, "optimizer": optimizer, "step": step, "random": random}

    def save(self, path: Path) -> None:
        """Write a checkpoint beside the old one, then swap them: after a crash one is complete."""
        fresh = path.with_suffix(".new")
        dcp.save(self.state(), checkpoint_id=fresh)
        if is_first_rank():
            shutil.rmtree(path, ignore_errors=True)
            fresh.rename(path)
        dist.barrier()

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.start = int(state["step"])
        (torch.cuda if self.job.device == "cuda" else torch).set_rng_state(state["random"])


def train(job: Job) -> bool:
    """Train, resume from the checkpoint, compare with one process; return whether results agree."""
    mesh = init_device_mesh(job.device, job.mesh, mesh_dim_names=("data", "tensor"))
    trainer = Trainer(job, mesh)
    if job.resume:
        trainer.load(job.resume)
    with CommDebugMode() as counted:
        trainer.step(trainer.start)
    late = max(trainer.start + 1, job.steps - max(1, job.steps // 10))
    speed = trainer.run(job.steps, f"mesh {job.mesh[0]}x{job.mesh[1]}", save_at=late)

    again = Trainer(job, mesh)  # a new model, as after a crash
    again.load(job.out / "checkpoint")
    again.run(job.steps, "resumed")
    agrees = [again.losses == trainer.losses[late - trainer.start :]]  # bit for bit

    weights = {name: whole(weight.detach()) for name, weight in trainer.weights.items()}
    if is_first_rank():
        print(
            f"\nresumed from step {late}: losses {'equal bit for bit' if agrees[0] else 'DIFFER'}"
        )
        counts = (f"{count} {op.__name__}" for op, count in counted.get_comm_counts().items())
        print("collectives of one step:", ", ".join(counts))
        agrees[0] &= compare(job, trainer, weights, speed)
    dist.broadcast_object_list(agrees)
    return agrees[0]


def compare(job: Job, trainer: Trainer, weights: dict[str, Tensor], speed: float) -> bool:
    """Train the same model on this process alone, report both, and draw the pictures."""
    # one rank draws: matplotlib takes a second to import
    from pictures import draw_layout, draw_losses

    alone = Trainer(job, None)
    before = {name: weight.detach().clone() for name, weight in alone.weights.items()}
    speed_alone = alone.run(job.steps, "one process")
    losses = alone.losses[trainer.start :]
    loss_gap = max(abs(a - b) / b for a, b in zip(trainer.losses, losses, strict=True))
    moved = norm(alone.weights[name] - before[name] for name in before)
    weight_gap = norm(alone.weights[name] - weights[name] for name in before) / moved
    print(
        f"{'':12}{'tokens/s':>10}{'last loss':>11}"
        f"{'parameters, bytes/rank':>25}{'optimizer, bytes/rank':>24}"
    )
    for title, run, tokens in (
        (f"{job.ranks} ranks", trainer, speed),
        ("one process", alone, speed_alone),
    ):
        moments = [moment for state in run.optimizer.state.values() for moment in state.values()]
        sizes = f"{num_bytes(run.weights.values()):25,}{num_bytes(moments):24,}"
        print(f"{title:12}{tokens:10.0f}{run.losses[-1]:11.4f}{sizes}")
    if job.device == "cpu" and job.ranks > (cores := os.cpu_count() or 1):
        print(
            f"({job.ranks} ranks share {cores} cores and pay for collectives besides: slower is "
            "expected here)"
        )
    print(
        f"largest relative difference of the losses   {loss_gap:.1e} (allowed "
        f"{LOSS_TOLERANCE[job.dtype]:.0e})"
    )
    print(
        f"difference of the weights / distance moved  {weight_gap:.1e} (allowed "
        f"{WEIGHT_TOLERANCE[job.dtype]:.0e})"
    )
    draw_losses(
        job.out / "losses.png",
        {f"{job.ranks} ranks": trainer.losses, "one process": losses},
        trainer.start,
    )
    draw_layout(job.out / "layout.png", trainer.weights, job.mesh)
    print(f"pictures and checkpoint are in {job.out}")
    return loss_gap <= LOSS_TOLERANCE[job.dtype] and weight_gap <= WEIGHT_TOLERANCE[job.dtype]


def whole(tensor: Tensor) -> Tensor:
    """Return the global value, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the norm of all elements together."""
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the tensors that this rank holds."""
    return sum(
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors
    )


def is_first_rank() -> bool:
    """Return whether this rank prints."""
    return dist.get_rank() == 0


def main() -> None:
    """Check the command line, then train."""
    try:
        job = read_job()
    except JobError as error:
        sys.exit(f"train_llama: {error}")
    if not all(launch(train, job.ranks, job)):
        sys.exit("train_llama: the runs disagree")


if __name__ == "__main__":
    main()
