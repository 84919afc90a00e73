"""Choices of the user for one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

# Stands for `unit.Unit`, which this file cannot import: `unit` imports this file.
Unit = TypeVar("Unit")


@dataclass(slots=True)
class UnitSettings(Generic[Unit]):
    """Choices of the user for one unit."""

    # None: free after the forward unless the unit is the outermost one; a number: keep shards over
    # groups of this many ranks
    reshard_after_forward: bool | int | None
    # the units that start to gather when this one's forward begins; None: the unit that came next
    # the last time
    prefetch_in_forward: Sequence[Unit] | None = None
    # the same for its backward; None: the unit whose forward ended before
    prefetch_in_backward: Sequence[Unit] | None = None
    # whether a backward frees what it gathered
    reshard_after_backward: bool = True
    # whether a backward gathers before anything reads the parameters
    unshard_in_backward: bool = True
    # whether gathered tensors keep their memory, and addresses, while they have no values
    keep_unsharded_storage: bool = False
