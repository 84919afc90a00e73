"""One rank of a training run of torchtitan 0.3, started by `torchrun`.

It is as `titan_rank` for torchtitan 0.2.

    torchrun --nproc-per-node 4 -m integration_tests.titan_rank_0_3 RUN.json

`RUN.json` has the fields of `titan_rank.Run`; names in its `config` are those of `Trainer.Config`.
The only entry of its `sizes` is `n_layers`. torchtitan's language models attend with flex
attention, whose kernels are for GPUs; here they attend with its `ScaledDotProductAttention`, which
is causal. Losses and rotary embeddings, which torchtitan computes in float32, stay in float64.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from integration_tests.titan_rank import (
    SEQUENCE,
    Metrics,
    Run,
    Tokens,
    prepare,
    run_trainer,
)

# fields of the configuration; a run's own fields stand over them
DEFAULTS = {
    "training.seq_len": SEQUENCE,
    "training.dtype": "float64",
    "training.mixed_precision_param": "float64",
    "training.mixed_precision_reduce": "float64",
    "training.disable_cuda_graphs": True,
    "lr_scheduler.warmup_steps": 2,
    "debug.seed": 42,
    "activation_checkpoint": "none",
    "checkpoint.enable": True,
    "checkpoint.interval": 10**6,
    "checkpoint.last_save_model_only": True,
}


def prepare_torch() -> None:
    """Keep float64 in calls of `float`, and give torch 2.13 a function of torch 2.14."""
    cast = torch.Tensor.float

    def keep_float64(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if tensor.dtype is torch.float64 else cast(tensor, *args, **kwargs)

    torch.Tensor.float = keep_float64  # type: ignore[assignment]  # for this process
    # the trainer shortens the time-outs of its groups with it, after the first step
    if not hasattr(torch.distributed, "set_timeout"):
        vars(torch.distributed)["set_timeout"] = lambda timeout, group=None: None


class PositionedTokens(Tokens):
    """Tokens with their positions, which the trainer shards together with them."""

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for inputs, labels in super().__iter__():
            positions = torch.arange(SEQUENCE).expand(labels.shape).contiguous()
            yield {**inputs, "positions": positions}, labels


def small_model(run: Run) -> Any:
    """Return torchtitan's description of its debug model, with fewer layers."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[: run.sizes["n_layers"]]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def exchanged_parts(run: Run, vocabulary: int) -> dict[str, Any]:
    """Return configurations of the trainer's parts that build those of the run."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.tokenizer import BaseTokenizer

    @dataclass(kw_only=True, slots=True)
    class TokenConfig(BaseDataLoader.Config):  # type: ignore[misc]  # torchtitan is not checked
        def build(self, **kwargs: Any) -> Tokens:
            ranks = kwargs["dp_world_size"]
            has_context = run.config.get("parallelism.context_parallel_degree", 1) > 1
            kind = PositionedTokens if has_context else Tokens
            return kind(run, vocabulary, ranks, kwargs["dp_rank"], kwargs["local_batch_size"])

    @dataclass(kw_only=True, slots=True)
    class NoTokenizerConfig(BaseTokenizer.Config):  # type: ignore[misc]  # is not checked
        def build(self, **kwargs: Any) -> None:
            return None

    @dataclass(kw_only=True, slots=True)
    class MetricsConfig(MetricsProcessor.Config):  # type: ignore[misc]  # torchtitan is not checked
        def build(self, **kwargs: Any) -> Metrics:
            return Metrics(run)

    return {
        "dataloader": TokenConfig(),
        "tokenizer": NoTokenizerConfig(),
        "metrics": MetricsConfig(),
    }


def configured(run: Run) -> Any:
    """Return a configuration of torchtitan's trainer with the values of a run."""
    import torchtitan.config
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.trainer import Trainer

    torchtitan.config.TORCH_DTYPE_MAP["float64"] = torch.float64
    spec = small_model(run)
    vocabulary = spec.model.vocab_size
    config = Trainer.Config(
        model_spec=spec,
        optimizer=default_adamw(lr=1e-2),
        loss=CrossEntropyLoss.Config(global_vocab_size=vocabulary),
        **exchanged_parts(run, vocabulary),
    )
    own = {
        "training.steps": run.steps,
        "training.global_batch_size": run.batch,
        "checkpoint.initial_load_path": str(Path(run.seed, "checkpoint", "step-0")),
        "dump_folder": run.out or run.seed,
    }
    checkpointing = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    values: dict[str, Any] = DEFAULTS | own | run.config
    for name, value in values.items():
        *path, last = name.split(".")
        part: Any = config
        for each in path:
            part = getattr(part, each)
        assert hasattr(part, last), name
        setattr(part, last, checkpointing[value] if last == "activation_checkpoint" else value)
    return config


def main(path: str) -> None:
    run = Run(**json.loads(Path(path).read_text(encoding="utf-8")))
    prepare(run)
    prepare_torch()
    from torchtitan.trainer import Trainer

    run_trainer(Trainer(configured(run)), run)


if __name__ == "__main__":
    main(sys.argv[1])
