"""Adapters of peft on a parallel model: LoRA, IA3 and prefix tuning, saved in peft's format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor import DTensor, full_tensor, implicit_replication
from shoal_dtensor.errors import UnsupportedModuleError
from shoal_dtensor.internal import local_of, unwatch_draws, watch_draws
from shoal_mesh import DeviceMesh
from shoal_tp_styles import ModuleSharding
from shoal_tp_styles.internal import ColumnLinear, RowLinear, apply_sharding, shardings_of
from shoal_transfer.internal import own_rank

from ..errors import CheckpointError
from ..weights.loading import boxes_of, stored_in
from .sliced_adapters import can_be_scaled, is_scaled, slice_prefix, slice_scales

Model = TypeVar("Model", bound=nn.Module)


def parallelize_adapters(model: Model) -> Model:
    """Shard a peft model's adapters as the layers that they are added to; return the model.

    The layers are parallel already. IA3 and prefix tuning keep their parameters whole on every
    rank, and a forward uses the slice of the rank's features or heads. Prompt tuning, P-tuning and
    trained norms need no change.

    LoRA is sharded. An adapter adds B(A(x)) to the output of its layer; A and B are
    Linears. Their weights are replicated (R) or sharded (S):

        layer     A      B
        columns   R      S(0)   B has the style of the layer; its input sums A's gradient over ranks
        rows      S(1)   R      A has the style of the layer

    Call this function after `get_peft_model` or `PeftModel.from_pretrained` on a parallel model. If
    peft comes first, add `.base_layer` to the paths of the plan, and call this function after
    `parallelize_module`.

    Args:
        model: a model of peft, changed in place. Its adapters have the same values on all ranks.
            Adapters that are already parallel stay unchanged.

    Raises:
        UnsupportedModuleError: if a parallel layer has an adapter of another kind than LoRA or IA3
            for Linear, or the sharding of the heads of prefix tuning cannot be seen, before any
            adapter is changed.

    Example:
        >>> from peft import LoraConfig, get_peft_model  # doctest: +SKIP
        >>> config = LoraConfig(target_modules=["q_proj", "o_proj"])  # doctest: +SKIP
        >>> model = get_peft_model(model, config)  # doctest: +SKIP
        >>> model = parallelize_adapters(model)  # doctest: +SKIP
    """
    layers = [*_adapted_layers(model)]
    for layer, record, _ in layers:
        is_possible = can_be_scaled if is_scaled(layer) else _can_be_sharded
        if not is_possible(layer, record):
            raise UnsupportedModuleError(
                f"parallelize_adapters: {type(layer).__module__}.{type(layer).__name__} around a "
                f"layer with the style {record.style} cannot be sharded; supported are LoRA "
                "(without DoRA) and IA3 of Linear layers under ColwiseParallel and "
                "RowwiseParallel, the latter where tokens are not sharded. "
                "Leave the layer out of target_modules, or out of the plan"
            )
    slice_prefix(model)
    for layer, record, mesh in layers:
        if is_scaled(layer):
            slice_scales(layer, record, mesh)
            continue
        factors = layer.lora_B if record.lowering is ColumnLinear else layer.lora_A
        for factor in factors.values():
            if not isinstance(factor.weight, DTensor):
                apply_sharding(factor, record, mesh)
    # Watch the model again: the Dropouts of the adapters draw random numbers too.
    unwatch_draws(model)
    watch_draws(model)
    return model


class _AdaptedLayer(NamedTuple):
    """A layer that peft has put around a parallel layer.

    Attributes:
        layer: the layer of peft.
        record: what a style declares for the layer inside.
        mesh: the mesh of the style.
    """

    layer: Any
    record: ModuleSharding
    mesh: DeviceMesh


def _adapted_layers(model: nn.Module) -> Iterator[_AdaptedLayer]:
    """Yield the layers of peft around parallel layers, once per style."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            for record, mesh in shardings_of(base):
                yield _AdaptedLayer(module, record, mesh)


# Attributes that are not empty for other adapters: variants such as DoRA, adapters of embeddings.
_VARIANTS = ("lora_variant", "lora_magnitude_vector", "lora_embedding_A")


def _can_be_sharded(layer: Any, record: ModuleSharding) -> bool:
    """Tell whether the adapters of a layer are LoRA for a Linear by columns or by rows."""
    is_linear = record.lowering in (ColumnLinear, RowLinear) and record.options is None
    factors = [getattr(layer, name, None) for name in ("lora_A", "lora_B")]
    is_lora = all(isinstance(factor, nn.ModuleDict) for factor in factors)
    has_variants = any(len(getattr(layer, name, None) or ()) for name in _VARIANTS)
    return is_linear and is_lora and not has_variants


def merging_adapters() -> AbstractContextManager[None]:
    """Let peft merge adapters into parallel layers inside the block.

    Call `merge_adapter`, `unmerge_adapter` or `merge_and_unload` in the block. One of the two
    factors of an adapter is a plain tensor, equal on all ranks; the block lets it count as
    replicated beside the other factor, which is a DTensor.

    Example:
        >>> with merging_adapters():
        ...     pass  # model = model.merge_and_unload()
    """
    return implicit_replication()


def save_adapters(
    model: Any, directory: str | PathLike[str], adapter_name: str = "default"
) -> None:
    """Write an adapter in peft's format.

    `PeftModel.from_pretrained` loads the files, for a plain model or a parallel one.

    All ranks call this function. The tensors of the adapter are gathered one by one, and rank 0
    writes them; the tensors of the layers are not gathered.

    Args:
        model: a model of peft.
        directory: where `adapter_model.safetensors` and `adapter_config.json` are written.
        adapter_name: name of an adapter of the model.

    Example:
        >>> save_adapters(model, "adapter")  # doctest: +SKIP
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=adapter_name)
    gathered = {name: full_tensor(tensor) for name, tensor in state.items()}
    if own_rank() == 0:
        from safetensors.torch import save_file

        Path(directory).mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in gathered.items()}
        save_file(tensors, Path(directory) / "adapter_model.safetensors", metadata={"format": "pt"})
        model.peft_config[adapter_name].save_pretrained(directory)
    if dist.is_initialized():
        dist.barrier()


def load_adapters(
    model: Any, directory: str | PathLike[str], adapter_name: str = "default"
) -> None:
    """Fill a model's adapters from a file that `save_adapters` or peft's `save_pretrained` wrote.

    Every rank reads its own shards; nothing is sent.

    Args:
        model: a model of peft that has an adapter of that name; it is changed in place.
        directory: the directory that has `adapter_model.safetensors`.
        adapter_name: name of an adapter of the model.

    Raises:
        CheckpointError: if the file and the model have different tensors, or the file has the
            results of a projection that the model computes (prefix tuning, P-tuning).

    Example:
        >>> load_adapters(parallelize_adapters(model), "adapter")  # doctest: +SKIP
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=adapter_name)
    file = Path(directory) / "adapter_model.safetensors"
    with ExitStack() as stack, torch.no_grad():
        stored = stored_in(file, stack)
        differing = state.keys() ^ stored.keys()
        for name in state.keys() & stored.keys():
            if state[name].shape != stored[name].shape:
                differing.add(name)
        if differing:
            raise CheckpointError(
                f"load_adapters: {file} and the model's adapter {adapter_name!r} differ in "
                f"{', '.join(sorted(differing))}; make the model with the adapter_config.json "
                "beside the file"
            )
        if model.peft_config[adapter_name].is_prompt_learning:
            _load_prompt(model, {name: stored[name][slice(None),] for name in state}, adapter_name)
            return
        for name, tensor in state.items():
            for slices, place in boxes_of(tensor, 0):
                local_of(tensor)[place].copy_(stored[name][slices])


def _load_prompt(model: Any, state: dict[str, Tensor], adapter_name: str) -> None:
    """Fill the prompt of a model from a file; its tensors are computed, not the parameters.

    Every rank has the whole prompt.
    """
    from peft import set_peft_model_state_dict

    try:
        set_peft_model_state_dict(model, state, adapter_name=adapter_name)
    except RuntimeError as error:
        raise CheckpointError(
            "load_adapters: the file has the prompt that a projection computed, and the model has "
            "the projection, whose parameters peft does not write; load the file with "
            "PeftModel.from_pretrained, which makes a model without a projection, or save and load "
            "the model's state_dict()"
        ) from error
