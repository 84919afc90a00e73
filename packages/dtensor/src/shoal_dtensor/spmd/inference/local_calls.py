"""Comparison of an operator with the computation that its rule runs on shards.

On the shards of DTensors, a rule may replace the operator by another function. For example, a
lookup in a shard of a table masks the indices that belong to other ranks. A program on local
tensors calls the operator itself. Its result is right only if the rule, too, runs the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._torch.interception import TorchDispatchMode
from ..._torch.operators import OpOverload, signature_of
from ...errors import ShoalTensorError
from ...layout.tensor_meta import flatten, with_tensors
from ...rules.language.op_call import schema_of
from ...rules.language.rule import LocalCall, Rule, local_function

# Operators that only change the shape of one tensor: they keep the row-major order of its elements,
# or repeat them along dims of size 1 (expand). The result then follows from the two shapes, so two
# of these operators are equivalent if their shapes are equal.
_RESHAPES = frozenset({"view", "_unsafe_view", "_reshape_alias", "reshape", "expand", "squeeze"})


class _OperatorCall(NamedTuple):
    """A call of an operator that a function has made."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """A mode that records the operators that a function calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.calls: list[_OperatorCall] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.calls.append(_OperatorCall(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def is_the_operator(rule: Rule, local_call: LocalCall) -> bool:
    """Tell whether a rule runs the operator itself, with the same arguments, on shards.

    Args:
        rule: the rule of the operator.
        local_call: the global call, the layouts of its tensors, and a rank that runs it. This rank
            is not rank 0, because a rule may run the operator itself on rank 0 only: an offset is 0
            there.
    """
    # No operand moves, so the row of the rule does not communicate.
    function = local_function(rule, local_call, communicates=False)
    if function is None:
        # The rule has no function of its own for this call.
        return True
    call = local_call.call
    args, kwargs = _local_arguments(local_call)
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
    (recorded,) = recorder.calls
    if _name(recorded.operator) in _RESHAPES and _name(call.op) in _RESHAPES:
        return True
    if recorded.operator is not call.op:
        return False
    recorded_options = _other_arguments(call.op, recorded.args, recorded.kwargs)
    return recorded_options == _other_arguments(call.op, args, kwargs)


def _local_arguments(local_call: LocalCall) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call, with shards on the meta device in place of its tensors."""
    call = local_call.call
    shards = []
    for meta, spec in zip(call.tensors, local_call.inputs, strict=True):
        shards.append(torch.empty(spec.local_shape, dtype=meta.dtype, device="meta"))
    args, kwargs = with_tensors((call.args, {**call.kwargs}), shards)
    return args, kwargs


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
    """Return the elements of a storage that a view consists of, and their dtype."""
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _name(op: OpOverload) -> str:
    return signature_of(op).name.removeprefix("aten::")


def _other_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call that are not tensors (sizes, dtypes, flags), with defaults."""
    schema = schema_of(op)
    positional = dict(zip(schema.positional, args, strict=False))
    values = {**schema.defaults, **positional, **kwargs}
    others = {}
    for name, value in values.items():
        if not _holds_tensors(value):
            # A list equals a tuple of the same items.
            others[name] = [*value] if isinstance(value, list | tuple) else value
    return others


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)
