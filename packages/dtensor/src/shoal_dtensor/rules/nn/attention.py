"""Sharding of fused scaled-dot-product attention: by batch and by head, forward and backward.

Query heads that share a head of keys stay on the rank of that head. Queries may also be sharded
along their sequence, with replicated keys and values. If the mask is causal, it depends on
positions, and queries are sharded along their sequence only for the kernel that accepts a mask
tensor instead. Kernels with dropout return their random state. The state cannot be sharded, so they
run replicated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...layout.tensor_meta import TensorMeta
from ..language.local_ops import sharding_axes, with_arguments
from ..language.notation import broadcast_entry
from ..language.rule import (
    Entry,
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    Rule,
    S,
    Table,
    backward,
    family,
)

QUERY_SIDE = ("query", "grad_out", "grad_out_", "out", "logsumexp")
KEY_SIDE = ("key", "value")
MASKS = ("attn_mask", "attn_bias", "dropout_mask")
GRADIENTS = ("query", "key", "value", "attn_bias")


def _entry(call: OpCall, name: str, dim: int, group: int) -> Entry:
    """Return an argument's entry if a dim of the query is sharded; masks align on the right."""
    meta = call[name]
    query = call["query"]
    if name in MASKS:
        return broadcast_entry(meta, dim, query.ndim, group)
    if name in KEY_SIDE and dim < query.ndim - 2:
        return S(dim)
    # Example: with 8 query heads and 4 key heads, a `group` of 2 query heads is one step.
    if name in QUERY_SIDE and meta.ndim > dim:
        return S(dim, group)
    return R


def _shardable(call: OpCall) -> Iterator[tuple[int, int]]:
    """Yield the dims of the query that may be sharded, each with the query heads per head of keys.

    The dims are batch, heads and sequence.
    """
    query = call["query"].shape
    key = call["key"].shape
    value = call["value"].shape
    heads = len(query) - 3
    sequence = len(query) - 2
    masked = "attn_mask" in call.arguments
    if call.get("dropout_p"):
        return
    for d in range(sequence):
        queries = query[d]
        keys = key[d]
        # Several query heads may share a head of keys.
        fits = keys and keys == value[d] and queries % keys == 0
        is_batch_or_heads = queries == keys or d == heads
        if fits and is_batch_or_heads:
            yield d, queries // keys
    # Other kernels get the longest sequence as a number, or pad the log-sum.
    if "logsumexp" in call.arguments:
        outputs_follow = masked
    else:
        shaped = [meta for meta in call.outputs if not _is_bookkeeping(meta, call)]
        outputs_follow = all(meta.shape[sequence] == query[sequence] for meta in shaped)
    if outputs_follow and (masked or not call["is_causal"]):
        yield sequence, 1


def _is_bookkeeping(meta: TensorMeta, call: OpCall) -> bool:
    """Tell whether an output is random state or sequence lengths rather than attention."""
    return meta.ndim < int(call["query"].ndim) - 1


def attention(call: OpCall) -> Iterator[Row]:
    """Yield rows of attention and of its gradients, which are sharded as their inputs.

    The gradients of replicated inputs are summed.

    The gradient of a mask that broadcasts does not have a row.
    """
    first = next(iter(call.places))
    present = dict(zip(GRADIENTS, call.results.values(), strict=False))
    is_gradient = first in QUERY_SIDE[1:]
    for d, group in _shardable(call):
        names = [name for name, place in call.places.items() if place]
        entries = {name: _entry(call, name, d, group) for name in names}
        results: list[Entry] = []
        if is_gradient:
            mask = entries.get("attn_bias", R)
            is_broadcast = mask is R or call["attn_bias"].ndim < call["query"].ndim
            if present.get("attn_bias") and is_broadcast:
                continue
            for name in present:
                entry = entries.get(name, R)
                results.append(P("sum") if entry is R else entry)
        else:
            results += [R if _is_bookkeeping(m, call) else S(d, group) for m in call.outputs]
        for i, entry in enumerate(results):
            entries[f"out{i}"] = entry
        yield call.row(entries)


def _attend(local_call: LocalCall) -> LocalFunction | None:
    """Run the operator on this rank's rows of a causal mask, given as an ordinary mask."""
    call = local_call.call
    query = local_call["query"]
    dim = query.ndim - 2
    if not call["is_causal"] or not sharding_axes(query, (dim,)):
        return None
    start = query.offset(dim)
    queries = query.local_shape[dim]
    keys = call["key"].shape[dim]
    attend = with_arguments(call, is_causal=False)
    place = call.schema.inputs.index("query")

    def run(*args: Any, **kwargs: Any) -> Any:
        like = args[place]
        # Example: on the rank with queries 4..7, row `i` of the shard reads keys up to `4 + i`.
        everywhere = torch.ones((queries, keys), dtype=torch.bool, device=like.device)
        is_later = everywhere.triu_(start + 1)
        mask = torch.zeros((queries, keys), dtype=like.dtype, device=like.device)
        mask.masked_fill_(is_later, -torch.inf)
        return attend(*args, **kwargs | {"attn_mask": mask})

    return run


_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable"
)
ATTENTION: Table = family(
    {
        f"{_KERNELS} {backward(_KERNELS)}": Rule(
            attention, _attend, skip_empty=True, linear="grad_out grad_out_"
        )
    }
)
