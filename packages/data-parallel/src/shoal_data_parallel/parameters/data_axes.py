"""The axes of data parallelism, and the layouts that they give to parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch.distributed as dist

from shoal_dtensor import Placement, Replicate
from shoal_dtensor.errors import LayoutError
from shoal_mesh import Comm, DeviceMesh


@dataclass(frozen=True, slots=True, eq=False)
class DataAxes:
    """The axes of data parallelism."""

    mesh: DeviceMesh  # the mesh of these axes alone
    # this many of the last axes shard parameters; the other axes hold replicas
    num_sharding_axes: int = 1
    # the names that these axes have in a mesh on which parameters are DTensors (`dp_mesh_dims`)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            raise LayoutError(
                "expected a shoal_mesh.DeviceMesh of the data axes, got "
                f"{type(self.mesh).__name__}; shoal_dtensor.interop converts torch's"
            )

    @property
    def comm(self) -> Comm:
        return self.mesh.comm(tuple(range(self.mesh.ndim)))

    @property
    def ranks_of_shards(self) -> int:
        return prod(self.mesh.shape[self.mesh.ndim - self.num_sharding_axes :])

    @property
    def has_replicas(self) -> bool:
        """True if parameters are replicated over some axes, and sharded over others."""
        return self.num_sharding_axes < self.mesh.ndim

    @property
    def sharding_group(self) -> dist.ProcessGroup:
        """The process group of the last axis."""
        return self.mesh.comm((self.mesh.ndim - 1,)).group

    @property
    def coordinates_of_group(self) -> list[int]:
        """The coordinates on the last axis, in the order of the ranks of its group."""
        comm = self.mesh.comm((self.mesh.ndim - 1,))
        order = range(comm.size) if comm.order is None else comm.order
        return sorted(range(comm.size), key=order.__getitem__)

    def inside(self, ranks: int) -> DataAxes:
        """Return axes that shard over groups of this many neighbors, and replicate over the groups.

        With 8 shards and 2 neighbors there are 4 groups of 2 ranks, and each group has all of a
        parameter.
        """
        axis = self.mesh.ndim - 1
        groups = self.mesh.shape[axis] // ranks
        names = None
        if self.mesh.mesh_dim_names is not None:
            name = self.mesh.mesh_dim_names[axis]
            names = (f"{name}_groups", f"{name}_in_group")
        return DataAxes(self.mesh.unflatten(axis, (groups, ranks), names))

    def placements(self, shard: Placement) -> list[Placement]:
        """Return one placement per data axis of a parameter that `shard` shards."""
        return [
            *[Replicate()] * (self.mesh.ndim - self.num_sharding_axes),
            *[shard] * self.num_sharding_axes,
        ]
