"""The axes of data parallelism, and the layouts that they give to parameters.

A leaf is the parameter that the optimizer gets: a shard of a model's parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch.distributed as dist

from shoal_dtensor import Placement, Replicate, Shard
from shoal_dtensor.errors import LayoutError
from shoal_mesh import Comm, DeviceMesh
from shoal_mesh.internal import OldAttribute


@dataclass(frozen=True, slots=True, eq=False)
class DataAxes:
    """The axes of data parallelism."""

    # the mesh of these axes alone
    mesh: DeviceMesh
    # this many of the last axes shard parameters; the other axes hold replicas
    num_sharding_axes: int = 1
    # the names of these axes in `spmd_mesh` (`dp_mesh_dims`)
    names: tuple[str, ...] = ()
    # the mesh on which parameters are DTensors, if these axes are axes of it
    spmd_mesh: DeviceMesh | None = None
    # Whether the axis of replicas shards the leaves too. Example: 2 replicas have a shard of 4 rows
    # each, the same 4 rows. The optimizer of each replica then updates a leaf of 2 of these rows.
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
    def num_shards(self) -> int:
        """The number of shards of a parameter, not counting replicas."""
        return prod(self.mesh.shape[self.mesh.ndim - self.num_sharding_axes :])

    ranks_of_shards = OldAttribute("num_shards")

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
    def num_leaf_shards(self) -> int:
        """The number of parts into which leaves divide a parameter."""
        return prod(self.mesh.shape[axis] for axis in self.axes_of_leaves)

    @property
    def has_replicas(self) -> bool:
        """True if parameters are replicated over some axes, and sharded over others."""
        return self.num_sharding_axes < self.mesh.ndim

    @property
    def sharding_group(self) -> dist.ProcessGroup:
        """The process group of the last axis, for collectives of the user.

        `fully_shard` makes one axis of all axes that shard, so the last axis is the only one.
        """
        return self.mesh.comm((self.mesh.ndim - 1,)).group

    @property
    def coordinates_of_group(self) -> list[int]:
        """The coordinates on the last axis, in the order of the ranks of its group."""
        comm = self.mesh.comm((self.mesh.ndim - 1,))
        if comm.order is None:
            return list(range(comm.size))
        # The inverse permutation. Example: the coordinates 0, 1 and 2 have the ranks 2, 0 and 1 in
        # the group -> the ranks 0, 1 and 2 of the group have the coordinates 1, 2 and 0.
        rank_in_group = comm.order
        return sorted(range(comm.size), key=lambda coordinate: rank_in_group[coordinate])

    def shared_by_replicas(self) -> DataAxes:
        """Return these axes with `shards_over_replicas` set, if there are replicas."""
        return replace(self, shards_over_replicas=self.has_replicas)

    def in_groups_of(self, ranks: int) -> DataAxes:
        """Return axes that shard over groups of this many neighbors, and replicate over the groups.

        With 8 shards and 2 neighbors there are 4 groups of 2 ranks, and each group has all of a
        parameter. The axes are for values that stay after a forward. Leaves need `names` and
        `spmd_mesh`, such values do not, so these are left out.
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
        """Return the placements over the axis of replicas and the axis of shards, in this order.

        The axis of replicas is the innermost one: it divides the shards. Examples with 2 replicas,
        3 shards and 10 rows:

        | sizes            | replicas                      | shards           | leaves             |
        | ---------------- | ----------------------------- | ---------------- | ------------------ |
        | 4 4 2            | Shard(0)                      | sizes 4 4 2      | 2 2, 2 2, 1 1      |
        | 3 1 2 2 1 1      | sizes 3 1 2 2 1 1             | sizes 4 4 2      | 3 1, 2 2, 1 1      |
        | None             | Shard(0)                      | Shard(0)         | 2 2, 2 2, 1 1      |
        """
        _, shards = self.mesh.shape
        if shard.sizes is not None and len(shard.sizes) == shards:
            return [Shard(shard.dim), shard]
        return [shard, self.placement_of_shards(shard)]

    def placement_of_shards(self, shard: Shard) -> Shard:
        """Return the placement over the axis of shards, before replicas divide the shards.

        Example: 2 replicas and 3 shards with sizes 3 1 2 2 1 1 -> sizes 4 4 2.
        """
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
        # the sizes of one shard's leaves are next to each other
        sums = [sum(shard.sizes[start : start + replicas]) for start in starts]
        return Shard(shard.dim, sizes=sums)
