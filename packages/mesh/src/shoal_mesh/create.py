"""Meshes from a shape: over the whole world, or without one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from .arguments import BackendOverride, check_fits, read_backends, read_device_type, read_names, read_shape
from .device_mesh import DeviceMesh, rebuild_mesh
from .errors import MeshError
from .grid import Parts
from .groups import BackendChoice
from .layout import Layout
from .world import check_agreement, ensure_world

__all__ = ["abstract_mesh", "init_device_mesh", "safe_globals"]


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: BackendOverride | None = None,
    validate: bool = True,
    lazy: bool = False,
) -> DeviceMesh:
    """The row-major mesh over the first ranks of the world; called by every rank with the same arguments.

    Initialises the default process group from the environment (torchrun) when there is none.

    Args:
        device_type: `cpu`, `cuda`, ...: without an index.
        mesh_shape: number of ranks along each axis.
        mesh_dim_names: one distinct name per axis.
        backend_override: per axis (name or index) a backend, its options, or both as a pair.
        validate: compare the arguments of all ranks in one small collective, before any group is made.
        lazy: make the group of an axis at its first use instead of now.

    Returns:
        The mesh, with a process group along every axis.

    Raises:
        MeshError: shape, names or device type make no mesh, or the world is too small.
        MeshMismatchError: ranks passed different arguments; raised on all of them.
    """
    device_type, shape = read_device_type(device_type), read_shape(mesh_shape)
    names = read_names(mesh_dim_names, len(shape))
    choices = read_backends(backend_override, names, len(shape))
    world = ensure_world(device_type)
    if validate:
        kinds = [c.key for c in choices] if any(c != BackendChoice() for c in choices) else "default"
        check_agreement(f"{device_type} mesh of shape {shape}, names {names}, backends {kinds}, lazy {lazy}")
    check_fits(shape, world.size())
    mesh = DeviceMesh._of(Parts(device_type, Layout.dense(shape), names, choices))
    if not lazy:
        mesh._make_groups()
    return mesh


def abstract_mesh(
    shape: Sequence[int], names: Sequence[str] | None = None, *, rank: int = 0, device_type: str = "cpu"
) -> DeviceMesh:
    """A mesh as one rank sees it, without process groups: for planning and simulation.

    Example:
        >>> abstract_mesh((2, 2), ("dp", "tp"), rank=3).get_coordinate()
        (1, 1)
    """
    sizes = read_shape(shape)
    if rank < 0:
        raise MeshError(f"rank {rank} of an abstract mesh of {prod(sizes)} ranks")
    axis_names = read_names(names, len(sizes))
    choices = (BackendChoice(),) * len(sizes)
    parts = Parts(read_device_type(device_type), Layout.dense(sizes), axis_names, choices, abstract_rank=rank)
    return DeviceMesh._of(parts)


def safe_globals() -> list[Any]:
    """What a pickled mesh is made of, for `torch.load(..., weights_only=True)`.

    Example:
        >>> import torch
        >>> with torch.serialization.safe_globals(safe_globals()):
        ...     pass
    """
    return [rebuild_mesh, Parts, Layout, BackendChoice]
