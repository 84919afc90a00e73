"""How the calls that test files list are validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_dtensor.rules.all_rules import TABLE
from shoal_dtensor.testing import validate
from shoal_dtensor.testing.validate import CallTrial, Report

__all__ = ["on_one_and_two_axes"]


def on_one_and_two_axes(op: Any, args: Any, kwargs: Mapping[str, Any], first: bool) -> Report:
    """What `validate` finds on three ranks, and for pairs of rows on 2 x 2: 2 shards along each axis, 4 along both.

    Without traffic one call of an operator is enough there: pairs of its rows differ in where shards begin only.

    Args:
        op: an operator overload.
        args: its global arguments.
        kwargs: its keyword arguments.
        first: whether no other call of the operator is validated with pairs.
    """
    communicates = any(row.communicates for row in CallTrial(op, args, kwargs, TABLE[op]).rows)
    return validate(op, *args, ways=(3,), pairs=first or communicates, **kwargs)
