"""Types at the boundary of `local_map`: of local inputs, and of outputs that become DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shoal_mesh import DeviceMesh

from .._torch.tensors import pytree
from ..errors import SpmdTypeError
from ..layout.placements import Placement
from ..tensor.dtensor import DTensor
from .assertions import check_source
from .declared import type_of_local
from .types.axis_types import I, R, type_of_placement
from .types.mesh_axes import axes_of
from .types.tensor_types import set_type, type_of


def declare_inputs(
    local: Sequence[Any], values: Sequence[Any], grads: Sequence[Any] | None
) -> None:
    """Give the local tensors of DTensors their types.

    Args:
        local: the arguments of the function, flattened, with local tensors.
        values: the same arguments with DTensors.
        grads: for each the placements of its gradient, or None.
    """
    for position, (one, value) in enumerate(zip(local, values, strict=True)):
        if isinstance(value, DTensor):
            grad = grads[position] if grads is not None else None
            set_type(one, type_of_local(value._spec, grad))


def check_outputs(result: Any, placements: Any, mesh: DeviceMesh) -> None:
    """Compare the types of outputs with the placements that they are to have.

    A replicated output must be I if it has a gradient, because a DTensor's gradient arrives
    complete on every rank.

    Raises:
        SpmdTypeError: if a type is another one.
    """
    flat = pytree.tree_leaves(result)
    listed = placements if isinstance(placements, tuple) else (placements,) * len(flat)
    for output, one in zip(flat, listed, strict=False):
        if isinstance(output, Tensor) and one is not None:
            _check_output(output, one, mesh)


def _check_output(output: Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> None:
    """Raise an error if the type of an output does not fit its placements."""
    for axis, placement in zip(axes_of(mesh), placements, strict=True):
        axis_type = type_of_placement(placement)
        if axis_type is None or axis.size() == 1:
            continue
        present = type_of(output)
        found = None if present is None else present.by_axis.get(axis)
        if axis_type is R and found is R and not output.requires_grad:
            continue
        if axis_type is R and found is R:
            raise SpmdTypeError(
                f"local_map: an output is R over {axis!r}, so its gradient would be a partial sum, "
                "and the gradient of a replicated DTensor is complete. Way out: make it I, "
                "all_reduce(x, axis, dst=I) or convert(x, axis, src=R, dst=I)"
            )
        check_source(output, axis, I if axis_type is R else axis_type, "local_map: an output")
