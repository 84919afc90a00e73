"""Answers of a DTensor to code of torch's stack: to `fully_shard`, and to who asks for torch's internals."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import ArgumentTypeError


class Absent:
    """A name of torch's class that is not here; reading it says what does its work.

    Args:
        instead: the public names.
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self._name}: {self._instead}")


def refuse_fsdp(tensor: Any) -> NoReturn:
    """Refuse to be sharded: torch asks every parameter for `fsdp_pre_all_gather` when it is wrapped.

    Raises:
        ArgumentTypeError: always; no AttributeError, which `hasattr` would take for "no".
    """
    raise ArgumentTypeError(
        f"torch's fully_shard and replicate take plain parameters and torch's DTensors, got {tensor.spec!r}; use "
        "shoal_data_parallel.fully_shard(module, mesh['data']) or shoal_data_parallel.replicate, which take both kinds"
    )
