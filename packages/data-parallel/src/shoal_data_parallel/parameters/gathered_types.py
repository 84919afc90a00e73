"""SPMD types of gathered parameters, for a checker of the plain code that reads them.

`shoal_dtensor.spmd.types.axis_types` explains the types. Each rank computes with a gathered
parameter on its own rows, and the gradient is summed over the ranks: the type along the data axes
is R. Along other axes a gathered parameter has the type that the program has asserted for the
parameter.

May import: nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from shoal_dtensor import DTensor
from shoal_mesh import DeviceMesh

if TYPE_CHECKING:
    from shoal_dtensor.internal import spmd


def declare_whole(
    mesh: DeviceMesh,
    parameter: Tensor,
    whole: Tensor,
    declared: spmd.TensorType | None = None,
) -> None:
    """Give the whole value of a sharded parameter its type.

    A DTensor, on the axes of a style, has no type.

    Args:
        mesh: the mesh of the data axes.
        parameter: the parameter, with the type along other axes that the program has asserted.
        whole: the tensor that modules see.
        declared: the type that it had before it was sharded; `to_empty` makes a parameter without
            one.
    """
    # few programs check types
    from shoal_dtensor.internal import R, spmd

    if isinstance(whole, DTensor):
        return
    asserted = spmd.type_of(parameter) or declared
    by_axis = {} if asserted is None else {**asserted.by_axis}
    for axis in spmd.axes_of(mesh):
        # an axis that the program has asserted may join the ranks of several data axes
        if axis.size() > 1 and not any(axis <= wider for wider in by_axis):
            by_axis[axis] = R
    spmd.set_type(whole, spmd.TensorType(by_axis))
