"""transformers' Trainer and accelerate with a parallel model: what they do per process is done once for the mesh.

Both take ranks for data-parallel processes: they would wrap the model in DistributedDataParallel and give every rank
other batches. Ranks of one tensor axis read the same batches, so every rank is one process to them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shoal_dtensor import clip_grad_norm_
from shoal_dtensor.errors import PlanError

from .trainer_checkpoints import checkpoint_shards

_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@contextmanager
def single_process() -> Iterator[None]:
    """Inside the block, accelerate and `TrainingArguments` do not see the other ranks that torchrun started.

    Make `Accelerator(...)`, or `TrainingArguments(...)` and `Trainer(...)`, in it, before anything else asks accelerate
    for its state; the mesh exists already.
    """
    removed = {name: os.environ.pop(name) for name in _WORLD if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(removed)


def prepare_accelerator(accelerator: Any) -> Any:
    """An `Accelerator` for a model on a tensor axis: `clip_grad_norm_` clips by the norm over all shards.

    Args:
        accelerator: made inside `single_process()`; changed in place.

    Raises:
        PlanError: if it is distributed itself.
    """
    if accelerator.num_processes != 1:
        raise PlanError(
            f"prepare_accelerator: accelerate has {accelerator.num_processes} processes and would give each rank other "
            "batches; make it inside `with hf.single_process():`, and have each data-parallel row read its own data"
        )

    def clip(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        accelerator.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    accelerator.clip_grad_norm_ = clip
    return accelerator


def prepare_trainer(trainer: Any) -> Any:
    """A `Trainer` of transformers for a parallel model.

    Gradients are clipped by the norm over all shards.  Checkpoints hold the shards of all ranks: models as
    `save_sharded` writes them, optimizers as torch.distributed.checkpoint does; `train(resume_from_checkpoint=...)`
    reads them, on any number of ranks.  Losses, schedules, accumulation, checkpointing of activations and fused
    optimizers need nothing.

    Args:
        trainer: made, with its `TrainingArguments`, inside `single_process()`; changed in place.

    Raises:
        PlanError: if its arguments are distributed.
    """
    prepare_accelerator(trainer.accelerator)
    checkpoint_shards(trainer)
    return trainer
