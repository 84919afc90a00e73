"""`invariant_arithmetic`: the mode in which a model computes the same bits on any number of ranks.

Sums over what ranks may share are taken over a fixed number of blocks and added in one binary tree. With 8 blocks, a
rank of four holds two of them: it computes each block alone, by a kernel that sees the same shape on any mesh, adds its
two, and the ranks add up in the upper part of the same tree (`shoal_mesh.sums_in_tree`).

The mode belongs to the process, since backward passes run in threads of their own. What it changes: the forms that
styles give modules inside it (`invariant/`), losses on a sharded vocabulary, every sum over ranks, and norms of
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from shoal_mesh import dataclass, sums_in_tree

from ._torch import ReplacedAttention
from .argument_types import takes
from .errors import StyleError

__all__ = ["COMPLETION", "InvariantArithmetic", "current_arithmetic", "invariant_arithmetic"]

COMPLETION = "invariant_arithmetic"
"""The name of what stands in for styles on modules that no style shards; a style that comes later replaces it."""


@dataclass(frozen=True, slots=True)
class InvariantArithmetic:
    """How sums are divided.

    Attributes:
        blocks: into how many parts a dim that ranks may share is divided; degrees divide it.
        rows: how many tokens of a sample are computed together; None for all.
    """

    blocks: int
    rows: int | None = None

    def own_blocks(self, ranks: int, size: int, what: str) -> int:
        """How many of the blocks one of so many ranks has.

        Args:
            ranks: that share a dim.
            size: of the whole dim.
            what: the dim, for the message.

        Raises:
            StyleError: if the ranks cannot share the blocks, or the dim cannot be divided into them.
        """
        if self.blocks % ranks or size % self.blocks:
            raise StyleError(
                f"invariant_arithmetic(blocks={self.blocks}): {what} of {size} elements over {ranks} ranks; the ranks "
                "must divide the blocks, and the blocks the dim. Choose another number of blocks (a power of two)"
            )
        return self.blocks // ranks


_current: InvariantArithmetic | None = None


def current_arithmetic() -> InvariantArithmetic | None:
    """The mode that is entered, or None."""
    return _current


@takes(blocks=int, rows=(int, type(None)))
@contextmanager
def invariant_arithmetic(blocks: int = 8, *, rows: int | None = None) -> Iterator[InvariantArithmetic]:
    """Train and serve with the same bits on any number of ranks that divides `blocks`, one rank among them.

    Everything happens inside: `parallelize_module`, `fully_shard` or `replicate`, forward and backward passes, clipping
    and steps. A single device is a mesh of one rank with the same plan. Dim 0 of what enters a layer is the batch: each
    sample is computed alone, so what a request gets does not depend on its neighbours either.

    Args:
        blocks: into how many parts sharded dims are divided, a power of two; sizes of sharded dims are multiples of it.
        rows: for serving: how many tokens of a sample linear layers and `F.scaled_dot_product_attention` compute
            together; what is missing is filled up. Then the chunks in which a prompt is prefilled change no bit
            either. With None kernels see whole sequences.

    Raises:
        StyleError: if `blocks` is no power of two, `rows` is not positive, or others are entered already. Inside, if a
            plan has a module for which there is no invariant form, or a dim that the blocks do not divide.

    Example:
        >>> from torch import nn
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_tp_styles import parallelize_module
        >>> with fake_world(1), invariant_arithmetic(blocks=4):
        ...     linear = parallelize_module(nn.Linear(8, 8), init_device_mesh("cpu", (1,)), "colwise")
        ...     type(linear.forward.__self__).__name__
        'InvariantColumn'
    """
    global _current  # noqa: PLW0603  # backward passes run in threads of their own
    if blocks < 1 or blocks & (blocks - 1):
        raise StyleError(f"invariant_arithmetic: blocks are halved again and again, so a power of two; got {blocks}")
    if rows is not None and rows < 1:
        raise StyleError(f"invariant_arithmetic: rows are computed together, so at least 1; got {rows}")
    before, entered = _current, InvariantArithmetic(blocks, rows)
    if before is not None and before != entered:
        raise StyleError(f"invariant_arithmetic({blocks=}, {rows=}) inside {before}")
    _current = entered
    try:
        with sums_in_tree(), _attention(rows):
            yield entered
    finally:
        _current = before


def _attention(rows: int | None) -> AbstractContextManager[object]:
    """Inside, attention by so many rows; torch's own where there is no number."""
    if rows is None:
        return nullcontext()
    from .row_attention import attention_in_rows  # a millisecond of every import, for those who serve

    return ReplacedAttention(partial(attention_in_rows, rows))
