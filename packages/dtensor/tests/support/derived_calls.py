"""Calls of an overload made from calls of its siblings, or from its schema alone.

`add.out` is called as `add.Tensor` was, `add_.Scalar` likewise with a number for the second tensor.
Where no sibling was seen, arguments are made up by type: that suits the many operators that take
tensors and numbers elementwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count as counting, islice
from typing import Any

import torch
from torch import Tensor

from operator_calls import Call, Calls
from shoal_dtensor._torch.operators import OpOverload
from shoal_dtensor.rules import flatten

__all__ = ["derived"]

DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)
# Shapes of an operator's tensors: broadcast, alike, matrices, lists of them.
SHAPES = (
    ((5, 3), (3,), (5, 3)),
    ((5, 3),) * 3,
    ((4, 3), (3, 5), (4, 5)),
    ((6,), (6,), (6,)),
    ((), (), ()),
)
# Arguments whose type does not say what they may be.
NAMED = {
    "dtype": torch.float64,
    "out_dtype": torch.float32,
    "reduce": "add",
    "rounding_mode": "floor",
}


def derived(op: OpOverload, known: Calls, count: int, *, made_up: bool) -> list[Call]:
    """Up to `count` calls of `op` that run.

    Args:
        op: the overload.
        known: calls of other overloads.
        count: how many are enough.
        made_up: whether to make up arguments where no sibling is known. For elementwise operators:
            some others crash the process when they are given what is not for them.
    """
    candidates = [
        *_from_siblings(op, known, SHAPES[0] if made_up else None),
        *(_from_nothing() if made_up else ()),
    ]
    calls = (_call(op, *candidate) for candidate in candidates)
    return list(islice((call for call in calls if call is not None), count))


Candidate = tuple[Mapping[str, Any], torch.dtype, Any]
"""Named arguments, and the dtype and shapes of tensors that are missing among them.

None if no tensor may be made up.
"""


def _from_siblings(op: OpOverload, known: Calls, shapes: Any) -> Iterator[Candidate]:
    for other, calls in known.items():
        if other is not op and _base(other) == _base(op):
            for call in calls:
                yield _named(call), torch.float64, shapes


def _from_nothing() -> Iterator[Candidate]:
    for dtype in DTYPES:
        for shapes in SHAPES:
            yield {}, dtype, shapes


def seeded(call: Call) -> Call:
    """The call with its own generator, if the operator takes one, so that it can be repeated."""
    names = [a.name for a in call.op._schema.arguments if "Generator" in str(a.type)]
    values = _named(call)
    if not names or values.get(names[0]) is not None:
        return call
    return Call(call.op, call.args, {**call.kwargs, names[0]: torch.Generator().manual_seed(7)})


@cache
def _base(op: OpOverload) -> str:
    name = str(op._schema.name).removeprefix("aten::")
    return name if name.endswith("__") else name.removesuffix("_")


def _named(call: Call) -> dict[str, Any]:
    arguments = call.op._schema.arguments
    return {a.name: value for a, value in zip(arguments, call.args, strict=False)} | dict(
        call.kwargs
    )


def _call(
    op: OpOverload, values: Mapping[str, Any], dtype: torch.dtype, shapes: Any
) -> Call | None:
    """A call with these named arguments, others made up; None if it does not run."""
    numbers = counting()
    made: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.is_out:
            continue
        kind = str(argument.type)
        if argument.name in values:
            made[argument.name] = _fitting(values[argument.name], kind)
        elif not argument.has_default_value() or kind in (
            "Optional[Generator]",
            "Optional[number]",
        ):
            if "Tensor" in kind and shapes is None:
                return None
            made[argument.name] = NAMED.get(argument.name, _made_up(kind, dtype, shapes, numbers))
    positional = []
    for argument in op._schema.arguments:
        if argument.kwarg_only or argument.name not in made:
            break
        positional.append(made.pop(argument.name))
    return _completed(Call(op, tuple(positional), made))


def _completed(call: Call) -> Call | None:
    """The call with targets for what it writes to; None if it does not run."""
    outs = [a for a in call.op._schema.arguments if a.is_out]
    try:
        targets = _targets(call) if outs else []
        if len(outs) == 1 and "List" in str(outs[0].type):
            targets = [targets]
        call = Call(
            call.op,
            call.args,
            {**call.kwargs, **dict(zip([a.name for a in outs], targets, strict=True))},
        )
    except Exception:
        # whatever an operator says to arguments that are not for it
        return None
    return call if call.runs() else None


def _targets(call: Call) -> list[Any]:
    """What the functional form with the same arguments returns, to be overwritten."""
    packet = getattr(torch.ops.aten, _base(call.op))
    return [torch.zeros_like(t) for t in flatten([packet(*call.args, **call.kwargs)])]


def _fitting(value: Any, kind: str) -> Any:
    """A sibling's argument as this overload takes it."""
    if kind in ("number", "Scalar", "float", "int", "Optional[number]") and isinstance(
        value, Tensor
    ):
        return value.flatten()[0].item() if value.numel() else 2
    if "Tensor" in kind and "List" not in kind and isinstance(value, int | float | complex | bool):
        return torch.tensor(value)
    return value


def _made_up(kind: str, dtype: torch.dtype, shapes: Any, numbers: Iterator[int]) -> Any:
    """An argument of a type; tensors take the next of the shapes."""
    if "Tensor" in kind:
        if "List" in kind:
            return [_filled((3, 2), dtype, next(numbers)), _filled((4, 1), dtype, next(numbers))]
        index = next(numbers)
        return _filled(shapes[index % len(shapes)], dtype, index)
    simple = {"bool": False, "int": 1, "float": 0.5, "str": "none", "List[int]": [0]}
    if kind in simple:
        return simple[kind]
    if "Generator" in kind:
        return torch.Generator().manual_seed(7)
    number = 0.5 if dtype.is_floating_point or dtype.is_complex else 1
    return [number, number + 1] if "List" in kind else number


def _filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Distinct values between 0 and 1, or small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return (
            torch.rand(shape, dtype=torch.float64, generator=generator).mul(0.8).add(0.1).to(dtype)
        )
    return (torch.rand(shape, generator=generator) * (2 if dtype is torch.bool else 5)).to(dtype)
