"""The error on parameters and buffers that are on the meta device when a forward begins."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import StyleError


def check_materialized(function: str, names: Sequence[str]) -> None:
    """Raise StyleError if there are parameters or buffers on the meta device.

    Args:
        function: the name of the function that is called, for the error.
        names: the parameters and buffers that the caller has found there; empty if it found none.
    """
    if names:
        raise StyleError(
            f"{function}: parameters or buffers {list(names)} are on the meta device and have no "
            'values: call module.to_empty(device="cpu"), or another device, and initialize them '
            "(with module.reset_parameters(), or by load_state_dict), before the first forward"
        )
