"""Tensors at the boundary of a module, by way of DTensor: any layout to any layout.

The general path.  Lowerings take it for DTensor inputs and unusual layouts; the usual ones are resolved
to direct collectives by each lowering.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard
from shoal_mesh import DeviceMesh

from ..errors import LayoutError
from ..sharding import ModuleSharding, Port
from .forward import Lowered

__all__ = ["Boundary", "arrive", "arrive_local", "leave", "leave_local", "wrap_like"]


def arrive(tensor: Tensor, port: Port, mesh: DeviceMesh) -> DTensor:
    """The DTensor in the port's desired layout; a plain tensor is taken as its `layout`.

    Raises:
        LayoutError: if a DTensor comes from another mesh, or something else than a tensor was given.
    """
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise LayoutError(f"the input lies on {tensor.device_mesh}, the module on {mesh}")
        arrived = tensor
    elif isinstance(tensor, Tensor):
        arrived = DTensor.from_local(tensor, mesh, (port.layout,), run_check=False)
    else:
        raise LayoutError(
            f"layout {port.layout} is given for a {type(tensor).__name__}; use None for what is no tensor"
        )
    return _to(arrived, port.desired)


def _to(tensor: DTensor, placement: Placement) -> DTensor:
    if isinstance(placement, Shard) and placement.dim < 0:
        placement = placement.on_dim(placement.dim + tensor.ndim)
    if tensor.placements == (placement,):
        return tensor
    return tensor.redistribute(placements=(placement,))


def arrive_local(tensor: Tensor, port: Port, mesh: DeviceMesh, grad: Placement) -> Tensor:
    """The local part in the port's desired layout.

    Args:
        tensor: plain or DTensor.
        port: what it means and what is wanted.
        mesh: the module's mesh.
        grad: the placement in which the computation gives the gradient of this part.
    """
    arrived = arrive(tensor, port, mesh)
    return arrived.to_local(grad_placements=(_positive(grad, arrived.ndim),))


def _positive(placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Shard) and placement.dim < 0:
        return placement.on_dim(placement.dim + ndim)
    return placement


def leave(tensor: Tensor, port: Port, mesh: DeviceMesh, shape: Sequence[int] | None = None) -> DTensor:
    """The DTensor in the port's desired layout; a plain tensor is what the computation gave: the port's `layout`.

    Args:
        tensor: plain or DTensor.
        port: what it is and what is wanted.
        mesh: the module's mesh.
        shape: global shape of a plain tensor where ranks may hold unequal parts.
    """
    if isinstance(tensor, DTensor):
        return _to(tensor, port.desired)
    return _to(wrap_like(tensor, port.layout, mesh, shape), port.desired)


def leave_local(tensor: DTensor) -> Tensor:
    """The local part of an output.

    Raises:
        LayoutError: if ranks hold unequal parts of a dim that plain tensors cannot tell apart.
    """
    (placement,) = tensor.placements
    # The consumer of a plain replicated tensor gives back a complete gradient; of a partial one, a replicated one.
    grad: Placement = Replicate() if isinstance(placement, Partial) else placement
    return tensor.to_local(grad_placements=(grad,))


def wrap_like(tensor: Tensor, placement: Placement, mesh: DeviceMesh, shape: Sequence[int] | None) -> DTensor:
    """A plain local part as DTensor."""
    placement = _positive(placement, tensor.ndim)
    if shape is None:
        return DTensor.from_local(tensor, mesh, (placement,), run_check=False)
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(tensor, mesh, (placement,), run_check=False, shape=torch.Size(shape), stride=stride)


class Boundary(Lowered):
    """Brings inputs to their ports, runs what was the forward before, brings outputs to theirs.

    What runs inside is the module's own forward on DTensors (dispatch finds what every op does), or a
    lowering that one of these wraps.
    """

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sharding, mesh = self.sharding, self.mesh
        args = _each(args, sharding.inputs, lambda x, port: _in(x, port, sharding, mesh), sharding, "inputs")
        for name, port in sharding.keywords.items():
            if name in kwargs:
                kwargs[name] = _in(kwargs[name], port, sharding, mesh)
        inner = self.inner
        module = self.module
        out = inner(*args, **kwargs) if inner is not None else type(module).forward(module, *args, **kwargs)
        if sharding.outputs is None:
            return out
        many = isinstance(out, (tuple, list))
        results = tuple(out) if many else (out,)
        results = _each(results, sharding.outputs, lambda x, port: _out(x, port, sharding, mesh), sharding, "outputs")
        return type(out)(results) if many and type(out) in (tuple, list) else results if many else results[0]


def _each(values: tuple[Any, ...], ports: Any, move: Any, sharding: ModuleSharding, what: str) -> tuple[Any, ...]:
    if ports is None:
        return values
    if sharding.strict and len(values) != len(ports):
        raise LayoutError(
            f"{sharding.kind}: the module has {len(values)} {what}, but layouts for {len(ports)} are given; "
            "use None for those that pass through"
        )
    moved = tuple(
        value if port is None or value is None else move(value, port)
        for value, port in zip(values, ports, strict=False)  # inputs behind the last port pass through
    )
    return moved + values[len(ports) :]


def _in(value: Any, port: Port, sharding: ModuleSharding, mesh: DeviceMesh) -> Any:
    arrived = arrive(value, port, mesh)
    return leave_local(arrived) if sharding.local_inputs else arrived


def _out(value: Any, port: Port, sharding: ModuleSharding, mesh: DeviceMesh) -> Any:
    left = leave(value, port, mesh)
    return leave_local(left) if sharding.local_outputs else left
