"""What users pass for a mesh, checked once: device types, ranks, names and backends become the fields of a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from .._torch import BackendOptions
from ..argument_types import kind_of, require, require_each
from ..errors import AxisError, BackendError, MeshError, MeshTypeError
from ..groups.process_groups import BackendChoice
from .rank_layout import Layout, read_sizes

BackendOverride = (
    Mapping[int, Any] | Mapping[str, Any] | Mapping[int | str, Any]
)  # axis -> "gloo" | Options | ("nccl", Options)


def read_device_type(device_type: str) -> str:
    """The device type without an index; MeshError for one with an index, as `cuda:0` has."""
    require(device_type, str | torch.device, "a device type is 'cpu', 'cuda', ...")
    try:
        device = torch.device(device_type)
    except RuntimeError as error:
        raise MeshError(f"{device_type!r} is no device type: use 'cpu', 'cuda', ...") from error
    if ":" in str(device_type):
        raise MeshError(
            f"device type {device_type!r} has an index: a mesh spans the devices of all ranks, so pass {device.type!r} "
            "and choose this rank's device with torch.accelerator.set_device_index"
        )
    return device.type


def read_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """A mesh shape as plain positive integers; MeshError for a size below 1, or none."""
    sizes = read_sizes((shape,) if isinstance(shape, int) else shape, "a mesh shape")
    if not sizes or any(size < 1 for size in sizes):
        raise MeshError(f"a mesh shape is one positive size per axis, got {shape}")
    return sizes


def read_ranks(mesh: torch.Tensor | Sequence[Any] | None, world: int | None) -> Layout:
    """The layout of the ranks that a user has listed, as tensor or nested list: all of the world in a row if None.

    MeshError if they are repeated, not in the world (None if its size is unknown), no integers, or none.
    """
    if mesh is None:
        return Layout.dense((world or 1,))
    try:
        ranks = torch.as_tensor(mesh).cpu()
    except (TypeError, RuntimeError) as error:
        raise MeshTypeError(f"the ranks of a mesh are a tensor or nested list of int, got {kind_of(mesh)}") from error
    except ValueError as error:
        raise MeshError(f"the ranks of a mesh are a tensor or nested list of int of equal lengths: {error}") from error
    if ranks.is_floating_point() or ranks.is_complex() or ranks.dtype == torch.bool:
        raise MeshTypeError(f"the ranks of a mesh are integers, got {ranks.dtype}")
    if ranks.numel() == 0:
        raise MeshError(f"a mesh holds at least one rank, got shape {tuple(ranks.shape)}")
    shape = tuple(ranks.shape) or (1,)
    flat = ranks.reshape(-1).tolist()
    if twice := sorted(rank for rank, times in Counter(flat).items() if times > 1):
        raise MeshError(f"each rank may be in a mesh once; {twice} are there more often, in shape {shape}")
    if wrong := [rank for rank in flat if rank < 0 or (world is not None and rank >= world)]:
        raise MeshError(f"ranks {wrong[:8]} are not in the world of {world} ranks (mesh of shape {shape})")
    return Layout.of(shape, flat)


def read_names(names: Sequence[Any] | None, ndim: int) -> tuple[str, ...] | None:
    """One distinct name per axis, or None."""
    if names is None:
        return None
    if isinstance(names, str):
        names = (names,)
    require_each(names, str, f"names of mesh axes are strings, one for each of {ndim} axes")
    given = tuple(names)
    if len(given) != ndim:
        raise AxisError(f"a mesh of {ndim} axes needs {ndim} names, got {given}")
    if len(set(given)) != len(given) or not all(given):
        raise AxisError(f"names of mesh axes are distinct, non-empty strings, got {given}")
    return given


def read_backends(
    override: BackendOverride | None, names: Sequence[str] | None, ndim: int
) -> tuple[BackendChoice, ...]:
    """The backend choice of every axis; AxisError for one that does not exist, or is given by name and by index."""
    choices: dict[int, BackendChoice] = {}
    require(override, Mapping | None, "backend_override maps axes to backends")
    for axis, value in (override or {}).items():
        index = list(names or ()).index(axis) if isinstance(axis, str) and axis in (names or ()) else axis
        if not isinstance(index, int) or not 0 <= index < ndim:
            raise AxisError(f"backend_override names axis {axis!r}; the axes are {tuple(names or range(ndim))}")
        if index in choices:
            raise AxisError(f"backend_override gives axis {axis!r} twice, by name and by index")
        choices[index] = _read_choice(axis, value)
    return tuple(choices.get(i, BackendChoice()) for i in range(ndim))


def _read_choice(axis: int | str, value: object) -> BackendChoice:
    if isinstance(value, BackendOptions):
        return BackendChoice(options=value)
    backend, options = value if isinstance(value, tuple | list) and len(value) == 2 else (value, None)
    if not isinstance(backend, str):
        raise BackendError(
            f"backend_override of axis {axis!r} is a backend, its options, or both as a pair, got {kind_of(value)}"
        )
    known = dist.Backend.backend_list
    if not all(part.rpartition(":")[2] in known for part in backend.lower().split(",")):
        raise BackendError(f"backend {backend!r} of axis {axis!r} is none of {', '.join(known)}, cpu:gloo,cuda:nccl")
    return BackendChoice(backend, options)


def check_fits(shape: Sequence[int], world: int) -> None:
    """MeshError unless a mesh of this shape fits the world."""
    if prod(shape) > world:
        raise MeshError(f"a mesh of shape {tuple(shape)} needs {prod(shape)} ranks; the world has {world}")


def common_root(meshes: Sequence[Any]) -> Any:
    """The mesh that several meshes were sliced from; MeshError if there is none.

    What is kept for a mesh is kept for its equals, so a mesh may come back as an equal slice of another root: it counts
    as the slice of this root that it equals.
    """
    root = meshes[0]._get_root_mesh()
    for mesh in meshes:
        same = mesh._get_root_mesh() == root or (
            {*mesh.axis_names} <= {*root.axis_names} and root[mesh.axis_names] == mesh
        )
        if not same:
            raise MeshError(f"only meshes sliced from one mesh can be concatenated, got {', '.join(map(repr, meshes))}")
    return root
