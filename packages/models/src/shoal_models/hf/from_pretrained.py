"""`from_pretrained`: load a model of transformers onto a mesh; a rank reads its shards only.

The steps are: build the model on the meta device, choose and apply a plan, load the shards,
initialize what no file has. At the end, methods that do not support shards are replaced on the
model: saving, resizing embeddings, continuous batching.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Set as AbstractSet
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError, PlanError, UnsupportedModuleError
from shoal_dtensor.internal import check_device_mesh, save_whole_tensors
from shoal_mesh import DeviceMesh
from shoal_tp_styles import UnmatchedPlanWarning, parallelize_module, unparallelize_module
from shoal_tp_styles.internal import Adapter, Plan, apply_sharding, initialize_adapter, shardings_of
from shoal_transfer.internal import entries_of

from ..errors import CheckpointError
from ..weights.loading import Loaded, Stored, compare_entries, load_sharded, stored_in
from ..weights.saving import save_sharded
from .checked_plan import REMEDY, choose_plan
from .checkpoint_files import find_files, source_of, stored_for
from .data_axes import shard_over_data
from .distributed_config import data_axes_of, is_distributed_config, mesh_of, plan_of
from .expert_axes import (
    EXPERTS_REMEDY,
    expert_axes_of,
    expert_rules_of,
    parallelize_experts,
    plan_of_tensor_axis,
)
from .pipeline_stages import PipelineStages, stage_axis_of
from .unfilled_tensors import UnfilledTensors


def from_pretrained(  # noqa: PLR0913  # keyword-only arguments of transformers
    path: str | PathLike[str],
    device_mesh: Any,
    plan: Plan | None = None,
    *,
    model_class: Any = None,
    dtype: torch.dtype | str = "auto",
    strict: bool = True,
    output_loading_info: bool = False,
    **config_kwargs: Any,
) -> Any:
    """Load a model of transformers from files, parallel and in eval mode.

    The model is built on the meta device and made parallel there; then every rank reads its own
    shards, without communication. A rank's peak memory is its own part, plus the largest parameter
    if the architecture converts entries (experts that are stored one by one).

    Args:
        path: a local directory as `save_pretrained` and `save_sharded` write it, its index, or one
            file in it.
        device_mesh: a mesh with one axis, or with several axes if one is named "tp"; convert a mesh
            of torch first, by `shoal_dtensor.interop.mesh_from_torch`. It may also be a
            `DistributedConfig` of transformers; the configuration's `tp_plan` changes rules of the
            model's own plan. Then the model is also sharded over the data axes "dp_replicate" and
            "fsdp", by its own `fsdp_plan` and that of the configuration. With `ep_size` its experts
            are divided among ranks of "fsdp" and "tp", by the `ep_plan` of both.
        plan: styles by path; the model's own plan if left out. Every rank proves the plan on a
            small copy of the model with random weights. If the model's own plan is missing or does
            not fit, an automatic plan is proven and used instead.
        model_class: a class of transformers or an Auto class; the class of the configuration if
            left out.
        dtype: dtype of floating-point parameters; the configuration's dtype for "auto".
        strict: raise if the files and the model do not have the same entries. Otherwise missing
            entries are initialized by the model class, or else by the `reset_parameters` of their
            module or by their style. The values are the same on any number of ranks.
        output_loading_info: return a `Loaded` too, with missing and unexpected entries, and the
            number of bytes that this rank read.
        config_kwargs: changes of the configuration, such as `attn_implementation`.

    Returns:
        The model, or the model and a `Loaded`.

    Raises:
        CheckpointError: if the path has no model; the message names the expected and the existing
            files.
        LayoutError: if the mesh has several axes and none is named "tp", or if the product of the
            sizes of a `DistributedConfig` is not the number of ranks.
        PlanError: if no plan is found, if the plan does not fit (the message names a parameter or
            output that would be wrong), if entries differ under `strict`, if nothing initializes a
            missing entry, or if weights are quantized.

    Warns:
        PlanWarning: if the model's own plan does not fit its configuration, or a plan could not be
            proven, with the reason.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))  # doctest: +SKIP
        >>> model = from_pretrained("path/to/llama", mesh)  # doctest: +SKIP
        >>> model.generate(tokens, max_new_tokens=20)  # doctest: +SKIP
    """
    home, files = find_files(path)
    is_config = is_distributed_config(device_mesh)
    mesh = mesh_of(device_mesh) if is_config else device_mesh
    tensor_mesh = _tensor_axis_of(mesh)
    data_mesh = data_axes_of(mesh) if is_config else None
    stage_mesh = stage_axis_of(mesh) if is_config else None
    with ExitStack() as open_files:
        stored = stored_in(source_of(files), open_files)
        config = _read_config(home, config_kwargs)
        model_dtype = _choose_dtype(dtype, config, stored)
        model = _build_on_meta(_class_of(config, model_class), config, model_dtype)
        stored_by_name = stored_for(model, stored)
        comparison = compare_entries([*entries_of(model)], stored_by_name, strict=False)
        _drop_irrelevant_keys(model, comparison)
        if strict:
            _check_keys(model, comparison)
        stages = None
        if stage_mesh is not None:
            stages = PipelineStages(model, stage_mesh, comparison)
        if is_config:
            _parallelize_by_config(model, mesh, plan, device_mesh)
        else:
            _parallelize(model, tensor_mesh, plan, allows_unmatched=False)
        if stages is not None:
            stored_by_name = stages.cut(model, stored_by_name)
        loaded = load_sharded(model, stored_by_name, strict=False)
    # `load_sharded` has compared this rank's stage only; the report is about the whole model.
    loaded.missing = comparison.missing
    loaded.unexpected = comparison.unexpected
    # the ranks over which the model is sharded
    _initialize_unfilled(model, tensor_mesh if data_mesh is None else mesh.flatten())
    _replace_methods(model.eval(), home, tensor_mesh)
    if stages is not None:
        stages.join(model)
    if data_mesh is not None:
        model.resize_token_embeddings = _refuse_to_resize
    return (model, loaded) if output_loading_info else model


def _parallelize_by_config(model: Any, mesh: DeviceMesh, plan: Plan | None, config: Any) -> None:
    """Shard a model over the axes of the mesh of a `DistributedConfig`, in place.

    Args:
        model: the whole model, on the meta device.
        mesh: the mesh of the configuration.
        plan: the plan of the axis "tp"; if left out, the plan of the configuration.
        config: the `DistributedConfig`.
    """
    data_mesh = data_axes_of(mesh)
    tensor_mesh = mesh["tp"]
    if plan is None:
        plan = plan_of(config, model)
    remedy = REMEDY
    expert_rules = expert_rules_of(config, model)
    expert_axes = expert_axes_of(config, mesh, expert_rules)
    if expert_rules:
        plan_without_experts = plan if plan is not None else model.tp_plan or {}
        plan = plan_of_tensor_axis(plan_without_experts, expert_rules, expert_axes, model)
        remedy = EXPERTS_REMEDY
    has_other_axes = data_mesh is not None or stage_axis_of(mesh) is not None
    # On one rank a plan does nothing, so it is not proven if other axes shard the model. Without
    # other axes it is proven on one rank too, as for a plain mesh.
    if tensor_mesh.size() > 1 or not has_other_axes:
        _parallelize(model, tensor_mesh, plan, allows_unmatched=True, remedy=remedy)
    if expert_axes is not None:
        parallelize_experts(model, expert_axes)
    if data_mesh is not None:
        shard_over_data(model, config, data_mesh, expert_axes)


def _parallelize(
    model: Any,
    mesh: DeviceMesh,
    plan: Plan | None,
    *,
    allows_unmatched: bool,
    remedy: str = REMEDY,
) -> None:
    """Choose and prove a plan for a tensor axis, and apply it in place.

    Args:
        model: the model, on the meta device.
        mesh: the tensor axis.
        plan: the user's plan; None for the model's own.
        allows_unmatched: whether entries of `plan` may match no module.
        remedy: the end of the error for a plan that does not fit.
    """
    with warnings.catch_warnings():
        # The plan of an architecture has entries for all its variants, so some match no module.
        if plan is None or allows_unmatched:
            warnings.simplefilter("ignore", UnmatchedPlanWarning)
        chosen = choose_plan(model, mesh, plan, remedy=remedy)
        parallelize_module(model, mesh, chosen, src_data_rank=None)


def _tensor_axis_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axis "tp" of a mesh, or the only axis."""
    check_device_mesh("from_pretrained", mesh)
    if mesh.ndim == 1:
        return mesh
    if "tp" not in (mesh.mesh_dim_names or ()):
        raise LayoutError(
            f"from_pretrained: {mesh} has several axes, none of them named 'tp'; pass the axis to "
            "shard over, mesh['name']"
        )
    return mesh["tp"]


def _read_config(home: Path, changes: Mapping[str, Any]) -> Any:
    """Return the configuration of a directory, with changes; raise if its weights are quantized."""
    from transformers import AutoConfig

    if not (home / "config.json").exists():
        raise CheckpointError(
            f"{str(home)!r} has weights but no config.json; write it with "
            "config.save_pretrained(path)"
        )
    config = AutoConfig.from_pretrained(home, **changes)
    if getattr(config, "quantization_config", None) is not None:
        raise PlanError(
            f"{str(home)!r} has quantized weights, which cannot be read in shards; load the model "
            "with transformers once, dequantize() it and save it"
        )
    return config


def _class_of(config: Any, model_class: Any) -> Any:
    """Return `model_class`, or else the class that the configuration names."""
    import transformers

    if model_class is not None:
        return model_class
    names = config.architectures or ()
    declared = getattr(transformers, names[0], None) if names else None
    if declared is None:
        raise PlanError(
            f"config.json names the architectures {config.architectures}, which transformers does "
            "not have; pass model_class=, a class of transformers"
        )
    return declared


def _choose_dtype(
    dtype: torch.dtype | str, config: Any, stored: Mapping[str, Stored]
) -> torch.dtype:
    """Return the dtype of floating-point parameters.

    Args:
        dtype: a dtype, its name, or "auto" for the dtype of the configuration.
        config: the configuration, which may have no dtype.
        stored: the tensors of the files, whose dtype is used if the configuration has none.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    declared: torch.dtype | None = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if declared is None:
        return _stored_dtype(stored)
    assert isinstance(declared, torch.dtype), "a configuration has a dtype or none"
    return declared


def _stored_dtype(stored: Mapping[str, Stored]) -> torch.dtype:
    """Return the dtype of the first floating-point tensor of the files, by name."""
    for name in sorted(stored):
        if stored[name].shape:
            # A stored tensor shows its dtype on a part that is read only; this part is empty.
            no_rows = stored[name][(slice(0, 0),)]
            if no_rows.dtype.is_floating_point:
                return no_rows.dtype
    return torch.get_default_dtype()


def _build_on_meta(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build a model without storage, with the dtypes that transformers gives it."""
    with torch.device("meta"):
        # Auto classes have `from_config`, model classes have `_from_config`.
        build = getattr(model_class, "from_config", None) or model_class._from_config
        model = build(config, dtype=dtype)
    # names of modules that stay in float32, as one pattern
    names_in_float32 = "|".join(re.escape(name) for name in model._get_dtype_plan(dtype))
    if not names_in_float32:
        return model
    for path, param in model.named_parameters():
        # A name is one or several whole parts of the path.
        if re.search(rf"(^|\.)({names_in_float32})(\.|$)", path):
            param.data = param.data.float()
    return model


def _drop_irrelevant_keys(model: Any, comparison: Loaded) -> None:
    """Remove missing and unexpected keys that the model class declares as irrelevant."""
    info = SimpleNamespace(
        missing_keys=set(comparison.missing), unexpected_keys=set(comparison.unexpected)
    )
    model._adjust_missing_and_unexpected_keys(info)
    comparison.missing = sorted(info.missing_keys)
    comparison.unexpected = sorted(info.unexpected_keys)


def _check_keys(model: Any, comparison: Loaded) -> None:
    """Raise PlanError if the files and the model do not have the same keys."""
    if comparison.missing or comparison.unexpected:
        raise PlanError(
            f"from_pretrained: {type(model).__name__} has missing keys {comparison.missing} and "
            f"unexpected keys {comparison.unexpected} in the files; strict=False initializes the "
            "missing tensors and ignores the unexpected ones, model_class= loads another class"
        )


def _initialize_unfilled(model: Any, mesh: DeviceMesh) -> None:
    """Initialize the parameters and buffers that no file has.

    Three sources of values are tried in this order: the model's `initialize_weights`, its
    constructor (for buffers), and the rules of single modules.

    Args:
        model: the sharded model, with the values of the files.
        mesh: the ranks over which it is sharded.

    Raises:
        PlanError: on all ranks, if no source has values for a tensor.
    """
    unfilled = UnfilledTensors(model, mesh)
    unfilled.mark()
    _mark_filled_modules(model, unfilled.holes)
    model.initialize_weights()
    unfilled.share_ties()
    _compute_buffers(model, unfilled)
    for module, names in unfilled.modules_left():
        _initialize(module, names)
    left = unfilled.left()
    if left:
        raise PlanError(
            f"from_pretrained: the files do not have {left}, and neither _init_weights of "
            f"{type(model).__name__} nor reset_parameters of the modules initializes these "
            "tensors. Write one of the two methods, or add the tensors to the files"
        )


def _mark_filled_modules(model: nn.Module, holes: Iterable[str]) -> None:
    """Mark modules that transformers must not initialize, because no tensor below them is a hole.

    A module with a hole further below is not marked, because its rule may fill buffers of the
    modules below it, as FalconH1's does.

    Args:
        model: the model, whose modules are marked.
        holes: paths of tensors that no file has.
    """
    # Example: the hole "layers.0.bias" -> "", "layers" and "layers.0".
    paths_with_holes = {""}
    for hole in holes:
        parts = hole.split(".")
        for count in range(1, len(parts)):
            paths_with_holes.add(".".join(parts[:count]))
    module: Any
    for path, module in model.named_modules():
        module._is_hf_initialized = path not in paths_with_holes


def _compute_buffers(model: Any, unfilled: UnfilledTensors) -> None:
    """Take the values of unfilled buffers from a model that its constructor has just built.

    No bool value can mark a buffer as unfilled, so all bool buffers are computed.
    """
    buffers = {path: unfilled.holes[path].tensor for path in unfilled.buffers_left()}
    # The constructor computes whole tensors only.
    whole = {path: buffer for path, buffer in buffers.items() if not isinstance(buffer, DTensor)}
    if not whole:
        return
    computed = dict(_build_with_buffers_only(model).named_buffers())
    for path, buffer in whole.items():
        if path in computed and computed[path].shape == buffer.shape:
            buffer.copy_(computed[path])


def _build_with_buffers_only(model: Any) -> nn.Module:
    """Build a model of this configuration: buffers on CPU, parameters without storage."""

    def drop_storage(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(param.detach().to("meta"), param.requires_grad)

    # The hook's result replaces the parameter, but torch types it as returning None.
    replace: Any = drop_storage
    # The constructor draws random numbers, which must not change those of the program.
    with torch.random.fork_rng(devices=[]):
        handle = register_module_parameter_registration_hook(replace)
        try:
            built: nn.Module = type(model)._from_config(deepcopy(model.config), dtype=model.dtype)
        finally:
            handle.remove()
    return built


def _initialize(module: nn.Module, names: AbstractSet[str]) -> None:
    """Initialize some tensors of a module by its own rule; the other tensors keep their values."""
    initializer = _initializer_of(module)
    if initializer is None:
        return
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # The rule initializes all tensors, so the values of the others are put back.
    with torch.no_grad():
        kept = {name: tensor.clone() for name, tensor in tensors.items() if name not in names}
        initializer()
        for name, value in kept.items():
            tensors[name].copy_(value)


def _initializer_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the function that initializes a module by its own rule, if it has one."""
    for sharding, _ in shardings_of(module):
        if isinstance(sharding.options, Adapter):
            return partial(initialize_adapter, module)
    reset = getattr(module, "reset_parameters", None)
    return reset or getattr(module, "_reset_parameters", None)


# --- methods of a parallel model ------------------------------------------------------------------


def _replace_methods(model: Any, home: Path, mesh: DeviceMesh) -> None:
    """Replace methods that do not support shards, and set the files' generation config.

    Args:
        model: the model.
        home: the directory of its files.
        mesh: the tensor axis.
    """
    if model.can_generate() and (home / "generation_config.json").exists():
        generation_config = type(model.generation_config).from_pretrained(home)
        model.generation_config = generation_config
    model.save_pretrained = partial(_save_pretrained, model)
    model.resize_token_embeddings = partial(_resize_token_embeddings, model)
    if hasattr(model, "init_continuous_batching"):
        model.init_continuous_batching = partial(_init_continuous_batching, model, mesh)


def _save_pretrained(
    model: Any, save_directory: str | PathLike[str], *args: Any, **options: Any
) -> None:
    """Save the shards of all ranks, or a given state dict of whole tensors on the calling rank.

    Without this, every rank would write its own shards as if they were the whole model.
    """
    if not save_whole_tensors(model, save_directory, *args, **options):
        save_sharded(model, save_directory)


def _resize_token_embeddings(model: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Resize the embeddings and the head on every rank.

    The two modules become plain for the call, and are sharded again after it. The new rows have the
    values of rank 0.
    """
    resized_modules = (model.get_input_embeddings(), model.get_output_embeddings())
    resized_ids = {id(module) for module in resized_modules}
    modules = {path: child for path, child in model.named_modules() if id(child) in resized_ids}
    # pairs of a sharding and its mesh
    shardings_by_path = {path: [*shardings_of(module)] for path, module in modules.items()}
    # in one call, so that a weight that both modules share stays shared
    unparallelize_module(nn.ModuleList(modules.values()))
    embeddings: nn.Module = type(model).resize_token_embeddings(model, *args, **kwargs)
    for path, shardings in shardings_by_path.items():
        # transformers may have put another module at the path.
        for sharding, mesh in shardings:
            apply_sharding(model.get_submodule(path), sharding, mesh)
    return embeddings


def _refuse_to_resize(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise the error for resizing a model that is sharded over data axes."""
    raise UnsupportedModuleError(
        "resize_token_embeddings: this model is sharded over the data axes of a DistributedConfig; "
        "resize the model in one process and save it, or load it with tp_size alone, resize it, "
        "and then call shoal_data_parallel.fully_shard"
    )


def _init_continuous_batching(model: Any, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """Return the manager of `generate_batch`, with caches for this rank's heads.

    transformers computes the number of heads from the mesh and from the entries of its own plan.
    If this rank has another number of heads, the function raises UnsupportedModuleError.
    """
    if any(isinstance(param, DTensor) for param in model.parameters()):
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        is_divisible = heads % mesh.size() == 0
        for projection in ("k_proj", "v_proj"):
            if not is_divisible or not _is_sharded_by_own_plan(model, projection):
                raise UnsupportedModuleError(
                    f"generate_batch of a parallel model: {projection} must be sharded by the "
                    f"model's own plan, and its {heads} heads must be divisible by "
                    f"{mesh.size()} ranks, because transformers sizes its cache this way; use "
                    "generate()"
                )
        # transformers reads the size of the axis "tp", or of a mesh without names. The axis may
        # have another name here, so the mesh that transformers gets has no names.
        model._device_mesh = DeviceMesh(mesh.device_type, mesh.mesh)
    return type(model).init_continuous_batching(model, *args, **kwargs)


def _is_sharded_by_own_plan(model: Any, projection: str) -> bool:
    """Tell whether the model's own plan names a projection, and all its weights are sharded.

    Args:
        model: the model.
        projection: the last part of the projection's path, such as "k_proj".
    """
    entries = [f"{prefix}layers.*.self_attn.{projection}" for prefix in ("", "model.")]
    if not any(entry in model.tp_plan for entry in entries):
        return False
    weights = []
    for path, module in model.named_modules():
        if path.endswith(f".{projection}"):
            weights.append(module.weight)
    return bool(weights) and all(isinstance(weight, DTensor) for weight in weights)
