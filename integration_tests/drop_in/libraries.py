"""The names that snippets use, from torch's stack or from shoal's, under one spelling."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["LIBRARIES", "names"]

LIBRARIES = ("torch", "shoal")

# spelling -> (torch's home, shoal's home, shoal's name where it is another one)
_TENSOR = "torch.distributed.tensor"
_HOMES: dict[str, tuple[str, str]] = {
    "DeviceMesh init_device_mesh": ("torch.distributed.device_mesh", "shoal_mesh"),
    "DTensor distribute_tensor distribute_module Shard Replicate Partial Placement "
    "ones empty full rand randn zeros": (
        _TENSOR,
        "shoal_dtensor",
    ),
    "local_map implicit_replication register_sharding": (
        f"{_TENSOR}.experimental",
        "shoal_dtensor",
    ),
    "context_parallel context_parallel_unshard set_rotate_method _ContextParallel "
    "_context_parallel_shard "
    "_HeadTailLoadBalancer": (f"{_TENSOR}.experimental._attention", "shoal_context_parallel"),
    "tensor_parallel_transformation": (f"{_TENSOR}.experimental._tp_transform", "shoal_tp_styles"),
    "redistribute_local_tensor use_min_cost_redistribution_plan": (
        f"{_TENSOR}._redistribute",
        "shoal_dtensor",
    ),
    "OpStrategy": (f"{_TENSOR}._op_schema", "shoal_dtensor"),
    "register_op_strategy": (f"{_TENSOR}._ops.utils", "shoal_dtensor"),
    "CommDebugMode": (f"{_TENSOR}.debug", "shoal_mesh"),
    "visualize_sharding": (f"{_TENSOR}.debug", "shoal_dtensor"),
    "DTensorSpec TensorMeta ShardOrderEntry": (f"{_TENSOR}._dtensor_spec", "shoal_dtensor"),
    "compute_local_shape_and_global_offset ExplicitRedistributionContext compute_local_tensor_info "
    "compute_global_tensor_shape": (f"{_TENSOR}._utils", "shoal_dtensor"),
    "_StridedShard": (f"{_TENSOR}.placement_types", "shoal_dtensor"),
    # torch's, in a DTensor of each
    "LocalShardsWrapper": (f"{_TENSOR}._shards_wrapper", f"{_TENSOR}._shards_wrapper"),
    "DebugMode": ("torch.utils._debug_mode", "shoal_dtensor"),
    "manual_seed is_rng_supported_mesh": (f"{_TENSOR}._random", "shoal_dtensor"),
    "ColwiseParallel RowwiseParallel SequenceParallel PrepareModuleInput PrepareModuleOutput "
    "PrepareModuleInputOutput ParallelStyle parallelize_module "
    "loss_parallel": (f"{_TENSOR}.parallel", "shoal_tp_styles"),
    "input_reshard": (f"{_TENSOR}.parallel.input_reshard", "shoal_tp_styles"),
    "_pre_dp_module_transform": (f"{_TENSOR}.parallel.ddp", "shoal_tp_styles"),
}
_SHARD_HOMES = (
    "",
    ".api",
    ".sharded_tensor",
    ".sharding_spec",
    ".sharding_plan",
    ".sharder",
    ".sharded_optim",
)
_SHARD_MORE = (
    ".metadata",
    "._utils",
    ".sharding_spec.api",
    ".sharded_tensor.api",
    ".sharded_tensor.metadata",
)
_SHARD_DEEP = (
    ".sharding_spec._internals",
    ".sharding_spec.chunk_sharding_spec",
    ".sharded_tensor._ops._common",
    ".sharded_tensor.utils",
)


class _Missing:
    """A name that a library does not have: any use of it is the error that an import would be."""

    def __init__(self, name: str, error: Exception) -> None:
        self._why = ImportError(f"{name}: {error}")

    def __getattr__(self, name: str) -> Any:
        raise self._why

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._why


def _found(home: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError) as error:
        return _Missing(name, error)


class ShardApi:
    """torch's sub-modules of `_shard` as one flat list, as shoal's are."""

    def __init__(self, library: str) -> None:
        root = "torch.distributed._shard"
        self._homes = (
            [root + part for part in _SHARD_HOMES + _SHARD_MORE + _SHARD_DEEP]
            if library == "torch"
            else ["shoal_shard_api"]
        )

    def __getattr__(self, name: str) -> Any:
        for home in self._homes:
            found = getattr(importlib.import_module(home), name, None)
            if found is not None:
                return found
        raise ImportError(f"no {name} in {self._homes[0]}")


@functools.cache
def names(library: str) -> dict[str, Any]:
    """The namespace of a snippet: one library's names, meshes of the four ranks, and short forms.

    `mesh` is a mesh of four ranks named "tp", `grid` one of 2 x 2 named "dp" and "tp";
    `spread(tensor, *placements)` is a DTensor on `mesh`, or on `grid` if there are two placements;
    `numbers(*shape)` counts from 1.
    """
    column = 0 if library == "torch" else 1
    found: dict[str, Any] = {
        name: _found(homes[column], name)
        for spelled, homes in _HOMES.items()
        for name in spelled.split()
    }
    mesh = found["init_device_mesh"]("cpu", (4,), mesh_dim_names=("tp",))
    grid = found["init_device_mesh"]("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def spread(tensor: torch.Tensor, *placements: Any) -> Any:
        return found["distribute_tensor"](
            tensor, mesh if len(placements) == 1 else grid, placements, src_data_rank=None
        )

    def numbers(*shape: int) -> torch.Tensor:
        return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).view(shape)

    def local(tensor: Any, *placements: Any) -> Any:
        where = mesh if len(placements) == 1 else grid
        return found["DTensor"].from_local(tensor, where, placements)

    return found | {
        "sh": ShardApi(library),
        "dist": dist,
        "rank": dist.get_rank(),
        "mesh": mesh,
        "grid": grid,
        "spread": spread,
        "numbers": numbers,
        "local": local,
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "copy": copy,
        "S": found["Shard"],
        "R": found["Replicate"](),
        "P": found["Partial"],
    }
