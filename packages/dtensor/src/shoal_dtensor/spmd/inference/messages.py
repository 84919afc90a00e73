"""Texts of type errors: the line of the program, the operator, its types and the way out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

import torch

from ..._torch.operators import signature_of
from ...layout.spec import Spec
from ..types.axis_types import AnyAxisType, AxisType, I, P, R, Shard, V, pending, type_of_placement
from ..types.mesh_axes import MeshAxis
from .operator_call import LocalOperatorCall

# Frames of these folders are not lines of a user's program.
_OWN_FOLDERS = [
    str(Path(__file__).parent.parent),
    str(Path(torch.__file__).parent),
    str(Path(contextlib.__file__).parent / "contextlib.py"),
    "<frozen",
    "<string>",
]


def hide_frames_of(folder: str) -> None:
    """Leave the files of a folder out when the line of the user's program is looked up.

    Args:
        folder: a folder of a package that calls the checker.
    """
    if folder not in _OWN_FOLDERS:
        _OWN_FOLDERS.append(folder)


def user_line() -> str:
    """Return file and line of the innermost frame that belongs to the user's program."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code: CodeType = frame.f_code
        if not code.co_filename.startswith(tuple(_OWN_FOLDERS)):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "<unknown line>"


def describe_call(call: LocalOperatorCall, *axes: MeshAxis) -> str:
    """Return the operator with shapes and types of its operands, and the line of the program.

    Args:
        call: the call.
        axes: the mesh axes whose types are shown.
    """
    operands = []
    for operand in call.operands:
        shape = "x".join(map(str, operand.meta.shape)) or "scalar"
        if operand.tensor_type is None:
            operands.append(f"{shape} constant")
            continue
        types = ", ".join([f"{operand.on(axis)}@{axis!r}" for axis in axes])
        operands.append(f"{shape} {types}")
    name = signature_of(call.op).name.removeprefix("aten::")
    return f"{user_line()}: {name}({'; '.join(operands)})"


def ways_out(
    call: LocalOperatorCall,
    axes: Sequence[MeshAxis],
    specs: Sequence[Spec],
    wanted: Sequence[Spec] | None,
) -> str:
    """Return the moves of operands after which the operator would be right, as calls to write.

    Args:
        call: the refused call.
        axes: the mesh axes of the specs.
        specs: the layouts of the distinct operands.
        wanted: the layouts that the cheapest row requires, one per operand; None if unknown.
    """
    if wanted is None:
        return ""
    lines = []
    by_operand = dict(zip(dict.fromkeys(call.operands), specs, strict=True))
    for position, (operand, target) in enumerate(zip(call.operands, wanted, strict=True)):
        source = by_operand[operand]
        for index, axis in enumerate(axes):
            line = _move(f"operand {position}", axis, (source, target), index)
            if line:
                lines.append(line)
    return f". Way out: {'; '.join(lines)}" if lines else ""


def _move(name: str, axis: MeshAxis, layouts: tuple[Spec, Spec], index: int) -> str:
    """Return the conversion of an operand along one axis as advice; empty if its type stays."""
    source, target = layouts
    before = _type_at(source, index)
    after = _type_at(target, index)
    if before is after:
        return ""
    if before is P and after is R:
        return (
            f"{name} is P over {axis!r}: all_reduce(x, {axis.argument}, src=P, dst=R), or "
            "reduce_scatter it; without that each rank uses its addend, and its gradient would be "
            f"counted {axis.size()} times"
        )
    if isinstance(before, Shard) and after is R:
        return f"{name}: all_gather(x, {axis.argument}, src={before}, dst=R)"
    if isinstance(before, Shard) and isinstance(after, Shard):
        return f"{name}: all_to_all(x, {axis.argument}, src={before}, dst={after})"
    if before in (R, I) and after is not None:
        return f"{name}: convert(x, {axis.argument}, src={before}, dst={after})"
    return f"{name}: {before} -> {after} over {axis!r}"


def _type_at(spec: Spec, index: int) -> object:
    """Return the type of a layout on one axis; its placement if no type describes it."""
    for dim, sharding in spec.shard_order:
        if index in sharding:
            return Shard(dim)
    pendings = dict(spec.partials)
    if index in pendings:
        return pending(pendings[index])
    return type_of_placement(spec.placements[index]) or spec.placements[index]


def way_from(axis: MeshAxis, present: AnyAxisType, wanted: AnyAxisType) -> str:
    """Return advice for a tensor that has one type where a function takes another.

    Args:
        axis: the mesh axis.
        present: the type that the tensor has.
        wanted: the type that the function takes.
    """
    is_shard = isinstance(present, Shard)
    if present is P and wanted in (R, I):
        return f"all_reduce(x, {axis.argument}, src=P, dst={wanted})"
    if present is P and isinstance(wanted, Shard):
        return f"reduce_scatter(x, {axis.argument}, src=P, dst={wanted})"
    if isinstance(present, AxisType) and present.name == "P" and present is not P:
        advice = f'reduce it by its own operator, src=pending("{present.reduce_op}")'
        if present.reduce_op == "avg":
            return f"{advice}; or sum instead of the mean, which is P, and divide by all elements"
        return advice
    if is_shard and isinstance(wanted, Shard):
        move = f"all_to_all(x, {axis.argument}, src={present}, dst={wanted})"
        return f"pass src={present}, or {move} first"
    if is_shard and wanted is P:
        return (
            f"shards are joined by all_gather(x, {axis.argument}, src={present}, dst=R), not "
            "summed; P are addends, such as the product of two operands that are sharded along the "
            "summed dim"
        )
    if is_shard and wanted in (R, I):
        return f"all_gather(x, {axis.argument}, src={present}, dst={wanted})"
    if present is V and isinstance(wanted, Shard):
        assertion = f"assert_type(x, {{{axis.argument}: {wanted}}})"
        return f"{assertion}, if it is a shard of equal size on all ranks"
    if present in (R, I) and wanted is P:
        return "leave the reduction out: the tensor is whole on every rank"
    if (present is I and wanted is R) or (present in (R, I) and isinstance(wanted, Shard)):
        return f"convert(x, {axis.argument}, src={present}, dst={wanted})"
    return "pass the type that the tensor has, or convert the tensor first"
