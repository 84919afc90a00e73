"""`TensorType`: the type of a tensor on every mesh axis, and where tensors keep it.

A type is an attribute of the tensor object. Copies, pickles and files do not have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ..._torch.tensors import TensorNote, pytree
from ...errors import SpmdTypeError
from .axis_types import AnyAxisType, AxisType, Shard, V, local_type
from .mesh_axes import MESH, AxisLike, MeshAxis, normalize_axis

_ATTRIBUTE = "_shoal_spmd_type"
DimOrder = tuple[tuple[int, tuple[MeshAxis, ...]], ...]


class TensorType:
    """The type of a tensor on each mesh axis; a value.

    Attributes:
        by_axis: the type on each axis of more than one rank.
        order: pairs (tensor dim, axes outermost first) of the dims that several axes shard.
    """

    def __init__(self, by_axis: Mapping[MeshAxis, AnyAxisType], order: DimOrder = ()) -> None:
        self.by_axis: dict[MeshAxis, AnyAxisType] = dict(by_axis)
        self.order: DimOrder = order

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A hashable value that distinguishes this type from others."""
        return (frozenset(self.by_axis.items()), self.order)

    @cached_property
    def local(self) -> dict[MeshAxis, AxisType]:
        """The types without dims: V in place of S(i)."""
        return {axis: local_type(axis_type) for axis, axis_type in self.by_axis.items()}

    @cached_property
    def dims(self) -> dict[int, tuple[MeshAxis, ...]]:
        """The axes that shard each sharded dim, outermost first."""
        ordered = dict(self.order)
        found: dict[int, list[MeshAxis]] = {}
        for axis, axis_type in self.by_axis.items():
            if isinstance(axis_type, Shard):
                found.setdefault(axis_type.dim, []).append(axis)
        return {dim: ordered.get(dim, tuple(axes)) for dim, axes in sorted(found.items())}

    def with_axis(self, axis: MeshAxis, axis_type: AnyAxisType) -> TensorType:
        """Return the type with another type on one axis.

        An axis that newly shards a dim becomes the innermost of the dim's axes.
        """
        dims: dict[int, tuple[MeshAxis, ...]] = {}
        for dim, axes in self.dims.items():
            others = [other for other in axes if other != axis]
            dims[dim] = tuple(others)
        if isinstance(axis_type, Shard):
            dims[axis_type.dim] = (*dims.get(axis_type.dim, ()), axis)
        order = [(dim, axes) for dim, axes in sorted(dims.items()) if len(axes) > 1]
        return TensorType({**self.by_axis, axis: axis_type}, tuple(order))

    def without_dims(self) -> TensorType:
        """Return the type with V in place of S(i)."""
        return TensorType(self.local)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorType) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        parts = [f"{axis!r}: {axis_type!r}" for axis, axis_type in self.by_axis.items()]
        text = "{" + ", ".join(parts) + "}"
        orders = []
        for dim, axes in self.dims.items():
            if len(axes) > 1:
                names = ", ".join(map(repr, axes))
                orders.append(f"dim {dim} by {names}")
        return f"{text} ({'; '.join(orders)})" if orders else text


class _Note(TensorNote):
    """The type that a tensor object has."""

    __slots__ = ("tensor_type",)

    def __init__(self, tensor_type: TensorType | None) -> None:
        self.tensor_type = tensor_type


# the note of a tensor that is computed from numbers of the program alone
_CONSTANT = _Note(None)


def is_constant(tensor: Any) -> bool:
    """Tell whether a tensor was made from numbers of the program alone, equal on all ranks."""
    return getattr(tensor, _ATTRIBUTE, None) is _CONSTANT


def mark_constant(tensor: Any, constant: bool) -> None:
    """Note that a tensor without a type is a constant, or that it is not one any more."""
    if constant:
        setattr(tensor, _ATTRIBUTE, _CONSTANT)
    elif is_constant(tensor):
        delattr(tensor, _ATTRIBUTE)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments or results, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def type_of(tensor: Any) -> TensorType | None:
    """Return the type of a tensor; None if it does not have one."""
    note = getattr(tensor, _ATTRIBUTE, None)
    return note.tensor_type if isinstance(note, _Note) else None


def set_type(tensor: Any, tensor_type: TensorType | None) -> None:
    """Give a tensor a type, in place of the one that it has; None takes the type away."""
    if tensor_type is not None:
        setattr(tensor, _ATTRIBUTE, _Note(tensor_type))
    elif hasattr(tensor, _ATTRIBUTE):
        delattr(tensor, _ATTRIBUTE)


def read_type(
    types: Mapping[AxisLike, AnyAxisType], ndim: int, spec: Sequence[Any] | None = None
) -> TensorType:
    """Return the type that a user wrote for a tensor of `ndim` dims.

    Axes with one rank are left out: every type holds along them.

    Args:
        types: types by axis.
        ndim: the number of dims of the tensor.
        spec: for each tensor dim the axis or the axes that shard it, or None; these axes are V in
            `types`, or are not in it.

    Raises:
        SpmdTypeError: if the types contradict each other or the number of dims, or two axes shard
            one dim without a spec that orders them.
    """
    by_axis: dict[MeshAxis, AnyAxisType] = {}
    for axis_like, axis_type in types.items():
        axis = normalize_axis(axis_like)
        resolved = _valid_type(axis_like, axis_type, ndim)
        # All axes of one rank are equal, but a mesh may have several, with other types.
        if axis.size() == 1:
            continue
        if by_axis.setdefault(axis, resolved) is not resolved:
            raise SpmdTypeError(
                f"the axis {axis!r} is given twice, as {by_axis[axis]} and as {resolved}"
            )
    order: DimOrder = ()
    if spec is not None:
        order = _read_spec(by_axis, ndim, spec)
    else:
        _check_single_axes(by_axis)
    kept = [(dim, axes) for dim, axes in order if len(axes) > 1]
    return TensorType(_in_mesh_order(by_axis), tuple(kept))


def _valid_type(axis: AxisLike, axis_type: AnyAxisType, ndim: int) -> AnyAxisType:
    """Return a type with its dim counted from the front; raise an error if it is not valid."""
    if not isinstance(axis_type, AxisType | Shard):
        raise SpmdTypeError(
            f"the type on axis {axis!r} must be one of R, I, V, P and S(dim), got {axis_type!r}"
        )
    if not isinstance(axis_type, Shard):
        return axis_type
    resolved = axis_type.resolve(ndim)
    if not 0 <= resolved.dim < ndim:
        raise SpmdTypeError(f"{axis_type} on axis {axis!r}: the tensor has {ndim} dims")
    return resolved


def axes_of_entry(entry: Any) -> tuple[Any, ...]:
    """Return the axes that an entry of a partition spec names: none, one or several."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _read_spec(by_axis: dict[MeshAxis, AnyAxisType], ndim: int, spec: Sequence[Any]) -> DimOrder:
    """Add the sharded dims of a spec to the types, and return the order of axes."""
    if len(spec) != ndim:
        raise SpmdTypeError(
            f"{spec!r} has {len(spec)} entries, but the tensor has {ndim} dims: pass one entry "
            "per dim"
        )
    written = [axis for axis, axis_type in by_axis.items() if isinstance(axis_type, Shard)]
    if written:
        raise SpmdTypeError(
            f"S(i) on axis {written[0]!r} together with {spec!r}: write the sharded dims in one of "
            "them"
        )
    order = []
    seen: set[MeshAxis] = set()
    for dim, entry in enumerate(spec):
        named = [normalize_axis(axis) for axis in axes_of_entry(entry)]
        axes = tuple([axis for axis in named if axis.size() > 1])
        for axis in axes:
            if axis in seen:
                raise SpmdTypeError(f"{spec!r} names the axis {axis!r} twice")
            seen.add(axis)
            if by_axis.get(axis, V) is not V:
                raise SpmdTypeError(
                    f"the axis {axis!r} is {by_axis[axis]} and shards dim {dim} in {spec!r}: a "
                    "sharding axis must be V, or be left out of the types"
                )
            by_axis[axis] = Shard(dim)
        order.append((dim, axes))
    return tuple(order)


def _check_single_axes(by_axis: Mapping[MeshAxis, AnyAxisType]) -> None:
    """Raise an error if several axes shard one dim, because their order is unknown."""
    sharding: dict[int, MeshAxis] = {}
    for axis, axis_type in by_axis.items():
        if not isinstance(axis_type, Shard):
            continue
        other = sharding.setdefault(axis_type.dim, axis)
        if other != axis:
            raise SpmdTypeError(
                f"the axes {other!r} and {axis!r} both shard dim {axis_type.dim}, and their order "
                "is unknown: pass a PartitionSpec, outermost axis first, such as "
                f"PartitionSpec(({other!r}, {axis!r}), ...)"
            )


def _in_mesh_order(by_axis: Mapping[MeshAxis, AnyAxisType]) -> dict[MeshAxis, AnyAxisType]:
    """Return the types with the axes of the current mesh first, so that texts are alike."""
    current = MESH.get()
    axes_of_mesh = () if current is None else current.axes
    first = [axis for axis in axes_of_mesh if axis in by_axis]
    rest = [axis for axis in by_axis if axis not in first]
    return {axis: by_axis[axis] for axis in (*first, *rest)}


def refine(old: TensorType, new: TensorType) -> TensorType:
    """Return the more specific of two types on each axis; S(i) is more specific than V.

    Args:
        old: the type that a tensor has.
        new: the type that a program asserts.

    Raises:
        SpmdTypeError: if they contradict each other.
    """
    merged = dict(old.by_axis)
    for axis, axis_type in new.by_axis.items():
        present = merged.get(axis, axis_type)
        if present is axis_type or (axis_type is V and isinstance(present, Shard)):
            merged[axis] = present
        elif present is V and isinstance(axis_type, Shard):
            merged[axis] = axis_type
        else:
            raise SpmdTypeError(
                f"the tensor is {present} over {axis!r}, but {axis_type} is asserted: its type is "
                f"{old!r}, the asserted type is {new!r}"
            )
    return TensorType(merged, _merged_order(old, new, merged))


def _merged_order(
    old: TensorType, new: TensorType, merged: Mapping[MeshAxis, AnyAxisType]
) -> DimOrder:
    """Return the order of the axes of each dim, which both types must agree on."""
    order = []
    for dim in sorted({*old.dims, *new.dims}):
        axes = [axis for axis, axis_type in merged.items() if axis_type is Shard(dim)]
        if len(axes) == 1:
            continue
        candidates = [
            tensor_type.dims[dim] for tensor_type in (old, new) if dim in tensor_type.dims
        ]
        complete = [listed for listed in candidates if len(listed) == len(axes)]
        if len(complete) < len(candidates) or len({*complete}) != 1:
            raise SpmdTypeError(
                f"dim {dim} is sharded by {candidates[0]} in one type and by {candidates[-1]} in "
                "the other: assert the complete order of its axes at once, as a PartitionSpec"
            )
        order.append((dim, complete[0]))
    return tuple(order)


def describe_axes(axes: Iterable[MeshAxis]) -> str:
    """Return the names of axes, separated by commas."""
    return ", ".join(map(repr, axes))
