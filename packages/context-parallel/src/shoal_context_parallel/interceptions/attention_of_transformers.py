"""Attention of transformers in a block: queries of this rank, keys and values of all ranks.

May import: active_block, flex, position_mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import unwatched_functions

from .._torch import disable_dynamo
from ..errors import UnsupportedAttentionError
from .active_block import (
    HOW_TO_PASS_POSITIONS,
    ActiveBlock,
    Block,
    is_attention_of_block,
    layout_of,
    sharding_block,
)
from .flex import gather_keys
from .position_mask import PositionMask


@disable_dynamo
def look_up_attention(
    active: ActiveBlock, registry: Any, implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the attention of an implementation, of the whole sequence if a block is active.

    Args:
        active: returns the active block.
        registry: the registry of transformers, whose method `get_interface` this replaces.
        implementation: the name of an implementation; it may be None.
        default: the model's own function.
    """
    function: Callable[..., Any] = type(registry).get_interface(registry, implementation, default)
    block = sharding_block(active)
    if block is None:
        return function
    name = implementation or ""
    # `redirect_flex_attention` has replaced the function that it calls.
    if name == "flex_attention":
        return function
    if is_attention_of_block(name):
        return partial(_attend_by_block, block, registry["sdpa"])
    return partial(_attend_all_keys, block, function)


def _attend_by_block(  # noqa: PLR0913  # the arguments of transformers' functions
    block: Block,
    implementation: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> Any:
    """Call transformers' "sdpa" function, in which the block replaces torch's attention."""
    if not isinstance(attention_mask, PositionMask):
        return implementation(module, query, key, value, attention_mask, **options)
    # The function repeats shared heads of keys if it gets a mask. It gets none, so that fewer keys
    # are sent.
    with block.adding_mask(attention_mask.rule):
        return implementation(module, query, key, value, None, **options)


@disable_dynamo
def _attend_all_keys(  # noqa: PLR0913  # likewise
    block: Block,
    implementation: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> Any:
    """Attend from this rank's queries to the keys and values of all ranks, by another function."""
    if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
        raise UnsupportedAttentionError(
            "attention of DTensors in a context_parallel block supports "
            "attn_implementation='sdpa' only; use it, or plain local tensors"
        )
    dropout = options.get("dropout") or 0.0
    if dropout:
        raise UnsupportedAttentionError(
            f"dropout of attention weights ({dropout}) is not supported over a sharded sequence, "
            "because no rank has all weights that one device would draw random numbers for. Set "
            "attention_dropout=0 in the configuration"
        )
    layout = layout_of(block, query.shape[-2])
    # The model's cache (`KeysOfAllRanks`) may have gathered the keys.
    has_all_keys = layout is not None and key.shape[-2] == layout.length
    if not has_all_keys:
        block.agree((query, key, value), None)
    with unwatched_functions():
        layout = block.options.layout_of(query.shape[-2], block.comm)
        columns = None if attention_mask is None else attention_mask.shape[-1]
        # torch broadcasts a single column over all keys.
        if columns not in (None, 1, layout.length):
            raise LayoutError(
                f"the mask has {columns} columns, but the sequence has {layout.length} positions. "
                + HOW_TO_PASS_POSITIONS
            )
        if not has_all_keys:
            key, value = gather_keys(key, value, block.comm, layout)
        return implementation(module, query, key, value, attention_mask, **options)
