"""Sharding of distances between rows of two matrices, on one mesh axis: by batch and by either side's rows."""

from __future__ import annotations

from .local import or_empty, zeros
from .notation import product
from .rule import LocalCall, LocalFunction, Table
from .table import family

__all__ = ["DISTANCE"]


def _backward(decided: LocalCall) -> LocalFunction | None:
    """A rank without rows of one side adds nothing; torch's kernel would leave out the batch that sides share."""
    return zeros(decided) if any(0 in spec.local_shape for spec in decided.inputs) else None


DISTANCE: Table = family(
    {
        "_cdist_forward _euclidean_dist": product("... p m, ... r m -> ... p r", whole="m", local=or_empty),
        "_cdist_backward": product("... p r, ... p m, ... r m, ... p r -> ... p m", linear=(0,), local=_backward),
    }
)
