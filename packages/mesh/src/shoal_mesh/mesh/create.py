"""Creation of a mesh from its shape, with or without ranks, and torch's `_mesh_resources`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ..accelerator import own_device
from ..argument_types import FUNCTION, require, require_each, suggests_keywords
from ..errors import MeshError, NoGroupError
from ..groups.process_groups import BackendChoice, Comm
from ..groups.world import check_agreement, ensure_world
from .device_mesh import DeviceMesh, current_mesh, rebuild_mesh
from .rank_layout import (
    BackendOverride,
    Layout,
    MeshFields,
    check_fits,
    read_backends,
    read_device,
    read_names,
    read_shape,
)
from .rank_order import RankOrder, measured_costs, order_by_costs


@suggests_keywords()
def init_device_mesh(  # noqa: PLR0913  # torch's arguments, and three independent options
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: BackendOverride | None = None,
    validate: bool = True,
    lazy: bool = False,
    order: str = "rank",
) -> DeviceMesh:
    """Create the row-major mesh over the first ranks of the world.

    All ranks call it with the same arguments. If there is no default process group, it is
    initialized from the environment (torchrun).

    Args:
        device_type: `cpu`, `cuda`, ...: without an index.
        mesh_shape: number of ranks along each axis.
        mesh_dim_names: one distinct name per axis.
        backend_override: per axis (name or index) a backend, its options, or both as a pair.
        validate: compare the arguments of all ranks in one all-gather of 16 bytes, before any group
            is created.
        lazy: create the group of an axis at its first use instead of now.
        order: "rank", or "topology". For "topology" the links between all ranks are measured. The
            ranks with the fastest links, such as the ranks of one host, are placed along the last
            axis, the next fastest along the axis before it (`measured_order` returns the gain).
            Ranks stay in order unless another order is clearly better.

    Returns:
        The mesh, with a process group along every axis.

    Raises:
        MeshTypeError: an argument of a wrong type.
        MeshError: shape, names or device type describe no mesh, or the world is too small.
        MeshMismatchError: ranks passed different arguments; raised on all of them.

    Example:
        >>> def example() -> tuple[int, ...] | None:
        ...     mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        ...     return mesh.get_coordinate()
        >>> launch(example, 2)
        [(0, 0), (0, 1)]
    """
    require_each((validate, lazy), bool, "validate and lazy are bool")
    require(order, str, "the order of ranks is 'rank' or 'topology'")
    if order not in {"rank", "topology"}:
        raise MeshError(f"order must be 'rank' or 'topology', got {order!r}")
    device_type = read_device(device_type)
    shape = read_shape(mesh_shape)
    names = read_names(mesh_dim_names, len(shape))
    choices = read_backends(backend_override, names, len(shape))
    world = ensure_world(device_type)
    if validate:
        kinds = [choice.key for choice in choices]
        check_agreement(
            f"{device_type} mesh of shape {shape}, names {names}, backends {kinds}, lazy {lazy}, "
            f"order {order}"
        )
    check_fits(shape, world.size())
    layout = Layout.dense(shape)
    if order == "topology":
        layout = Layout.of(shape, measured_order(shape, device_type).ranks)
    mesh = DeviceMesh._of(MeshFields(device_type, layout, names, choices))
    if not lazy:
        mesh._create_groups()
    return mesh


def measured_order(mesh_shape: Sequence[int], device_type: str = "cpu") -> RankOrder:
    """Return the order that `init_device_mesh(..., order="topology")` would choose.

    All ranks call it. The result has the costs in rank order and in the new order.

    Raises:
        MeshTypeError: an argument of a wrong type.
        MeshError: the shape is not valid, or the world is too small.

    Example:
        >>> launch(lambda: measured_order((2,)).ranks, 2)[0]
        (0, 1)
    """
    device_name = read_device(device_type)
    shape = read_shape(mesh_shape)
    world = ensure_world(device_name)
    check_fits(shape, world.size())
    return order_by_costs(shape, measured_costs(world, own_device(device_name)))


@suggests_keywords()
def abstract_mesh(
    shape: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    rank: int = 0,
    device_type: str = "cpu",
    connect: Callable[[tuple[int, ...]], Comm] | None = None,
) -> DeviceMesh:
    """Create a mesh as one rank sees it, without process groups: for planning and simulation.

    Args:
        shape: number of ranks along each axis.
        names: one distinct name per axis.
        rank: the rank whose view the mesh is; a rank that is not in the mesh has no coordinate.
        device_type: `cpu`, `cuda`, ...: without an index.
        connect: a function for simulated ranks that communicate. Given the global ranks of a group,
            it returns the communicator of this rank among them; it is called once for each group.
            Meshes with different functions are not equal.

    Raises:
        MeshTypeError: an argument of a wrong type.
        MeshError: shape, names or device type describe no mesh, or the rank is negative.

    Example:
        >>> abstract_mesh((2, 2), ("dp", "tp"), rank=3).get_coordinate()
        (1, 1)
    """
    sizes = read_shape(shape)
    require(rank, int, "the rank of an abstract mesh is an int")
    allowed = "connect is a function of ranks"
    require(connect, FUNCTION | None, allowed)
    if rank < 0:
        raise MeshError(f"rank {rank} of an abstract mesh of {prod(sizes)} ranks")
    axis_names = read_names(names, len(sizes))
    fields = MeshFields(
        device_type=read_device(device_type),
        layout=Layout.dense(sizes),
        names=axis_names,
        choices=(BackendChoice(),) * len(sizes),
        abstract_rank=rank,
        connect=connect,
    )
    return DeviceMesh._of(fields)


def safe_globals() -> list[Any]:
    """Return the classes and functions in a pickled mesh, for `torch.load(weights_only=True)`.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> torch.save(abstract_mesh((2, 2)), file)
        >>> with torch.serialization.safe_globals(safe_globals()):
        ...     torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        DeviceMesh((2, 2), 'cpu', ranks 0-3, abstract)
    """
    return [rebuild_mesh, MeshFields, Layout, range, BackendChoice]


# lower case, because in torch it is an instance
class _mesh_resources:
    """A name that programs import from torch.

    Its methods return the enclosing mesh, the root of a mesh, and the numbers of devices and hosts.
    """

    @staticmethod
    def get_current_mesh() -> DeviceMesh:
        mesh = current_mesh()
        if mesh is None:
            raise NoGroupError("no device mesh is current: enter one with `with mesh:`")
        return mesh

    get_root_mesh = staticmethod(DeviceMesh._get_root_mesh)

    @staticmethod
    def num_devices_per_host(device_type: str) -> int:
        """Return the number of devices on this host.

        For the CPU it is the number of ranks that the launcher started here.
        """
        if device_type == "cpu":
            return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return int(torch.get_device_module(device_type).device_count())

    @classmethod
    def num_hosts(cls, device_type: str) -> int:
        per_host = max(1, cls.num_devices_per_host(device_type))
        return max(1, dist.get_world_size() // per_host)
