"""Layouts of plain local tensors: the global tensor, and the shard of it that a rank holds.

A layout is an attribute of the tensor object. It lives as long as the object, and costs nothing
without a watch. Views and results of functions are other objects: a watch infers their layouts
(`layout_inference`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from .._torch.compiling import is_compiling
from .._torch.tensors import TensorNote
from ..layout.dim_sharding import StridedDimSharding
from ..layout.memory_order import dense_stride, dims_by_stride
from ..layout.placements import Shard, StridedShard
from ..layout.spec import Spec

_ATTRIBUTE = "_shoal_layout"
AnyShard = Shard | StridedShard

WAY_OUT = (
    "Assert its type where the layout is not known any more, "
    "shoal_spmd_types.assert_type(x, {axis: S(dim)}), draw where the layout is known (before the "
    "function), let the module run on DTensors (use_local_output=False), or let every rank draw "
    "different numbers: shoal_dtensor.random_mode('local')"
)
"""The last sentence of errors that refuse a draw because a layout is unknown."""


class UnknownLayoutError(Exception):
    """The error for shards that do not determine the layout of a result, with the reason."""


@dataclass(frozen=True, slots=True)
class LocalLayout(TensorNote):
    """The known layout of a local tensor.

    Examples on 2 ranks, of tensors of shape (4, 3) on each rank:

    - `LocalLayout(Spec(mesh, [Shard(0)], (8, 3)))`: rows of a tensor of shape (8, 3);
    - `LocalLayout(Spec(mesh, [Replicate()], (4, 3)), has_equal_draws=True)`: random numbers that
      every rank has drawn;
    - `LocalLayout(unknown_reason="select: it takes a part of a sharded dim")`;
    - `UNSEEN` and `UNSHARDED`: any other tensor, which counts as equal on all ranks.

    In terms of the types of plain tensors (`spmd.types.axis_types`), a dim that `spec` shards is
    S(i) with the sizes of all shards, equal draws are R, a fused output has `Parts`, and a tensor
    of unknown layout is V.
    """

    # the spec of the global tensor; None if it is unknown, or if the tensor is not known to be
    # sharded
    spec: Spec | None = None
    # why the layout is unknown; empty otherwise
    unknown_reason: str = ""
    # whether the tensor holds random numbers that are equal on all ranks along the axes on which
    # `spec` is replicated
    has_equal_draws: bool = False
    # for a fused output, the specs of its blocks, which follow each other along the last dim
    block_specs: tuple[Spec, ...] = ()

    @property
    def counts_as_equal(self) -> bool:
        """True if nothing is known about the tensor: it counts as equal on all ranks."""
        return self.spec is None and not self.unknown_reason


UNSEEN = LocalLayout()
"""The layout of tensors that no watched function has returned. It is compared by identity."""
UNSHARDED = LocalLayout()
"""The layout of tensors that a watched function has returned and that are not sharded."""


def known_layout(tensor: Tensor) -> LocalLayout:
    """Return the known layout of a tensor.

    For a DTensor on some of the axes, it is the layout of its local shard on all axes.
    """
    # The attribute is empty in copies of a tensor (`TensorNote`).
    layout: LocalLayout = getattr(tensor, _ATTRIBUTE, None) or UNSEEN
    spec = layout.spec
    # The shape of a DTensor is global on its own axes.
    if spec is None or spec.local_shape == tensor.shape or hasattr(tensor, "device_mesh"):
        return layout
    return LocalLayout(unknown_reason="its shape was changed in place")


def known_spec(value: Any) -> Spec | None:
    """Return the spec of the global tensor that a local tensor is a shard of; None if unknown."""
    return known_layout(value).spec if isinstance(value, Tensor) else None


def note_layout(tensor: Tensor, layout: LocalLayout) -> None:
    """Attach a layout to a tensor."""
    setattr(tensor, _ATTRIBUTE, layout)


# --- placements with the sizes of all shards ------------------------------------------------------


@lru_cache(maxsize=1024)
def shard_sizes_along(spec: Spec, axis: int) -> tuple[int, ...]:
    """Return the size on each rank of an axis of the dim that the axis shards."""
    dim = getattr(spec.placements[axis], "dim", None)
    assert dim is not None, "the axis shards a dim"
    # Example: for the rank at (1, 0), the ranks along axis 1 are at (1, 0) and (1, 1). A rank
    # outside of the mesh does not have a coordinate, and takes the ranks at 0 of the other axes.
    coordinate = list(spec.coordinate or (0,) * spec.mesh.ndim)
    sizes = []
    for position in range(spec.mesh.size(axis)):
        coordinate[axis] = position
        sizes.append(spec.dim_shardings[dim].size(coordinate))
    return tuple(sizes)


def sized_placement(spec: Spec, axis: int) -> AnyShard | None:
    """Return an axis' placement with the sizes of all its shards; None if it does not shard."""
    placement = spec.placements[axis]
    if not isinstance(placement, AnyShard):
        return None
    sharding = spec.dim_shardings[placement.dim]
    is_even_strided = isinstance(placement, StridedShard) and sharding.even
    # Runs of a strided dim cannot be described by one size for each rank.
    if is_even_strided or isinstance(sharding, StridedDimSharding):
        return placement
    return Shard(placement.dim, sizes=shard_sizes_along(spec, axis))


# --- the order of dims in memory ------------------------------------------------------------------


def global_stride(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of a dense global tensor with the local tensor's memory order.

    A transposed local tensor of shape (4, 5) and stride (1, 4) is a shard of a global tensor of
    shape (8, 5) and stride (1, 8).
    """
    return dense_stride(shape, _memory_order(local))


def with_memory_order_of(reference: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with the memory order of dims of `reference`.

    Random functions fill a tensor in the order of memory, so both tensors are filled alike.
    """
    order = _memory_order(reference)
    if order == _memory_order(tensor):
        return tensor
    memory = tensor.new_empty([tensor.shape[dim] for dim in order])
    position = [order.index(dim) for dim in range(tensor.ndim)]
    return memory.permute(position).copy_(tensor)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims by descending stride; of equal strides, a dim of size 1 is the inner one."""
    # Strides may be symbols, which cannot be sorted. Compiled code is not watched, so any order is
    # right.
    if is_compiling():
        return tuple(range(tensor.ndim))
    return dims_by_stride(tensor.stride(), tensor.shape)
