"""Plain tensors and modules spread over a mesh: `distribute_tensor` and `distribute_module`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from shoal_mesh import DeviceMesh, all_to_all_v, broadcast

from ._torch import whole_when_compiled
from .chunks import ShardOrder
from .crossing import mesh_or_current
from .errors import PlacementError
from .per_dim import Placements, read_placements
from .placements import Partial, Placement
from .redistribute.folds import unfolded
from .spec import Box, Spec
from .tensor import DTensor

__all__ = ["Sliceable", "distribute_module", "distribute_tensor"]


class Sliceable(Protocol):
    """A stored tensor that is read by slices: what `safetensors.safe_open(...).get_slice(name)` gives."""

    def get_shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@whole_when_compiled
def distribute_tensor(
    tensor: torch.Tensor | Sliceable,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: ShardOrder | None = None,
) -> DTensor:
    """`V -> placements`: the DTensor with the values of one rank's plain tensor.

    Every rank but the source needs memory for its own part only (pass, say, `torch.empty(1).expand(shape)` there). A
    tensor on the meta device gives meta parts, on every rank.

    Args:
        tensor: the global tensor, of the same shape and dtype on every rank; a leaf. A DTensor that already lies so
            is returned as it is. Or a stored tensor, `safetensors.safe_open(...).get_slice(name)`, that all ranks can
            read: each reads its own part, and nothing is sent.
        device_mesh: the mesh; the one of the enclosing `with mesh:` when left out.
        placements: one per mesh axis, or a `PerDim`; all replicated when left out.
        src_data_rank: whose values count: the rank at this coordinate of every mesh axis.  None: each rank cuts its
            part out of its own tensor, without any communication; of a memory-mapped one (`torch.load(mmap=True)`,
            `torch.from_file`) it reads only that. A stored tensor is always read so.
        shard_order: pairs (tensor dim, mesh axes outermost first) where axes do not cut in ascending order.

    Raises:
        PlacementError: if the placements do not fit, the tensor is no leaf, or it is a DTensor that lies otherwise.
    """
    mesh = mesh_or_current(device_mesh)
    wanted, shard_order = read_placements(mesh, placements, shard_order)
    if any(isinstance(p, Partial) for p in wanted):
        raise PlacementError(f"distribute_tensor: placements must be Shard or Replicate, got {list(wanted)}")
    if isinstance(tensor, DTensor):
        return _as_it_is(tensor, mesh, wanted, shard_order)
    if not isinstance(tensor, torch.Tensor):
        return _read(tensor, mesh, wanted, shard_order)
    if not tensor.is_leaf:
        raise PlacementError(
            "distribute_tensor: expected a leaf tensor; use DTensor.from_local, which is differentiable"
        )
    spec = Spec(mesh, wanted, tensor.shape, _dense(tensor), tensor.dtype, shard_order)
    with torch.no_grad():
        local = _local_part(tensor.detach().resolve_conj().resolve_neg(), spec, src_data_rank)
    result = DTensor(local, spec, requires_grad=tensor.requires_grad)
    return nn.Parameter(result, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else result  # type: ignore[return-value]  # Parameter keeps the DTensor class


def _read(
    stored: Sliceable, mesh: DeviceMesh, placements: tuple[Placement, ...], shard_order: ShardOrder | None
) -> DTensor:
    """Each rank reads its own box, and no rank more."""
    if not hasattr(stored, "get_shape"):
        raise PlacementError(
            "distribute_tensor: expected a tensor, or a stored one with get_shape() and slices, as safetensors' "
            f"get_slice(name) gives, got {type(stored).__name__}"
        )
    shape = tuple(stored.get_shape())
    nothing = stored[tuple(slice(0, 0) for _ in shape)] if shape else stored[...]
    spec = Spec(mesh, placements, shape, None, nothing.dtype, shard_order)
    device = torch.device(mesh.device_type)
    if spec.coordinate is None:
        return DTensor(nothing.new_empty((0,), device=device), spec)
    box = tuple(slice(start, stop) for start, stop in spec.box(spec.coordinate))
    part = (stored[box] if shape else nothing).to(device).contiguous()
    shares = part.untyped_storage().nbytes() != part.nbytes  # a view would keep more than the part alive
    return DTensor(part.clone() if shares else part, spec)


def _as_it_is(
    tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shard_order: ShardOrder | None
) -> DTensor:
    found = tensor._spec
    asked = Spec(mesh, placements, found.shape, found.stride, found.dtype, shard_order)
    if not found.same_layout(asked):
        raise PlacementError(
            f"distribute_tensor: the tensor is a DTensor already, {found!r}; use redistribute to {asked!r}"
        )
    return tensor


def _dense(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.is_contiguous() or tensor.is_meta else None


def _local_part(tensor: torch.Tensor, spec: Spec, source: int | None) -> torch.Tensor:
    """This rank's part of the source's tensor."""
    if spec.coordinate is None:
        return tensor.new_empty((0,), device=_device(tensor, spec))
    if spec.folded:
        opened = unfolded(spec)
        return _local_part(tensor.reshape(opened.shape), opened, source).reshape(spec.local_shape)
    if source is None or tensor.is_meta:
        return _cut(tensor, spec.box(spec.coordinate)).to(_device(tensor, spec))
    return _from_source(tensor, spec, source)


def _device(tensor: torch.Tensor, spec: Spec) -> torch.device:
    """Where local parts live: the tensor's device if the mesh is of its type, else the mesh's current device."""
    if tensor.device.type == spec.mesh.device_type or tensor.is_meta:
        return tensor.device
    return torch.device(spec.mesh.device_type)


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a tensor, in memory of its own unless it is the whole."""
    part = tensor
    for dim, (start, stop) in enumerate(box):
        part = part.narrow(dim, start, stop - start)
    return part if part.shape == tensor.shape else part.clone(memory_format=torch.contiguous_format)


def _from_source(tensor: torch.Tensor, spec: Spec, source: int) -> torch.Tensor:
    """Scatter exact boxes over the axes that cut, in the source's plane; then broadcast to the other planes."""
    mesh, coordinate = spec.mesh, spec.coordinate
    assert coordinate is not None, "only ranks of the mesh take part"
    cutting = tuple(sorted(axis for cut in spec.cuts for axis in cut.axes))
    copying = tuple(axis for axis in range(mesh.ndim) if axis not in cutting)
    for axis, size in enumerate(mesh.shape):
        if not 0 <= source < size:
            raise PlacementError(
                f"src_data_rank {source} is no coordinate of mesh axis {mesh.axis_names[axis]!r} of size {size}"
            )
    device = _device(tensor, spec)
    local = torch.empty(spec.local_shape, dtype=tensor.dtype, device=device)
    if all(coordinate[axis] == source for axis in copying):
        local = _scatter(tensor.to(device), spec, source, cutting) if cutting else tensor.to(device).contiguous()
    if copying and prod(mesh.shape[axis] for axis in copying) > 1:
        index = 0
        for axis in copying:
            index = index * mesh.shape[axis] + source
        local = broadcast(local, mesh.comm(copying), src=index)
    return local


def _scatter(tensor: torch.Tensor, spec: Spec, source: int, axes: tuple[int, ...]) -> torch.Tensor:
    mesh, coordinate = spec.mesh, spec.coordinate
    assert coordinate is not None, "only ranks of the mesh take part"
    sends = all(coordinate[axis] == source for axis in axes)
    boxes: list[Box] = []
    for along in product(*(range(mesh.shape[axis]) for axis in axes)):
        there = list(coordinate)
        for axis, position in zip(axes, along, strict=True):
            there[axis] = position
        boxes.append(spec.box(there))
    sizes = [prod(stop - start for start, stop in box) for box in boxes]
    pieces = [_narrow(tensor, box).reshape(-1) for box in boxes] if sends else []
    flat = torch.cat(pieces) if pieces else tensor.new_empty(0)
    index = 0
    for axis in axes:
        index = index * mesh.shape[axis] + source
    receives = [prod(spec.local_shape) if i == index else 0 for i in range(len(boxes))]
    got = all_to_all_v(flat, mesh.comm(axes), sizes if sends else [0] * len(boxes), receives)
    return got.view(spec.local_shape)


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, stop) in enumerate(box):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """The module itself, its parameters and buffers made DTensors and its inputs and outputs converted.

    Args:
        module: changed in place and returned. A parameter shared by several modules stays shared.
        device_mesh: the mesh; the one of the enclosing `with mesh:` when left out.
        partition_fn: called with the name, module and mesh of every sub-module, to replace parameters by DTensors;
            whatever it leaves plain is replicated.
        input_fn: `input_fn(module, inputs, mesh)` before forward; its result replaces the inputs.
        output_fn: `output_fn(module, outputs, mesh)` after forward; its result replaces the outputs.

    Raises:
        PlacementError: if the module was distributed before.
    """
    mesh = mesh_or_current(device_mesh)
    if getattr(module, "_shoal_distributed", False):
        raise PlacementError("distribute_module: this module was distributed before; distribute a fresh one")
    shared: dict[int, nn.Parameter | torch.Tensor] = {}
    for name, child in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, child, mesh)
        _replicate(child, mesh, shared)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: output_fn(mod, outputs, mesh))
    module._shoal_distributed = True  # type: ignore[assignment]  # a mark, not a submodule
    return module


def _replicate(module: nn.Module, mesh: DeviceMesh, shared: dict[int, Any]) -> None:
    """Replicate what is still plain; one plain tensor becomes one DTensor however many modules hold it."""
    for table in (module._parameters, module._buffers):
        for name, held in table.items():
            if held is None or isinstance(held, DTensor):
                continue
            made = shared.get(id(held))
            if made is None:
                made = shared[id(held)] = distribute_tensor(held, mesh)
                shared[-id(held)] = held
            table[name] = made  # type: ignore[assignment]  # a DTensor parameter is a Parameter
