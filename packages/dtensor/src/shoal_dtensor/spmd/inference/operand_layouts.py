"""Layouts of the global tensors behind local operands, and types of layouts.

`spec_of_operand` makes a `Spec` on an abstract mesh of a local operand and its type;
`types_of_spec` reads the types back from a `Spec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from shoal_mesh import DeviceMesh, abstract_mesh

from ...layout.dim_sharding import StridedDimSharding
from ...layout.placements import Placement, Replicate
from ...layout.spec import Spec
from ...layout.tensor_meta import map_instances
from ..types.axis_types import (
    SHARDS,
    AnyAxisType,
    FoldedShard,
    I,
    R,
    Shard,
    V,
    pending,
    placement_of,
)
from ..types.mesh_axes import MeshAxis
from ..types.tensor_types import TensorType
from .operator_call import LocalOperatorCall, Operand


@lru_cache(maxsize=256)
def mesh_over(axes: tuple[MeshAxis, ...]) -> DeviceMesh:
    """Return an abstract mesh with these axes, as its last rank sees it.

    The last rank differs from rank 0 in everything that rules do on one rank only.
    """
    sizes = [axis.size() for axis in axes]
    names = [f"{index}:{axis!r}" for index, axis in enumerate(axes)]
    return abstract_mesh(sizes, names, rank=prod(sizes) - 1)


def spec_of_operand(operand: Operand, axes: tuple[MeshAxis, ...]) -> Spec:
    """Return the layout of the global tensor behind a local operand.

    Args:
        operand: an operand whose type is R, I, P or S(i) on each of the axes.
        axes: the mesh axes.
    """
    # A stride only decides whether a view is possible, and the view was possible for the local
    # tensors.
    declared = operand.tensor_type or TensorType({})
    meta = operand.meta
    return spec_of_type(declared, mesh_over(axes), axes, meta.shape, dtype=meta.dtype)


def spec_of_type(
    tensor_type: TensorType,
    mesh: DeviceMesh,
    axes: Sequence[MeshAxis],
    local_shape: Sequence[int],
    *,
    dtype: torch.dtype,
) -> Spec:
    """Return the contiguous layout of the global tensor of which ranks have parts of a type.

    Args:
        tensor_type: the type of a rank's part: R, I, P or S(i) on each of the axes. On an axis that
            the type lacks the part is R.
        mesh: the mesh of the layout.
        axes: its axes, in order.
        local_shape: the shape of a part; all ranks have equal ones.
        dtype: the dtype.
    """
    shape = [*local_shape]
    placements: list[Placement] = []
    folded: dict[int, Placement] = {}
    for index, axis in enumerate(axes):
        axis_type = tensor_type.by_axis.get(axis, R)
        if isinstance(axis_type, SHARDS):
            shape[axis_type.dim] *= axis.size()
        if isinstance(axis_type, FoldedShard):
            folded[index] = axis_type.placement
            placements.append(Replicate())
        else:
            placements.append(placement_of(axis_type) or Replicate())
    order = []
    for dim, sharding in tensor_type.dims.items():
        indices = tuple([axes.index(axis) for axis in sharding if axis in axes])
        if indices:
            order.append((dim, indices))
    spec = Spec(mesh, placements, shape, None, dtype=dtype, shard_order=tuple(order))
    if not folded:
        return spec
    # The placements of a spec alone determine its layout.
    combined = [folded.get(index, placement) for index, placement in enumerate(spec.placements)]
    return Spec(mesh, combined, shape, None, dtype=dtype)


def types_of_spec(
    spec: Spec, axes: Sequence[MeshAxis]
) -> tuple[dict[MeshAxis, AnyAxisType], dict[int, tuple[MeshAxis, ...]]]:
    """Return the types of a layout by axis, and the axes of its sharded dims, outermost first."""
    pendings = dict(spec.partials)
    dim_of = {index: dim for dim, sharding in spec.shard_order for index in sharding}
    found: dict[MeshAxis, AnyAxisType] = {}
    for index, axis in enumerate(axes):
        dim = dim_of.get(index)
        if dim is not None and isinstance(spec.dim_shardings[dim], StridedDimSharding):
            found[axis] = FoldedShard(spec.placements[index], dim)
        elif dim is not None:
            found[axis] = Shard(dim)
        elif index in pendings:
            found[axis] = pending(pendings[index])
        else:
            found[axis] = R
    order: dict[int, tuple[MeshAxis, ...]] = {}
    for dim, sharding in spec.shard_order:
        if not isinstance(spec.dim_shardings[dim], StridedDimSharding):
            order[dim] = tuple(map(axes.__getitem__, sharding))
    return found, order


def count_runs(specs: Sequence[Spec]) -> int:
    """Return the number of axes whose shards are several runs of a dim."""
    count = 0
    for spec in specs:
        for dim, axes in spec.shard_order:
            if isinstance(spec.dim_shardings[dim], StridedDimSharding):
                count += len(axes)
    return count


class Leading(NamedTuple):
    """The axes that shard the leading dims of an operand of a function on batches.

    Attributes:
        dims: for each leading dim the axes that shard it, outermost first.
        kept: the number of last dims that the function does not merge with others.
    """

    dims: tuple[tuple[MeshAxis, ...], ...]
    kept: int = 0

    def agrees(self, specs: Sequence[Spec], axes: Sequence[MeshAxis]) -> bool:
        """Tell whether layouts over `axes` shard their leading dims in this way."""
        for spec in specs:
            _, order = types_of_spec(spec, axes)
            for dim, sharding in enumerate(self.dims[: spec.ndim]):
                if order.get(dim, ()) != tuple([axis for axis in sharding if axis in axes]):
                    return False
        return True


def with_expanded_shards(
    call: LocalOperatorCall, axes: tuple[MeshAxis, ...]
) -> LocalOperatorCall | None:
    """Return the call with expanded R operands as shards; None if there are none.

    A program expands a tensor to the local size of a shard: (2, 1, 6, 8) of type R to (2, 4, 6, 8)
    beside 4 of 8 heads, S(1). All its elements along that dim are equal, so it is also the shard of
    the tensor that one process expands to 8 heads. Its gradient is partial either way.
    """
    replaced: dict[Operand, Operand] = {}
    for axis in axes:
        shards = {operand.on(axis) for operand in call.operands}
        for kind in shards:
            if not isinstance(kind, Shard):
                continue
            for operand in call.operands:
                present = replaced.get(operand, operand)
                if operand.on(axis) is R and present.is_expanded_along(kind.dim):
                    replaced[operand] = present.with_type_on(axis, kind)
    if not replaced:
        return None
    args, kwargs = map_instances(
        (call.args, {**call.kwargs}), Operand, lambda operand: replaced.get(operand, operand)
    )
    operands = tuple([replaced.get(operand, operand) for operand in call.operands])
    return call._replace(args=args, kwargs=kwargs, operands=operands)


def type_of_memory(call: LocalOperatorCall) -> TensorType:
    """Return the type of memory without values: that of the operand where its size is the same.

    What is written to it must have this type. Elsewhere it is R.
    """
    (operand,) = call.operands
    assert operand.tensor_type is not None, "a call on types"
    shape = call.outputs[0].shape
    found = operand.tensor_type
    for axis, axis_type in operand.tensor_type.by_axis.items():
        if axis_type in (R, I, V):
            continue
        if not isinstance(axis_type, Shard):
            # memory holds no addends yet
            found = found.with_axis(axis, R)
            continue
        dim = axis_type.dim
        keeps_size = dim < len(shape) and shape[dim] == operand.meta.shape[dim]
        if not keeps_size:
            found = found.with_axis(axis, R)
    return found
