"""transformers' Trainer and accelerate with a parallel model.

Trainer and accelerate treat ranks as data-parallel processes: they would wrap the model in
DistributedDataParallel and give every rank different batches. Ranks of one tensor axis read the
same batches, so `single_process` lets each rank appear as the only process. `prepare_accelerator`
and `prepare_trainer` then replace the parts that need all ranks: the rows of each rank of data
axes, clipping of gradients, and checkpoints. All ranks write and read a checkpoint together:

checkpoint-STEP/
    model*.safetensors, config.json    the model, as `save_sharded` writes it
    adapter_model.safetensors, ...     for a model of peft, the adapters instead of the model
    optimizer/                         as torch.distributed.checkpoint writes it, for any number of
                                       ranks
    scheduler.pt, rng_state.pth, ...   as Trainer writes them, on rank 0
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor import clip_grad_norm_, get_optimizer_state_dict, set_optimizer_state_dict
from shoal_dtensor.errors import PlanError
from shoal_mesh import DeviceMesh
from shoal_transfer.internal import own_rank

from ..weights.saving import on_first, save_sharded
from .accelerate_sharding import shard_with_shoal
from .adapters import load_adapters, save_adapters
from .checkpoint_files import find_files, source_of
from .data_rows import DataRows
from .pipeline_stages import load_model

# Environment variables by which torchrun tells a process about the other ranks.
_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@contextmanager
def single_process() -> Iterator[None]:
    """Hide the other ranks that torchrun started from accelerate and `TrainingArguments`.

    Create the mesh before the block. In the block, create `Accelerator(...)`, or
    `TrainingArguments(...)` and `Trainer(...)`, before anything else initializes accelerate's
    state.

    Example:
        >>> with single_process():
        ...     pass  # trainer = Trainer(model, TrainingArguments("out"), train_dataset=data)
    """
    names = [name for name in _WORLD if name in os.environ]
    removed = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(removed)


def prepare_accelerator(accelerator: Any, data: DeviceMesh | None = None) -> Any:
    """Prepare an `Accelerator` for a parallel model; return it.

    `clip_grad_norm_` clips by the norm over all shards.

    An accelerator with FSDP2 (`FullyShardedDataParallelPlugin(fsdp_version=2)`, with or without a
    `ParallelismConfig` of data axes) is not made inside `single_process()`: it distributes data
    itself, and its `prepare` shards models by shoal's `fully_shard`. It saves and loads states as
    before, and reads those of torch.

    Args:
        accelerator: an `Accelerator` made inside `single_process()`, or one with FSDP2 that has
            prepared nothing; it is changed in place.
        data: the data axes over which the model is sharded or replicated. Loaders that are prepared
            afterwards read the rows of this rank, and `gather` and `gather_for_metrics` return the
            rows of all ranks. The batch size is that of one rank. Without `data` all ranks read
            the same rows.

    Raises:
        PlanError: if the accelerator is itself distributed without FSDP2, or has FSDP2 and other
            axes than data axes, or has prepared a model.

    Example:
        >>> with single_process():  # doctest: +SKIP
        ...     accelerator = prepare_accelerator(Accelerator())
        >>> accelerator = prepare_accelerator(Accelerator(fsdp_plugin=plugin))  # doctest: +SKIP
    """
    if accelerator.is_fsdp2 and data is None:
        shard_with_shoal(accelerator)
    elif accelerator.num_processes != 1:
        raise PlanError(
            f"prepare_accelerator: accelerate has {accelerator.num_processes} processes and would "
            "give each rank different batches; create it inside `with hf.single_process():`, and "
            "have each data-parallel row read its own data"
        )

    def clip(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        accelerator.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    accelerator.clip_grad_norm_ = clip
    if data is not None:
        DataRows(data).install_in_accelerator(accelerator)
    return accelerator


def prepare_trainer(trainer: Any, data: DeviceMesh | None = None) -> Any:
    """Prepare a `Trainer` of transformers for a parallel model; return it.

    Gradients are clipped by the norm over all shards. Checkpoints hold the shards of all ranks:
    models as `save_sharded` writes them, optimizers as torch.distributed.checkpoint does;
    `train(resume_from_checkpoint=...)` reads them, on any number of ranks. Losses, schedules,
    accumulation, checkpointing of activations and fused optimizers need no preparation.

    Args:
        trainer: a `Trainer` made, with its `TrainingArguments`, inside `single_process()`; it is
            changed in place.
        data: the data axes over which the model is sharded or replicated. Each of their ranks reads
            its own rows, and `per_device_train_batch_size` is the number of rows of one rank.
            Losses and counts of tokens are those of all rows. Without `data` all ranks read the
            same rows.

    Raises:
        PlanError: if the trainer's arguments are distributed.

    Example:
        >>> with single_process():  # doctest: +SKIP
        ...     trainer = Trainer(model, TrainingArguments("out"), train_dataset=data)
        >>> prepare_trainer(trainer).train()  # doctest: +SKIP
    """
    prepare_accelerator(trainer.accelerator, data)
    if data is not None:
        DataRows(data).install_in_trainer(trainer)
    if own_rank() != 0:
        # Rank 0 deletes old checkpoints, so the other ranks have no limit.
        trainer.args.save_total_limit = None
    trainer._save = partial(_save, trainer, trainer._save)
    trainer._save_checkpoint = partial(_save_checkpoint, trainer, trainer._save_checkpoint)
    trainer._load_from_checkpoint = partial(_load_model, trainer)
    trainer._load_optimizer_and_scheduler = partial(_load_optimizer, trainer)
    trainer._load_best_model = lambda: _load_model(trainer, trainer.state.best_model_checkpoint)
    return trainer


# --- checkpoints of a Trainer ---------------------------------------------------------------------


def _save(
    trainer: Any, inner: Callable[..., None], output_dir: str | None = None, state_dict: Any = None
) -> None:
    """Save the model on all ranks; save tokenizer and arguments on rank 0.

    Args:
        trainer: the trainer.
        inner: the trainer's own method.
        output_dir: directory of the files; by default that of the trainer's arguments.
        state_dict: passed to `inner`.
    """
    directory = output_dir or trainer.args.output_dir
    if _has_adapters(trainer.model):
        save_adapters(trainer.model, directory, trainer.model.active_adapter)
    else:
        save_sharded(trainer.model, directory)
    with _doing_nothing(trainer.model, "save_pretrained"):
        on_first("cannot write the Trainer's files", lambda: inner(directory, state_dict))


def _save_checkpoint(trainer: Any, inner: Callable[..., None], model: Any, trial: Any) -> None:
    """Save model and optimizer on all ranks; save the rest by the trainer's method on rank 0."""
    output = Path(trainer._get_output_dir(trial=trial))
    directory = output / f"checkpoint-{trainer.state.global_step}"
    trainer.save_model(str(directory), _internal_call=True)
    if not trainer.args.save_only_model:
        import torch.distributed.checkpoint as dcp

        state = get_optimizer_state_dict(
            trainer.model, _optimizer(trainer), options=_flat_options()
        )
        dcp.save(state, checkpoint_id=directory / "optimizer")

    def write_rest() -> Any:
        inner(model, trial)
        if not trainer.args.save_only_model:
            torch.save(trainer.lr_scheduler.state_dict(), directory / "scheduler.pt")
        return trainer.state.best_model_checkpoint

    with _doing_nothing(trainer, "save_model", "_save_optimizer_and_scheduler"):
        best = on_first("cannot write the Trainer's checkpoint", write_rest)
        trainer.state.best_model_checkpoint = best


def _load_model(trainer: Any, checkpoint: str, model: Any = None) -> None:
    model = trainer.model if model is None else model
    if _has_adapters(model):
        load_adapters(model, checkpoint, model.active_adapter)
    else:
        _, files = find_files(checkpoint)
        load_model(model, source_of(files))


def _has_adapters(model: Any) -> bool:
    """Tell whether a model is a model of peft; only its adapters are saved and loaded."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _load_optimizer(trainer: Any, checkpoint: str | None) -> None:
    """Load the optimizer; do nothing if the checkpoint has the model only, as Trainer does."""
    if checkpoint is None or not (Path(checkpoint) / "optimizer").is_dir():
        return
    import torch.distributed.checkpoint as dcp

    optimizer = _optimizer(trainer)
    options = _flat_options()
    state = get_optimizer_state_dict(trainer.model, optimizer, options=options)
    dcp.load(state, checkpoint_id=Path(checkpoint) / "optimizer")
    set_optimizer_state_dict(trainer.model, optimizer, state, options=options)
    scheduler = torch.load(Path(checkpoint) / "scheduler.pt", map_location="cpu", weights_only=True)
    trainer.lr_scheduler.load_state_dict(scheduler)


def _flat_options() -> Any:
    """Return the options for states of optimizers by names of parameters alone.

    Ranks of different stages have different parameters, and lists of them could not be merged.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)


def _optimizer(trainer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's optimizer."""
    inner: torch.optim.Optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return inner


@contextmanager
def _doing_nothing(owner: Any, *names: str) -> Iterator[None]:
    """Replace methods of an object by methods that do nothing, inside the block."""
    before = {name: vars(owner).get(name) for name in names}
    for name in names:
        setattr(owner, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(owner, name)
            else:
                setattr(owner, name, method)
