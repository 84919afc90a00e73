"""`Collective`: one collective that a module runs, declared before it runs."""

from __future__ import annotations

from collections.abc import Hashable

from shoal_mesh.internal import dataclass


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a module's forward or backward.

    Attributes:
        op: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        nbytes: bytes of the global tensor.
        backward: whether it runs in the backward.
        once_for: modules that declare the same key run this collective once, together; None: on its own.
        ranks: number of ranks that take part; None: all of the axis.
        chunks: in how many messages it is sent.
    """

    op: str
    nbytes: int
    backward: bool = False
    once_for: Hashable = None
    ranks: int | None = None
    chunks: int = 1
