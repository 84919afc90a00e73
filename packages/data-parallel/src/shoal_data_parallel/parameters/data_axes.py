"""The axes of data parallelism, and the layouts that they give to parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch.distributed as dist

from shoal_dtensor import Placement, Replicate, Shard
from shoal_dtensor.errors import LayoutError
from shoal_mesh import Comm, DeviceMesh


@dataclass(frozen=True, slots=True, eq=False)
class DataAxes:
    """The axes of data parallelism."""

    mesh: DeviceMesh  # the mesh of these axes alone
    # this many of the last axes shard parameters; the other axes hold replicas
    num_sharding_axes: int = 1
    # the names that these axes have in a mesh on which parameters are DTensors (`dp_mesh_dims`),
    # and this mesh
    names: tuple[str, ...] = ()
    spmd_mesh: DeviceMesh | None = None
    # whether the axis of replicas shards the leaves too: each replica then updates a part of the
    # shards that all replicas have
    shards_over_replicas: bool = False

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
    def axes_of_leaves(self) -> tuple[int, ...]:
        """The axes that shard the leaves, outermost first.

        If replicas divide the optimizer's work, the axis of replicas is the innermost one, so that
        the leaf is a part of the shard that all replicas have.
        """
        replicas = self.mesh.ndim - self.num_sharding_axes
        sharding = tuple(range(replicas, self.mesh.ndim))
        return (*sharding, *range(replicas)) if self.shards_over_replicas else sharding

    @property
    def ranks_of_leaves(self) -> int:
        """The number of different shards of a leaf."""
        return prod(self.mesh.shape[axis] for axis in self.axes_of_leaves)

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

    def shared_by_replicas(self) -> DataAxes:
        """Return axes over which leaves are also sharded over the replicas, if there are some."""
        return replace(self, shards_over_replicas=self.has_replicas)

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
        """Return one placement per data axis of a leaf that `shard` shards."""
        if self.shards_over_replicas and isinstance(shard, Shard):
            return self._placements_over_both(shard)
        return [
            *[Replicate()] * (self.mesh.ndim - self.num_sharding_axes),
            *[shard] * self.num_sharding_axes,
        ]

    def _placements_over_both(self, shard: Shard) -> list[Placement]:
        """Return the placements over the axis of replicas and the axis of shards.

        With 2 replicas and 3 shards, `sizes` may have 3 entries, whose rows the replicas divide
        evenly, or 6 entries: those of both replicas of shard 0, then those of shard 1, and so on.
        """
        if shard.sizes is not None and len(shard.sizes) == self.mesh.shape[1]:
            return [Shard(shard.dim), shard]
        return [shard, self.placement_of_shards(shard)]

    def placement_of_shards(self, shard: Shard) -> Shard:
        """Return the placement over the axis of shards of the shard that all replicas have."""
        replicas, shards = self.mesh.shape
        if shard.sizes is None or len(shard.sizes) == shards:
            return shard
        if len(shard.sizes) != replicas * shards:
            raise LayoutError(
                f"shard_placement_fn: {shard!r} must have a size for each of the {shards} shards, "
                f"or, with shard_optimizer, for each of {replicas * shards} ranks, got "
                f"{len(shard.sizes)} sizes"
            )
        starts = range(0, replicas * shards, replicas)
        sums = [sum(shard.sizes[start : start + replicas]) for start in starts]
        return Shard(shard.dim, sizes=sums)
