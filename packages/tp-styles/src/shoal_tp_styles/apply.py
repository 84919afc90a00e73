"""The only file that changes a module: parameters become DTensors, the forward gets a stand-in, and back.

A parameter that several modules share stays one: the plain parameter remembers the DTensor parameter that
took its place, so whoever meets it later, in this call or another, takes the same one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Placement, Spec, distribute_tensor
from shoal_mesh import DeviceMesh

from .blocks import block_rows, fuse_blocks, split_blocks
from .errors import LayoutError, TiedWeightError
from .lowering import Boundary, Lowered, lowering_of
from .sharding import ModuleSharding

__all__ = ["apply_sharding", "plain_module", "shardings_of"]

_SUCCESSOR = "_shoal_successor"


def apply_sharding(
    module: nn.Module,
    sharding: ModuleSharding,
    mesh: DeviceMesh,
    *,
    src_data_rank: int | None = 0,
    lower: bool = True,
) -> nn.Module:
    """The module, parallel on a one-axis mesh as the record says.

    Args:
        module: changed in place.
        sharding: placements of parameters, inputs and outputs.
        mesh: with one axis.
        src_data_rank: rank along the axis whose parameters are the truth; None keeps every rank's own part.
        lower: let known module types run as local computation; False runs everything through DTensor dispatch.

    Raises:
        LayoutError: if the mesh has several axes.
        TiedWeightError: if a shared parameter already lies otherwise.
    """
    if mesh.ndim != 1:
        raise LayoutError(
            f"a style acts on one mesh axis, the mesh has {dict(zip(mesh.axis_names, mesh.shape, strict=True))}; "
            "name one with style.on(axis) or pass the sub-mesh"
        )
    kind = lowering_of(sharding, module) if lower or "blocks" in sharding.options else None
    if "blocks" in sharding.options:
        split_blocks(module, sharding, mesh, src_data_rank)
    if sharding.distributes:
        _distribute(module, sharding, mesh, src_data_rank, buffers=kind is None)
    inner = module.__dict__.get("forward")
    if inner is not None and not isinstance(inner, Lowered):
        raise LayoutError(
            f"{sharding.kind}: {type(module).__name__} has a forward of its own on the instance; a style would hide it"
        )
    module.__dict__["forward"] = (kind or Boundary)(module, sharding, mesh, inner)
    return module


def _distribute(
    module: nn.Module, sharding: ModuleSharding, mesh: DeviceMesh, src_data_rank: int | None, *, buffers: bool
) -> None:
    split = {name for name, _ in block_rows(sharding)} if "blocks" in sharding.options else set()
    for prefix, owner in module.named_modules():
        for name, param in owner._parameters.items():
            path = f"{prefix}.{name}" if prefix else name
            if param is not None and path not in split:
                placement = sharding.placement(path, mesh.size())
                owner._parameters[name] = _distributed(path, param, placement, mesh, src_data_rank)
        for name, buffer in owner._buffers.items():
            if buffers and buffer is not None and not isinstance(buffer, DTensor):
                path = f"{prefix}.{name}" if prefix else name
                placement = sharding.placement(path, mesh.size())
                owner._buffers[name] = distribute_tensor(buffer, mesh, (placement,), src_data_rank=src_data_rank)


def _distributed(
    name: str, param: nn.Parameter, placement: Placement, mesh: DeviceMesh, src_data_rank: int | None
) -> nn.Parameter:
    """The DTensor parameter that takes a parameter's place; the one that already did, where it is shared."""
    taken: Tensor = getattr(param, _SUCCESSOR, param)
    if isinstance(taken, DTensor):
        asked = Spec(mesh, (placement,), taken.shape, taken._spec.stride, taken.dtype)
        if not taken._spec.same_layout(asked):
            raise TiedWeightError(
                f"parameter {name!r} is to become {placement} on {mesh}, but it is shared and already "
                f"{taken.placements} on {taken.device_mesh}; styles of modules that share a parameter must agree"
            )
        return taken  # type: ignore[return-value]  # a Parameter that holds a DTensor
    sharded = distribute_tensor(param.detach(), mesh, (placement,), src_data_rank=src_data_rank)
    successor = nn.Parameter(sharded, requires_grad=param.requires_grad)
    if param.grad is not None:
        successor.grad = distribute_tensor(param.grad, mesh, (placement,), src_data_rank=src_data_rank)
    setattr(param, _SUCCESSOR, successor)
    return successor


def shardings_of(module: nn.Module) -> Iterator[tuple[ModuleSharding, DeviceMesh]]:
    """The records applied to a module, first applied first."""
    lowered = module.__dict__.get("forward")
    if isinstance(lowered, Lowered):
        yield from _records(lowered)


def _records(lowered: Lowered) -> Iterator[tuple[ModuleSharding, DeviceMesh]]:
    if lowered.inner is not None:
        yield from _records(lowered.inner)
    yield lowered.sharding, lowered.mesh


def plain_module(module: nn.Module) -> nn.Module:
    """The module with plain whole parameters and its own forward again; parameters that were shared still are."""
    whole: dict[int, nn.Parameter] = {}
    kept: list[Tensor] = []
    for owner in module.modules():
        for sharding, _ in shardings_of(owner):
            if "blocks" in sharding.options:
                fuse_blocks(owner, sharding)
        if isinstance(owner.__dict__.get("forward"), Lowered):
            del owner.__dict__["forward"]
        for name, param in owner._parameters.items():
            held: Tensor | None = param
            if isinstance(held, DTensor):
                if id(held) not in whole:
                    kept.append(held)  # as long as it lives, its id names it
                    whole[id(held)] = _plain(held)
                owner._parameters[name] = whole[id(held)]
        for name, buffer in owner._buffers.items():
            if isinstance(buffer, DTensor):
                owner._buffers[name] = _whole(buffer)
    return module


def _plain(param: Tensor) -> nn.Parameter:
    plain = nn.Parameter(_whole(param), requires_grad=param.requires_grad)
    if param.grad is not None:
        plain.grad = _whole(param.grad)
    return plain


def _whole(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor
