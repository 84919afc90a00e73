"""LoRA adapters of peft on a parallel model, sharded as their layers, saved in peft's format."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shoal_dtensor import DTensor, full_tensor, implicit_replication
from shoal_dtensor.errors import UnsupportedModuleError
from shoal_dtensor.internal import local_of, unwatch_draws, watch_draws
from shoal_tp_styles.internal import ColumnLinear, RowLinear, apply_sharding, shardings_of
from shoal_transfer.internal import own_rank

from ..errors import CheckpointError
from ..weights.loading import boxes_of, stored_in

Model = TypeVar("Model", bound=nn.Module)


def parallelize_adapters(model: Model) -> Model:
    """Shard a peft model's LoRA adapters as the layers that they are added to; return the model.

    The base of the model is parallel.

        columns   A: R, B: S(0)    B has the style of the layer; the gradient of A is reduced where B reads it
        rows      A: S(1), B: R    A has the style of the layer

    Call this function after `get_peft_model` or `PeftModel.from_pretrained` on a parallel model. If
    peft comes first, add `.base_layer` to the paths of the plan, and call this function after
    `parallelize_module`.

    Args:
        model: changed in place; adapters have the same values on all ranks. Adapters that are
            already parallel stay unchanged.

    Raises:
        UnsupportedModuleError: if a parallel layer has an adapter of another kind than LoRA for
            Linear, before any adapter is changed.

    Example:
        >>> from peft import LoraConfig, get_peft_model  # doctest: +SKIP
        >>> model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"]))  # doctest: +SKIP
        >>> model = parallelize_adapters(model)  # doctest: +SKIP
    """
    # by peft
    around: list[Any] = [
        m for m in model.modules() if isinstance(getattr(m, "base_layer", None), nn.Module)
    ]
    found = [(layer, *record) for layer in around for record in shardings_of(layer.base_layer)]
    # DoRA and its kin; embeddings
    variants = ("lora_variant", "lora_magnitude_vector", "lora_embedding_A")
    for layer, record, _ in found:
        plain = record.lowering in (ColumnLinear, RowLinear) and record.options is None
        is_lora = all(
            isinstance(getattr(layer, name, None), nn.ModuleDict) for name in ("lora_A", "lora_B")
        )
        if not (plain and is_lora) or any(
            len(getattr(layer, name, None) or ()) for name in variants
        ):
            raise UnsupportedModuleError(
                f"parallelize_adapters: {type(layer).__module__}.{type(layer).__name__} around a "
                f"layer with the style {record.style} is not sharded; LoRA (without DoRA) of "
                "Linear layers under ColwiseParallel and RowwiseParallel is. Leave the layer out "
                "of target_modules, or out of the plan"
            )
    for layer, record, mesh in found:
        for adapter in (layer.lora_B if record.lowering is ColumnLinear else layer.lora_A).values():
            if not isinstance(adapter.weight, DTensor):
                apply_sharding(adapter, record, mesh)
    unwatch_draws(model)
    watch_draws(model)  # of the adapters' Dropouts too
    return model


def merging_adapters() -> AbstractContextManager[None]:
    """Let peft merge adapters into parallel layers inside the block.

    The methods are `merge_adapter`, `unmerge_adapter` and `merge_and_unload`.

    One factor of an adapter is replicated and plain, which counts as replicated here.

    Example:
        >>> with merging_adapters():
        ...     pass  # model = model.merge_and_unload()
    """
    return implicit_replication()


def save_adapters(
    model: Any, directory: str | PathLike[str], adapter_name: str = "default"
) -> None:
    """Write an adapter as peft does.

    `PeftModel.from_pretrained` loads it, around a plain model or a parallel one.

    All ranks call it; the adapter's tensors, not the model's, are gathered one by one, and rank 0
    writes them.

    Args:
        model: of peft.
        directory: where `adapter_model.safetensors` and `adapter_config.json` are written.
        adapter_name: name of an adapter of the model.

    Example:
        >>> save_adapters(model, "adapter")  # doctest: +SKIP
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=adapter_name)
    gathered = {name: full_tensor(each) for name, each in state.items()}
    if own_rank() == 0:
        from safetensors.torch import save_file

        Path(directory).mkdir(parents=True, exist_ok=True)
        tensors = {name: each.detach().cpu().contiguous() for name, each in gathered.items()}
        save_file(tensors, Path(directory) / "adapter_model.safetensors", metadata={"format": "pt"})
        model.peft_config[adapter_name].save_pretrained(directory)
    if dist.is_initialized():
        dist.barrier()


def load_adapters(
    model: Any, directory: str | PathLike[str], adapter_name: str = "default"
) -> None:
    """Fill a model's adapters from a file of `save_adapters`, or of peft's `save_pretrained`.

    Every rank reads its own shards; nothing is sent.

    Args:
        model: of peft, with adapters of that name; changed in place.
        directory: of `adapter_model.safetensors`.
        adapter_name: name of an adapter of the model.

    Raises:
        CheckpointError: if the file has other tensors than the model.

    Example:
        >>> load_adapters(parallelize_adapters(model), "adapter")  # doctest: +SKIP
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=adapter_name)
    file = Path(directory) / "adapter_model.safetensors"
    with ExitStack() as stack, torch.no_grad():
        stored = stored_in(file, stack)
        apart = state.keys() ^ stored.keys()
        apart |= {name for name in state.keys() - apart if state[name].shape != stored[name].shape}
        if apart:
            raise CheckpointError(
                f"load_adapters: {file} and the model's adapter {adapter_name!r} differ in "
                f"{', '.join(sorted(apart))}; make the model with the adapter_config.json beside "
                "the file"
            )
        for name, tensor in state.items():
            for slices, place in boxes_of(tensor, 0):
                local_of(tensor)[place].copy_(stored[name][slices])
