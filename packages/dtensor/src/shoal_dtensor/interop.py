"""Conversion between shoal's DTensor and torch's own, without copies.

No other module imports torch's DTensor, and this module imports it only inside functions.

May import: argument_types, errors, layout, tensor.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import require

from .argument_types import check_mesh
from .errors import ArgumentTypeError, PlacementError
from .layout.placements import Partial, Placement, Replicate, Shard, StridedShard, norm_order
from .layout.spec import Spec
from .tensor.dtensor import DTensor

__all__ = ["from_torch", "mesh_from_torch", "mesh_to_torch", "to_torch"]


def mesh_to_torch(mesh: DeviceMesh) -> Any:
    """Return torch's `DeviceMesh` over the same ranks and the same process groups.

    Args:
        mesh: shoal's mesh; all of its ranks call this.

    Example:
        >>> from shoal_mesh import init_device_mesh, launch
        >>> def axis_names():
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     return mesh_to_torch(mesh).mesh_dim_names
        >>> launch(axis_names, 2)
        [('tp',), ('tp',)]
    """
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    check_mesh("mesh_to_torch", mesh)
    return _over_groups(TorchMesh, mesh, mesh.mesh_dim_names if mesh.ndim == 1 else mesh.axis_names)


def mesh_from_torch(mesh: Any) -> DeviceMesh:
    """Return shoal's `DeviceMesh` over the ranks and process groups of torch's mesh.

    Args:
        mesh: torch's mesh; all of its ranks call this.

    Example:
        >>> from shoal_mesh import init_device_mesh, launch
        >>> launch(lambda: mesh_from_torch(mesh_to_torch(init_device_mesh("cpu", (2,)))).shape, 2)
        [(2,), (2,)]
    """
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    require(mesh, TorchMesh, "mesh_from_torch: mesh is torch's DeviceMesh", ArgumentTypeError)
    converted: DeviceMesh = _over_groups(DeviceMesh, mesh, mesh.mesh_dim_names)
    return converted


def _over_groups(mesh_class: Any, mesh: Any, names: Any) -> Any:
    """Return a mesh of class `mesh_class` over the process groups of another mesh.

    Torch's mesh needs names if it has several axes.
    """
    groups = mesh.get_all_groups()
    if mesh.ndim == 1:
        return mesh_class.from_group(groups[0], mesh.device_type, mesh_dim_names=names)
    return mesh_class.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=names)


def to_torch(tensor: DTensor, mesh: Any | None = None) -> Any:
    """Wrap the same local tensor in torch's DTensor.

    Args:
        tensor: the DTensor; its gradient history is not carried over.
        mesh: torch's mesh over the same ranks; made from the tensor's process groups when left out.

    Raises:
        PlacementError: if torch cannot represent the tensor's layout (ragged sizes, shards at
            multiples).
    """
    from torch.distributed.tensor import DTensor as TorchTensor

    require(tensor, DTensor, "to_torch: tensor is a DTensor of shoal", ArgumentTypeError)
    spec = tensor._spec
    placements = [_to_torch_placement(spec, axis) for axis in range(spec.mesh.ndim)]
    torch_mesh = mesh if mesh is not None else mesh_to_torch(spec.mesh)
    tensor_of_torch = TorchTensor.from_local(
        tensor._local_tensor.detach(),
        torch_mesh,
        placements,
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=spec.stride,
    )
    return tensor_of_torch.requires_grad_(tensor.requires_grad)


def from_torch(tensor: Any, mesh: DeviceMesh | None = None) -> DTensor:
    """Wrap the local tensor of torch's DTensor in shoal's DTensor.

    Args:
        tensor: torch's DTensor; its gradient history is not carried over.
        mesh: shoal's mesh over the same ranks; made from the tensor's process groups when left out.

    Raises:
        PlacementError: if a strided placement does not correspond to an order of mesh axes, or
            shards unevenly (torch then interleaves).
    """
    from torch.distributed.tensor import DTensor as TorchTensor

    require(tensor, TorchTensor, "from_torch: tensor is torch's DTensor", ArgumentTypeError)
    own_mesh = mesh if mesh is not None else mesh_from_torch(tensor.device_mesh)
    placements = [_from_torch_placement(placement) for placement in tensor.placements]
    spec = Spec(own_mesh, placements, tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype)
    if any(isinstance(p, StridedShard) for p in placements):
        _refuse_uneven(spec)
    return DTensor(tensor._local_tensor.detach(), spec, requires_grad=tensor.requires_grad)


def _to_torch_placement(spec: Spec, axis: int) -> Any:
    """Return torch's placement for one mesh axis of a spec."""
    from torch.distributed import tensor as peer
    from torch.distributed.tensor.placement_types import _StridedShard

    placement = spec.placements[axis]
    if isinstance(placement, Replicate):
        return peer.Replicate()
    if isinstance(placement, Partial):
        order = norm_order(placement.reduce_op)
        if order is None:
            return peer.Partial(placement.reduce_op)
        return _partial_norm()(order)
    assert isinstance(placement, Shard | StridedShard), "all other placements were handled"
    sharding = spec.dim_sharding(placement.dim)
    if sharding != sharding.rechunked(sharding.length):
        raise PlacementError(
            f"torch's DTensor cannot shard dim {placement.dim} into {sharding.sizes}; redistribute "
            f"to {Shard(placement.dim)!r}"
        )
    outer = sharding.axes[: sharding.axes.index(axis)]
    factor = prod(spec.mesh.shape[other] for other in outer if other > axis)
    if factor == 1:
        return peer.Shard(placement.dim)
    _refuse_uneven(spec)
    return _StridedShard(placement.dim, split_factor=factor)


def _from_torch_placement(placement: Any) -> Placement:
    """Return shoal's placement for a placement of torch."""
    if placement.is_replicate():
        return Replicate()
    if placement.is_partial():
        is_norm = isinstance(placement, _partial_norm()) and placement.reduce_op == "sum"
        if is_norm and placement.norm_type not in (0, 1):
            return Partial(f"norm{placement.norm_type}")
        return Partial(placement.reduce_op)
    if type(placement).__name__ == "_StridedShard":
        return StridedShard(placement.dim, split_factor=placement.split_factor)
    return Shard(placement.dim)


def _partial_norm() -> Any:
    """Return torch's class for partial norms.

    The class does not have a public name, and it calls its reduction a sum.
    """
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    return _NormPartial


def _refuse_uneven(spec: Spec) -> None:
    """Raise an error if several axes shard a dim unevenly."""
    for dim, sharding in enumerate(spec.dim_shardings):
        if len(sharding.axes) > 1 and not sharding.even:
            raise PlacementError(
                f"dim {dim} of {spec!r} is sharded unevenly by several axes out of order: torch "
                "interleaves such shards, shoal keeps them contiguous, so they do not hold the "
                "same elements"
            )
