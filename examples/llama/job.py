"""A training job: the command line, checked completely before a rank starts or a file is written.

Every process runs the same checks on the same facts, so under torchrun all ranks end with the same
line.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from llama import Llama, LlamaConfig
from torch import Tensor

CORPUS_BYTES = 8_000_000


class JobError(ValueError):
    """A command line that cannot be run."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training run."""

    config: LlamaConfig
    corpus: Tensor
    mesh: tuple[int, int]
    device: str
    steps: int
    batch: int
    seq: int
    lr: float
    seed: int
    out: Path
    resume: Path | None
    dtype: torch.dtype
    fsdp: bool

    @property
    def ranks(self) -> int:
        """Return the number of ranks on the mesh."""
        return math.prod(self.mesh)

    def tokens(self, step: int) -> Tensor:
        """Return the global batch of a step, (batch, seq + 1): the same on all ranks and meshes."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.corpus) - self.seq, (self.batch,), generator=draw)
        return (
            torch.stack([self.corpus[at : at + self.seq + 1] for at in starts.tolist()])
            .long()
            .to(self.device)
        )


def read_job(argv: list[str] | None = None) -> Job:
    """Return the job of the command line.

    Raises:
        JobError: if data are missing or too short, sizes do not fit each other, the mesh or the
            world, or the checkpoint to resume from is missing or holds another model.
    """
    asked = parser().parse_args(argv)
    try:
        config = LlamaConfig(
            asked.dim,
            asked.layers,
            asked.heads,
            asked.kv_heads,
            asked.hidden,
            256,
            asked.seq,
            asked.dropout,
            asked.tied,
        )
    except ValueError as error:
        raise JobError(str(error)) from None
    check_mesh(asked)
    corpus = read_corpus(asked.data)
    if len(corpus) <= asked.seq:
        raise JobError(
            f"{asked.data} has {len(corpus)} bytes, fewer than a sequence of {asked.seq} and its "
            "successor"
        )
    start = 0 if asked.resume is None else check_checkpoint(asked.resume, config)
    if asked.steps < start + 2:
        raise JobError(
            f"a run from step {start} needs --steps of at least {start + 2}, got {asked.steps}"
        )
    data, tensor = asked.mesh
    device = "cuda" if torch.cuda.device_count() >= data * tensor else "cpu"
    return Job(
        config, corpus, asked.mesh, device, asked.steps, asked.batch, asked.seq, asked.lr,
        asked.seed, asked.out, asked.resume, getattr(torch, asked.dtype), asked.fsdp,
    )  # fmt: skip


def check_mesh(asked: argparse.Namespace) -> None:
    """Refuse a mesh that the world, the batch, the sequence or the model does not split over."""
    data, tensor = asked.mesh
    shape = f"a mesh of {data}x{tensor}"
    world = int(os.environ.get("WORLD_SIZE", data * tensor))
    if world != data * tensor:
        raise JobError(f"{shape} has {data * tensor} ranks, but torchrun started {world}")
    if asked.batch % data:
        raise JobError(f"{shape}: a batch of {asked.batch} does not split into {data} equal parts")
    if asked.kv_heads % tensor:
        raise JobError(
            f"{shape}: {asked.kv_heads} key-value heads do not split over {tensor} ranks"
        )
    if asked.batch < 1 or asked.seq < 1:
        raise JobError(f"batch and seq must be positive, got {asked.batch} and {asked.seq}")


def read_corpus(path: Path) -> Tensor:
    """Read the first bytes of a file, or of all text files in a folder in order of name.

    The result is (bytes,) uint8.
    """
    if not path.exists():
        raise JobError(f"there are no data at {path}")
    files = (
        [path]
        if path.is_file()
        else sorted(file for file in path.glob("*") if file.suffix in (".py", ".txt", ".md"))
    )
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return (
        torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8)
    )


def check_checkpoint(path: Path, config: LlamaConfig) -> int:
    """Return the step of a checkpoint; refuse a missing checkpoint, or one of another model."""
    if not (path / ".metadata").is_file():
        raise JobError(f"there is no checkpoint at {path}")
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        name: tuple(getattr(entry, "size", ()))
        for name, entry in saved.items()
        if name.startswith("model.")
    }
    with torch.device("meta"):
        wanted = {
            f"model.{name}": tuple(weight.shape)
            for name, weight in Llama(config).state_dict().items()
        }
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise JobError(
                f"the checkpoint at {path} holds another model: {name.removeprefix('model.')} is "
                f"{found.get(name, 'missing')} there and {wanted.get(name, 'missing')} here"
            )
    step = torch.tensor(0)
    # it is meant: this process alone reads one number
    with warnings.catch_warnings(action="ignore"):
        dcp.load({"step": step}, checkpoint_id=path, no_dist=True)
    return int(step)


def mesh_shape(text: str) -> tuple[int, int]:
    """`2x4` -> (2, 4): data-parallel by tensor-parallel ranks."""
    sizes = text.lower().split("x")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"a mesh is DATAxTENSOR, for example 2x2, got {text!r}")
    return int(sizes[0]), int(sizes[1])


def parser() -> argparse.ArgumentParser:
    """Return the parser with all options and their defaults."""
    options = argparse.ArgumentParser(
        prog="train_llama", description="Train a small Llama on a mesh of ranks."
    )
    add = options.add_argument
    add(
        "--data",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="text: a file or a folder",
    )
    add("--mesh", type=mesh_shape, default=(2, 2), help="data-parallel x tensor-parallel ranks")
    add("--fsdp", action="store_true", help="shard the weights along the data-parallel axis too")
    add("--steps", type=int, default=60)
    add("--batch", type=int, default=8, help="sequences in the global batch")
    add("--seq", type=int, default=128, help="bytes in a sequence")
    add("--dim", type=int, default=256, help="width of the model")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=4)
    add("--hidden", type=int, default=704, help="width of the feed-forward layers")
    add("--dropout", type=float, default=0.1)
    add("--tied", action="store_true", help="the head shares the embedding's weight")
    add("--lr", type=float, default=1e-3, help="reached after ten steps of warm-up")
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--seed", type=int, default=0)
    add(
        "--out",
        type=Path,
        default=Path("out/demo"),
        help="where the checkpoint and the pictures go",
    )
    add("--resume", type=Path, default=None, help="a checkpoint to go on from, saved on any mesh")
    return options
