"""Comparison of an operator with the computation that its rule runs on shards.

A rule may run another function on shards than the operator. For example, a lookup in a shard of a
table masks the indices of other ranks. Plain code runs the operator itself, which is correct only
if the rule's function does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._torch.interception import TorchDispatchMode
from ..._torch.operators import OpOverload, signature_of
from ...errors import ShoalTensorError
from ...layout.tensor_meta import TensorMeta, flatten, mapped
from ...rules.language.op_call import schema_of
from ...rules.language.rule import LocalCall, Rule, local_function

# These keep the row-major order of elements, so equal shapes make them equal.
_RESHAPES = frozenset({"view", "_unsafe_view", "_reshape_alias", "reshape", "expand", "squeeze"})


class _LocalCall(NamedTuple):
    """A call of an operator."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """The operators that a function runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.calls: list[_LocalCall] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.calls.append(_LocalCall(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def is_the_operator(rule: Rule, local_call: LocalCall) -> bool:
    """Tell whether a rule runs the operator itself, with the same arguments, on shards.

    Args:
        rule: the rule of the operator.
        local_call: the global call with its decided layouts, as a rank other than 0 sees it.
    """
    function = local_function(rule, local_call, communicates=False)
    if function is None:
        return True
    call = local_call.call
    shapes = iter(local_call.inputs)

    def make(meta: TensorMeta) -> torch.Tensor:
        return torch.empty(next(shapes).local_shape, dtype=meta.dtype, device="meta")

    args, kwargs = mapped((call.args, {**call.kwargs}), TensorMeta, make)
    if call.schema.is_view and _name(call.op) not in _RESHAPES:
        return _makes_same_views(function, call.op, args, kwargs)
    recorder = _CallRecorder()
    try:
        with torch.no_grad(), recorder:
            function(*args, **kwargs)
    except (ShoalTensorError, RuntimeError, IndexError, NotImplementedError):
        return False
    if len(recorder.calls) != 1:
        return False
    (run,) = recorder.calls
    if _name(run.operator) in _RESHAPES and _name(call.op) in _RESHAPES:
        return True
    if run.operator is not call.op:
        return False
    return _numbers(call.op, run.args, run.kwargs) == _numbers(call.op, args, kwargs)


def _makes_same_views(
    function: Callable[..., Any], op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Tell whether a function and a view operator return the same parts of the same memory."""
    try:
        with torch.no_grad():
            results = function(*args, **kwargs)
            expected = op(*args, **kwargs)
    except (ShoalTensorError, RuntimeError, IndexError):
        return False
    return [*map(_place, flatten([results]))] == [*map(_place, flatten([expected]))]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _name(op: OpOverload) -> str:
    return signature_of(op).name.removeprefix("aten::")


def _numbers(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that are not tensors, with defaults."""
    schema = schema_of(op)
    positional = dict(zip(schema.positional, args, strict=False))
    values = {**schema.defaults, **positional, **kwargs}
    numbers = {}
    for name, value in values.items():
        if not _holds_tensors(value):
            numbers[name] = [*value] if isinstance(value, list | tuple) else value
    return numbers


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)
