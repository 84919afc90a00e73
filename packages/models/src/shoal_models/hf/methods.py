"""Methods of a model of transformers that know nothing of shards: what stands in for them on a parallel one."""

from __future__ import annotations

from functools import partial
from os import PathLike
from typing import Any

from torch import nn

from shoal_dtensor import DTensor
from shoal_dtensor.errors import UnsupportedModuleError
from shoal_mesh import DeviceMesh
from shoal_tp_styles.internal import apply_sharding, shardings_of

from ..weights.saving import save_sharded


def stand_in(model: Any, mesh: DeviceMesh) -> None:
    """Have a parallel model save shards, size continuous batching by its own heads, and resize sharded embeddings.

    Args:
        model: of transformers; it gets attributes that hide the methods of its class.
        mesh: the axis that shards it.
    """
    model.save_pretrained = partial(_save_pretrained, model)
    model.resize_token_embeddings = partial(_resize_token_embeddings, model)
    if hasattr(model, "init_continuous_batching"):
        model.init_continuous_batching = partial(_init_continuous_batching, model, mesh)


def _save_pretrained(model: Any, save_directory: str | PathLike[str], *_: Any, **__: Any) -> None:
    """The model's own would have every rank write its shards as the whole."""
    save_sharded(model, save_directory)


def _resize_token_embeddings(model: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """On every rank of the embeddings and the head alone, which are plain meanwhile; new rows are those of rank 0."""
    from shoal_tp_styles import unparallelize_module  # here, so that no chain of imports is longer than twelve

    found = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = {name: module for name, module in model.named_modules() if any(module is each for each in found)}
    records = {name: [*shardings_of(module)] for name, module in modules.items()}
    unparallelize_module(nn.ModuleList(modules.values()))  # in one call, so that a shared weight stays one
    resized: nn.Module = type(model).resize_token_embeddings(model, *args, **kwargs)
    for name, each in records.items():
        for sharding, mesh in each:
            apply_sharding(model.get_submodule(name), sharding, mesh)
    return resized


def _init_continuous_batching(model: Any, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """The manager of `generate_batch`, whose caches have this rank's heads.

    transformers takes their number from the mesh and from the entries of its own plan.

    Raises:
        UnsupportedModuleError: if that is not the number that this rank has.
    """
    if any(isinstance(param, DTensor) for param in model.parameters()):
        heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
        for kind in ("k_proj", "v_proj"):
            planned = any(f"{start}layers.*.self_attn.{kind}" in model.tp_plan for start in ("", "model."))
            weights = [module.weight for name, module in model.named_modules() if name.endswith(f".{kind}")]
            sharded = weights and all(isinstance(each, DTensor) for each in weights)
            if not (planned and sharded and heads % mesh.size() == 0):
                raise UnsupportedModuleError(
                    f"generate_batch of a parallel model: expected {kind} sharded by the model's own plan, and its "
                    f"{heads} heads divided by {mesh.size()} ranks without a rest, because transformers counts the "
                    "heads of its cache so; use generate()"
                )
        # Looked for by the name "tp", or without names.
        model._device_mesh = DeviceMesh(mesh.device_type, mesh.mesh)
    return type(model).init_continuous_batching(model, *args, **kwargs)
