"""Meta twins of a module's parameters and buffers, in the module's tables for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ._torch import meta_twin

Table = dict[str, Any]


class Twins:
    """The twins of one module.

    Attributes:
        by_original: pairs (original, twin) of parameters and buffers, by `id` of the original.
    """

    def __init__(self) -> None:
        self.by_original: dict[int, tuple[Tensor, Tensor]] = {}

    def twin_of(self, original: Tensor) -> Tensor:
        """Return the twin of a tensor, the same one at every call."""
        if id(original) not in self.by_original:
            self.by_original[id(original)] = (original, meta_twin(original))
        return self.by_original[id(original)][1]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the originals with their twins."""
        return list(self.by_original.values())


@contextmanager
def meta_twins(module: nn.Module) -> Iterator[Twins]:
    """Open a block in which a module has meta twins in place of its parameters and buffers.

    The twins have the attributes of the originals, such as `weight_loader`. After the block the
    module has its originals again, unchanged by a loader that ran in the block.
    """
    twins = Twins()
    saved: list[tuple[Table, Table]] = []
    try:
        for owner in module.modules():
            tables: list[Table] = [owner._parameters, owner._buffers]
            for table in tables:
                saved.append((table, dict(table)))
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = twins.twin_of(tensor)
        yield twins
    finally:
        for table, before in saved:
            table.clear()
            table.update(before)
