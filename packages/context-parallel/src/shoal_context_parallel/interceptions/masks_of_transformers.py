"""Masks of transformers in a block: this rank's rows and all columns, by global positions.

May import: active_block, flex, position_mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import unwatched_functions

from .._torch import disable_dynamo
from ..errors import UnsupportedAttentionError
from ..sequence_layout import AttentionMask, Documents, SequenceLayout
from .active_block import (
    HOW_TO_PASS_POSITIONS,
    OTHER_WAYS,
    ActiveBlock,
    Block,
    is_attention_of_block,
    layout_of,
    sharding_block,
)
from .flex import function_of
from .position_mask import PositionMask, chunks_as_documents


@disable_dynamo
def make_mask(
    active: ActiveBlock, implementation: str, original: Callable[..., Any], **arguments: Any
) -> Any:
    """Make the mask of this rank's queries and all keys.

    Args:
        active: returns the active block.
        implementation: the name of the attention that gets the mask.
        original: the function of transformers that makes its masks.
        arguments: the arguments of `original`.
    """
    block = sharding_block(active)
    if block is None:
        return original(**arguments)
    queries = arguments["q_length"]
    keys = arguments["kv_length"]
    layout = layout_of(block, queries)
    has_own_keys = layout is not None and keys in (queries, layout.length)
    if layout is None or not has_own_keys or _follows_cached_keys(arguments):
        # The mask is not of the block's sequence. The attention that gets it refuses its tensors.
        return original(**arguments)
    padding = arguments.get("attention_mask")
    if padding is not None and not bool(padding.all()):
        block.refuse(
            LayoutError(
                "the attention_mask in a context_parallel block has columns for this rank's "
                "positions only. " + HOW_TO_PASS_POSITIONS
            )
        )
    rule = _rule_of(arguments, layout, block.options.documents)
    if rule is not None and is_attention_of_block(implementation):
        device = arguments.get("device", "cpu")
        return PositionMask.of(rule, queries, layout.length, device)
    if rule == AttentionMask() and block.options.window == (None, None):
        # Every query reads every key.
        return None
    return _make_with_all_columns(block, layout, original, arguments)


def _follows_cached_keys(arguments: Any) -> bool:
    """Tell whether the queries of a mask follow keys of a cache."""
    offsets = (arguments.get("q_offset", 0), arguments.get("kv_offset", 0))
    return any(isinstance(offset, Tensor) or offset != 0 for offset in offsets)


def _rule_of(
    arguments: Any, layout: SequenceLayout, documents: Documents | None
) -> AttentionMask | None:
    """Return a mask of transformers as ranges of positions.

    Args:
        arguments: the arguments of the function that makes the mask.
        layout: the positions of the ranks.
        documents: the documents of the options, which are added to the mask.

    Returns:
        None for a mask that is known only as a function of indices.
    """
    # transformers allows its kernels to skip a mask if nothing was added to its own function.
    skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    if not any(arguments.get(name, False) for name in skips):
        return None
    # size of a window or of a chunk; None without either
    size = arguments.get("local_size")
    span = size or layout.length
    for rule in _known_rules(size, layout.length):
        if not _agree_at_borders(arguments["mask_function"], rule, span, layout.length):
            continue
        if documents is None:
            return rule
        is_chunked = rule.documents is not None
        if is_chunked:
            documents = chunks_as_documents(span, layout.length, documents)
        return replace(rule, documents=documents)
    return None


def _known_rules(size: int | None, length: int) -> list[AttentionMask]:
    """Return the masks that transformers' own functions describe: causal, full, windows, chunks."""
    if size is None:
        return [AttentionMask(causal=True), AttentionMask()]
    # The size of a causal window counts the query's own position.
    rules = [AttentionMask(causal=True, window=(size - 1, None))]
    chunks = chunks_as_documents(size, length, None)
    rules.append(AttentionMask(causal=True, documents=chunks))
    # The size of a window to both sides is, depending on the model, the reach of one side, the sum
    # of both sides, or the reach of one side and the query's own position.
    sides = (size, size // 2, size - 1)
    rules.extend(AttentionMask(window=(side, side)) for side in sides)
    return rules


def _agree_at_borders(
    function: Callable[..., Any], rule: AttentionMask, span: int, length: int
) -> bool:
    """Compare a mask function with a rule around the borders of windows and chunks.

    Args:
        function: function of batch row, head, query and key.
        rule: the rule.
        span: size of a window or a chunk, or the length of the sequence.
        length: the length of the sequence.
    """
    half = span // 2
    borders = torch.tensor([0, half, span, span + half, 2 * span, length])
    # Example: around the border 8, the positions 6 to 10.
    near_borders = borders[:, None] + torch.arange(-2, 3)
    positions = near_borders.flatten().clamp(0, max(length - 1, 0))
    queries = positions[:, None]
    keys = positions[None, :]
    first_row_or_head = torch.zeros((), dtype=torch.long)
    try:
        wanted = torch.as_tensor(function(first_row_or_head, first_row_or_head, queries, keys))
    except (IndexError, RuntimeError):
        # The function reads tensors of this rank's positions.
        return False
    allowed = function_of(rule, torch.device("cpu"))(first_row_or_head, queries, keys)
    return torch.equal(wanted.expand_as(allowed), allowed)


def _make_with_all_columns(
    block: Block, layout: SequenceLayout, original: Callable[..., Any], arguments: Any
) -> Any:
    """Make a mask of this rank's rows and all columns, by `original` and global positions."""
    device = arguments.get("device", "cpu")
    positions = layout.positions(block.comm.rank, device)
    options = block.options
    options_mask = AttentionMask(False, options.window, options.documents)
    allows_by_options = function_of(options_mask, device)
    function = arguments["mask_function"]

    def by_position(row: Any, head: Any, query: Any, key: Any) -> Any:
        # Block masks also evaluate indices after the last query and the last key.
        position = positions[query.clamp(max=len(positions) - 1)]
        key = key.clamp(max=layout.length - 1)
        return function(row, head, position, key) & allows_by_options(row, position, key)

    # `original` must evaluate the function for each element, without a shortcut for known masks.
    changes = {
        "kv_length": layout.length,
        "mask_function": by_position,
        "attention_mask": None,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
        "local_size": None,
    }
    try:
        with unwatched_functions():
            return original(**{**arguments, **changes})
    except IndexError:
        block.refuse(
            UnsupportedAttentionError(
                "a mask of transformers indexes a tensor with global positions, but the tensor "
                "has only this rank's positions (groups of image tokens, for instance). "
                + OTHER_WAYS
            )
        )
        return None


@disable_dynamo
def find_documents(
    active: ActiveBlock, original: Callable[[Tensor], Any], position_ids: Tensor
) -> Any:
    """Find documents by jumps of position ids, in place of a function of transformers.

    A block has the documents of its options only: the positions that a rank holds jump too.
    """
    block = sharding_block(active)
    layout = None if block is None else layout_of(block, position_ids.shape[-1])
    if block is None or layout is None:
        return original(position_ids)
    refuse_other_positions(block, layout, position_ids)
    return None


def refuse_other_positions(block: Block, layout: SequenceLayout, position_ids: Tensor) -> None:
    """Refuse position ids that are not this rank's positions, unless the options have documents.

    Ids of documents may begin at 0 in each document.
    """
    held_positions = layout.positions(block.comm.rank, position_ids.device)
    is_own = torch.equal(position_ids, held_positions.expand_as(position_ids))
    if block.options.documents is None and not is_own:
        block.refuse(
            LayoutError(
                "position_ids differ from the positions that this rank holds. "
                + HOW_TO_PASS_POSITIONS
            )
        )
