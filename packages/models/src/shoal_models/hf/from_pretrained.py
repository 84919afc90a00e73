"""`from_pretrained`: a model of transformers from files onto a mesh; a rank reads its shards only.

Methods that do not support shards are replaced on the model: saving, resizing embeddings,
continuous batching.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from math import isnan
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError, PlanError, UnsupportedModuleError
from shoal_dtensor.internal import check_device_mesh, local_of, save_whole_tensors
from shoal_mesh import DeviceMesh, all_reduce
from shoal_tp_styles import UnmatchedPlanWarning, parallelize_module, unparallelize_module
from shoal_tp_styles.internal import Adapter, Plan, apply_sharding, initialize_adapter, shardings_of

from ..errors import CheckpointError
from ..weights.loading import Loaded, Stored, load_sharded, stored_in
from ..weights.saving import save_sharded
from .checked_plan import choose_plan
from .checkpoint_files import find_files, source_of, stored_for


def from_pretrained(  # noqa: PLR0913  # by name; they are those of transformers
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
            of torch first, by `shoal_dtensor.interop.mesh_from_torch`.
        plan: styles by path; the model's own plan if left out. Every rank proves it on a small copy
            of the model with random weights. An automatic plan, proven likewise, replaces a model's
            own plan that does not fit or is missing.
        model_class: a class of transformers, also an Auto class; the class of the configuration if
            left out.
        dtype: dtype of floating-point parameters; the configuration's dtype for "auto".
        strict: raise if the files and the model do not have the same entries; otherwise missing
            entries are initialized as the model class does, else by their module's
            `reset_parameters` or their style, with the same values on any number of ranks.
        output_loading_info: return a `Loaded` too, with missing and unexpected entries, and the
            number of bytes that this rank read.
        config_kwargs: changes of the configuration, `attn_implementation` among them.

    Returns:
        The model, or the model and a `Loaded`.

    Raises:
        CheckpointError: if the path has no model; the message names the expected and the existing
            files.
        LayoutError: if the mesh has several axes and none is named "tp".
        PlanError: if no plan is found, the plan does not fit (with the parameter or output that
            would be wrong), entries differ under `strict`, nothing initializes a missing one, or
            weights are quantized.

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
    mesh = _tensor_axis(device_mesh)
    with ExitStack() as stack:
        stored = stored_in(source_of(files), stack)
        config = _config(home, config_kwargs)
        wanted = _dtype(dtype, config, stored)
        model = _on_meta(_class_of(config, model_class), config, wanted)
        named = stored_for(model, stored)
        _parallelize(model, mesh, plan)
        loaded = load_sharded(model, named, strict=False)
    _check(model, loaded, strict=strict)
    _initialize_rest(model, mesh)
    _finish(model.eval(), home, mesh)
    return (model, loaded) if output_loading_info else model


def _parallelize(model: Any, mesh: DeviceMesh, plan: Plan | None) -> None:
    with warnings.catch_warnings():
        # a plan of an architecture has entries for all its variants
        if plan is None:
            warnings.simplefilter("ignore", UnmatchedPlanWarning)
        parallelize_module(model, mesh, choose_plan(model, mesh, plan), src_data_rank=None)


def _tensor_axis(mesh: DeviceMesh) -> DeviceMesh:
    check_device_mesh("from_pretrained", mesh)
    if mesh.ndim == 1:
        return mesh
    if "tp" not in (mesh.mesh_dim_names or ()):
        raise LayoutError(
            f"from_pretrained: {mesh} has several axes and none is named 'tp'; pass the axis, "
            "mesh['name']"
        )
    return mesh["tp"]


def _config(home: Path, changes: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    if not (home / "config.json").exists():
        raise CheckpointError(
            f"{str(home)!r} has weights, but no config.json: config.save_pretrained(path) writes it"
        )
    config = AutoConfig.from_pretrained(home, **changes)
    if getattr(config, "quantization_config", None) is not None:
        raise PlanError(
            f"{str(home)!r} has quantized weights, of which shards are not read; load and "
            "dequantize() the model with transformers once, and save it"
        )
    return config


def _class_of(config: Any, given: Any) -> Any:
    import transformers

    if given is not None:
        return given
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    if not named or named[0] is None:
        raise PlanError(
            f"config.json names the architectures {config.architectures}, of which transformers "
            "has none; pass model_class=, a class of transformers"
        )
    return named[0]


def _dtype(dtype: torch.dtype | str, config: Any, stored: Mapping[str, Stored]) -> torch.dtype:
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype)
    found = config.dtype if dtype == "auto" else dtype
    # an old configuration: as the files have it
    if found is None:
        first = (stored[name][slice(0, 0),].dtype for name in sorted(stored) if stored[name].shape)
        found = next((each for each in first if each.is_floating_point), torch.get_default_dtype())
    assert isinstance(found, torch.dtype), "a configuration has a dtype or none"
    return found


def _on_meta(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build a model without storage, with the dtypes that transformers gives it."""
    with torch.device("meta"):
        make = getattr(model_class, "from_config", None) or model_class._from_config
        model = make(config, dtype=dtype)
    # modules that stay in float32
    in_float32 = "|".join(re.escape(name) for name in model._get_dtype_plan(dtype))
    for name, param in model.named_parameters() if in_float32 else ():
        if re.search(rf"(^|\.)({in_float32})(\.|$)", name):
            param.data = param.data.float()
    return model


def _check(model: Any, loaded: Loaded, *, strict: bool) -> None:
    """Remove irrelevant entries from the report, as the model class declares; raise if strict."""
    info = SimpleNamespace(missing_keys=set(loaded.missing), unexpected_keys=set(loaded.unexpected))
    model._adjust_missing_and_unexpected_keys(info)
    loaded.missing = sorted(info.missing_keys)
    loaded.unexpected = sorted(info.unexpected_keys)
    if strict and (loaded.missing or loaded.unexpected):
        raise PlanError(
            f"from_pretrained: {type(model).__name__} misses {loaded.missing} in the files, which "
            f"have {loaded.unexpected} beside it; strict=False initializes the ones and leaves out "
            "the others, model_class= loads another class"
        )


class _Hole(NamedTuple):
    """A tensor that no file has: a parameter that is missing, or a buffer.

    Attributes:
        module: its owner.
        table: the owner's parameters or buffers.
        name: its name there.
    """

    module: nn.Module
    table: dict[str, Any]
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """The current tensor of the owner."""
        tensor: torch.Tensor = self.table[self.name]
        return tensor


def _initialize_rest(model: Any, mesh: DeviceMesh) -> None:
    """Initialize buffers, which no file has, and missing parameters.

    The values follow the rules of the model and of its modules.

    If a tensor has no rule, all ranks raise PlanError.
    """
    holes = _find_holes(model)
    shared: dict[int, list[_Hole]] = {}
    for hole in holes.values():
        shared.setdefault(id(hole.tensor), []).append(hole)
    for hole in holes.values():
        hole.table[hole.name] = _unset_values(hole.tensor, mesh.device_type)
    _mark_filled_modules(model, holes)
    model.initialize_weights()
    # Each name of a shared tensor draws values; those of the first name count.
    for first, *others in shared.values():
        for other in others:
            other.table[other.name] = first.tensor
    _compute_buffers(model, holes, mesh)
    for module in dict.fromkeys(holes[path].module for path in _untouched(holes, mesh)):
        _initialize(module, {hole.name for hole in holes.values() if hole.module is module})
    left = _untouched(holes, mesh)
    if left:
        raise PlanError(
            f"from_pretrained: nothing initializes {left}, which the files do not have: neither "
            f"_init_weights of {type(model).__name__} nor reset_parameters of their modules. Write "
            "one of them, or files that have them"
        )


def _find_holes(model: nn.Module) -> dict[str, _Hole]:
    """Return tensors on the meta device, by path; mark the other tensors as filled.

    transformers leaves marked tensors alone.
    """
    holes: dict[str, _Hole] = {}
    for path, module in model.named_modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if local_of(tensor).is_meta:
                    full_name = f"{path}.{name}" if path else name
                    holes[full_name] = _Hole(module, table, name)
                else:
                    tensor._is_hf_initialized = True
    return holes


def _unset_values(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    """Return a tensor of the same kind on the device, with values that no rule gives."""
    with torch.no_grad():
        local = torch.full_like(local_of(tensor), _unset(tensor.dtype), device=device_type)
        value: Any = DTensor(local, tensor.spec) if isinstance(tensor, DTensor) else local
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _mark_filled_modules(model: nn.Module, holes: Iterable[str]) -> None:
    """Mark modules without a hole below them: transformers leaves them alone.

    A module may fill buffers of the modules below it, as FalconH1's module does.
    """
    with_holes = {""}
    for path in holes:
        parts = path.split(".")
        with_holes.update(".".join(parts[:count]) for count in range(1, len(parts)))
    module: Any
    for path, module in model.named_modules():
        module._is_hf_initialized = path not in with_holes


def _compute_buffers(model: Any, holes: Mapping[str, _Hole], mesh: DeviceMesh) -> None:
    """Compute buffers that no rule has filled, as the constructor of the model does.

    No bool value can mark a buffer as unfilled, so all bool buffers are computed.
    """
    buffers = {path for path, hole in holes.items() if hole.table is hole.module._buffers}
    missing = buffers.intersection(_untouched(holes, mesh))
    missing |= {path for path in buffers if holes[path].tensor.dtype is torch.bool}
    plain = [path for path in sorted(missing) if not isinstance(holes[path].tensor, DTensor)]
    if not plain:
        return
    computed = dict(_with_buffers_alone(model).named_buffers())
    for path in plain:
        tensor = holes[path].tensor
        if path in computed and computed[path].shape == tensor.shape:
            tensor.copy_(computed[path])


def _with_buffers_alone(model: Any) -> nn.Module:
    """Build a model of the same configuration whose parameters have no storage.

    The buffers are on CPU.
    """

    def drop_storage(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(param.detach().to("meta"), param.requires_grad)

    # torch's types have the hook return nothing.
    replace: Any = drop_storage
    with torch.random.fork_rng(devices=[]):
        hook = register_module_parameter_registration_hook(replace)
        try:
            made: nn.Module = type(model)._from_config(deepcopy(model.config), dtype=model.dtype)
        finally:
            hook.remove()
    return made


def _untouched(holes: Mapping[str, _Hole], mesh: DeviceMesh) -> list[str]:
    """Return the tensors that still lack values on some rank."""
    tensors = [hole.tensor for hole in holes.values()]
    values = [(local_of(tensor), _unset(tensor.dtype)) for tensor in tensors]
    empty = [
        bool((local.isnan() if isnan(unset) else local == unset).any()) for local, unset in values
    ]
    if any(isinstance(tensor, DTensor) for tensor in tensors):  # shards may be empty
        empty = all_reduce(
            torch.tensor(empty, dtype=torch.int, device=mesh.device_type), mesh.comm(0)
        ).tolist()
    return [path for path, is_empty in zip(holes, empty, strict=True) if is_empty]


def _initialize(module: nn.Module, names: set[str]) -> None:
    """Initialize some tensors of a module by its own rule; the other tensors keep their values."""
    adapted = any(isinstance(sharding.options, Adapter) for sharding, _ in shardings_of(module))
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    rule = partial(initialize_adapter, module) if adapted else reset
    if rule is not None:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            values = {name: tensor.clone() for name, tensor in tensors.items() if name not in names}
            rule()
            for name, value in values.items():
                tensors[name].copy_(value)


def _unset(dtype: torch.dtype) -> float:
    """Return a value that no rule gives: NaN, or the largest integer.

    No bool value can serve for this.
    """
    whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return torch.iinfo(dtype).max if whole else torch.nan


# --- methods of a parallel model ------------------------------------------------------------------


def _finish(model: Any, home: Path, mesh: DeviceMesh) -> None:
    """Set the files' generation config, and replace methods that do not support shards."""
    if model.can_generate() and (home / "generation_config.json").exists():
        model.generation_config = type(model.generation_config).from_pretrained(home)
    model.save_pretrained = partial(_save_pretrained, model)
    model.resize_token_embeddings = partial(_resize_token_embeddings, model)
    if hasattr(model, "init_continuous_batching"):
        model.init_continuous_batching = partial(_init_continuous_batching, model, mesh)


def _save_pretrained(
    model: Any, save_directory: str | PathLike[str], *args: Any, **options: Any
) -> None:
    """Save shards on all ranks, or a given state dict of full tensors on the ranks that have it.

    The method of the class would have every rank write its shards as the whole.
    """
    if not save_whole_tensors(model, save_directory, *args, **options):
        save_sharded(model, save_directory)


def _resize_token_embeddings(model: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Resize the embeddings and the head, which are plain meanwhile, on every rank.

    The new rows are the rows of rank 0.
    """
    found = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = {
        name: module
        for name, module in model.named_modules()
        if any(module is each for each in found)
    }
    records = {name: [*shardings_of(module)] for name, module in modules.items()}
    # in one call, so that a shared weight stays one
    unparallelize_module(nn.ModuleList(modules.values()))
    resized: nn.Module = type(model).resize_token_embeddings(model, *args, **kwargs)
    for name, each in records.items():
        for sharding, mesh in each:
            apply_sharding(model.get_submodule(name), sharding, mesh)
    return resized


def _init_continuous_batching(model: Any, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """Return the manager of `generate_batch`, whose caches have this rank's heads.

    transformers takes the number of heads from the mesh and from the entries of its own plan:
    another number is refused.
    """
    if any(isinstance(param, DTensor) for param in model.parameters()):
        heads = (
            getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
        )
        for kind in ("k_proj", "v_proj"):
            planned = any(
                f"{start}layers.*.self_attn.{kind}" in model.tp_plan for start in ("", "model.")
            )
            weights = [
                module.weight for name, module in model.named_modules() if name.endswith(f".{kind}")
            ]
            sharded = weights and all(isinstance(each, DTensor) for each in weights)
            if not (planned and sharded and heads % mesh.size() == 0):
                raise UnsupportedModuleError(
                    f"generate_batch of a parallel model: expected {kind} sharded by the model's "
                    f"own plan, and its {heads} heads divided by {mesh.size()} ranks without a "
                    "rest, because transformers counts the heads of its cache so; use generate()"
                )
        # Looked for by the name "tp", or without names.
        model._device_mesh = DeviceMesh(mesh.device_type, mesh.mesh)
    return type(model).init_continuous_batching(model, *args, **kwargs)
