"""Preparation of processes that fork ranks: the ranks share the memory of its results.

May import: _torch, dispatch, rules, tensor.
"""

from __future__ import annotations

from functools import cache

from ._torch.interception import register_dispatch

# its own name would hide the folder
from .dispatch.dispatch import dispatch as run_operator
from .tensor.dtensor import DTensor, run_on_pending
from .tensor.gradients import ACCUMULATION


@cache
def register_operators() -> None:
    """Make torch call this package for operators on DTensors; later calls do nothing.

    The registrations of 2,000 operators take half a second and 12 MiB. They do not change an
    operator on other tensors.
    """
    register_dispatch(DTensor, run_operator)
    register_dispatch(DTensor.pending, run_on_pending, ACCUMULATION)


def prepare_dispatch() -> None:
    """Do the parts of the first use of a DTensor that do not change torch for other tensors.

    The fork server of `shoal_mesh` calls it (`local_ranks/pool.py`).
    """
    # the table is imported at the first operator otherwise
    from .rules import all_rules  # noqa: F401  # the import itself is the effect

    register_operators()
