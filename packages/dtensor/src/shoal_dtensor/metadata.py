"""Operators that change a tensor's own shape in place (`squeeze_`, `t_`, ...): the tensor becomes its own view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._torch import OpOverload, change_shape, view_of

__all__ = ["in_place_view"]


def in_place_view(op: OpOverload) -> Callable[..., Any] | None:
    """A function that runs `op` on a DTensor; None if `op` is no view in place."""
    view = view_of(op)
    if view is None:
        return None

    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        made = view(tensor, *args, **kwargs)
        change_shape(op, tensor, *args, **kwargs)
        tensor._become(made._local_tensor, made._spec)
        return tensor

    return run
