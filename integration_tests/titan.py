"""torchtitan 0.2.2, its imports changed to shoal's, trains on meshes.

Losses and norms are compared with one process on torch.

    python -m integration_tests.titan PATH [--models llama3] [--meshes fsdp4 hsdp] [--steps 5]
    [--torch]

PATH is the folder that has `torchtitan` (`pip install --no-deps --target PATH torchtitan==0.2.2`,
and what it imports). `python -m shoal_dtensor.migrate --write` rewrites a copy of it; what is
counted is what differs. One process of torchtitan as it is, on torch, writes its seed checkpoint;
every run loads that, trains for some steps on the same global batches in float64, and its losses
and gradient norms are compared with those of one process, step for step. torchtitan itself divides
gradients once more by the ranks of a DistributedDataParallel, and does not divide them by the
tokens in a pipeline: the one process has the same factor there. `--torch` runs every mesh on
torch's own stack too.

`--models deepseek_v3` routes tokens in float32: under a tensor axis both stacks are as far from one
process as that is. Its experts on several ranks need a kernel for GPUs; context parallelism asks
for private names of torch.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from integration_tests.titan_rank import BATCH, TOKENS, Run

ROOT = Path(__file__).resolve().parent.parent
BAR = 1e-9
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama3": {
        "dim": 32,
        "n_layers": 4,
        "n_heads": 8,
        "n_kv_heads": 4,
        "vocab_size": 96,
        "multiple_of": 16,
    },
    "qwen3": {
        "dim": 32,
        "n_layers": 4,
        "n_heads": 8,
        "n_kv_heads": 4,
        "head_dim": 8,
        "hidden_dim": 64,
        "vocab_size": 96,
        "enable_weight_tying": False,
    },
    "deepseek_v3": {
        "dim": 32,
        "n_layers": 4,
        "n_heads": 4,
        "inter_dim": 64,
        "moe_inter_dim": 16,
        "vocab_size": 96,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "moe_args": {"num_experts": 4, "num_shared_experts": 1, "top_k": 2},
    },
}

# What the command leaves to a person: (file, line as it is, line as it has to be).
BY_HAND = (
    (
        # the arguments of DistributedDataParallel
        "models/llama3/infra/parallelize.py",
        "    replicate(model, device_mesh=dp_mesh, bucket_cap_mb=100)",
        "    replicate(model, dp_mesh, bucket_bytes=100 << 20)",
    ),
)


def degrees(**given: int) -> dict[str, Any]:
    """Entries of torchtitan's configuration for the degrees of a mesh."""
    names = {
        "replicate": "data_parallel_replicate_degree",
        "shard": "data_parallel_shard_degree",
        "tp": "tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "cp": "context_parallel_degree",
    }
    parts = given.get("replicate", 1) * given.get("shard", 1)
    found = {f"parallelism.{full}": given.get(short, 1) for short, full in names.items()}
    return found | {"training.local_batch_size": BATCH // parts}


def pipeline(schedule: str, layers: int | None = None) -> dict[str, Any]:
    return {
        "parallelism.pipeline_parallel_schedule": schedule,
        "parallelism.pipeline_parallel_layers_per_stage": layers,
        "parallelism.pipeline_parallel_microbatch_size": 1,
    }


ACCUMULATED = {"training.local_batch_size": 1}
CHECKPOINTED = {"activation_checkpoint.mode": "full"}
SELECTIVE = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
# Ranks, and the configuration.
MESHES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "fsdp4": (4, degrees(shard=4)),
    "fsdp2 x tp2": (4, degrees(shard=2, tp=2)),
    "hsdp2x2": (4, degrees(replicate=2, shard=2)),
    "ddp4": (4, degrees(replicate=4)),
    "tp4": (4, degrees(tp=4)),
    "pp2 x tp2": (4, degrees(pp=2, tp=2) | pipeline("1F1B")),
    "pp2 x fsdp2": (4, degrees(pp=2, shard=2) | pipeline("1F1B")),
    "pp2 x fsdp2, interleaved": (4, degrees(pp=2, shard=2) | pipeline("Interleaved1F1B", 1)),
    "pp2 x fsdp2, zero bubble": (4, degrees(pp=2, shard=2) | pipeline("ZBVZeroBubble")),
    "pp2 x fsdp2 x tp2": (8, degrees(pp=2, shard=2, tp=2) | pipeline("1F1B")),
    "hsdp2x2 x tp2": (8, degrees(replicate=2, shard=2, tp=2)),
    "cp2": (2, degrees(cp=2)),
    "cp2 x fsdp2": (4, degrees(cp=2, shard=2)),
    "cp2 x tp2": (4, degrees(cp=2, tp=2)),
    "fsdp2 x tp2, accumulated": (4, degrees(shard=2, tp=2) | ACCUMULATED),
    "fsdp2 x tp2, checkpointed": (4, degrees(shard=2, tp=2) | CHECKPOINTED),
    "fsdp2 x tp2, selective": (4, degrees(shard=2, tp=2) | SELECTIVE),
}


def migrated(source: Path, target: Path, by_hand: Sequence[tuple[str, str, str]] = BY_HAND) -> int:
    """A copy of torchtitan with shoal's imports; returns the number of its lines that are new."""
    shutil.copytree(
        source, target / "torchtitan", ignore=shutil.ignore_patterns("__pycache__", "experiments")
    )
    # It reads torchtitan's list of experiments, of which none is used.
    (target / "torchtitan" / "experiments").mkdir()
    shutil.copy(source / "experiments" / "__init__.py", target / "torchtitan" / "experiments")
    command = [sys.executable, "-m", "shoal_dtensor.migrate", str(target / "torchtitan"), "--write"]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    for name, old, new in by_hand:
        path = target / "torchtitan" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, (name, old)
        path.write_text(text.replace(old, new), encoding="utf-8")
    return sum(
        changed_lines(source / path.relative_to(target / "torchtitan"), path)
        for path in sorted(target.rglob("*.py"))
    )


def changed_lines(old: Path, new: Path) -> int:
    """Lines of `new` that `old` has not; prints them."""
    before, after = (path.read_text(encoding="utf-8").splitlines() for path in (old, new))
    lines = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    for line in lines:
        print(f"  {new.name}: {line[2:]}")
    return len(lines)


def train(
    run: Run, ranks: int, work: Path, program: str = "integration_tests.titan_rank"
) -> list[list[float]]:
    """(loss, norm, seconds) per step; raises with the last lines of a run that failed."""
    path = work / "run.json"
    path.write_text(json.dumps(asdict(run)), encoding="utf-8")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    done = subprocess.run(
        [*launcher, "-m", program, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-60:]))
    if run.out is None:
        return []
    logs = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(Path(run.out).glob("*.json"))
    ]
    # ranks without the last stage of a pipeline log -1
    return next(log for log in logs if log[0][0] >= 0)


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--models", nargs="*", default=["llama3", "qwen3"])
    parser.add_argument("--meshes", nargs="*", default=list(MESHES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--torch", action="store_true")
    given = parser.parse_args(args)
    print(f"torch {torch_version()}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        lines = migrated(given.path / "torchtitan", work / "port")
        print(f"{lines} lines of torchtitan differ")
        stacks = {"shoal": [str(work / "port"), str(given.path)], "torch": [str(given.path)]}
        wrong = 0
        for model in given.models:
            wrong += compare(model, given, stacks, work)
    return min(wrong, 1)


def torch_version() -> str:
    import torch

    return str(torch.__version__)


def compare(
    model: str, given: argparse.Namespace, stacks: Mapping[str, list[str]], work: Path
) -> int:
    """Prints a line per mesh; returns how many are not those of one process."""

    def start(
        name: str, stack: str, ranks: int, config: Mapping[str, Any], gradients: float = 1.0
    ) -> list[list[float]]:
        folder = work / f"{model} {name} {stack}".replace(" ", "_")
        folder.mkdir()
        seed = str(work / f"seed_{model}")
        run = Run(
            stacks[stack],
            model,
            dict(MODELS[model]),
            dict(config),
            seed,
            str(folder),
            given.steps,
            BATCH,
            gradients,
        )
        return train(run if name != "seed" else replace(run, out=None), ranks, work)

    alone = degrees()
    start(
        "seed",
        "torch",
        1,
        alone | {"checkpoint.create_seed_checkpoint": True, "checkpoint.initial_load_path": None},
    )
    # torchtitan splits Qwen3 into no stages.
    meshes = [name for name in given.meshes if model != "qwen3" or not name.startswith("pp")]
    factors = {name: gradient_factor(MESHES[name][1]) for name in meshes}
    one = {each: start(f"one {each}", "torch", 1, alone, each) for each in {1.0, *factors.values()}}
    print(
        f"{model}, one process on torch: losses {', '.join(f'{line[0]:.6f}' for line in one[1.0])}",
        flush=True,
    )
    wrong = 0
    for name, stack in product(meshes, ("shoal", "torch") if given.torch else ("shoal",)):
        ranks, config = MESHES[name]
        try:
            many = start(name, stack, ranks, config)
        except RuntimeError as error:
            print(f"{model} {name} {stack}: failed\n{error}", flush=True)
            wrong += stack == "shoal"
            continue
        expected = one[factors[name]]
        apart = [
            max(abs(a[i] - b[i]) / abs(b[i]) for a, b in zip(many, expected, strict=True))
            for i in (0, 1)
        ]
        verdict = "same" if max(apart) <= BAR else "NOT THE SAME"
        print(
            f"{model} {name} {stack}: {verdict}: losses {apart[0]:.1e}, norms {apart[1]:.1e}",
            flush=True,
        )
        wrong += stack == "shoal" and max(apart) > BAR
    return wrong


def gradient_factor(config: Mapping[str, Any]) -> float:
    """What torchtitan's gradients are multiples of on a mesh."""
    if config["parallelism.pipeline_parallel_degree"] > 1:
        return float(TOKENS)
    return (
        1.0
        if config["parallelism.data_parallel_shard_degree"] > 1
        else 1 / config["parallelism.data_parallel_replicate_degree"]
    )


if __name__ == "__main__":
    sys.exit(main())
