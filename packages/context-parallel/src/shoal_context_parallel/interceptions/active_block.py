"""`Block`: the interface of an active block for the functions that take the place of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from shoal_dtensor.errors import LayoutError, StyleError
from shoal_mesh import Comm

from ..context_options import ContextOptions
from ..sequence_layout import AttentionMask, SequenceLayout

HOW_TO_PASS_POSITIONS = (
    "Pass position_ids=layout.positions(rank)[None], or arange(length)[None] among the buffers; "
    "leave out attention_mask, pass documents= for packed documents (behind a causal mask, padding "
    "at the end needs no mask)"
)
OTHER_WAYS = (
    "Use tensor parallelism or `fully_shard` for it, or call context_parallel_attention in the "
    "layers that only attend"
)


class Block(Protocol):
    """The interface of an active block.

    Attributes:
        comm: the communicator along the axis of the sequence.
        options: the options of the block's attention.
    """

    comm: Comm
    options: ContextOptions

    def agree(self, qkv: Any, attn_mask: Tensor | None) -> None:
        """Raise on all ranks if the arguments of some ranks do not fit, at the first attention."""

    def refuse(self, error: StyleError) -> None:
        """Make all ranks raise at the next agreement, or raise here if there is none."""

    def adding_mask(self, mask: AttentionMask) -> Any:
        """Return a scope in which the mask is added to the options' mask."""


# Function that returns the innermost active block of the calling thread, if there is one.
ActiveBlock = Callable[[], Block | None]


def sharding_block(active: ActiveBlock) -> Block | None:
    """Return the active block, or None if attention needs no change.

    Attention needs no change if this rank holds the whole sequence and the options add no mask.
    """
    block = active()
    if block is None or block.comm.size > 1:
        return block
    options = block.options
    is_plain = options.documents is None and options.window == (None, None)
    return None if is_plain else block


def layout_of(block: Block, local_length: int) -> SequenceLayout | None:
    """Return the layout of the block's sequence.

    None if a tensor with so many positions is not this rank's part of the sequence.
    """
    try:
        return block.options.layout_of(local_length, block.comm)
    except LayoutError:
        return None


def is_attention_of_block(implementation: str) -> bool:
    """Tell whether the block's attention takes the place of an implementation of transformers.

    "sdpa" calls `F.scaled_dot_product_attention`, and flash attention computes the same function.
    """
    return implementation == "sdpa" or "flash" in implementation
