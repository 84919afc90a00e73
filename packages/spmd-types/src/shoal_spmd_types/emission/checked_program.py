"""`CheckedProgram`: the lines of a program, each of which has run under the checker.

May import: names, recorder, statements, trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor import Placement, Replicate
from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import (
    FakeTensorMode,
    TorchDispatchMode,
    overload_name,
    pytree,
    signature_of,
    spmd,
)
from shoal_mesh import DeviceMesh

from ..collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from ..conversions import convert
from ..runtime import assert_type
from .names import NameTable
from .recorder import EmissionError
from .statements import Statement
from .trace import Trace, TracedOperation, TracedValue

_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "_reshape_alias"})
# operators that are not compared, because they do not change values
_LEFT_OUT = frozenset({"aten::detach", "aten::alias", "prim::device"})


@dataclass(frozen=True, slots=True)
class ProgramLine:
    """A line of a program.

    Attributes:
        text: the text of the statement.
        comment: shape, dtype and types of its results.
        path: the path of the module whose forward has the statement.
        is_constant: whether the program computes it once.
    """

    text: str
    comment: str
    path: str
    is_constant: bool = False


class _LineCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """A mode that records the operators that a line calls, as values of `_describe_call`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.calls: list[Any] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if signature_of(func).name not in _LEFT_OUT:
            outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            self.calls.append(_describe_call(func, args, kwargs or {}, outputs))
        return result


def _describe_call(func: Any, args: Any, kwargs: Any, outputs: Sequence[Any]) -> object:
    """Return a call as a value to compare: operator, arguments and shapes of the results.

    Calls that differ only in the spelling of equal arguments give equal values: all views are one
    operator, arguments that are left out have their defaults, and dims count from the front.
    """
    shapes = [tuple(output.shape) for output in outputs]
    name = signature_of(func).name.removeprefix("aten::")
    if name in _VIEWS:
        return ("view", shapes)
    values = {}
    for argument, value in zip(signature_of(func).arguments, args, strict=False):
        values[argument.name] = value
    values |= kwargs
    for argument in signature_of(func).arguments:
        if argument.has_default_value():
            values.setdefault(argument.name, argument.default_value)
    ignored = ("pin_memory", "layout", "device")
    kept = {key: _plain(value) for key, value in values.items() if key not in ignored}
    dim = kept.get("dim")
    if isinstance(dim, int) and dim < 0 and isinstance(values.get("self"), Tensor | TracedValue):
        kept["dim"] = dim + len(values["self"].shape)
    return (name, overload_name(func), kept, shapes)


def _plain(value: Any) -> object:
    """Return an argument as a value to compare: a tensor as its shape and dtype, False as None."""
    if isinstance(value, Tensor | TracedValue):
        return ("tensor", tuple(value.shape), value.dtype)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is False:
        return None
    return value


class CheckedProgram:
    """The lines of a program, each of which has run on tensors without memory under the checker.

    Attributes:
        lines: the lines.
        names: the names of values.
        constants: the names of the values that constant lines compute and other lines read.
    """

    def __init__(self, trace: Trace, statements: Sequence[Statement], mesh: DeviceMesh) -> None:
        self.lines: list[ProgramLine] = []
        self.constants: list[str] = []
        self.names = NameTable(trace, statements)
        self._mesh = mesh
        self._scope: dict[str, Any] = {}
        with ExitStack() as stack:
            stack.enter_context(spmd.set_current_mesh(mesh))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=False))
            stack.enter_context(spmd.typecheck(local=False))
            self._make_scope(trace)
            read = _ids_that_others_read(statements)
            for number, statement in enumerate(statements):
                self.names.reach(number)
                self._add(statement)
                if statement.is_constant:
                    kept = [value for value in statement.outputs if id(value) in read]
                    self.constants += map(self.names.of, kept)

    def _make_scope(self, trace: Trace) -> None:
        """Set the variables that the lines can read: functions, types, weights and inputs."""
        self._scope |= {function.__name__: function for function in _FUNCTIONS}
        self._scope |= {"I": spmd.I, "P": spmd.P, "R": spmd.R, "S": spmd.Shard}
        self._scope |= {"torch": torch, "F": torch.nn.functional}
        weights = {name: self._leaf(value) for name, value in trace.parameters.items()}
        self._scope["weights"] = weights
        for name, value in trace.inputs.items():
            self._scope[name] = self._leaf(value)

    def _leaf(self, value: TracedValue) -> Tensor:
        """Make the typed tensor of a parameter or an input, without memory."""
        device = self._mesh.device_type
        leaf = torch.empty(value.shape, dtype=value.dtype, device=device)
        leaf.requires_grad_(value.takes_gradient)
        spmd.assert_tensor_type(leaf, types_of(value, self._mesh))
        return leaf

    def _add(self, statement: Statement) -> None:
        """Add the first text of a statement that calls the recorded operators when it runs.

        If no text does, its parts are added one by one.
        """
        expected = sorted(
            [_expected_description(operation) for operation in statement.operations], key=repr
        )
        # why the last text was not taken
        reason = ""
        for text in statement.texts(self.names.of):
            recorder = _LineCalls()
            try:
                with recorder:
                    result = eval(text, self._scope)
            except SpmdTypeError as error:
                raise EmissionError(f"emit: the checker refuses {text!r}: {error}") from error
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                reason = f"{text}: {error}"
                continue
            calls = sorted(recorder.calls, key=repr)
            if not statement.operations or calls == expected:
                self._assign(statement, text, result)
                return
            reason = f"{text} calls {calls}, and the forward calls {expected}"
        if not statement.parts:
            raise EmissionError(f"emit: no text calls the operators of {statement.path}: {reason}")
        for part in statement.parts:
            self._add(part)

    def _assign(self, statement: Statement, text: str, result: Any) -> None:
        """Name the results of a statement, compare their types, and add the line."""
        is_single = isinstance(result, Tensor)
        results = [result] if is_single else [*result]
        self.names.release()
        targets = []
        comments = []
        # names of results whose shards the checker does not find, and the texts of their types
        asserted: list[tuple[str, str]] = []
        for value, tensor in zip(statement.outputs, results, strict=False):
            name = self.names.new(value, statement)
            self._scope[name] = tensor
            if _is_unknown(value, tensor):
                wanted = types_of(value, self._mesh)
                spmd.assert_tensor_type(tensor, wanted)
                asserted.append((name, types_text(wanted)))
            _compare(value, tensor, self._mesh, text)
            targets.append(name)
            comments.append(describe_value(value, spmd.type_of(tensor)))
        if is_single and asserted:
            text = f"assert_type({text}, {asserted.pop()[1]})"
        left = ", ".join(targets)
        comma = "," if len(targets) == 1 and not is_single else ""
        line = f"{left}{comma} = {text}"
        self._append(line, "; ".join(comments), statement)
        for name, types in asserted:
            self._append(f"assert_type({name}, {types})", "", statement)

    def _append(self, text: str, comment: str, statement: Statement) -> None:
        line = ProgramLine(text, comment, statement.path, is_constant=statement.is_constant)
        self.lines.append(line)


def _ids_that_others_read(statements: Sequence[Statement]) -> set[int]:
    """Return the ids of the operands of statements that are not constant."""
    others = [statement for statement in statements if not statement.is_constant]
    return {id(value) for statement in others for value in statement.operands}


# abbreviations of dtypes in comments
_SHORT = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int64": "i64",
    "int32": "i32",
}
_FUNCTIONS: tuple[Any, ...] = (
    all_gather,
    all_reduce,
    all_to_all,
    assert_type,
    convert,
    reduce_scatter,
    spmd.pending,
)


def _expected_description(operation: TracedOperation) -> Any:
    """Return the value of `_describe_call` for a recorded operation."""
    return _describe_call(operation.operator, operation.args, operation.kwargs, operation.outputs)


def types_of(value: TracedValue, mesh: DeviceMesh) -> dict[spmd.AxisLike, spmd.AnyAxisType]:
    """Return the types of a value by axis, with I for replicated values."""
    types: dict[spmd.AxisLike, spmd.AnyAxisType] = {}
    for axis, name in enumerate(mesh.axis_names):
        placement: Placement = Replicate() if value.spec is None else value.spec.placements[axis]
        found = spmd.type_of_placement(placement)
        if found is None:
            raise EmissionError(f"emit: {placement!r} of {value.spec!r} has no type")
        types[name] = spmd.I if found is spmd.R else found
    return types


def types_text(types: Mapping[Any, Any]) -> str:
    """Return types as the text of a dict."""
    items = [f'"{axis}": {axis_type}' for axis, axis_type in types.items()]
    return "{" + ", ".join(items) + "}"


def _is_unknown(value: TracedValue, tensor: Tensor) -> bool:
    """Return whether the checker found V for a value whose sharding is known."""
    found = spmd.type_of(tensor)
    if found is None or value.spec is None:
        return False
    kinds = found.by_axis.values()
    return any(axis_type is spmd.V for axis_type in kinds)


def _compare(value: TracedValue, tensor: Tensor, mesh: DeviceMesh, text: str) -> None:
    """Compare the checker's types of a result with its layout in the recorded forward."""
    found = spmd.type_of(tensor)
    if found is None or value.spec is None:
        return
    for axis, axis_type in found.by_axis.items():
        index = [*mesh.axis_names].index(repr(axis))
        wanted = value.spec.placements[index]
        placement = spmd.placement_of(axis_type)
        if placement != wanted:
            raise EmissionError(
                f"emit: the checker finds {axis_type} over {axis!r} for {text}, and the forward on "
                f"DTensors has {wanted!r}"
            )


def describe_value(value: TracedValue, tensor_type: Any) -> str:
    """Return dtype, local shape and types of a value: `f32[2, 8] tp: S(1)`."""
    shape = ", ".join(map(str, value.shape))
    name = str(value.dtype).removeprefix("torch.")
    head = f"{_SHORT.get(name, name)}[{shape}]"
    # On one rank, a type has no axes.
    if tensor_type is None or not tensor_type.by_axis:
        return head
    kinds = [f"{axis!r}: {axis_type}" for axis, axis_type in tensor_type.by_axis.items()]
    return f"{head} {', '.join(kinds)}"
