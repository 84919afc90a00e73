"""Host time of emitted programs, beside the same models made parallel by hand.

Run: ``python benchmarks/emitted.py [NAMES]``. The models are tiny architectures of transformers on
two ranks of a fake world, where collectives cost nothing, so the time is Python's and the
dispatcher's. By hand means: the model's own code on local shards, its linear layers replaced by
column-parallel and row-parallel ones with autograd functions over `torch.distributed`.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from _timing import race, report
from integration_tests.architectures import VOCABULARY, build
from integration_tests.emitted import program_of
from torch import Tensor, nn
from torch.nn import functional as F

from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_spmd_types import set_current_mesh

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "packages" / "tp-styles" / "tests" / "support")
)
# the same by hand as in the tests of memory
from by_hand import HandCopy, HandReduce

RANKS = 2
NAMES = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gpt_neox",
    "phi",
    "olmo",
    "granite",
    "starcoder2",
    "cohere",
)


class HandColumn(nn.Module):
    """This rank's output features of a linear layer."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(RANKS)[0].clone())
        has_bias = whole.bias is not None
        self.bias = nn.Parameter(whole.bias.detach().chunk(RANKS)[0].clone()) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        copied: Tensor = HandCopy.apply(x)
        return F.linear(copied, self.weight, self.bias)


class HandRow(nn.Module):
    """This rank's input features of a linear layer; the bias is added to the sum."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(RANKS, 1)[0].clone())
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = HandReduce.apply(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


def reduce_gradients_of(module: Any) -> None:
    """Have the gradient of a norm's weight summed: each rank's heads contribute an addend."""
    whole = module.weight
    del module.weight

    def copy_weight(norm: Any, args: object) -> None:
        norm.weight = HandCopy.apply(norm.whole)

    module.whole = whole
    module.register_forward_pre_hook(copy_weight)


def make_parallel_by_hand(model: nn.Module) -> None:
    """Replace the linear layers that the model's plan names; reduce the gradients it names."""
    styles = dict[str, str](model.tp_plan)  # type: ignore[arg-type]  # of transformers
    for path, module in list(model.named_modules()):
        style = next((kind for name, kind in styles.items() if fnmatchcase(path, name)), None)
        if style == "replicated_with_grad_allreduce":
            reduce_gradients_of(module)
        if not isinstance(module, nn.Linear) or style not in ("colwise", "rowwise"):
            continue
        parent, _, name = path.rpartition(".")
        replacement = HandColumn(module) if style == "colwise" else HandRow(module)
        setattr(model.get_submodule(parent), name, replacement)


def rivals_of(name: str, mesh: Any) -> dict[str, Callable[[], object]]:
    """Return one forward and backward of an architecture, emitted and by hand."""
    tokens = torch.randint(3, VOCABULARY, (2, 6))
    model = build(name)
    program = program_of(model, mesh, tokens)
    forward = program.load()
    local = dict[str, Tensor]()
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        shard = tensor.detach()
        for placement in program.specs[path].placements:
            if placement.is_shard():
                shard = shard.chunk(RANKS, placement.dim)[0]
        local[path] = shard.clone().requires_grad_(tensor.requires_grad)
    by_hand = build(name)
    make_parallel_by_hand(by_hand)

    def run_emitted() -> None:
        forward(local, tokens)["logits"].sum().backward()

    def run_by_hand() -> None:
        by_hand(input_ids=tokens, use_cache=False).logits.sum().backward()

    return {"emitted": run_emitted, "by hand": run_by_hand}


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    rows = []
    ratios = []
    with fake_world(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        with set_current_mesh(mesh):
            for name in names or NAMES:
                timings = race(rivals_of(name, mesh), rounds=20, clock=time.process_time)
                ratio = timings["emitted"].best / timings["by hand"].best
                ratios.append(ratio)
                rows.append((name, timings["emitted"].us, timings["by hand"].us, ratio))
    report("emitted", ("architecture", "emitted us", "by hand us", "ratio"), rows)
    print(f"geometric mean of the ratios: {geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
