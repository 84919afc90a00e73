"""The last product and the loss of a language model over ranks that shard the classes.

Time and peak memory are measured.

`linear_cross_entropy` against the product and `losses.cross_entropy` on its logits, and against
torch's counterpart of both: DTensor logits under torch's `loss_parallel`. Forward and backward on
two gloo ranks.

    python benchmarks/loss.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_mesh
import torch.distributed.tensor as torch_dtensor
import torch.distributed.tensor.parallel as torch_tp
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _timing import Case, keep_cases, report
from tp_training import in_turns, peak_bytes

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor
from shoal_mesh import init_device_mesh, launch
from shoal_tp_styles.losses import cross_entropy, linear_cross_entropy

RANKS = 2
SIZES = {"2,048 x 256 -> 32,768": (2048, 256, 32768), "512 x 256 -> 131,072": (512, 256, 131072)}


def step(loss_of: Callable[[Any, Any], Tensor], x: Any, head: Any) -> Callable[[], None]:
    """Forward and backward of a loss."""

    def run() -> None:
        x.grad = head.grad = None
        loss_of(x, head).backward()

    return run


def rivals(rows: int, features: int, classes: int) -> dict[str, dict[str, Callable[[], None]]]:
    """Each as a step of one phase."""
    torch.manual_seed(0)
    x, w, target = (
        torch.randn(rows, features),
        torch.randn(classes, features) / 30,
        torch.randint(classes, (rows,)),
    )
    ours, theirs = init_device_mesh("cpu", (RANKS,)), torch_mesh.init_device_mesh("cpu", (RANKS,))
    kept: dict[str, Any] = {
        "ours": distribute_tensor(w, ours, [Shard(0)]).requires_grad_(),
        "theirs": torch_dtensor.distribute_tensor(
            w, theirs, [torch_dtensor.Shard(0)]
        ).requires_grad_(),
    }

    def fused(x: Any, head: Any) -> Tensor:
        return linear_cross_entropy(x, head, target)

    def unfused(x: Any, head: Any) -> Tensor:
        whole = DTensor.from_local(x, ours, [Replicate()])
        return cross_entropy(F.linear(whole, head), target)

    def torchs(x: Any, head: Any) -> Tensor:
        whole = torch_dtensor.DTensor.from_local(x, theirs, [torch_dtensor.Replicate()])
        labels = torch_dtensor.DTensor.from_local(target, theirs, [torch_dtensor.Replicate()])
        with torch_tp.loss_parallel():
            loss = F.cross_entropy(F.linear(whole, head), labels)
            loss.backward()  # inside of the block, as torch asks for
        return loss.detach().to_local().requires_grad_()

    runs = {"fused": (fused, "ours"), "unfused": (unfused, "ours"), "torch": (torchs, "theirs")}
    return {
        name: {"step": step(loss, x.clone().requires_grad_(), kept[owner])}
        for name, (loss, owner) in runs.items()
    }


def measure(rows: int, features: int, classes: int) -> dict[str, tuple[float, int]]:
    """Seconds of the best step and peak bytes of each, on every rank."""
    torch.set_num_threads(1)
    works = rivals(rows, features, classes)
    for work in works.values():
        work["step"]()
    seconds = in_turns(works, 1, 3)
    return {
        name: (min(seconds[name]), peak_bytes({"zero_grad": dist.barrier, **work}))
        for name, work in works.items()
    }


def main() -> None:
    """Print the table."""
    table: list[list[object]] = []
    for size, shape in SIZES.items():
        found = launch(measure, RANKS, *shape)[0]
        for name, (seconds, peak) in found.items():
            ratios = [seconds / found["torch"][0], peak / found["torch"][1]]
            table.append([size, name, seconds * 1e3, peak / 2**20, *ratios])
    fused, torchs = found["fused"], found["torch"]  # of the size with most classes
    keep_cases("loss", [
        Case(f"loss of {size}: a step", "ms", fused[0] * 1e3, torch=torchs[0] * 1e3),
        Case(f"loss of {size}: peak", "MiB", fused[1] / 2**20, torch=torchs[1] / 2**20),
    ])  # fmt: skip
    report(
        "loss",
        ["rows x features -> classes", "loss", "ms", "peak MiB", "time / torch", "peak / torch"],
        table,
    )


if __name__ == "__main__":
    main()
