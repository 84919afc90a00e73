"""The mode of arithmetic that is entered, which decides how parallel modules and sums over ranks are computed.

There is none until a package above enters one.  It belongs to the process, since backward passes run in threads of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from shoal_mesh import DeviceMesh

DataDtypes = tuple[torch.dtype | None, torch.dtype | None]
"""In which gradients are computed, and summed over data ranks; None for those of the parameters."""


class Arithmetic(Protocol):
    """What a mode decides."""

    def own_blocks(self, ranks: int, size: int, what: str) -> int:
        """How many of the blocks of a dim of `size` elements one of so many ranks has; `what` names the dim."""

    def form_of(self, lowering: type[Any], sharding: Any, module: nn.Module) -> type[Any]:
        """The class that stands in for the class of a module's forward, which was chosen by a style's record."""

    def complete(self, mesh: DeviceMesh, module: nn.Module, over_data: DataDtypes | None) -> None:
        """Give the modules of a tree that no style shards the forwards that they need."""


_current: Arithmetic | None = None


def current_arithmetic() -> Arithmetic | None:
    """The mode that is entered, or None."""
    return _current


@contextmanager
def arithmetic(mode: Arithmetic) -> Iterator[None]:
    """Inside the block, a mode is entered."""
    global _current  # noqa: PLW0603  # backward passes run in threads of their own
    before, _current = _current, mode
    try:
        yield
    finally:
        _current = before


def complete_forms(mesh: DeviceMesh, *modules: nn.Module, over_data: DataDtypes | None = None) -> None:
    """Where a mode is entered, give modules on a mesh that no style shards the forwards that it needs.

    Where gradients are to be summed over the mesh, `over_data` are their dtypes.

    Raises:
        UnsupportedModuleError: if there is none for one of them.
        StyleError: if gradients would be reduced in another dtype than they are computed in.
        TiedWeightError: if gradients of a shared parameter would be summed over data ranks.
    """
    if _current is not None:
        for module in modules:
            _current.complete(mesh, module, over_data)
