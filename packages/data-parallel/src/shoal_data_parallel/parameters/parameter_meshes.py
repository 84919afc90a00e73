"""A mesh per parameter: the data axes and the placement that `shard_placement_fn` chooses.

One call of `fully_shard` makes one unit for each mesh. On 4 ranks, with dense parameters over all
of them, and two experts on two ranks each:

    parameter          mesh                   shards      gathered and reduced
    router, norm       data (4)               4           among 4 ranks
    experts            pair, sharded (2, 2)   2           among the 2 ranks that have the expert
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from shoal_dtensor import Shard
from shoal_dtensor.errors import LayoutError
from shoal_mesh import DeviceMesh

from .data_axes import DataAxes
from .policies import DataParallelMeshDims
from .sharded_parameters import Site


@dataclass(frozen=True, slots=True)
class FSDPMeshInfo:
    """The data axes in a mesh, for parameters whose data axes `shard_placement_fn` chooses.

    Attributes:
        mesh: the mesh with the axes.
        shard_mesh_dim: the index of the axis over which parameters are sharded.
        replicate_mesh_dim: the index of the axis over which parameters are replicated, if there is
            one.
        dp_mesh_dims: names of axes in `spmd_mesh`, in place of indices; as for `fully_shard`.
        spmd_mesh: the mesh on which parameters are DTensors; by default `mesh`.

    Raises:
        LayoutError: if there is no axis to shard over, or an index is not one of the mesh. (A
            ValueError too.)

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(8):
        ...     mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pair", "sharded"))
        ...     FSDPMeshInfo(mesh, shard_mesh_dim=1).axes.num_shards
        4
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.dp_mesh_dims is not None:
            return
        if self.shard_mesh_dim is None:
            raise LayoutError(
                f"{type(self).__name__}: pass shard_mesh_dim=, the index of the axis of "
                f"{self.mesh!r} to shard over"
            )
        for axis in (self.shard_mesh_dim, self.replicate_mesh_dim):
            if axis is not None and axis not in range(self.mesh.ndim):
                raise LayoutError(
                    f"{type(self).__name__}: {self.mesh!r} has axes 0 to {self.mesh.ndim - 1}, got "
                    f"{axis}"
                )
        if self.shard_mesh_dim == self.replicate_mesh_dim:
            raise LayoutError(
                f"{type(self).__name__}: axis {self.shard_mesh_dim} cannot both shard and replicate"
            )

    @property
    def is_spmd_mesh(self) -> bool:
        """True if `dp_mesh_dims` names the data axes."""
        return self.dp_mesh_dims is not None

    @property
    def axes(self) -> DataAxes:
        """The data axes."""
        if self.dp_mesh_dims is not None:
            return data_axes_of(self.spmd_mesh or self.mesh, self.dp_mesh_dims)
        assert self.shard_mesh_dim is not None, "checked when it was made"
        sharded = self._along(self.shard_mesh_dim)
        if self.replicate_mesh_dim is None:
            return DataAxes(sharded)
        return DataAxes(DeviceMesh.concatenate([self._along(self.replicate_mesh_dim), sharded]))

    def _along(self, axis: int) -> DeviceMesh:
        return self.mesh if self.mesh.ndim == 1 else self.mesh[axis]


@dataclass(frozen=True, slots=True)
class HSDPMeshInfo(FSDPMeshInfo):
    """The axes of shards and of replicas in a mesh; both are required.

    Attributes:
        mesh: the mesh with the axes.
        shard_mesh_dim: the index of the axis over which parameters are sharded.
        replicate_mesh_dim: the index of the axis over which parameters are replicated.
        dp_mesh_dims: names of axes in `spmd_mesh`, in place of indices; as for `fully_shard`.
        spmd_mesh: the mesh on which parameters are DTensors; by default `mesh`.

    Raises:
        LayoutError: if there is no axis of replicas. The error is also a ValueError.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(8):
        ...     mesh = init_device_mesh("cpu", (2, 4))
        ...     HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0).axes.has_replicas
        True
    """

    def __post_init__(self) -> None:
        FSDPMeshInfo.__post_init__(self)
        if self.dp_mesh_dims is None and self.replicate_mesh_dim is None:
            raise LayoutError(
                f"HSDPMeshInfo: pass replicate_mesh_dim=, the index of the axis of {self.mesh!r} "
                "to replicate over, or use FSDPMeshInfo, which does not need one"
            )


class ShardPlacementResult(NamedTuple):
    """The result of a `shard_placement_fn` that chooses the data axes of a parameter, too.

    Attributes:
        placement: the placement over the axes that shard; None for the first dim.
        mesh_info: the data axes.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "sharded"))
        ...     experts = FSDPMeshInfo(pairs["sharded"], shard_mesh_dim=0)
        ...     ShardPlacementResult(Shard(1), experts).placement
        Shard(dim=1)
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


PlacementFunction = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


class Assigned(NamedTuple):
    """The placement and the data axes of one parameter."""

    placement: Shard | None
    axes: DataAxes


class MeshAssignment:
    """The results of one call's `shard_placement_fn`, which is called once per parameter.

    A result is stored by the parameter's module and name, because styles that are applied later
    replace the parameter. The function is not called for a parameter of 0 dims, which stays
    replicated over the axes of the call.

    Args:
        choose: the function; None for the first dim and the axes of the call.
        axes: the data axes of the call.
        shard_optimizer: shard leaves over axes of replicas, too.
    """

    def __init__(
        self, choose: PlacementFunction | None, axes: DataAxes, *, shard_optimizer: bool = False
    ) -> None:
        self._choose = choose
        self._shard_optimizer = shard_optimizer
        axes = axes.shared_by_replicas() if shard_optimizer else axes
        self._axes = [axes]
        self._assigned: dict[Site, Assigned] = {}

    @property
    def axes(self) -> Sequence[DataAxes]:
        """The data axes of all parameters so far, without repetition; those of the call first."""
        return self._axes

    def of(self, param: nn.Parameter, sites: Iterable[Site]) -> Assigned:
        """Return the placement and the axes of a parameter that modules hold at these sites.

        Raises:
            LayoutError: if the function returns something else.
        """
        site = next(iter(sites))
        if site not in self._assigned:
            self._assigned[site] = self._ask(param)
        return self._assigned[site]

    def _ask(self, param: nn.Parameter) -> Assigned:
        answer = self._choose(param) if self._choose is not None and param.ndim else None
        if not isinstance(answer, ShardPlacementResult):
            return Assigned(answer, self._axes[0])
        if not isinstance(answer.mesh_info, FSDPMeshInfo):
            raise LayoutError(
                "shard_placement_fn: expected a shoal_data_parallel.FSDPMeshInfo as mesh_info, got "
                f"{type(answer.mesh_info).__name__}"
            )
        axes = answer.mesh_info.axes
        if self._shard_optimizer:
            axes = axes.shared_by_replicas()
        return Assigned(answer.placement, self._reuse_equal(axes))

    def _reuse_equal(self, wanted: DataAxes) -> DataAxes:
        """Return the object for these axes: an earlier parameter's if it is equal, or this one."""
        for axes in self._axes:
            if _identity(axes) == _identity(wanted):
                return axes
        self._axes.append(wanted)
        return wanted


def _identity(axes: DataAxes) -> tuple[object, ...]:
    """Return what is equal for equal axes."""
    return axes.mesh, axes.num_sharding_axes, axes.names, axes.spmd_mesh


def mesh_info(mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None) -> FSDPMeshInfo:
    """Return the data axes in a mesh, as `fully_shard` with the same two arguments takes them.

    Args:
        mesh: the mesh with the axes: one axis to shard over, or an axis of replicas before it.
        dp_mesh_dims: names of the data axes, if the mesh has other axes too.

    Raises:
        LayoutError: if the mesh has more than two axes, and none are named.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(8):
        ...     mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("hosts", "data"))
        ...     info = mesh_info(mesh)
        ...     info.axes.num_shards, info.replicate_mesh_dim
        (4, 0)
    """
    if dp_mesh_dims is not None:
        return FSDPMeshInfo(mesh, dp_mesh_dims=dp_mesh_dims, spmd_mesh=mesh)
    if mesh.ndim > 2:
        raise LayoutError(
            f"mesh_info: expected one or two data axes, got {mesh!r}; pass them as mesh['data'], "
            "or name them in dp_mesh_dims"
        )
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def data_axes_of(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataAxes:
    """Return the data axes that are named in a mesh.

    Several axes to shard over act as one, and so do several axes of replicas.

    Raises:
        LayoutError: if the mesh has no such axes.
    """
    names = (*dims.replicate_names, *dims.shard_names)
    missing = [name for name in names if name not in (mesh.mesh_dim_names or ())]
    if missing:
        raise LayoutError(
            f"dp_mesh_dims: {mesh!r} has no axes {missing}; expected names of {mesh.mesh_dim_names}"
        )
    parts = []
    for group in (dims.replicate_names, dims.shard_names):
        if group:
            submesh = mesh[group]
            parts.append(submesh if len(group) == 1 else submesh.flatten())
    joined = parts[0] if len(parts) == 1 else DeviceMesh.concatenate(parts)
    return DataAxes(
        joined, num_sharding_axes=1 if dims.shard_names else 0, names=names, spmd_mesh=mesh
    )
