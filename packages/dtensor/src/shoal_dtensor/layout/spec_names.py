"""What a `Spec` is called: by torch's names, and in one line of text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from shoal_mesh import DeviceMesh

from .placements import Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from .strided_dim import AnyDimSharding


class SpecNames:
    """What downstream code reads of torch's `DTensorSpec`, derived from a `Spec`; and its text.

    Attributes:
        dim_map: for each tensor dim the mesh axis that shards it first, -1 where none does.
        num_shards_map: for each tensor dim into how many parts it is divided.
        num_shards: number of different parts of the tensor.
        sums: mesh axes over which the values are still to be reduced.
    """

    __slots__ = ()

    mesh: DeviceMesh
    shape: torch.Size
    dtype: torch.dtype
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
        placements: list[Placement] = [Partial() if axis in sums else Replicate() for axis in range(mesh.ndim)]
        for dim, axis in enumerate(dim_map):
            if axis >= 0 and axis not in sums:
                placements[axis] = Shard(dim)
        shape, stride, dtype = tensor_meta
        return cls(mesh, placements, shape, stride, dtype)  # type: ignore[call-arg]  # the arguments of Spec

    def __repr__(self) -> str:
        """One line: dtype, sizes with the mesh axes that shard them, and what is still to be reduced.

        Example:
            >>> from shoal_mesh import abstract_mesh
            >>> from shoal_dtensor import Spec
            >>> Spec(abstract_mesh((2, 2), ("dp", "tp")), (Shard(0), Partial()), (5, 4), dtype=torch.bfloat16)
            Spec(bf16[5@(dp)=[3, 2], 4], partial sum over tp on (dp=2, tp=2))
        """
        names = self.mesh.axis_names
        dims = [
            f"{n}@({','.join(names[a] for a in sharding.axes)}){_sizes(sharding)}" if sharding.axes else str(n)
            for n, sharding in zip(self.shape, self.dim_shardings, strict=True)
        ]
        partial = "".join(f", partial {op} over {names[axis]}" for axis, op in self.partials)
        mesh = ", ".join(f"{name}={size}" for name, size in zip(names, self.mesh.shape, strict=True))
        return f"Spec({_short(self.dtype)}[{', '.join(dims)}]{partial} on ({mesh}))"


def _sizes(sharding: Any) -> str:
    """How a sharding differs from an even one."""
    if hasattr(sharding, "levels"):  # a StridedDimSharding
        return f" strided of {list(sharding.shape)}"
    if sharding.even:
        return ""
    if sharding.ragged is None and sharding.shards > 16:  # all is said by the first, and there may be thousands
        return f"=[{sharding.step}, ...]"
    return f"={list(sharding.sizes)}"


def _short(dtype: torch.dtype) -> str:
    """bfloat16 -> bf16, float32 -> f32, uint8 -> u8, bool -> bool."""
    return re.sub(r"^(bf|f|u|i|c)[a-z]+", r"\1", str(dtype).removeprefix("torch."))
