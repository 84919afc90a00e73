"""Signatures and attributes of the public classes and functions of both libraries.

They are compared without running them.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from integration_tests.drop_in.libraries import names

from shoal_dtensor import Spec

__all__ = ["differences"]

# The row of docs/differences.md that says why a name differs, by the longest prefix.
_ROWS = {
    "DTensorSpec": "d-specs",
    "DebugMode": "d-debug-mode",
    "ExplicitRedistributionContext.observe_redistribution": "d-debug-mode",
    "_StridedShard": "d-strided",
    "_pre_dp_module_transform": "d-ddp",
    **dict.fromkeys(
        [
            *("BackwardPrefetch", "CPUOffload:", "FullyShardedDataParallel", "MixedPrecision:"),
            *("FullOptimStateDictConfig", "FullStateDictConfig", "LocalOptimStateDictConfig"),
            *("LocalStateDictConfig", "OptimStateDictConfig", "OptimStateKeyType"),
            *("ShardedOptimStateDictConfig", "ShardedStateDictConfig", "ShardingStrategy"),
            *("StateDictConfig", "StateDictSettings", "StateDictType"),
        ],
        "d-fsdp1",
    ),
    **dict.fromkeys(["GradientReductionHandle(", "UnshardHandle("], "d-handles"),
    **dict.fromkeys(
        [
            *("OpStrategy", "_ContextParallel", "_HeadTailLoadBalancer", "_context_parallel_shard"),
            *(
                "redistribute_local_tensor",
                "register_op_strategy",
                "tensor_parallel_transformation",
            ),
            "use_min_cost_redistribution_plan",
        ],
        "d-internals",
    ),
}

# Modules of torch, all of whose public names are compared: new names of later versions, too.
_MODULES: dict[str, tuple[str, ...]] = {
    "device_mesh": ("shoal_mesh",),
    "tensor": ("shoal_dtensor",),
    "tensor.debug": ("shoal_mesh", "shoal_dtensor"),
    "tensor.experimental": ("shoal_dtensor", "shoal_context_parallel"),
    "tensor.parallel": ("shoal_tp_styles",),
    "tensor.placement_types": ("shoal_dtensor",),
    "fsdp": ("shoal_data_parallel",),
}
# Names of modules without `__all__`.
_MORE: dict[str, tuple[str, ...]] = {
    "_composable.replicate_with_fsdp": ("replicate", "ReplicateModule"),
    "fsdp._fully_shard._fsdp_api": ("AllGather", "ReduceScatter"),
    "fsdp._fully_shard._fsdp_common": ("FSDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult"),
}

_SHARD_NAMES = [
    "ShardedTensor",
    "ShardedTensorBase",
    "Shard",
    "ShardMetadata",
    "ShardedTensorMetadata",
    "TensorProperties",
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "ShardingSpec",
    "PlacementSpec",
    "DevicePlacementSpec",
    "ShardingPlan",
    "ShardingPlanner",
    "Sharder",
    "ShardedOptimizer",
    "shard_parameter",
    "shard_module",
    "_shard_tensor",
    "load_with_process_group",
    "empty",
    "ones",
    "zeros",
    "full",
    "rand",
    "randn",
    "init_from_local_shards",
    "state_dict_hook",
    "pre_load_state_dict_hook",
    "custom_sharded_op_impl",
    "_sharded_op_impl",
    "custom_sharding_spec_op",
    "named_params_with_sharded_tensor",
    "get_split_size",
    "get_chunked_dim_size",
    "get_chunk_sharding_params",
    "validate_non_overlapping_shards_metadata",
    "check_tensor",
    "narrow_tensor",
    "narrow_tensor_by_index",
    "_infer_sharding_spec_from_shards_metadata",
]


def differences() -> list[tuple[str, str]]:
    """One pair per difference: the anchor of its row, empty where there is none, and `NAME: what`.

    The name is that of a class, a function or a method.
    """
    theirs, ours = names("torch"), names("shoal")
    public = [
        n for n, value in theirs.items() if inspect.isclass(value) or inspect.isfunction(value)
    ]
    pairs = [
        (n, theirs[n], ours[n]) for n in public if n not in ("spread", "numbers", "local", "S", "P")
    ]
    known = {name for name, _, _ in pairs}
    pairs += [pair for pair in _public_names() if pair[0] not in known]
    pairs += [(f"sh.{n}", _of_shard_api(theirs, n), _of_shard_api(ours, n)) for n in _SHARD_NAMES]
    lines = [line for name, peer, own in pairs for line in _of(name, peer, own)]
    return [
        (next((row for name, row in _ROWS.items() if line.startswith(name)), ""), line)
        for line in lines
    ]


def _public_names() -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, torch's object, shoal's object or None) for the modules that are compared."""
    for home, packages in _MODULES.items():
        module = importlib.import_module(f"torch.distributed.{home}")
        for name in module.__all__:
            yield name, getattr(module, name), _of_packages(packages, name)
    for home, wanted in _MORE.items():
        module = importlib.import_module(f"torch.distributed.{home}")
        for name in wanted:
            yield name, getattr(module, name), _of_packages(("shoal_data_parallel",), name)


def _of_packages(packages: tuple[str, ...], name: str) -> Any:
    """Return the object of a name in the first package that has it, or None."""
    for package in packages:
        found = getattr(importlib.import_module(package), name, None)
        if found is not None:
            return found
    return None


def _of(name: str, peer: Any, own: Any) -> Iterator[str]:
    if own is None or type(own).__name__ == "_Missing":
        yield f"{name}: is not there"
        return
    if not inspect.isclass(peer):
        yield from _parameters(name, peer, own)
        return
    yield from _parameters(name, peer, own)
    own = Spec if name == "DTensorSpec" else own  # what it makes
    for attribute in _attributes(peer):
        if not hasattr(own, attribute) and attribute not in getattr(own, "__annotations__", {}):
            yield f"{name}.{attribute}: is not there"
        elif callable(getattr(peer, attribute)) and callable(getattr(own, attribute, None)):
            yield from _parameters(
                f"{name}.{attribute}", getattr(peer, attribute), getattr(own, attribute)
            )


def _attributes(kind: type) -> list[str]:
    """Public attributes of a class that `torch.Tensor` and `object` have not."""
    known = (
        {*dir(torch.Tensor), *dir(torch.nn.Module)}
        if issubclass(kind, torch.Tensor)
        else set(dir(object))
    )
    own = {n for base in kind.__mro__ if base.__module__.startswith("torch") for n in vars(base)}
    return sorted(n for n in own - known if not n.startswith("_"))


def _parameters(name: str, peer: Any, own: Any) -> Iterator[str]:
    """Parameters of torch that shoal lacks or has at another place, of another kind or default."""
    try:
        theirs, ours = inspect.signature(peer).parameters, inspect.signature(own).parameters
    except (ValueError, TypeError):
        return
    if not inspect.isclass(peer):
        theirs, ours = _unbound(theirs), _unbound(ours)  # type: ignore[assignment]  # plain dicts
    free = any(p.kind is p.VAR_KEYWORD for p in theirs.values())
    for parameter, own_one in ours.items():
        is_named = own_one.kind not in (own_one.VAR_KEYWORD, own_one.VAR_POSITIONAL)
        is_required = is_named and own_one.default is own_one.empty
        if is_required and parameter not in theirs and not free:
            yield f"{name}({parameter}): torch has no such argument, and it has no default"
    positions = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for parameter, there in theirs.items():
        if there.kind in (there.VAR_KEYWORD, there.VAR_POSITIONAL) or parameter.startswith("_"):
            continue
        here = ours.get(parameter)
        if here is None:
            if not free:
                yield f"{name}({parameter}): no such argument"
        elif there.kind is there.POSITIONAL_OR_KEYWORD and (
            parameter not in positions or positions.index(parameter) != expected.index(parameter)
        ):
            yield f"{name}({parameter}): at another position"
        elif (
            not _is_equal(_default(peer, there), _default(own, here))
            and there.default is not there.empty
        ):
            yield f"{name}({parameter}): default {here.default!r}, torch's {there.default!r}"
        elif there.default is not there.empty and here.default is here.empty:
            yield f"{name}({parameter}): has no default"


def _default(function: Any, parameter: inspect.Parameter) -> Any:
    """The default of a parameter; of a factory of a dataclass, what it makes."""
    field = getattr(function, "__dataclass_fields__", {}).get(parameter.name)
    if field is None or field.default_factory is dataclasses.MISSING:
        return parameter.default
    return field.default_factory()


def _is_equal(theirs: Any, ours: Any) -> bool:
    """Return whether two defaults are equal, as texts, in the fields that torch's has."""
    if dataclasses.is_dataclass(theirs) and dataclasses.is_dataclass(ours):
        fields = [field.name for field in dataclasses.fields(theirs)]
        return all(_is_equal(getattr(theirs, n), getattr(ours, n, None)) for n in fields)
    return repr(theirs) == repr(ours)


def _unbound(parameters: Any) -> dict[str, inspect.Parameter]:
    return {n: p for n, p in parameters.items() if n not in ("self", "cls")}


def _of_shard_api(library: dict[str, Any], name: str) -> Any:
    try:
        return getattr(library["sh"], name)
    except ImportError:
        return None
