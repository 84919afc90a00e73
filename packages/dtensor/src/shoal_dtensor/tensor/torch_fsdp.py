"""Answers of a DTensor to code of torch's stack: to `fully_shard`, to who asks for torch's internals or for memory."""

from __future__ import annotations

import sys
from typing import Any, NoReturn, TypeVar

from .._torch import BASE
from ..errors import ArgumentTypeError, NoRuleError

T = TypeVar("T")
_MEMORY = ("data_ptr", "storage", "_typed_storage", "share_memory_", "apply_", "map_", "map2_", "__dlpack__")


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


def refuse_memory(tensor: Any, *_: Any, **__: Any) -> NoReturn:
    """Refuse raw memory: that of the wrapper is null, and reading it ends the process.

    Raises:
        NoRuleError: always; a NotImplementedError, for which those who look for shared memory are prepared.
    """
    raise NoRuleError(
        f"a DTensor has no memory of its own (data_ptr, storage, dlpack, share_memory_, apply_), got {tensor.spec!r}; "
        "use to_local(), which is this rank's part, or full_tensor()"
    )


# They tell tensors apart by their storages, and read none.
_COMPILERS = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses", "torch.fx")


def storage_for_compilers(tensor: Any) -> Any:
    """The storage of the wrapper, for torch's compiler alone; for anybody else `refuse_memory`."""
    if sys._getframe(1).f_globals.get("__name__", "").startswith(_COMPILERS):
        return BASE.untyped_storage(tensor)
    refuse_memory(tensor)


def without_memory(cls: type[T]) -> type[T]:
    """The class, whose tensors refuse what would read or hand out their memory."""
    for name in _MEMORY:
        setattr(cls, name, refuse_memory)
    cls.untyped_storage = storage_for_compilers  # type: ignore[attr-defined]  # a class of tensors has it
    return cls
