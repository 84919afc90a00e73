"""State dicts of models and optimizers with DTensors, sharded or full, by the names of torch.

Torch's functions would leave DTensors of this package sharded in full state dicts, because they
recognize torch's own DTensor by its class. Therefore the inner functions of torch that read and
load state are wrapped: the wrappers gather and shard DTensors, one tensor at a time. After that,
torch's functions behave like the functions here, which also check their arguments on all ranks
first. torch.distributed.checkpoint is imported in the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from shoal_mesh.internal import agree

from .._torch.interception import around_state_dicts
from .._torch.tensors import pytree
from ..argument_types import suggests_keywords
from ..errors import StateDictError
from ..redistribute.scatter import shard_of
from ..tensor.dtensor import DTensor
from .optimizer_states import (
    add_frozen_states,
    check_complete,
    load_states,
    nest_state,
    optimizers_of,
    with_first_states,
)

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@suggests_keywords()
def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """Return the parameters and buffers of a model by name.

    It is `placements -> R` for a full state dict; otherwise nothing is communicated.

    Args:
        model: the model; all ranks call this with the same one.
        submodules: as in torch (deprecated there).
        options: a `torch.distributed.checkpoint.state_dict.StateDictOptions`. With
            `full_state_dict`, every DTensor becomes a plain tensor of the global shape, on every
            rank; with `cpu_offload` too, in CPU memory on rank 0 alone, and the other ranks get an
            empty dict. Otherwise the values are DTensors, and each rank has its shards.

    Raises:
        StateDictError: the options have another type, or `get` does not take them.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh, launch
        >>> def saved() -> dict[str, torch.Tensor]:
        ...     from torch.distributed.checkpoint.state_dict import StateDictOptions
        ...     weight = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
        ...     model = nn.ParameterDict({"weight": weight})
        ...     return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        >>> launch(saved, 2)[0]
        {'weight': tensor([1., 1.])}
    """
    api, options = _read(options)
    return cast(
        "dict[str, Any]", api.get_model_state_dict(model, submodules=submodules, options=options)
    )


@suggests_keywords()
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> dict[str, Any]:
    """Return the state and options of optimizers by names of parameters.

    It is `placements -> R` for a full state dict; otherwise nothing is communicated.

    Args:
        model: the model that the optimizers step.
        optimizers: one or several, which stay unchanged. A trainable parameter without state gets
            the state with which its first step begins; if that is unknown, the state after a step
            without gradients, as in torch.
        submodules: as in torch (deprecated there).
        options: as for `get_model_state_dict`; also `flatten_optimizer_state_dict`.

    Raises:
        StateDictError: the options have another type, or an optimizer does not belong to this
            model.
    """
    api, options = _read(options)
    optimizers = optimizers_of(model, optimizers)
    with with_first_states(optimizers):
        state: dict[str, Any] = api.get_optimizer_state_dict(
            model, optimizers, submodules=submodules, options=options
        )
    return state


@suggests_keywords()
def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of a model and of its optimizers.

    It is `placements -> R` for full state dicts; otherwise nothing is communicated.

    Args:
        model, optimizers, submodules, options: as for `get_optimizer_state_dict`.

    Raises:
        StateDictError: as for `get_optimizer_state_dict`.
    """
    model_state = get_model_state_dict(model, submodules=submodules, options=options)
    return model_state, get_optimizer_state_dict(
        model, optimizers, submodules=submodules, options=options
    )


@suggests_keywords()
def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Any = None
) -> Any:
    """Load parameters and buffers into a model.

    It is `R -> placements` of a full state dict, or of rank 0's; otherwise DTensors are copied.

    Args:
        model: the model, which keeps its layouts; all ranks call this.
        model_state_dict: the result of `get_model_state_dict`. If it is full, each rank takes its
            shards from its own tensors, or with `broadcast_from_rank0` from the tensors of rank 0
            (one tensor at a time; the other ranks pass `{}`).
        options: a `StateDictOptions`: `full_state_dict`, `broadcast_from_rank0`, `strict`.

    Returns:
        The missing and unexpected keys, as `nn.Module.load_state_dict`.

    Raises:
        StateDictError: a key is missing or unexpected with `strict`, a tensor has another shape
            than the parameter, or a parameter is on the meta device. Every rank raises, and the
            model is unchanged.

    Example:
        >>> model = torch.nn.Linear(2, 4)
        >>> set_model_state_dict(model, get_model_state_dict(model)).missing_keys
        []
    """
    api, options = _read(options)
    if options.full_state_dict:
        model_state_dict = _shard_state(model_state_dict, api.get_model_state_dict(model), options)
    return api.set_model_state_dict(
        model, dict(model_state_dict), options=_sharded_options(options)
    )


@suggests_keywords()
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: Any = None,
) -> None:
    """Load state and options into optimizers.

    It is `R -> placements` of a full state dict, or of rank 0's; otherwise the optimizers take over
    the DTensors.

    Args:
        model: the model that the optimizers step.
        optimizers: one or several.
        optim_state_dict: the result of `get_optimizer_state_dict`; with `broadcast_from_rank0`,
            only the state dict of rank 0 counts.
        options: as for `set_model_state_dict`.

    Raises:
        StateDictError: an entry has another shape than the state that it replaces, an entry is
            missing with `strict`, or an optimizer does not belong to this model. Every rank raises,
            and nothing is changed.

    Example:
        >>> model = torch.nn.Linear(2, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    """
    api, options = _read(options)
    optimizers = optimizers_of(model, optimizers)
    get = partial(api.get_optimizer_state_dict, model, optimizers)
    _load_states(lambda options: get(options=options), optimizers, optim_state_dict, options)


@suggests_keywords()
def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: Any = None,
) -> Any:
    """Load the state dicts of a model and of its optimizers.

    It is `R -> placements` of full state dicts, or of rank 0's; otherwise DTensors are copied.

    Args:
        model, model_state_dict, options: as for `set_model_state_dict`.
        optimizers, optim_state_dict: as for `set_optimizer_state_dict`.

    Returns:
        The missing and unexpected keys of the model.

    Raises:
        StateDictError: as for `set_model_state_dict` and `set_optimizer_state_dict`.
    """
    keys = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return keys


def _get(original: Callable[..., Any], *args: Any) -> Any:
    """Return torch's result for a model or its optimizers, with full tensors if so requested."""
    *owners, options = args
    if not _has_dtensors(owners[0]):
        return original(*args)
    with with_first_states(chain(*owners[1:])):
        if not options.full_state_dict:
            return original(*args)
        # Read on all ranks, because gathering needs all of them.
        state = original(*owners, replace(options, cpu_offload=False))
    return _gather_state(state, options)


def _load(original: Callable[..., Any], original_get: Callable[..., Any], *args: Any) -> Any:
    """Load a state dict; if it is full by the options, replace its tensors by shards first."""
    *owners, state, options = args
    if not _has_dtensors(owners[0]):
        return original(*args)
    if any(owners[1:]):
        return _load_states(partial(original_get, *owners), owners[1], state, options)
    if not options.full_state_dict:
        return original(*args)
    sharded_options = _sharded_options(options)
    target = original_get(*owners, replace(sharded_options, ignore_frozen_params=False))
    return original(*owners, _shard_state(state, target, options), sharded_options)


# Makes torch's functions gather and shard DTensors. It is called when the first `Spec` is made.
install_in_torch = partial(around_state_dicts, _get, _load)


def _has_dtensors(model: nn.Module) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in (*model.parameters(), *model.buffers()))


def _read(options: Any) -> tuple[Any, Any]:
    """Return torch's module, and the options (the defaults for None)."""
    from torch.distributed.checkpoint import state_dict as api

    if options is None:
        return api, api.StateDictOptions()
    if not isinstance(options, api.StateDictOptions):
        raise StateDictError(
            "options must be a torch.distributed.checkpoint.state_dict.StateDictOptions or None, "
            f"got {type(options).__name__}"
        )
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise StateDictError(
            "broadcast_from_rank0=True needs full_state_dict=True: only full tensors are broadcast"
        )
    return api, options


def _sharded_options(options: Any) -> Any:
    return replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)


def _load_states(
    get: Callable[[Any], Any], optimizers: Sequence[torch.optim.Optimizer], state: Any, options: Any
) -> None:
    """Load state of optimizers in their layouts; nothing changes if it raises.

    `get` returns their present state dict.
    """
    with with_first_states(optimizers):
        target = get(replace(_sharded_options(options), flatten_optimizer_state_dict=False))
    state = nest_state(state, target["param_groups"])
    structure = _structure(state, options)
    add_frozen_states(optimizers, target, structure.get("state", {}))
    _check_structure(structure, target)
    if options.strict:
        check_complete(structure, target)
    if options.full_state_dict:
        state = _in_layouts_of(structure, state, target, options)
    load_states(optimizers, state, target)


# --- full state dicts -----------------------------------------------------------------------------


def _gather_state(state: dict[str, Any], options: Any) -> dict[str, Any]:
    """`placements -> R`: return the state with full tensors, on rank 0 alone if offloaded."""
    is_receiver = not options.cpu_offload or dist.get_rank() == 0

    def gather(value: Any) -> Any:
        detached: Any = value.detach()
        full = detached.full_tensor() if isinstance(value, DTensor) else value
        if not is_receiver:
            return None
        return full.cpu() if options.cpu_offload else full

    result = pytree.tree_map_only(torch.Tensor, gather, state)
    return dict(result) if is_receiver else {}


def _by_path(state: Any) -> dict[Any, Any]:
    """Return the leaves of nested dicts and lists, by the keys that lead to them."""
    return dict(pytree.tree_leaves_with_path(state))


def _shard_state(state: Any, target: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """`R -> placements`: return a full state dict of a model in the layouts of the target.

    It is checked before any tensor moves.
    """
    state = dict(state) if isinstance(state, Mapping) else state
    structure = _structure(state, options)
    if options.strict and structure.keys() != target.keys():
        missing = sorted(target.keys() - structure.keys())
        unexpected = sorted(structure.keys() - target.keys())
        raise StateDictError(
            f"the state dict does not fit the model: missing {missing}, unexpected {unexpected}; "
            "strict=False loads the common entries"
        )
    _check_structure(structure, target)
    return _in_layouts_of(structure, state, target, options)


def _in_layouts_of(
    structure: Mapping[str, Any], state: Mapping[str, Any], target: Mapping[str, Any], options: Any
) -> dict[str, Any]:
    """`R -> placements`: return the tensors of a full state dict in the layouts of the target.

    `structure` lists the tensors (see `_structure`).
    """
    values = _by_path(state)
    wanted = _by_path(target)
    dtensors = [tensor for tensor in wanted.values() if isinstance(tensor, DTensor)]
    device = dtensors[0].device if dtensors else torch.device("cpu")

    def shard(path: Any, info: Any) -> Any:
        if not isinstance(info, torch.Tensor) or not info.dim():
            return info
        full: Any = values.get(path)
        if options.broadcast_from_rank0 and (full is None or dist.get_rank() != 0):
            full = torch.empty(info.shape, dtype=info.dtype, device=device)
        full = full.detach()
        if options.broadcast_from_rank0:
            full = full.to(device).contiguous()
            dist.broadcast(full, src=0)
        like = wanted.get(path)
        if not isinstance(like, DTensor):
            return full.to(like.device) if isinstance(like, torch.Tensor) else full
        spec = like.spec.with_(shape=full.shape, dtype=full.dtype)
        return DTensor(shard_of(full.to(spec.mesh.device_type), spec, None), spec)

    return dict(pytree.tree_map_with_path(shard, structure))


def _structure(state: Any, options: Any) -> dict[str, Any]:
    """Return the state dict with meta tensors in place of all tensors except numbers.

    It is the state dict of rank 0 if that rank broadcasts.
    """
    structure: Any = None
    if not options.broadcast_from_rank0 or dist.get_rank() == 0:
        structure = pytree.tree_map_only(torch.Tensor, _without_values, state)
    if options.broadcast_from_rank0:
        refusal = "the state dict of rank 0 cannot be sent"
        structure, *_ = agree(lambda: structure, None, StateDictError, refusal)
    # Pytree takes mappings of unknown classes for leaves.
    others = [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, Mapping)]
    if others or not isinstance(structure, dict):
        refused = others[-1] if others else structure
        raise StateDictError(f"a state dict must be a dict, got {type(refused).__name__}")
    return structure


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor in place of a tensor, and a number as it is."""
    if not tensor.dim():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _check_structure(structure: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Raise for entries of a structure that do not fit the target.

    With a broadcast the structure is the same on all ranks, and therefore the error is too.
    """
    wanted = _by_path(target)
    for path, info in _by_path(structure).items():
        like = wanted.get(path)
        if not isinstance(like, torch.Tensor) or not isinstance(info, torch.Tensor):
            continue
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        if like.shape != info.shape:
            raise StateDictError(
                f"{name} has shape {tuple(info.shape)} in the state dict, but {tuple(like.shape)} "
                "in the model"
            )
        if like.is_meta:
            raise StateDictError(
                f"{name} is on the meta device: allocate the model first, with to_empty(device=...)"
            )
