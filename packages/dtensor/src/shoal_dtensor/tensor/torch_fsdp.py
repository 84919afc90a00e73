"""The answer of a DTensor to torch's `fully_shard`, which would take it for a plain parameter."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import ArgumentTypeError

__all__ = ["refuse_fsdp"]


def refuse_fsdp(tensor: Any) -> NoReturn:
    """Refuse to be sharded: torch asks every parameter for `fsdp_pre_all_gather` when it is wrapped.

    Raises:
        ArgumentTypeError: always; no AttributeError, which `hasattr` would take for "no".
    """
    raise ArgumentTypeError(
        f"torch's fully_shard and replicate take plain parameters and torch's DTensors, got {tensor.spec!r}; use "
        "shoal_tp_styles.fully_shard(module, mesh['data']) or shoal_tp_styles.replicate, which take both kinds"
    )
