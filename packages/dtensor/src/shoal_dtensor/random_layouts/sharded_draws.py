"""Random functions on local tensors, which draw this rank's shard of the numbers of one device.

The arguments become the DTensors whose shards they are, and the function runs on DTensors. For
example, `dropout(h, 0.1)` for a local `h` of shape (3, 4), a shard of (3, 8): dropout of a DTensor
of shape (3, 8) draws the mask of one device, and its local shard of shape (3, 4) is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from shoal_mesh import DeviceMesh

from ..dispatch.global_call import replicated_spec
from ..errors import LayoutError
from ..layout.spec import Spec
from ..layout.tensor_meta import flatten, map_instances
from ..scopes import implicit_replication
from ..spmd.first_check import copy_type
from ..tensor.dtensor import DTensor
from .layouts import (
    UNSEEN,
    WAY_OUT,
    LocalLayout,
    known_layout,
    known_spec,
    note_layout,
)


class RandomCall(NamedTuple):
    """A call of a function that draws random numbers, on local tensors."""

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def draw_as_one_device(call: RandomCall, mesh: DeviceMesh, in_checkpoint: bool) -> Any:
    """Return this rank's shard of the random result of one device.

    Args:
        call: the call.
        mesh: the mesh of the layouts.
        in_checkpoint: whether a checkpointed function makes the call.

    Raises:
        LayoutError: the layout of an argument is unknown, or a checkpoint would repeat the call
            without a watch. All ranks raise it.
    """
    tensors = [*flatten((*call.args, *call.kwargs.values()))]
    layouts = [known_layout(tensor) for tensor in tensors]
    for tensor, layout in zip(tensors, layouts, strict=True):
        reason = _reason_unknown(tensor, layout, mesh)
        if reason:
            raise LayoutError(
                f"{call.name} between styles must draw the numbers of one device, but the sharding "
                f"of its argument of local shape {tuple(tensor.shape)} over {mesh} is unknown: "
                f"{reason}. {WAY_OUT}"
            )
    if in_checkpoint:
        raise LayoutError(
            f"{call.name} in a function that is checkpointed (or under no_grad, as a reentrant "
            "checkpoint is) would draw other numbers when backward runs the function again; "
            "checkpoint a module instead"
        )
    if any(layout.spec and not layout.spec.replicated for layout in layouts):
        return _draw_sharded(call, mesh)
    out = call.function(*call.args, **call.kwargs)
    results = out if isinstance(out, tuple | list) else (out,)
    for result in results:
        if type(result) is Tensor and result.ndim:
            note_layout(result, LocalLayout(replicated_spec(mesh, result), has_equal_draws=True))
    return out


def _reason_unknown(tensor: Tensor, layout: LocalLayout, mesh: DeviceMesh) -> str:
    """Return why the sharding of an argument is unknown; empty if it is known."""
    if isinstance(tensor, DTensor):
        is_replicated = layout.spec is not None and layout.spec.replicated
        is_on_other_mesh = mesh.ndim > 1 and tensor.spec.mesh != mesh
        is_unwatched = is_on_other_mesh and not is_replicated
    else:
        # A tensor that was computed, but not by a watched function.
        is_unwatched = layout is UNSEEN and tensor.requires_grad and not tensor.is_leaf
    if is_unwatched:
        return (
            "it comes from code that is not a torch function, or from a DTensor of some of the axes"
        )
    return layout.unknown_reason


def _draw_sharded(call: RandomCall, mesh: DeviceMesh) -> Any:
    """Draw on DTensors; the layout of the first argument is the layout of the result."""
    spec = known_spec(call.args[0])
    if spec is None:
        raise LayoutError(
            f"{call.name}: its other arguments are sharded, but its first argument is not known to "
            f"be sharded. {WAY_OUT}"
        )
    is_in_place = call.name.endswith("_") or call.kwargs.get("inplace")
    if not is_in_place:
        return _draw_on_dtensors(call, mesh, spec)
    target: Tensor = call.args[0]
    layout = known_layout(target)
    # If autograd records the target, the draw writes to a copy, which is copied to the target
    # below. Otherwise it writes to the memory of the target.
    destination = target.clone() if target.requires_grad else target.detach()
    note_layout(destination, layout)
    out = _draw_on_dtensors(call._replace(args=(destination, *call.args[1:])), mesh, spec)
    if target.requires_grad:
        target.copy_(out)
    note_layout(target, layout)
    return target


def _draw_on_dtensors(call: RandomCall, mesh: DeviceMesh, spec: Spec) -> Any:
    """Run the function on DTensors and return local shards in the layout `spec`."""
    with implicit_replication():
        args, kwargs = map_instances(
            (tuple(call.args), dict(call.kwargs)), Tensor, partial(_as_dtensor, mesh=mesh)
        )
        result = call.function(*args, **kwargs)
    if type(result) is tuple:
        return tuple(_take_shard(item, spec, call.name) for item in result)
    out = _take_shard(result, spec, call.name)
    source = call.args[0]
    # Shards of different sizes have no type of their own, but the argument has one.
    if out.shape == source.shape:
        copy_type(source, out)
    return out


def _as_dtensor(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the DTensor that a plain tensor is a shard of; another tensor as it is."""
    if type(value) is not Tensor:
        return value
    spec = known_spec(value)
    if spec is not None:
        return DTensor.from_local(
            value, mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    if value.requires_grad:
        raise LayoutError(
            "a function that draws random numbers gets shards together with a tensor of "
            f"shape {tuple(value.shape)} that is not sharded and needs a gradient. "
            f"{WAY_OUT}"
        )
    return value


def _take_shard(result: Any, spec: Spec, name: str) -> Any:
    """Return this rank's shard of a result, placed like the function's first argument.

    Args:
        result: the result. Values that are not DTensors are returned as they are.
        spec: the layout of the first argument.
        name: the name of the function.
    """
    if not isinstance(result, DTensor):
        return result
    placements = spec.placements
    for placement in placements:
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        has_dim = dim < result.ndim and result.shape[dim] == spec.shape[dim]
        if not has_dim:
            raise LayoutError(
                f"{name}: the sharded dim {dim} of its argument is not a dim of its result. "
                f"{WAY_OUT}"
            )
    placed_result = result.redistribute(placements=placements)
    local: Tensor = placed_result.to_local(grad_placements=placements)
    is_sharded_on_all = all(placement.is_shard() for placement in placements)
    note_layout(local, LocalLayout(placed_result.spec, has_equal_draws=not is_sharded_on_all))
    return local
