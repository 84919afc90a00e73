"""Types that autograd functions declare: the registries, and the functions of shoal_mesh.

A type states how the values of the ranks along a mesh axis are related (`types.axis_types`):

    R         replicated: equal values, whose gradients are addends of a sum
    I         invariant: equal values with equal gradients
    P         partial: addends of a sum
    V         varying: the values may differ
    Shard(i)  varying: shards of a global tensor along dim i

The type checker (`checker`) derives the types of results from the operators that compute them. It
cannot do so inside of an autograd function, whose backward is code of its own: it may be another
function than the derivative of the operators in the forward. So the checker takes the types of the
results from a declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from shoal_mesh.internal import adjoint_types, linear_collective

from ..errors import SpmdTypeError
from ..layout.placements import Partial, Placement
from ..layout.spec import Spec
from ..tensor.autograd import FromLocal, ToLocal
from .assertions import check_source, moved_type
from .inference.messages import user_line
from .types.axis_types import AnyAxisType, I, P, R, Shard, V, local_type, type_of_placement
from .types.mesh_axes import MeshAxis, axes_of, normalize_axis
from .types.tensor_types import DimOrder, TensorType, set_type, tensors_in, type_of

Declaration = Callable[[Any, tuple[Any, ...]], None]
"""Function that assigns types to the outputs of a function: (outputs, arguments of `apply`)."""

_DECLARATIONS: WeakKeyDictionary[type, Declaration] = WeakKeyDictionary()
# Functions that look for a declaration in the methods of an autograd function's class; None if the
# class has no such method.
FINDERS: list[Callable[[type], Declaration | None]] = []
# The autograd functions that each rank computes on its own; `checker` applies `declare_local`.
LOCAL_FUNCTIONS: WeakSet[type] = WeakSet()
# autograd function -> a function of operators that computes the same results; `checker` runs it too
# and takes the types of its results
DECOMPOSITIONS: WeakKeyDictionary[type, Callable[..., Any]] = WeakKeyDictionary()


def declare_types(function: type[torch.autograd.Function], declaration: Declaration) -> None:
    """Register the declaration of an autograd function's types.

    Args:
        function: the class of the function.
        declaration: called with the outputs and the arguments of `apply`; it gives the outputs
            their types.
    """
    _DECLARATIONS[function] = declaration


def declaration_of(function: type) -> Declaration | None:
    """Return the declaration of an autograd function or of a base class; None without one."""
    for base in function.__mro__:
        found = _DECLARATIONS.get(base)
        if found is not None:
            return found
    found_by_method = [finder(function) for finder in FINDERS]
    return next(filter(None, found_by_method), None)


def declare_local(outputs: Any, args: tuple[Any, ...]) -> None:
    """Give types to the outputs of a function that every rank computes on its own.

    On each axis, the outputs have the type of the arguments if all of these are R, all are I, or
    all are V. Arguments of which some are R and some are V give V. Shards count as V.

    Raises:
        SpmdTypeError: if I is among other types, if an argument is P, or if the type of an argument
            lacks an axis on which another argument has a type.
    """
    found = [type_of(tensor) for tensor in tensors_in(args)]
    types = [tensor_type for tensor_type in found if tensor_type is not None]
    if not types:
        return
    axes = dict.fromkeys(axis for tensor_type in types for axis in tensor_type.by_axis)
    by_axis = {axis: _local_result(axis, types) for axis in axes}
    for output in tensors_in(outputs):
        set_type(output, TensorType(by_axis))


def _local_result(axis: MeshAxis, types: Iterable[TensorType]) -> AnyAxisType:
    """Return the type of the outputs on an axis, as `declare_local` describes it."""
    kinds = set()
    for tensor_type in types:
        axis_type = tensor_type.by_axis.get(axis)
        if axis_type is None:
            raise SpmdTypeError(
                f"{user_line()}: the operands of a local autograd function must have types on the "
                f"same axes, but the type {tensor_type!r} of an operand lacks the axis {axis!r} of "
                "another operand; assert its type on this axis"
            )
        kinds.add(local_type(axis_type))
    if kinds in ({R}, {I}, {V}):
        return kinds.pop()
    if kinds == {R, V}:
        return V
    names = ", ".join(sorted(map(repr, kinds)))
    raise SpmdTypeError(
        f"{user_line()}: the operands of a local autograd function must be R and V, or I only, "
        f"over {axis!r}, got {names}; convert or reduce the others first"
    )


def _declare_linear(outputs: Any, args: tuple[Any, ...]) -> None:
    """Give the result of a collective of `shoal_mesh.differentiable` its type."""
    # the tensor, its communicator, the collective, and the collective of the gradient
    tensor, comm, run, adjoint = args[:4]
    # the types of the argument and of the result, or None for a collective without types
    found = adjoint_types(run, adjoint)
    if type_of(tensor) is None:
        return
    if found is None:
        raise SpmdTypeError(
            f"{user_line()}: shoal_mesh.differentiable: this collective does not propagate types; "
            "call it in a function with declared types, or use a sum, a gather, a scatter or an "
            "all-to-all"
        )
    src, dst = [_type_of_name(name) for name in found]
    axis = normalize_axis(comm)
    check_source(tensor, axis, src, "shoal_mesh.differentiable")
    set_type(outputs, moved_type(tensor, axis, dst, outputs.ndim))


def type_of_local(spec: Spec, grads: Sequence[Placement] | None) -> TensorType:
    """Return the type of the local tensor of a DTensor.

    Args:
        spec: the layout of the DTensor.
        grads: the placements of the gradient; None for the placements of the DTensor itself. On an
            axis on which the DTensor is replicated, the type is R if the gradient is Partial, and I
            otherwise.
    """
    by_axis: dict[MeshAxis, AnyAxisType] = {}
    listed = (None,) * spec.mesh.ndim if grads is None else tuple(grads)
    for axis, placement, grad in zip(axes_of(spec.mesh), spec.placements, listed, strict=True):
        axis_type = type_of_placement(placement)
        if axis_type is R and not isinstance(grad, Partial):
            axis_type = I
        if axis.size() == 1:
            continue
        # V claims nothing. It is the type of placements that no other type describes (None), and of
        # layouts with uneven shards: the other types are those of even layouts.
        if axis_type is None or not spec.even:
            axis_type = V
        by_axis[axis] = axis_type
    return TensorType(by_axis, _order_of(spec))


def _declare_to_local(outputs: Any, args: tuple[Any, ...]) -> None:
    """Give the local tensor of a DTensor its type."""
    set_type(outputs, type_of_local(args[0]._spec, args[1]))


def _order_of(spec: Spec) -> DimOrder:
    """Return the order of the mesh axes on each dim that several axes shard evenly.

    Example: if the axes dp and tp shard dim 0, dp first, the order is ((0, (dp, tp)),).
    """
    axes = axes_of(spec.mesh)
    order: list[tuple[int, tuple[MeshAxis, ...]]] = []
    for dim, sharding in spec.shard_order:
        if len(sharding) > 1 and spec.even:
            listed = map(axes.__getitem__, sharding)
            order.append((dim, tuple(listed)))
    return tuple(order)


def _declare_from_local(outputs: Any, args: tuple[Any, ...]) -> None:
    """Compare the type of a tensor that becomes a DTensor with its placements."""
    local = args[0]
    spec: Spec = args[2]
    if type_of(local) is None or not local.requires_grad:
        return
    for axis, placement in zip(axes_of(spec.mesh), spec.placements, strict=True):
        axis_type = type_of_placement(placement)
        if axis_type is not None:
            # A replicated DTensor passes the complete gradient to every rank, so its local tensor
            # must be I (equal gradients), not R (addends of the gradient).
            check_source(local, axis, I if axis_type is R else axis_type, "DTensor.from_local")


def _type_of_name(name: str) -> AnyAxisType:
    """Return the type with a name: `"R"`, `"P"`, `"I"`, `"V"` or `"S(1)"`."""
    if name.startswith("S"):
        return Shard(int(name[2:-1]))
    return {"R": R, "I": I, "P": P, "V": V}[name]


declare_types(linear_collective, _declare_linear)
declare_types(ToLocal, _declare_to_local)
declare_types(FromLocal, _declare_from_local)
