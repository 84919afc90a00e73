"""`BlockArithmetic`: into how many blocks sums are divided, and what the mode that is entered says of it."""

from __future__ import annotations

from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import current_arithmetic as entered_arithmetic
from shoal_mesh.internal import dataclass


@dataclass(frozen=True, slots=True)
class BlockArithmetic:
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


def current_arithmetic() -> BlockArithmetic | None:
    """The mode that is entered, or None."""
    entered: object = entered_arithmetic()
    return entered if isinstance(entered, BlockArithmetic) else None
