"""Functions on shapes and placements under torch's names.

Only `compute_global_tensor_shape` communicates. Its docstring begins with `V -> check`: the shapes
may differ by rank (V, varying), and the ranks check that they fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal_mesh import DeviceMesh, all_gather

from ..errors import ArgumentValueError, PlacementError
from .placements import Placement
from .spec import Spec
from .tensor_meta import TensorMeta

# Names of torch's package that this package does not have, and what to use instead.
_RULES = (
    "register_rule and register_sharding define how an operator is sharded, `explain` and "
    "`cache_info` report decisions"
)
INSTEAD = {
    "LocalShardsWrapper": (
        "torch's own class can be the local tensor of a DTensor; a ShardedTensor can hold "
        "several shards"
    ),
    "LocalTensorMode": "shoal_dtensor.testing.simulate_ranks runs n ranks in one process",
    "redistribute_local_tensor": (
        "DTensor.redistribute, redistribute_shards for local tensors, or explain for the plan"
    ),
    "use_min_cost_redistribution_plan": "the cheapest plan is always taken; explain prints it",
    **dict.fromkeys(
        ("OpInfo", "OpSchema", "OpSpec", "OpStrategy", "OutputSharding", "RuntimeSchemaInfo"),
        _RULES,
    ),
    **dict.fromkeys(
        ("register_op_strategy", "register_prop_rule", "register_single_dim_strategy"), _RULES
    ),
}


class DTensorSpec:
    """`Spec` under torch's name and arguments; an instance is a `Spec`.

    Raises:
        ArgumentValueError: without `tensor_meta`: a spec includes the shape of its tensor.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Shard
        >>> meta = TensorMeta(torch.Size([4]), (1,), torch.float32)
        >>> DTensorSpec(abstract_mesh((2,), rank=0), (Shard(0),), meta)
        Spec(f32[4@(0)] on (0=2))
    """

    from_dim_map: Callable[..., Spec] = Spec.from_dim_map

    def __new__(  # type: ignore[misc]  # it makes a `Spec`
        cls,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        tensor_meta: TensorMeta | None = None,
        shard_order: Any = None,
    ) -> Spec:
        if tensor_meta is None:
            raise ArgumentValueError(
                "DTensorSpec: expected a tensor_meta, because a spec contains the shape, stride "
                "and dtype of its tensor; store mesh and placements separately until the tensor "
                "exists"
            )
        shape, stride, dtype = tensor_meta
        return Spec(mesh, placements, shape, stride, dtype=dtype, shard_order=shard_order)


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a tensor, and the index of its first element.

    The index is global.

    Args:
        global_shape: shape of the global tensor.
        mesh: the mesh.
        placements: one per mesh axis.
        skip_offset: return `()` for the index.

    Raises:
        PlacementError: if the placements do not fit.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Shard
        >>> compute_local_shape_and_global_offset((5, 4), abstract_mesh((2,), rank=1), [Shard(0)])
        ((2, 4), (3, 0))
    """
    spec = Spec(mesh, tuple(placements), global_shape)
    offset = () if skip_offset else spec.local_offset
    return tuple(spec.local_shape), offset


def compute_local_tensor_info(
    global_tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """Return shape and stride of this rank's part of a tensor.

    Args:
        global_tensor: the tensor whose shape and stride count; every rank has the same.
        mesh: any mesh; the result is for its rank.
        placements: one per axis of the mesh.

    Raises:
        PlacementError: if the placements do not fit.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Shard
        >>> compute_local_tensor_info(torch.ones(5, 4), abstract_mesh((2,), rank=1), [Shard(0)])
        ([2, 4], [4, 1])
    """
    spec = Spec(
        mesh,
        tuple(placements),
        global_tensor.shape,
        global_tensor.stride(),
        dtype=global_tensor.dtype,
    )
    return list(spec.local_shape), list(spec.local_stride)


def compute_global_tensor_shape(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Size:
    """`V -> check`: return the global shape of a tensor whose shard has `shape` on this rank.

    Every rank of a mesh with one axis holds a shard.

    Args:
        shape: the shape of this rank's local tensor.
        mesh: a mesh with one axis.
        placements: one placement, Shard or Replicate.

    Raises:
        PlacementError: if the mesh has several axes, a placement is partial, or the ranks' shapes
            differ in another dim than the sharded one.
    """
    if mesh.ndim != 1 or len(placements) != 1 or placements[0].is_partial():
        raise PlacementError(
            "compute_global_tensor_shape: expected Shard or Replicate on one mesh axis, got "
            f"{list(placements)} on {mesh!r}; DTensor.from_local(run_check=True) finds the shape "
            "on any mesh"
        )
    sharded_dim = getattr(placements[0], "dim", None)
    local_shape = torch.tensor([list(shape)], device=mesh.device_type)
    shapes: list[list[int]] = all_gather(local_shape, (mesh, 0)).tolist()
    global_shape = [*shape]
    for dim, size in enumerate(shape):
        sizes = [sizes_of_rank[dim] for sizes_of_rank in shapes]
        if dim == sharded_dim:
            global_shape[dim] = sum(sizes)
        elif any(n != size for n in sizes):
            raise PlacementError(
                f"compute_global_tensor_shape: {placements[0]!r} cannot combine local tensors of "
                f"shapes {shapes} into one tensor"
            )
    return torch.Size(global_shape)
