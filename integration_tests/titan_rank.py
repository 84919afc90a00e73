"""One rank of a training run of torchtitan, started by `torchrun`.

It has its own `Trainer`, models and checkpoints.

    torchrun --nproc-per-node 4 -m integration_tests.titan_rank RUN.json

`RUN.json` has the fields of `Run`. What torchtitan lets its users exchange is exchanged: the data
(random tokens, the same global batch on every mesh), the loss (in float64) and the metrics (kept in
full precision, written as JSON). What it asks of a GPU machine is answered for a CPU: the device
type, `triton`, which it imports for its MoE kernels.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

BATCH, SEQUENCE = 8, 32
# that count: of sample i the last i do not
TOKENS = BATCH * SEQUENCE - sum(range(BATCH))


@dataclass
class Run:
    """What a run is.

    Attributes:
        packages: folders for the front of `sys.path`; one has torchtitan.
        model: a model of torchtitan, such as "llama3".
        sizes: fields of the model's arguments that replace those of its "debugmodel".
        config: values of torchtitan's configuration, by dotted name.
        seed: the folder of the checkpoint that all runs start from.
        out: where losses and norms are written; None for the run that makes the checkpoint.
        steps: optimizer steps.
        batch: samples of a step, over all ranks and microbatches.
        gradients: a factor of all gradients.
    """

    packages: list[str]
    model: str
    sizes: dict[str, Any]
    config: dict[str, Any]
    seed: str
    out: str | None
    steps: int = 5
    batch: int = BATCH
    gradients: float = 1.0


class Tokens:
    """The rank's part of a global batch of random tokens, one microbatch after another."""

    def __init__(self, run: Run, vocabulary: int, ranks: int, rank: int, local: int) -> None:
        self.run, self.vocabulary, self.ranks, self.rank, self.local = (
            run,
            vocabulary,
            ranks,
            rank,
            local,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(7)
        while True:
            text = torch.randint(
                self.vocabulary, (self.run.batch, SEQUENCE + 1), generator=generator
            )
            labels = text[:, 1:].clone()
            labels[torch.arange(SEQUENCE) >= SEQUENCE - torch.arange(len(labels))[:, None]] = -100
            for inputs, targets in zip(self.own(text[:, :-1]), self.own(labels), strict=True):
                yield {"input": inputs}, targets

    def own(self, samples: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = samples.chunk(self.ranks)[self.rank]
        return rows.chunk(len(rows) // self.local)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Metrics:
    """Takes the place of torchtitan's metrics, which read the memory of a GPU."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.color = importlib.import_module("torchtitan.tools.utils").NoColor()
        stats = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = SimpleNamespace(
            device_name="CPU", get_peak_stats=lambda: stats
        )
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.last = time.perf_counter()
        self.lines: list[list[float]] = []

    def should_log(self, step: int) -> bool:
        return True

    def log(
        self, step: int, loss: float, most: float, norm: float, extra_metrics: dict[str, Any]
    ) -> None:
        now = time.perf_counter()
        self.lines.append([float(loss), float(norm), now - self.last])
        self.last = now

    def close(self) -> None:
        if self.run.out is not None:
            rank = os.environ["RANK"]
            Path(self.run.out, f"{rank}.json").write_text(json.dumps(self.lines), encoding="utf-8")


def loss_of(run: Run) -> Any:
    """The torchtitan loss without its cast to float32, and with the run's factor of gradients."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(0, 1), reduction="sum", ignore_index=-100
        )
        return (
            value
            if run.gradients == 1
            else value.detach() + (value - value.detach()) * run.gradients
        )

    return loss


def prepare(run: Run) -> None:
    """Lets torchtitan be imported where there is no GPU."""
    sys.path[:0] = run.packages
    # torchtitan makes a device of it, and a CPU has one
    os.environ["LOCAL_RANK"] = "0"
    torch._utils._get_available_device_type = lambda: "cpu"
    vars(torch.cpu)["current_device"] = lambda: 0
    torch.histc = lambda tokens, bins, **_: torch.bincount(tokens.reshape(-1), minlength=bins)
    if find_spec("triton") is not None:
        return
    for name in ("torch._dynamo", "torch._inductor.output_code", "torch._inductor.compile_fx"):
        # while they can see that there is no triton
        importlib.import_module(name)
    language: Any = ModuleType("triton.language")
    language.constexpr = int
    triton: Any = ModuleType("triton")
    triton.language, triton.jit = language, lambda function: function
    sys.modules |= {"triton": triton, "triton.language": language}
    importlib.import_module(f"torchtitan.models.{run.model}")
    del sys.modules["triton"], sys.modules["triton.language"]


def configured(run: Run) -> Any:
    """A JobConfig of torchtitan with the values of a run."""
    from torchtitan.config import TORCH_DTYPE_MAP, JobConfig

    TORCH_DTYPE_MAP["float64"] = torch.float64
    config = JobConfig()
    values = {
        "model.name": "exchanged",
        "model.flavor": "tiny",
        "training.seq_len": SEQUENCE,
        "training.steps": run.steps,
        "training.global_batch_size": run.batch,
        "training.dtype": "float64",
        "training.mixed_precision_param": "float64",
        "training.mixed_precision_reduce": "float64",
        "lr_scheduler.warmup_steps": 2,
        "optimizer.lr": 1e-2,
        "debug.seed": 42,
        "activation_checkpoint.mode": "none",
        "checkpoint.enable": True,
        "checkpoint.interval": 10**6,
        "checkpoint.last_save_model_only": True,
        "checkpoint.initial_load_path": str(Path(run.seed, "checkpoint", "step-0")),
        "job.dump_folder": run.out or run.seed,
    }
    for name, value in (values | run.config).items():
        *path, last = name.split(".")
        part: Any = config
        for each in path:
            part = getattr(part, each)
        assert hasattr(part, last), name
        setattr(part, last, value)
    return config


def replaced(arguments: Any, fields: dict[str, Any]) -> Any:
    """A dataclass with other values of fields, also of those of its dataclasses."""
    values = {
        k: replaced(getattr(arguments, k), v) if isinstance(v, dict) else v
        for k, v in fields.items()
    }
    return dataclasses.replace(arguments, **values)


def run_trainer(trainer: Any, run: Run) -> None:
    """Train, or save the checkpoint that all runs start from; end the process group."""
    if run.out is None:
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


def main(path: str) -> None:
    run = Run(**json.loads(Path(path).read_text(encoding="utf-8")))
    prepare(run)
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer

    spec = train_spec.get_train_spec(run.model)
    config, metrics = configured(run), Metrics(run)
    sizes = replaced(spec.model_args["debugmodel"], run.sizes)

    def data(dp_world_size: int, dp_rank: int, tokenizer: object, job_config: Any) -> Tokens:
        return Tokens(
            run, sizes.vocab_size, dp_world_size, dp_rank, job_config.training.local_batch_size
        )

    exchanged = dataclasses.replace(
        spec,
        model_args={"tiny": sizes},
        build_dataloader_fn=data,
        build_tokenizer_fn=None,
        build_loss_fn=lambda *_, **__: loss_of(run),
        build_metrics_processor_fn=lambda *_: metrics,
    )
    train_spec.register_train_spec("exchanged", exchanged)
    run_trainer(Trainer(config), run)


if __name__ == "__main__":
    main(sys.argv[1])
