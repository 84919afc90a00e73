"""Sharding of distances between rows of two matrices, on one mesh axis: by batch and by either side's rows."""

from __future__ import annotations

from .local import or_empty
from .notation import product
from .rule import Table
from .table import family

__all__ = ["DISTANCE"]

DISTANCE: Table = family(
    {
        "_cdist_forward _euclidean_dist": product("... p m, ... r m -> ... p r", whole="m", local=or_empty),
        "_cdist_backward": product("... p r, ... p m, ... r m, ... p r -> ... p m", linear=(0,), local=or_empty),
    }
)
