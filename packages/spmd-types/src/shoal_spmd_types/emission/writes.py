"""Writes in place as operators that return new tensors.

A program has a name for each value, so a write gives the written tensor a new value. For a write to
a slice of a tensor, that value is made by `slice_scatter`.

May import: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal_dtensor.internal import overload_name, signature_of

# for a view, the operator that returns its source with another view inside
_SCATTERS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}


class View(NamedTuple):
    """A view of a recorded tensor.

    Attributes:
        operator: the operator that made it.
        source: the tensor that it is a view of.
        rest: the arguments behind the source.
        kwargs: the keyword arguments.
    """

    operator: Any
    source: Tensor
    rest: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def scatter(self) -> Any:
        """The operator that puts a tensor in the place of the view; None if there is none."""
        return _SCATTERS.get(self.operator)


def written_form(operator: Any) -> Any:
    """Return the operator that returns the written tensor instead of writing it; None if none does.

    Args:
        operator: an operator that writes to its first argument.
    """
    name = signature_of(operator).name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None:
        return None
    return getattr(packet, overload_name(operator), None)
