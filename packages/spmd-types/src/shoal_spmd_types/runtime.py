"""Functions that assert and read types, and blocks in which types are checked in another way.

They do not communicate and do not change values. Along a mesh axis, a tensor has one of the types R
(replicated), I (invariant: replicated, with equal gradients), V (varying: each rank has values of
its own), P (addends of a pending sum) and S(i) (V, and a shard of dim i of a global tensor). The
*local type* of a tensor has V in the place of S(i); the partition spec has the dims.

May import: scalar, types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, overload

import torch

from shoal_dtensor.errors import ArgumentTypeError, SpmdTypeError
from shoal_dtensor.internal import (
    I,
    R,
    ShardType as Shard,
    assert_layout,
    current_watch,
    pytree,
    spmd,
)
from shoal_mesh import DeviceMesh

from .scalar import Scalar
from .types import PartitionSpec, SpmdType, entry_of

F = TypeVar("F", bound=Callable[..., Any])
TypeArgument = SpmdType | Mapping[Any, Any] | spmd.AxisType | PartitionSpec | None


# --- reading types --------------------------------------------------------------------------------


def has_local_type(tensor: Any) -> bool:
    """Return whether a tensor has a type.

    Args:
        tensor: a tensor, or a `Scalar`.

    Example:
        >>> has_local_type(torch.zeros(2))
        False
    """
    return isinstance(tensor, Scalar) or spmd.type_of(tensor) is not None


def get_local_type(value: Any) -> dict[spmd.MeshAxis, spmd.AxisType]:
    """Return the local type of a tensor: its type on each axis, with V in the place of S(i).

    Args:
        value: a tensor with a type, or a `Scalar`.

    Raises:
        SpmdTypeError: if it does not have a type.

    Example:
        >>> mesh = abstract_mesh((2, 4), ("dp", "tp"))
        >>> with set_current_mesh(mesh), typecheck():
        ...     get_local_type(assert_type(torch.zeros(4), {"dp": S(0), "tp": R}))
        {dp: V, tp: R}
    """
    if isinstance(value, Scalar):
        return value.local_type
    return {**_type_of(value).local}


def get_axis_local_type(tensor: Any, axis: Any) -> spmd.AxisType:
    """Return the local type of a tensor on one axis: V in the place of S(i).

    Args:
        tensor: a tensor with a type.
        axis: a name of the current mesh, a process group or a `MeshAxis`.

    Raises:
        SpmdTypeError: if it does not have a type on the axis.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     get_axis_local_type(assert_type(torch.zeros(4), {"tp": P}), "tp")
        P
    """
    found = maybe_get_axis_local_type(tensor, axis)
    if found is None:
        name = spmd.normalize_axis(axis)
        raise SpmdTypeError(
            f"the tensor does not have a type over {name!r}; its type is {spmd.type_of(tensor)}"
        )
    return found


def maybe_get_axis_local_type(tensor: Any, axis: Any) -> spmd.AxisType | None:
    """Return the local type of a tensor on one axis; None if it does not have a type there.

    Args:
        tensor: a tensor.
        axis: a name of the current mesh, a process group or a `MeshAxis`.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))):
        ...     maybe_get_axis_local_type(torch.zeros(4), "tp") is None
        True
    """
    present = spmd.type_of(tensor)
    if present is None:
        return None
    return present.local.get(spmd.normalize_axis(axis))


def get_partition_spec(tensor: Any) -> PartitionSpec | None:
    """Return the axes that shard each dim of a tensor; None if no axis does.

    Args:
        tensor: a tensor.

    Example:
        >>> with set_current_mesh(abstract_mesh((2, 4), ("dp", "tp"))), typecheck():
        ...     get_partition_spec(assert_type(torch.zeros(4, 2), {"dp": S(0), "tp": R}))
        PartitionSpec(dp, None)
    """
    present = spmd.type_of(tensor)
    if present is None:
        return None
    return _partition_spec_of(present, tensor.ndim)


def _partition_spec_of(tensor_type: spmd.TensorType, ndim: int) -> PartitionSpec | None:
    """Return the axes that shard each of `ndim` dims; None if no axis does."""
    if not tensor_type.dims:
        return None
    # An entry is None, an axis, or a tuple of axes: PartitionSpec(dp, None, (tp, cp)).
    entries = [entry_of(tensor_type.dims.get(dim, ())) for dim in range(ndim)]
    return PartitionSpec(*entries)


def _type_of(tensor: Any) -> spmd.TensorType:
    """Return the type of a tensor; raise SpmdTypeError if it has none."""
    present = spmd.type_of(tensor)
    if present is None:
        raise SpmdTypeError(
            "the tensor does not have a type; call assert_type(x, {axis: R, ...}) while types "
            "are checked"
        )
    return present


# --- asserting types ------------------------------------------------------------------------------


def merge_types(*types: TypeArgument) -> SpmdType:
    """Merge types of some axes into one type.

    Args:
        types: dicts by axis, values of `SpmdType` or `PartitionSpec`, one bare type such as R, or
            None. The bare type is the type on those axes of the current mesh that the other
            arguments do not name.

    Raises:
        SpmdTypeError: if the types contradict each other, or a bare type is given without a current
            mesh.
        ArgumentTypeError: for two bare types, or other arguments.

    Example:
        >>> with set_current_mesh(abstract_mesh((2, 4), ("dp", "tp"))):
        ...     merge_types(R, {"tp": V}).local_type
        {'tp': V, dp: R}
    """
    merged: dict[Any, Any] = {}
    spec: PartitionSpec | None = None
    bare: spmd.AxisType | None = None
    for item in types:
        if item is None:
            continue
        if isinstance(item, spmd.AxisType):
            if bare is not None:
                raise ArgumentTypeError(
                    f"merge_types: at most one bare type can fill the other axes, got {bare} and "
                    f"{item}"
                )
            bare = item
            continue
        types_by_axis, spec_of_item = _types_and_spec_of(item)
        for axis, axis_type in types_by_axis.items():
            # Equal types are one object.
            if axis in merged and merged[axis] is not axis_type:
                raise SpmdTypeError(
                    f"merge_types: {axis!r} is {merged[axis]} in one argument and {axis_type} in "
                    "another"
                )
            merged[axis] = axis_type
        if spec_of_item is not None:
            if spec is not None and spec != spec_of_item:
                raise SpmdTypeError(f"merge_types: {spec} and {spec_of_item} differ")
            spec = spec_of_item
    if bare is not None:
        merged = _fill_other_axes(merged, spec, bare)
    return SpmdType(merged, spec)


def _types_and_spec_of(item: Any) -> tuple[Mapping[Any, Any], PartitionSpec | None]:
    """Return the types by axis and the partition spec of an argument."""
    if isinstance(item, SpmdType):
        return item.local_type, item.partition_spec
    if isinstance(item, PartitionSpec):
        return {}, item
    if isinstance(item, Mapping):
        return item, None
    raise ArgumentTypeError(
        "a type must be a dict by axis, an SpmdType, a PartitionSpec, or one of R, I, V and P, "
        f"got {item!r}"
    )


def _fill_other_axes(
    merged: dict[Any, Any], spec: PartitionSpec | None, bare: spmd.AxisType
) -> dict[Any, Any]:
    """Add a bare type for the axes of the current mesh that no other type names."""
    mesh = spmd.MESH.get()
    if mesh is None:
        raise SpmdTypeError(
            f"the bare type {bare} applies to all axes of the current mesh, but no mesh is "
            "current; set it with set_current_mesh(mesh)"
        )
    named = {spmd.normalize_axis(axis) for axis in merged}
    if spec is not None:
        named |= spec.axes_with_partition_spec()
    others = [axis for axis in mesh.axes if axis not in named]
    return merged | dict.fromkeys(others, bare)


def assert_type(
    tensor: Any, *types: TypeArgument, partition_spec: PartitionSpec | None = None
) -> Any:
    """Give a tensor a type, or compare a type with the one that the tensor has.

    S(i) refines V; other types must be equal. Outside of `typecheck` the function does nothing,
    with two exceptions:

    - A parameter without a type gets one, because programs make parameters before they enter
      `typecheck`.
    - While a parallel module with random operators runs its forward, a watch records the layouts of
      plain tensors, so that a rank draws its shard of one device's random numbers. There the
      asserted type declares the layout of the tensor.

    Args:
        tensor: a tensor, or a list or tuple of tensors.
        types: dicts by axis, an `SpmdType`, a `PartitionSpec`, a bare type for all other axes of
            the current mesh, or None; they are merged.
        partition_spec: the axes that shard each dim, in place of S(i).

    Returns:
        `tensor`.

    Raises:
        SpmdTypeError: if the types contradict each other, the tensor's dims or its type.
        ArgumentTypeError: for other arguments.

    Example:
        >>> with set_current_mesh(abstract_mesh((2, 4), ("dp", "tp"))), typecheck():
        ...     x = assert_type(torch.zeros(4, 2), {"tp": R}, PartitionSpec("dp", None))
        ...     assert_type(x, {"tp": I})
        Traceback (most recent call last):
        shoal_dtensor.errors.SpmdTypeError: ...
    """
    if isinstance(tensor, list | tuple):
        cls: Any = type(tensor)
        return cls([assert_type(item, *types, partition_spec=partition_spec) for item in tensor])
    watch = current_watch()
    gets_type = spmd.is_active() or _is_new_parameter(tensor)
    if not gets_type and watch is None:
        return tensor
    # A watch has a mesh, by which names of axes are read if no mesh is current.
    watch_mesh = None if watch is None else watch.axes.mesh
    with _mesh_for_names(watch_mesh):
        try:
            merged = merge_types(*types, partition_spec)
        except SpmdTypeError as error:
            raise SpmdTypeError(f"{spmd.user_line()}: assert_type: {error}") from None
        if gets_type:
            spmd.assert_tensor_type(tensor, merged.local_type, merged.partition_spec)
        if watch is not None:
            assert_layout(tensor, watch.axes.mesh, merged.local_type, merged.partition_spec)
    return tensor


def _mesh_for_names(default: DeviceMesh | None) -> AbstractContextManager[Any]:
    """Return a block in which a mesh is current: as before, or the default if there was none."""
    if default is None or spmd.MESH.get() is not None:
        return nullcontext()
    return spmd.set_current_mesh(default)


def _is_new_parameter(tensor: Any) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and spmd.type_of(tensor) is None


def assert_local_type(tensor: torch.Tensor, type: Mapping[Any, Any]) -> torch.Tensor:
    """Call `assert_type`, under its former name.

    Args:
        tensor: a tensor.
        type: types by axis.

    Returns:
        `tensor`.

    Raises:
        SpmdTypeError: if the types contradict the tensor's dims or its type.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     get_local_type(assert_local_type(torch.zeros(4), {"tp": P}))
        {tp: P}
    """
    asserted: torch.Tensor = assert_type(tensor, type)
    return asserted


def assert_type_like(
    tensor: torch.Tensor, source: torch.Tensor, overrides: Mapping[Any, Any] | None = None
) -> None:
    """Assert that a tensor has the type of another tensor, with other types on some axes.

    Args:
        tensor: a tensor.
        source: a tensor with a type. If it is sharded, it has as many dims as `tensor`.
        overrides: types by axis, in place of the types of `source`.

    Raises:
        SpmdTypeError: if the tensor has another type, or `source` has none.

    Example:
        >>> with set_current_mesh(abstract_mesh((2, 4), ("dp", "tp"))), typecheck():
        ...     x = assert_type(torch.zeros(4), {"dp": S(0), "tp": P})
        ...     y = torch.zeros(4)
        ...     assert_type_like(y, x, {"tp": R})
        ...     get_local_type(y)
        {dp: V, tp: R}
    """
    # `is_active` is true in the whole `typecheck` block, also where checks of operators are paused
    # and `is_type_checking` is false.
    if not spmd.is_active():
        return
    _assert_tensor_type(tensor, _overridden(_type_of(source), overrides))


def assert_local_type_like(
    tensor: torch.Tensor, source: torch.Tensor, overrides: Mapping[Any, Any] | None = None
) -> None:
    """Assert that a tensor has the type of another tensor, with V in place of its shards.

    Args:
        tensor: a tensor.
        source: a tensor with a type.
        overrides: types by axis, in place of the types of `source`.

    Raises:
        SpmdTypeError: if the tensor has another type, or `source` has none.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     x = assert_type(torch.zeros(4), {"tp": S(0)})
        ...     y = torch.zeros(2, 2)
        ...     assert_local_type_like(y, x)
        ...     get_partition_spec(y) is None
        True
    """
    if not spmd.is_active():
        return
    _assert_tensor_type(tensor, _overridden(_type_of(source).without_dims(), overrides))


def _overridden(
    tensor_type: spmd.TensorType, overrides: Mapping[Any, Any] | None
) -> spmd.TensorType:
    """Return a type with other types on some axes."""
    for axis, axis_type in (overrides or {}).items():
        tensor_type = tensor_type.with_axis(spmd.normalize_axis(axis), axis_type)
    return tensor_type


def _assert_tensor_type(tensor: Any, wanted: spmd.TensorType) -> None:
    """Assert the type of another tensor.

    Its shards are asserted as a partition spec, which has the order of axes that shard one dim.
    S(i) by axis does not have this order.
    """
    pairs = wanted.by_axis.items()
    by_axis: dict[Any, Any] = {axis: kind for axis, kind in pairs if not isinstance(kind, Shard)}
    spmd.assert_tensor_type(tensor, by_axis, _partition_spec_of(wanted, tensor.ndim))


def mutate_type(tensor: torch.Tensor, axis: Any = None, *, src: Any, dst: Any) -> torch.Tensor:
    """Replace the type of a tensor on some axes, which must have the types `src`.

    Args:
        tensor: a tensor with a type, such as a buffer that a collective has filled.
        axis: the axis, if `src` and `dst` are single types; None for all axes of the tensor.
        src: the present type, or the present types by axis.
        dst: the new type, or the new types by axis.

    Returns:
        `tensor`.

    Raises:
        SpmdTypeError: if the tensor has other types, or the axes of `src` and `dst` differ.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     x = assert_type(torch.zeros(4), {"tp": V})
        ...     get_local_type(mutate_type(x, "tp", src=V, dst=R))
        {tp: R}
    """
    if not spmd.is_type_checking() and spmd.type_of(tensor) is None:
        return tensor
    present = _type_of(tensor)
    all_axes = [*present.by_axis]
    before = _types_by_axis(src, axis=axis, counterpart=dst, all_axes=all_axes)
    after = _types_by_axis(dst, axis=axis, counterpart=src, all_axes=all_axes)
    if before.keys() != after.keys():
        raise SpmdTypeError(
            f"mutate_type: src and dst must have the same axes, got {[*before]} and {[*after]}"
        )
    for mesh_axis, expected in before.items():
        found = present.local.get(mesh_axis)
        if mesh_axis.size() > 1 and found is not spmd.local_type(expected):
            raise SpmdTypeError(
                f"{spmd.user_line()}: mutate_type: the tensor is {found} over {mesh_axis!r}, not "
                f"{expected}: {present}"
            )
    for mesh_axis, axis_type in after.items():
        if mesh_axis.size() > 1:
            present = present.with_axis(mesh_axis, spmd.local_type(axis_type))
    spmd.set_type(tensor, present)
    return tensor


def _types_by_axis(
    types: Any, *, axis: Any, counterpart: Any, all_axes: Sequence[spmd.MeshAxis]
) -> dict[spmd.MeshAxis, Any]:
    """Return `src` or `dst` of `mutate_type` as types by axis.

    A single type is for `axis`. If that is None, it is for the axes that the counterpart names, or
    else for all axes.

    Args:
        types: types by axis, or a single type.
        axis: the argument of `mutate_type`.
        counterpart: `dst` if `types` is `src`, and the other way around.
        all_axes: the axes on which the tensor has a type.
    """
    if isinstance(types, Mapping):
        return {spmd.normalize_axis(name): axis_type for name, axis_type in types.items()}
    if axis is not None:
        return {spmd.normalize_axis(axis): types}
    if isinstance(counterpart, Mapping):
        axes = [spmd.normalize_axis(name) for name in counterpart]
        return dict.fromkeys(axes, types)
    return dict.fromkeys(all_axes, types)


def reinterpret_no_grad(tensor: torch.Tensor, axis: Any, *, dst: Any) -> torch.Tensor:
    """Change R to I, or I to R, of a tensor that has no gradient.

    Args:
        tensor: a tensor that does not require grad.
        axis: the axis.
        dst: R or I.

    Returns:
        A tensor with the same memory and the type `dst`.

    Raises:
        SpmdTypeError: if the tensor requires grad, or is neither R nor I.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     x = assert_type(torch.zeros(4), {"tp": R})
        ...     get_local_type(reinterpret_no_grad(x, "tp", dst=I))
        {tp: I}
    """
    if not spmd.is_type_checking() and spmd.type_of(tensor) is None:
        return tensor
    if tensor.requires_grad:
        raise SpmdTypeError(
            f"{spmd.user_line()}: reinterpret_no_grad: the tensor requires grad; use convert"
        )
    mesh_axis = spmd.normalize_axis(axis)
    has_ranks = mesh_axis.size() > 1
    present = _type_of(tensor)
    is_allowed = dst in (R, I)
    if has_ranks:
        is_allowed = is_allowed and present.by_axis.get(mesh_axis) in (R, I)
    if not is_allowed:
        raise SpmdTypeError(
            f"{spmd.user_line()}: reinterpret_no_grad changes between R and I only, got {dst} for "
            f"a tensor of type {present}"
        )
    with spmd.paused():
        result = tensor.view_as(tensor)
    after = present.with_axis(mesh_axis, dst) if has_ranks else present
    spmd.set_type(result, after)
    return result


def reinterpret_mesh(tensor: torch.Tensor, type: Any, *, inplace: bool = False) -> torch.Tensor:
    """Express the type of a tensor by other mesh axes over the same ranks.

    Args:
        tensor: a tensor with a type.
        type: a mesh, its axes, or types by axis of the other mesh.
        inplace: whether the type of `tensor` itself is changed.

    Returns:
        A tensor with the same memory; `tensor` with `inplace`.

    Raises:
        SpmdTypeError: if the axes do not join the same ranks, or axes that are joined into one have
            different types.

    Example:
        >>> flat = abstract_mesh((8,), ("ep",))
        >>> with set_current_mesh(abstract_mesh((2, 4), ("dp", "tp"))), typecheck():
        ...     x = assert_type(torch.zeros(4), {"dp": V, "tp": V})
        ...     get_local_type(reinterpret_mesh(x, flat))
        {ep: V}
    """
    if not spmd.is_type_checking() and spmd.type_of(tensor) is None:
        return tensor
    present = _type_of(tensor)
    wanted: spmd.TensorType | None = None
    if isinstance(type, Mapping):
        wanted = spmd.read_type(type, tensor.ndim)
        axes = [*wanted.by_axis]
    else:
        axes = [*spmd.read_mesh(type).axes]
    found = spmd.translate_type(present, axes)
    is_other = found is not None and wanted is not None and found.local != wanted.local
    if found is None or is_other:
        name = "type" if wanted is None else f"type {wanted}"
        raise SpmdTypeError(
            f"{spmd.user_line()}: reinterpret_mesh: a tensor of type {present} cannot have a "
            f"{name} over {axes}: the axes must join the same ranks, and axes that become one "
            "must have one type"
        )
    if inplace:
        spmd.set_type(tensor, wanted or found)
        return tensor
    with spmd.paused():
        result = tensor.view_as(tensor)
    spmd.set_type(result, wanted or found)
    return result


# --- boundaries -----------------------------------------------------------------------------------


class _InferType:
    """The class of `Infer`, which stands for types that are not checked."""

    def __repr__(self) -> str:
        return "Infer"


Infer = _InferType()


def local() -> AbstractContextManager[None]:
    """Return a block in which shards count as V, so that every rank computes on its own.

    The block has no effect while types are not checked.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck(local=False):
        ...     x = assert_type(torch.zeros(4, 2), {"tp": S(0)})
        ...     with local():
        ...         get_local_type(x.flatten().sort().values)
        {tp: V}
    """
    return spmd.local()


def local_map(*, in_types: Any = Infer, out_types: Any) -> Callable[[F], F]:
    """Return a decorator of functions whose bodies are checked in local mode (`local`).

    Args:
        in_types: for each positional argument a type, in the structure of the arguments: a dict by
            axis, a `PartitionSpec`, a pair of both, or None for an argument that is not a tensor.
            `Infer` does not check the arguments.
        out_types: the types of the results, in their structure.

    Raises:
        SpmdTypeError: (when called) if an argument or a result has another type, or the structures
            differ.

    Example:
        >>> @local_map(in_types=({"tp": S(0)},), out_types={"tp": S(0)})
        ... def rank_of_each(x):
        ...     return x.argsort(0).argsort(0)
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck(local=False):
        ...     x = assert_type(torch.zeros(4, 2), {"tp": S(0)})
        ...     get_partition_spec(rank_of_each(x))
        PartitionSpec(tp, None)
    """
    _refuse_infer("out_types", out_types)
    if in_types is not Infer:
        _refuse_infer("in_types", in_types)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call_locally(*args: Any, **kwargs: Any) -> Any:
            if not spmd.is_type_checking():
                return function(*args, **kwargs)
            name = function.__qualname__
            if in_types is not Infer:
                _assert_leaves(f"{name}: in_types", args, in_types)
            with spmd.local():
                outputs = function(*args, **kwargs)
            _assert_leaves(f"{name}: out_types", outputs, out_types)
            return outputs

        return call_locally  # type: ignore[return-value]  # has the signature of the function

    return decorate


def _is_leaf(spec: Any) -> bool:
    """Return whether a type of `local_map` belongs to one value."""
    if spec is None or spec is Infer or isinstance(spec, Mapping | PartitionSpec | SpmdType):
        return True
    if not isinstance(spec, tuple) or len(spec) != 2:
        return False
    by_axis, sharding = spec
    if not isinstance(by_axis, Mapping):
        return False
    return sharding is None or isinstance(sharding, PartitionSpec)


def _refuse_infer(call: str, types: Any) -> None:
    leaves = pytree.tree_leaves(types, is_leaf=_is_leaf)
    if any(leaf is Infer for leaf in leaves):
        raise SpmdTypeError(
            f"local_map: Infer cannot be nested inside {call}; name the type of each leaf"
        )


def _assert_leaves(call: str, values: Any, types: Any) -> None:
    """Assert the types of tensors in nested values; the types have the same structure."""
    if isinstance(values, Mapping):
        if not isinstance(types, Mapping) or types.keys() != values.keys():
            raise SpmdTypeError(f"{call}: expected types with the keys {[*values]}, got {types!r}")
        for name, value in values.items():
            _assert_leaves(call, value, types[name])
        return
    if not isinstance(values, list | tuple):
        _assert_leaf(call, values, types)
        return
    if not isinstance(types, list | tuple) or isinstance(types, PartitionSpec):
        raise SpmdTypeError(f"{call}: expected a structure of {len(values)} types, got {types!r}")
    if len(values) != len(types):
        raise SpmdTypeError(f"{call}: got {len(types)} types for {len(values)} values")
    for value, its_types in zip(values, types, strict=True):
        _assert_leaves(call, value, its_types)


def _assert_leaf(call: str, value: Any, leaf: Any) -> None:
    """Assert the type of one value; None is for values that are not tensors."""
    is_tensor = isinstance(value, torch.Tensor)
    if leaf is None:
        if is_tensor:
            raise SpmdTypeError(
                f"{call}: None stands for a value that is not a tensor, but the value is a "
                "tensor; give its type"
            )
        return
    if not is_tensor:
        class_name = type(value).__name__
        raise SpmdTypeError(
            f"{call}: {leaf!r} is a type for tensors, but the value is of the type {class_name}; "
            "write None"
        )
    is_pair = isinstance(leaf, tuple) and not isinstance(leaf, PartitionSpec)
    parts = leaf if is_pair else (leaf,)
    assert_type(value, *parts)


class _NoTypecheck(AbstractContextManager[None]):
    """A block, or a decorator without arguments, in which nothing is checked."""

    def __enter__(self) -> None:
        self._block = spmd.paused()
        self._block.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def __call__(self, function: F) -> F:
        return no_typecheck(function)


@overload
def no_typecheck() -> _NoTypecheck: ...
@overload
def no_typecheck(fn: F, /) -> F: ...
@overload
def no_typecheck(*, out_types: Any, in_types: Any = ...) -> Callable[[F], F]: ...
def no_typecheck(fn: Any = None, /, **kwargs: Any) -> Any:
    """Leave a block or a function unchecked, as a block or as a decorator.

    Args:
        fn: the function. If it is left out, the result is a block, which is also a decorator.
        kwargs: `out_types`, the types that the results of the unchecked function get; and
            `in_types`, with which its arguments are compared. Both are as for `local_map`.

    Returns:
        The function, a decorator, or the block.

    Raises:
        ArgumentTypeError: for other keywords, or `in_types` alone.
        SpmdTypeError: (when called) if an argument has another type than declared.

    Example:
        >>> @no_typecheck(out_types={"tp": R})
        ... def kernel(x):
        ...     return x.sort().values
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     get_local_type(kernel(assert_type(torch.zeros(4), {"tp": R})))
        {tp: R}
    """
    if kwargs:
        if "out_types" not in kwargs or not kwargs.keys() <= {"out_types", "in_types"}:
            raise ArgumentTypeError(
                f"no_typecheck needs out_types, with or without in_types, got {sorted(kwargs)}"
            )
        return functools.partial(_typed_boundary, **kwargs)
    if fn is None:
        return _NoTypecheck()

    @functools.wraps(fn)
    def call_unchecked(*args: Any, **kwargs: Any) -> Any:
        with spmd.paused():
            return fn(*args, **kwargs)

    return call_unchecked


def _typed_boundary(function: F, *, out_types: Any, in_types: Any = Infer) -> F:
    """Return a function that runs unchecked, between checks of its arguments and results."""

    @functools.wraps(function)
    def call_unchecked(*args: Any, **kwargs: Any) -> Any:
        if not spmd.is_type_checking():
            return function(*args, **kwargs)
        name = function.__qualname__
        if in_types is not Infer:
            _assert_leaves(f"{name}: in_types", args, in_types)
        with spmd.paused():
            outputs = function(*args, **kwargs)
        _assert_leaves(f"{name}: out_types", outputs, out_types)
        return outputs

    return call_unchecked  # type: ignore[return-value]  # has the signature of the function


def register_no_typecheck(fn: F) -> F:
    """Leave operators unchecked while a function is running, however it is called.

    Args:
        fn: a function or a method; wrappers are followed to the function inside.

    Returns:
        `fn` itself.

    Example:
        >>> def logging(x):
        ...     return x.sort().values
        >>> register_no_typecheck(logging) is logging
        True
    """
    spmd.leave_unchecked(fn)
    return fn


@contextmanager
def trace(enabled: bool = True) -> Iterator[None]:
    """Log operators with the types of their operands and results inside the block.

    The logger is `shoal_spmd_types.trace`, at level INFO.

    Args:
        enabled: False turns the log off inside the block.

    Example:
        >>> with trace():
        ...     pass
    """
    with spmd.tracing(enabled):
        yield
