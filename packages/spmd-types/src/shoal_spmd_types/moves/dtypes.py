"""Options of moves that users pass: op_dtype, out_dtype, async_op and backward_options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shoal_dtensor.errors import ArgumentValueError

from .moves import Dtypes, TypeStep

# Moves before which a tensor is converted to `out_dtype`. They reduce nothing, so the result is the
# same as with a conversion after them.
_EARLY = frozenset({"all_gather", "all_to_all", "keep_first", "pad"})
_REDUCES = frozenset({"all_reduce", "reduce_scatter"})
_ALLOWED = ("op_dtype", "out_dtype", "async_op", "backward_options")


def read_dtypes(
    steps: tuple[TypeStep, TypeStep],
    op_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    backward_options: Mapping[str, Any] | None,
) -> Dtypes:
    """Return the dtypes of a move and of its gradient's move.

    Args:
        steps: the move, and the move of its gradient.
        op_dtype: the dtype of the move. If it is left out, the moves in `_EARLY` use `out_dtype`.
        out_dtype: the dtype of the result; by default `op_dtype`.
        backward_options: the same options for the gradient's move.

    Raises:
        ArgumentValueError: for unknown options; or if the move uses a dtype other than float32, its
            gradient is reduced, and the dtype of this reduction is left out.
    """
    backward = dict(backward_options or {})
    unknown = [name for name in backward if name not in _ALLOWED]
    if unknown:
        raise ArgumentValueError(
            f"backward_options has unknown keys {', '.join(unknown)}; allowed are "
            f"{', '.join(_ALLOWED)}"
        )
    step, back = steps
    backward_op: torch.dtype | None = backward.get("op_dtype")
    other_dtypes = [dtype for dtype in (op_dtype, out_dtype) if dtype not in (None, torch.float32)]
    reduces_in_unknown = back.kind in _REDUCES and backward_op is None
    if other_dtypes and reduces_in_unknown:
        raise ArgumentValueError(
            f"the move is done in {other_dtypes[0]}, and its backward reduces gradients "
            f"({back.kind}): pass the dtype of that reduction, such as "
            f"backward_options={{'op_dtype': torch.float32}}"
        )
    if op_dtype is None and step.kind in _EARLY:
        op_dtype = out_dtype
    return Dtypes(op_dtype, out_dtype or op_dtype, backward_op, backward.get("out_dtype"))


def with_async(
    steps: tuple[TypeStep, TypeStep],
    async_op: bool,
    backward_options: Mapping[str, Any] | None,
) -> tuple[TypeStep, TypeStep]:
    """Return the steps of a move, each in flight if the options say so.

    Args:
        steps: the move, and the move of its gradient.
        async_op: whether the move may be in flight when its result is returned.
        backward_options: the same option for the gradient's move.
    """
    step, back = steps
    is_back_async = bool((backward_options or {}).get("async_op"))
    if async_op:
        step = replace(step, in_flight=True)
    if is_back_async:
        back = replace(back, in_flight=True)
    return step, back
