"""Running a function of plain tensors on the local parts of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal_mesh import DeviceMesh

from ._torch import pytree
from .errors import MixedTensorError, PlacementError
from .placements import Placement, Shard
from .tensor import DTensor

__all__ = ["local_map"]

Placements = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placements | tuple[Placements, ...] = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """`func` on local tensors, as a function on DTensors.

    Args:
        func: takes and returns plain tensors; left out, this is a decorator.
        out_placements: how the outputs lie: one list of placements for all of them, or a tuple with one for each;
            None leaves an output plain.
        in_placements: how the inputs (flattened) must lie, one entry each; None for what is no DTensor, or for any.
        in_grad_placements: how the inputs' gradients lie when they come back from `func`.
        device_mesh: the mesh of the outputs; the inputs' own when left out.
        redistribute_inputs: bring inputs that lie otherwise into place instead of raising.

    Returns:
        The wrapped function. Where an input is unevenly sharded, the sizes of sharded outputs are compared over the
        mesh, so that uneven outputs are right too.

    Raises:
        PlacementError: (when called) if an input lies otherwise, or the number of placements does not fit.
        MixedTensorError: (when called) if a placement is given for a plain tensor.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, structure = pytree.tree_flatten(args)
        _check_counts(len(flat), in_placements=in_placements, in_grad_placements=in_grad_placements)
        mesh, uneven, local = device_mesh, False, []
        for i, item in enumerate(flat):
            wanted = in_placements[i] if in_placements is not None else None
            if not isinstance(item, DTensor):
                if wanted is not None and isinstance(item, torch.Tensor):
                    raise MixedTensorError(f"local_map: input {i} is a plain tensor, but {list(wanted)} is asked of it")
                local.append(item)
                continue
            placed = _placed(i, item, wanted, redistribute_inputs)
            mesh = mesh or placed.device_mesh
            uneven = uneven or not placed._spec.even
            gradient = in_grad_placements[i] if in_grad_placements is not None else None
            local.append(placed.to_local(grad_placements=gradient))
        result = func(*pytree.tree_unflatten(local, structure), **kwargs)
        return _outputs(result, out_placements, mesh, uneven)

    return mapped


def _check_counts(inputs: int, **given: Sequence[Placements] | None) -> None:
    for name, entries in given.items():
        if entries is not None and len(entries) != inputs:
            raise PlacementError(f"local_map: {name} has {len(entries)} entries, the function got {inputs} inputs")


def _placed(index: int, item: DTensor, wanted: Placements, redistribute: bool) -> DTensor:
    """An input as it is asked to lie."""
    if wanted is None:
        return item
    target = item._spec.with_(placements=tuple(wanted))
    if item._spec.same_layout(target):
        return item
    if not redistribute:
        raise PlacementError(
            f"local_map: input {index} is {item._spec!r}, but {list(wanted)} is asked of it; "
            f"redistribute it, or set redistribute_inputs=True"
        )
    return item.redistribute(placements=wanted)


def _outputs(result: Any, out_placements: Any, mesh: DeviceMesh | None, uneven: bool) -> Any:
    flat, structure = pytree.tree_flatten(result)
    each = out_placements if isinstance(out_placements, tuple) else (out_placements,) * len(flat)
    if len(each) != len(flat):
        raise PlacementError(
            f"local_map: out_placements has {len(each)} entries, the function returned {len(flat)} outputs"
        )
    made = []
    for item, placements in zip(flat, each, strict=True):
        if placements is None or not isinstance(item, torch.Tensor):
            made.append(item)
            continue
        if mesh is None:
            raise PlacementError("local_map: no input is a DTensor, so device_mesh is needed for the outputs")
        check = uneven and any(isinstance(p, Shard) for p in placements)
        made.append(DTensor.from_local(item, mesh, placements, run_check=check))
    return pytree.tree_unflatten(made, structure)
