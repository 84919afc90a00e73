"""What downstream code reads of torch's `DTensorSpec`, derived from a `Spec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from shoal_mesh import DeviceMesh

if TYPE_CHECKING:
    from .placements import Placement
    from .strided_dim import AnyDimSharding


class SpecNames:
    """Properties of a spec under torch's names.

    Attributes:
        dim_map: for each tensor dim the mesh axis that shards it first, -1 where none does.
        num_shards_map: for each tensor dim into how many parts it is divided.
        num_shards: number of different parts of the tensor.
        sums: mesh axes over which the values are still to be reduced.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        mesh: DeviceMesh
        placements: tuple[Placement, ...]
        dim_shardings: tuple[AnyDimSharding, ...]
        partials: tuple[tuple[int, str], ...]
        replicated: bool

    @property
    def dim_map(self) -> list[int]:
        return [sharding.axes[0] if sharding.axes else -1 for sharding in self.dim_shardings]

    @property
    def num_shards_map(self) -> list[int]:
        return [prod(self.mesh.shape[axis] for axis in sharding.axes) for sharding in self.dim_shardings]

    @property
    def num_shards(self) -> int:
        return prod(self.num_shards_map)

    @property
    def sums(self) -> list[int]:
        return [axis for axis, _ in self.partials]

    def is_replicated(self) -> bool:
        """Whether every rank of the mesh holds all of the tensor."""
        return self.replicated

    def is_sharded(self) -> bool:
        """Whether some mesh axis shards the tensor."""
        return any(sharding.axes for sharding in self.dim_shardings)

    def shallow_copy_with_tensor_meta(self, tensor_meta: Any) -> Any:
        """The same layout of a tensor of another shape, stride and dtype."""
        shape, stride, dtype = tensor_meta
        return self.with_(shape=shape, stride=stride, dtype=dtype)  # type: ignore[attr-defined]  # a Spec has it

    @classmethod
    def from_dim_map(cls, mesh: DeviceMesh, dim_map: Sequence[int], sums: Sequence[int], tensor_meta: Any) -> Any:
        """The spec whose tensor dims are sharded by these mesh axes (-1: by none), partial sums over `sums`."""
        from .placements import Partial, Replicate, Shard

        of: Mapping[int, Placement] = {axis: Shard(dim) for dim, axis in enumerate(dim_map) if axis >= 0}
        placements = [Partial() if axis in sums else of.get(axis, Replicate()) for axis in range(mesh.ndim)]
        shape, stride, dtype = tensor_meta
        return cls(mesh, placements, shape, stride, dtype)  # type: ignore[call-arg]  # the arguments of Spec
