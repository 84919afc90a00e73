"""`flex_attention` in a block: masks and scores by global positions, on the keys of all ranks.

The keys and values of all ranks are gathered in the order of their positions. The user's functions
get global positions, so they are the same as without sharding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor import DTensor
from shoal_dtensor.internal import unwatched
from shoal_mesh import Comm, differentiable

from ..context_options import ContextOptions
from ..errors import UnsupportedAttentionError
from ..sequence_layout import AttentionMask, SequenceLayout, order_gathered

# Function of batch row, head, and indices of query and key, or without the head.
MaskFunction = Callable[..., Any]


def gather_keys(
    key: Tensor, value: Tensor, comm: Comm, layout: SequenceLayout
) -> tuple[Tensor, Tensor]:
    """Gather keys and values (..., length, width) of all ranks, positions in order.

    Their gradients are summed over the ranks.
    """
    # keys and values side by side, so that one collective gathers both
    both = torch.cat([key, value], -1).contiguous()
    sequence_dim = both.ndim - 2
    with unwatched():
        gathered = differentiable.all_gather_v(both, comm, layout.sizes, sequence_dim)
    whole = order_gathered(gathered, layout, -2)
    widths = [key.shape[-1], value.shape[-1]]
    keys, values = torch.split_with_sizes(whole, widths, -1)
    return keys, values


def attend_by_flex(
    original: Callable[..., Any],
    comm: Comm,
    options: ContextOptions,
    args: Any,
    kwargs: Any,
) -> Any:
    """Run `flex_attention` on this rank's queries and the keys and values of all ranks.

    Functions of the call get global indices of queries and keys. A mask of this rank's rows and all
    columns is used unchanged.

    Args:
        original: torch's function.
        comm: the communicator along the axis of the sequence.
        options: the options of the block.
        args: the arguments of the call.
        kwargs: its keyword arguments.

    Raises:
        UnsupportedAttentionError: if a tensor is a DTensor, or if the mask reads tensors of this
            rank's positions.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    call = bound.arguments
    query: Tensor = call["query"]
    key: Tensor = call["key"]
    value: Tensor = call["value"]
    if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
        raise UnsupportedAttentionError(
            "flex_attention of DTensors is not supported in a context_parallel block; pass plain "
            "local tensors, or call F.scaled_dot_product_attention"
        )
    layout = options.layout_of(query.shape[-2], comm)
    positions = layout.positions(comm.rank, query.device)
    whole_key, whole_value = gather_keys(key, value, comm, layout)
    call["key"] = whole_key
    call["value"] = whole_value
    mask = call.get("block_mask")
    call["block_mask"] = _mask_of_rows(mask, query, positions, layout, options=options)
    score = call.get("score_mod")
    if score is not None:
        call["score_mod"] = _score_by_position(score, positions)
    return original(*bound.args, **bound.kwargs)


def _score_by_position(score: MaskFunction, positions: Tensor) -> MaskFunction:
    """Return a function of local query indices for a score function of global positions."""
    last_row = len(positions) - 1

    def score_by_position(value: Any, row: Any, head: Any, query: Any, key: Any) -> Any:
        # Blocks also have indices after the last query.
        position = positions[query.clamp(max=last_row)]
        return score(value, row, head, position, key)

    return score_by_position


def _mask_of_rows(
    mask: Any, query: Tensor, positions: Tensor, layout: SequenceLayout, options: ContextOptions
) -> Any:
    """Return the mask of this rank's rows and all columns; None if there is nothing to mask.

    Args:
        mask: the block mask of the call, or None. Its rows are this rank's queries, or the whole
            sequence.
        query: this rank's queries (batch, heads, local length, width).
        positions: their global positions.
        layout: the positions of all ranks.
        options: the options of the block, whose window and documents are added.
    """  # imported here because it takes 0.1 s
    from torch.nn.attention.flex_attention import create_block_mask

    options_mask = AttentionMask(window=options.window, documents=options.documents)
    has_options_mask = options_mask != AttentionMask()
    if mask is None and not has_options_mask:
        return None
    rows = query.shape[-2]
    is_sharded = rows != layout.length
    has_own_rows = False
    if is_sharded and mask is not None:
        has_own_rows = mask.shape[-2:] == (rows, layout.length)
    if has_own_rows and not has_options_mask:
        return mask
    allows_by_options = function_of(options_mask, query.device)
    last_row = len(positions) - 1
    last_column = layout.length - 1

    def mask_by_position(row: Any, head: Any, query: Any, key: Any) -> Any:
        # Blocks also have indices after the last query and the last key.
        query = query.clamp(max=last_row)
        key = key.clamp(max=last_column)
        position = positions[query]
        allowed = allows_by_options(row, position, key)
        if mask is None:
            return allowed
        mask_row = query if has_own_rows else position
        return allowed & mask.mask_mod(row, head, mask_row, key)

    # None: one mask for all batch rows, or for all heads.
    batch_rows: int | None = None
    heads: int | None = None
    block_size = {}
    if mask is not None:
        mask_rows, mask_heads = mask.shape[:2]
        batch_rows = mask_rows if mask_rows > 1 else None
        heads = mask_heads if mask_heads > 1 else None
        block_size = {"BLOCK_SIZE": mask.BLOCK_SIZE}
    documents = options.documents
    if documents is not None and len(documents.rows) > 1:
        batch_rows = query.shape[0]
    try:
        return create_block_mask(
            mask_by_position,
            B=batch_rows,
            H=heads,
            Q_LEN=rows,
            KV_LEN=layout.length,
            device=str(query.device),
            **block_size,
        )
    except IndexError as error:
        raise UnsupportedAttentionError(
            "the mask of flex_attention indexes a tensor with global positions, but the tensor "
            "has only this rank's positions. Make it from tensors of the whole sequence, outside "
            "of the block, or pass documents= to the block"
        ) from error


def function_of(rule: AttentionMask, device: torch.device) -> MaskFunction:
    """Return a mask as a function of batch row and global positions of query and key.

    Its arguments and its result are tensors of indices and of bools, which broadcast.
    """
    left, right = rule.reach
    ids = None if rule.documents is None else rule.documents.ids(device)

    def allows(row: Any, position: Any, key: Any) -> Any:
        ahead = key - position
        allowed = (ahead <= right) & (-ahead <= left)
        if ids is None:
            return allowed
        # One row of documents stands for all batch rows.
        documents_row = row if len(ids) > 1 else torch.zeros_like(row)
        is_same_document = ids[documents_row, position] == ids[documents_row, key]
        return allowed & is_same_document

    return allows
