"""Operators that run by calling other operators, and collectives that run on shards.

A collective runs on shards if each rank of its group holds the same shard. This is the case if the
group has no other rank of the tensor's mesh, or consists of all ranks along mesh axes along which
the tensor is replicated. If values are partial along other axes, the collective's reduction must
commute with their reduction. Everything else is refused.

An operator on lists of DTensors on several meshes runs once for each mesh. If some elements are
redistributed, it runs on one element after the other, because it may write to a tensor that a later
element reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh

from .._torch.operators import OpOverload, group_ranks, reduction_name, signature_of
from .._torch.tensors import bump_version, wrap_local
from ..errors import (
    InPlaceError,
    MixedTensorError,
    NoRuleError,
    OperatorArgumentError,
    PlacementError,
)
from ..layout.placements import Replicate
from ..layout.spec import Spec
from ..layout.tensor_meta import flatten

# These operators and their in-place forms return their input, reduced or broadcast. Operators that
# gather, scatter or exchange make tensors of other shapes, whose layout only mesh axes can
# describe.
_REDUCTIONS = frozenset({"all_reduce", "all_reduce_coalesced", "allreduce", "allreduce_coalesced"})
_ON_SHARDS = _REDUCTIONS | {"broadcast", "check_for_nan"}
_UNCHANGED = frozenset({"wait_tensor", "_wrap_tensor_autograd"})


def collective_on_shards(op: OpOverload) -> Callable[..., Any]:
    """Return a function that runs a collective of `torch.distributed` on DTensors, or refuses it.

    If it refuses, it raises on all ranks.
    """
    name = signature_of(op).name.partition("::")[2]
    is_in_place = name.endswith("_")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NoRuleError(
            f"{op} got a DTensor, but its result cannot have placements: call it on "
            "tensor.to_local(), or on the result of redistribute or full_tensor"
        )

    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        is_single = isinstance(first, Tensor)
        tensors: list[Any] = [first] if is_single else list(first)
        _check_arguments(op, tensors, args)
        shards = [tensor._local_tensor for tensor in tensors]
        result = op(shards[0] if is_single else shards, *args, **kwargs)
        if is_in_place:
            bump_version(tensors)
        if op.namespace == "c10d":
            return (first, *result[1:]) if isinstance(result, tuple) else result
        waited = [torch.ops._c10d_functional.wait_tensor(shard) for shard in flatten(result)]
        if is_in_place:
            return first
        pairs = zip(tensors, waited, strict=True)
        wrapped = [wrap_local(type(t), shard, t._spec, False) for t, shard in pairs]
        return wrapped[0] if is_single else wrapped

    if name in _UNCHANGED:
        # nothing is in flight: `run` has waited
        return lambda tensor: tensor
    return run if name.removesuffix("_") in _ON_SHARDS else refuse


def _check_arguments(op: OpOverload, tensors: Sequence[Any], args: Sequence[Any]) -> None:
    """Check the tensors of a collective against its group and reduction, which are in `args`."""
    names = [argument.name for argument in signature_of(op).arguments[1:]]
    arguments = dict(zip(names, args, strict=False))
    group = arguments.get("process_group", arguments.get("group_name"))
    reduction = arguments.get("reduce_op")
    name_of_reduction = None if reduction is None else reduction_name(reduction)
    for tensor in tensors:
        _check_tensor(op, tensor, group, name_of_reduction)


def _check_tensor(op: OpOverload, tensor: Any, group: Any, reduction: str | None) -> None:
    """Refuse a tensor whose shards a group cannot combine, and a write to a copied view."""
    spec: Spec | None = getattr(tensor, "_spec", None)
    if spec is None:
        raise MixedTensorError(
            f"{op} got DTensors together with a plain tensor of shape {tuple(tensor.shape)}"
        )
    if group is None:
        return
    if isinstance(tensor, type(tensor).copied_view) and signature_of(op).name.endswith("_"):
        raise InPlaceError(
            f"{op} writes to a view that was redistributed, so the write would not reach its base"
        )
    ranks = group_ranks(group)
    axes = _axes_of(spec, ranks)
    placements = [spec.placements[axis] for axis in axes or ()]
    is_replicated = axes is not None and all(
        isinstance(placement, Replicate) for placement in placements
    )
    if not is_replicated:
        raise PlacementError(
            f"{op} over ranks {list(ranks)} got {spec!r}: these ranks do not hold the same shard "
            "of it; the group must consist of all ranks along mesh axes on which the tensor is "
            "replicated, or the tensor must be on another mesh. Redistribute it, or call the "
            "collective on tensor.to_local(). Instead of DistributedDataParallel around modules "
            "with styles, call shoal_data_parallel.replicate(module, mesh) with the data axis; "
            "fully_shard averages the gradients of its parameters itself"
        )
    if reduction is None:
        return
    for axis, partial in spec.partials:
        if reduction != partial and {reduction, partial} != {"sum", "avg"}:
            axis_name = spec.mesh.axis_names[axis]
            raise PlacementError(
                f"{op} with {reduction!r} got {spec!r}, which is partial ({partial!r}) on mesh "
                f"axis {axis_name!r}: the two reductions do not commute; redistribute it first"
            )


@lru_cache(maxsize=256)
def _axes_of(spec: Spec, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """Return the mesh axes along which a group of ranks extends.

    Return no axes if the group has no other rank of the mesh, and None if the group fits neither
    case.
    """
    # Example: in the mesh ((0, 1), (2, 3)), the ranks (1, 3) have the coordinates (0, 1) and
    # (1, 1), so the group extends along axis 0.
    found = [spec.mesh.coordinate_of(rank) for rank in ranks]
    coordinates = [coordinate for coordinate in found if coordinate is not None]
    if spec.coordinate is None or spec.coordinate not in coordinates:
        return None
    if len({*coordinates}) == 1:
        return ()
    axes = []
    for axis in range(spec.mesh.ndim):
        positions = {coordinate[axis] for coordinate in coordinates}
        if len(positions) > 1:
            axes.append(axis)
    along = spec.mesh.ranks_along(tuple(axes), spec.coordinate)
    return tuple(axes) if {*ranks} == {*along} else None


# --- views by strides -----------------------------------------------------------------------------


def check_strided(op: OpOverload, tensor: Any) -> None:
    """Refuse addresses by memory position in a view, unless each rank has the whole base."""
    base = tensor if tensor._base is None else tensor._base
    # Inference tensors do not expose their base, so any of them may be a view of a part.
    is_part = base.numel() != tensor.numel() or tensor.is_inference()
    if is_part and not (tensor._spec.replicated and base._spec.replicated):
        raise NoRuleError(
            f"{op} of a view of a part, {tensor._spec!r}: strides and offset count elements in "
            "the memory of its base, but a rank has only a part of that memory. Call it on "
            "view.clone(), with an offset into the clone, or on the base"
        )


# Operators that address elements by strides and an offset.
BY_STRIDES = frozenset(
    {torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default}
)


# --- results whose size depends on values ---------------------------------------------------------


def _one_hot_sized_by_values(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """Return `_one_hot_of_all_classes` if the call does not give the number of classes."""
    default = args[1] if len(args) > 1 else -1
    number = kwargs.get("num_classes", default)
    return _one_hot_of_all_classes if number == -1 else None


def _one_hot_of_all_classes(index: Any, num_classes: int = -1) -> Any:
    """Run `one_hot` with one class more than the largest index.

    Once the number is computed, the result is sharded as for any given number.
    """
    if not index.numel():
        raise OperatorArgumentError(
            "one_hot of an empty tensor: the number of classes cannot be inferred from the "
            "values; pass num_classes"
        )
    classes = int(index.max().item()) + 1
    return torch.ops.aten.one_hot.default(index, classes)


# For each operator: a function of its arguments. It returns a function that first computes the size
# of the result from values; None if the arguments give the size.
SIZED_BY_VALUES: Mapping[
    OpOverload, Callable[[Sequence[Any], Mapping[str, Any]], Callable[..., Any] | None]
] = {torch.ops.aten.one_hot.default: _one_hot_sized_by_values}


# --- lists ----------------------------------------------------------------------------------------


def groups_by_mesh(
    cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[list[int]] | None:
    """Return the positions of a `foreach` call grouped by mesh, such as [[0, 2], [1]].

    An element is the tuple of entries that the lists have at one position. Elements with plain
    tensors form a group of their own. Plain tensors without dims are allowed in every group. The
    result is None if all elements belong to one group, if an element belongs to two groups, or if
    the elements share a tensor with dims.
    """
    values = [*args, *kwargs.values()]
    if any(isinstance(value, Tensor) and value.ndim for value in values):
        return None
    count = len(args[0])
    lists = [value for value in values if _is_walked(value, count)]
    # positions by mesh; the key None is for plain tensors with dims
    groups: dict[Any, list[int]] = {}
    without_dims: list[int] = []
    for i, element in enumerate(zip(*lists, strict=True)):
        meshes = _meshes_of(cls, element)
        if len(meshes) > 1:
            return None
        if meshes:
            groups.setdefault(meshes.pop(), []).append(i)
        else:
            without_dims.append(i)
    if len(groups) < 2:
        return None
    first_group_on_a_mesh = next(group for mesh, group in groups.items() if mesh is not None)
    first_group_on_a_mesh.extend(without_dims)
    return [*groups.values()]


def _meshes_of(cls: Any, element: Sequence[Any]) -> set[DeviceMesh | None]:
    """Return the meshes of the tensors in an element; None for plain tensors with dims."""
    meshes: set[DeviceMesh | None] = set()
    for value in element:
        if isinstance(value, cls):
            meshes.add(value._spec.mesh)
        elif isinstance(value, Tensor) and value.ndim:
            meshes.add(None)
    return meshes


def run_in_groups(
    op: OpOverload, groups: Sequence[Sequence[int]], *args: Any, **kwargs: Any
) -> list[Any] | None:
    """Run a `foreach` operator on each group's elements in turn and return the joined result."""
    count = sum(map(len, groups))
    values = [*args, *kwargs.values()]
    results: list[Any] = [None] * count
    for group in groups:
        values_of_group = []
        for value in values:
            is_list = _is_walked(value, count)
            values_of_group.append([value[i] for i in group] if is_list else value)
        named = dict(zip(kwargs, values_of_group[len(args) :], strict=True))
        result = op(*values_of_group[: len(args)], **named)
        if result:
            for i, item in zip(group, result, strict=True):
                results[i] = item
    return results if signature_of(op).returns else None


def _is_walked(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count
