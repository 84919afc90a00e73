"""Facts about calls of torch functions that the operators inside of them do not show.

`linear` merges the leading dims of its operand and divides them again. `reshape` and `unflatten`
replace the -1 of a program by a local size. `FunctionHints` notes these facts while the function
runs, and the checker reads them for the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shoal_mesh.internal import ScopedValue

from .._torch.interception import FunctionMode
from .._torch.operators import OpOverload, signature_of
from .checker_state import active_checker
from .inference.operand_layouts import Leading
from .types.tensor_types import tensors_in, type_of

# Functions whose operators merge leading dims of their operands, and divide them again.
_ON_BATCHES = frozenset(
    {"linear", "matmul", "__matmul__", "__rmatmul__", "scaled_dot_product_attention"}
)
# the number of last dims that these functions keep apart from the others
_KEPT_DIMS = {"linear": 1, "matmul": 2, "__matmul__": 2, "__rmatmul__": 2}
_RESHAPES = frozenset({"reshape", "unflatten"})
_VIEWS = frozenset({"view", "_unsafe_view", "_reshape_alias"})
LEADING: ScopedValue[Leading | None] = ScopedValue(
    "shoal_spmd_leading", default=None, in_backward=False
)


class Wildcard(NamedTuple):
    """The place of a -1 among the sizes of a reshape.

    Attributes:
        place: its position.
        sizes: the number of sizes.
    """

    place: int
    sizes: int


_WILDCARD: ScopedValue[Wildcard | None] = ScopedValue(
    "shoal_spmd_wildcard", default=None, in_backward=False
)


class FunctionHints(FunctionMode):
    """The mode that notes sharded leading dims and the -1 of reshapes."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _ON_BATCHES and active_checker() is not None:
            with LEADING.entered(_axes_of_leading_dims(name, args, kwargs)):
                return func(*args, **kwargs)
        if name in _RESHAPES and active_checker() is not None:
            with _WILDCARD.entered(_wildcard(name, args, kwargs)):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _axes_of_leading_dims(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Leading | None:
    """Return the axes that shard the leading dims of the operand of a function on batches."""
    operand = max(tensors_in((args, kwargs)), key=lambda tensor: tensor.ndim)
    present = type_of(operand)
    if present is None:
        return None
    kept = 2 if name == "scaled_dot_product_attention" else operand.ndim - 1
    dims = [present.dims.get(dim, ()) for dim in range(kept)]
    return Leading(tuple(dims), _KEPT_DIMS.get(name, 0))


def _wildcard(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Wildcard | None:
    """Return the place of the -1 in the sizes that a reshape gets."""
    tensor: torch.Tensor = args[0] if args else kwargs.get("input", kwargs.get("self"))
    # all arguments but the tensor
    rest = [*args, *kwargs.values()][1:]
    if name == "unflatten":
        dim = rest[0] % max(tensor.ndim, 1) if isinstance(rest[0], int) else 0
        sizes = _flat(rest[1:])
        before = dim
        count = tensor.ndim - 1 + len(sizes)
    else:
        sizes = _flat(rest)
        before = 0
        count = len(sizes)
    if -1 not in sizes:
        return None
    return Wildcard(before + sizes.index(-1), count)


def _flat(values: Sequence[Any]) -> list[int]:
    """Return sizes that are given one by one, or as a sequence."""
    if len(values) == 1 and isinstance(values[0], list | tuple):
        return [*values[0]]
    return [*values]


def with_wildcard(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a view operator with the -1 that the program has written.

    Args:
        func: the operator.
        args: its positional arguments.
    """
    wildcard = _WILDCARD.context_value()
    if wildcard is None or signature_of(func).name.removeprefix("aten::") not in _VIEWS:
        return args
    sizes = args[1]
    if not isinstance(sizes, list | tuple) or -1 in sizes:
        return args
    if len(sizes) != wildcard.sizes:
        return args
    written = [*sizes]
    written[wildcard.place] = -1
    return (args[0], written, *args[2:])
