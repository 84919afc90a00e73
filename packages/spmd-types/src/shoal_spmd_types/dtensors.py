"""Translations between types of plain tensors and placements of DTensors.

May import: types.
"""

from __future__ import annotations

from typing import Any

from shoal_dtensor import DTensor, Partial, PartitionSpec, Placement, Replicate, Shard
from shoal_dtensor.errors import ArgumentValueError
from shoal_dtensor.internal import I, P, R, ShardType, V, spmd

from .types import (
    DTensorPropagationError,
    RedistributeError,
    TensorSharding,
    normalize_dim_sharding,
)


def dtensor_placement_to_spmd_type(
    placement: Placement, grad_placement: Placement | None = None
) -> Any:
    """Return the type of a placement.

    Args:
        placement: the placement of a DTensor along one axis.
        grad_placement: the placement of its gradient. A replicated tensor is R if its gradient is
            partial, and I otherwise.

    Raises:
        ArgumentValueError: for a placement that no type describes.

    Example:
        >>> from shoal_dtensor import Partial, Replicate
        >>> dtensor_placement_to_spmd_type(Replicate(), Partial())
        R
    """
    if isinstance(placement, Replicate):
        return R if isinstance(grad_placement, Partial) else I
    found = spmd.type_of_placement(placement)
    is_other_reduction = isinstance(placement, Partial) and found is not P
    if found is None or is_other_reduction:
        raise ArgumentValueError(
            f"{placement!r} does not have a type; types exist for Replicate(), Shard(dim) and "
            "Partial('sum')"
        )
    return found


def spmd_type_to_dtensor_placement(spmd_type: Any) -> Placement:
    """Return the placement of a type.

    Args:
        spmd_type: R, I, P or S(i).

    Raises:
        DTensorPropagationError: for V, which does not name a dim.

    Example:
        >>> spmd_type_to_dtensor_placement(S(1))
        Shard(dim=1)
    """
    if isinstance(spmd_type, ShardType):
        return Shard(spmd_type.dim)
    found = None if spmd_type is V else spmd.placement_of(spmd_type)
    if found is None:
        raise DTensorPropagationError(
            f"{spmd_type!r} does not name a dim, so it does not have a placement; use S(dim)"
        )
    return found


def spmd_redistribute(x: DTensor, src: TensorSharding, dst: TensorSharding) -> DTensor:
    """Redistribute a DTensor from one sharding to another, and its gradient back.

    Args:
        x: a DTensor that is sharded as `src`.
        src: the axes that shard each dim.
        dst: the axes that shard each dim of the result.

    Raises:
        RedistributeError: if `x` is not sharded as `src`.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> def example(mesh):
        ...     x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        ...     y = spmd_redistribute(x, TensorSharding("tp"), TensorSharding())
        ...     return y.to_local().tolist()
        >>> simulate_ranks(abstract_mesh((2,), ("tp",)), example)[1]
        [0.0, 1.0, 2.0, 3.0]
    """
    placements, _ = _spec(src).resolve(x.device_mesh)
    expected = x.spec.with_(placements=placements)
    if tuple(x.placements) != tuple(expected.placements):
        raise RedistributeError(f"spmd_redistribute: the DTensor is {x.spec!r}, not {src!r}")
    return x.redistribute(placements=_spec(dst))


def _spec(sharding: TensorSharding) -> PartitionSpec:
    """Return a sharding as the partition spec of a DTensor."""
    entries = [tuple(normalize_dim_sharding(entry)) for entry in sharding]
    return PartitionSpec(*entries)
