"""`Scalar`: a number of the program that may differ between ranks.

May import: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal_dtensor.errors import ArgumentTypeError, SpmdTypeError
from shoal_dtensor.internal import pytree, spmd


class Scalar:
    """A number with a type, for numbers that differ between ranks.

    Plain numbers count as equal on all ranks. While types are not checked, a `Scalar` acts like its
    value.

    Args:
        value: an int, a float or a complex number.
        spmd_type: the type on each axis: R (replicated), I (invariant), V (varying) or P (partial).

    Raises:
        ArgumentTypeError: if `value` is a bool, or not a number.
        SpmdTypeError: if a type is not R, I, V or P.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     x = assert_type(torch.zeros(4), {"tp": R})
        ...     get_local_type(x * Scalar(0.5, {"tp": V}))
        {tp: V}
    """

    def __init__(self, value: int | float | complex, spmd_type: Mapping[Any, Any]) -> None:
        is_number = isinstance(value, int | float | complex)
        if isinstance(value, bool) or not is_number:
            raise ArgumentTypeError(f"Scalar: expected a number, got {value!r}")
        for axis, axis_type in spmd_type.items():
            if not isinstance(axis_type, spmd.AxisType):
                raise SpmdTypeError(
                    f"Scalar: the type over {axis!r} must be R, I, V or P, got {axis_type!r}"
                )
        self._value = value
        self._type = spmd.read_type(spmd_type, ndim=0)

    @property
    def value(self) -> int | float | complex:
        """The number."""
        return self._value

    @property
    def local_type(self) -> dict[spmd.MeshAxis, spmd.AxisType]:
        """The type on each axis."""
        # A number does not have dims, so its type is already without S(dim).
        return {**self._type.local}

    def operand(self) -> Any:
        """Return the number as a tensor with the type; while types are not checked, the number."""
        if not spmd.is_type_checking():
            return self._value
        # The checker leaves `torch.tensor` out; the type is set below.
        with spmd.paused():
            # In an operator with a tensor of the same kind, a tensor of 0 dims does not change the
            # dtype of the result, as a number does not. The widest dtype keeps the number exact.
            tensor = torch.tensor(self._value, dtype=_widest(self._value))
        spmd.set_type(tensor, self._type)
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def operand_of(value: Any) -> Any:
            return value.operand() if isinstance(value, Scalar) else value

        args, named = pytree.tree_map(operand_of, (args, dict(kwargs or {})))
        return func(*args, **named)

    def __repr__(self) -> str:
        return f"Scalar({self._value!r}, {self._type})"


def _widest(value: int | float | complex) -> torch.dtype:
    """Return the widest dtype of the kind of a number: complex, int or float."""
    if isinstance(value, complex):
        return torch.complex128
    return torch.int64 if isinstance(value, int) else torch.float64
