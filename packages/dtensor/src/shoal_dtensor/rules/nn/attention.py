"""Sharding of fused scaled-dot-product attention: by batch and by head, forward and backward.

Query heads that share a head of keys stay on the rank of that head. Queries may also be sharded
along their sequence, with replicated keys and values. A causal mask depends on the positions of the
queries. With a causal mask, queries are therefore sharded along their sequence only for the kernel
that accepts a mask tensor, which gets this rank's rows of the mask. A call with dropout runs
replicated, because its kernel returns its random state, and the state cannot be sharded.
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

# Some kernels name the gradient of the output `grad_out`, and some name it `grad_out_`.
QUERY_SIDE = ("query", "grad_out", "grad_out_", "out", "logsumexp")
KEY_SIDE = ("key", "value")
MASKS = ("attn_mask", "attn_bias", "dropout_mask")
GRADIENTS = ("query", "key", "value", "attn_bias")


def _entry(call: OpCall, name: str, dim: int, group: int) -> Entry:
    """Return the entry of an argument in the row that shards a dim of the query.

    Args:
        call: the call.
        name: the argument.
        dim: the dim of the query. If it is the sequence, keys and values are replicated.
        group: the number of query heads that share a head of keys and stay together; 1 for other
            dims. With 8 query heads and 4 key heads it is 2, and `S(dim, 2)` divides the heads at
            multiples of 2.
    """
    meta = call[name]
    query = call["query"]
    # The dims of a mask are the last dims of the query: (4, 6) masks a query of (2, 8, 4, 16).
    if name in MASKS:
        return broadcast_entry(meta, dim, query.ndim, group)
    is_batch_or_heads = dim < query.ndim - 2
    if name in KEY_SIDE and is_batch_or_heads:
        return S(dim)
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
    accepts_mask = "attn_mask" in call.arguments
    if call.get("dropout_p"):
        return
    for d in range(sequence):
        query_size = query[d]
        key_size = key[d]
        if not key_size or key_size != value[d] or query_size % key_size != 0:
            continue
        # Several query heads may share a head of keys. Other dims have one size.
        if d == heads or query_size == key_size:
            yield d, query_size // key_size
    is_backward = "logsumexp" in call.arguments
    if is_backward:
        # Kernels that do not accept a mask tensor cannot compute the gradients of a part of the
        # sequence: they get the longest sequence as a number, or a log-sum that is padded.
        allows_sequence = accepts_mask
    else:
        # Kernels may also pad the sequence of a result.
        results = [meta for meta in call.outputs if not _is_bookkeeping(meta, call)]
        allows_sequence = all(meta.shape[sequence] == query[sequence] for meta in results)
    if allows_sequence and (accepts_mask or not call["is_causal"]):
        yield sequence, 1


def _is_bookkeeping(meta: TensorMeta, call: OpCall) -> bool:
    """Tell whether an output is random state or sequence lengths rather than attention.

    For a query of 4 dims, the attention has 4 dims and its log-sum 3. Other outputs have at most 1.
    """
    return meta.ndim < int(call["query"].ndim) - 1


def attention(call: OpCall) -> Iterator[Row]:
    """Yield rows of attention and of its gradients, which are sharded as their inputs.

    The gradients of replicated inputs are summed.

    The gradient of a mask that broadcasts does not have a row.
    """
    # A backward kernel gets the gradient of the output first. A forward kernel gets the
    # query first.
    first = next(iter(call.places))
    is_gradient = first in QUERY_SIDE[1:]
    # Backward kernels return gradients in the order of `GRADIENTS`. A gradient that a call leaves
    # out has an empty range of outputs.
    outputs_of_gradient = dict(zip(GRADIENTS, call.results.values(), strict=False))
    for d, group in _shardable(call):
        names = [name for name, place in call.places.items() if place]
        entries = {name: _entry(call, name, d, group) for name in names}
        results: list[Entry] = []
        if is_gradient:
            has_gradient_of_mask = bool(outputs_of_gradient.get("attn_bias"))
            if has_gradient_of_mask:
                mask = entries.get("attn_bias", R)
                is_broadcast = mask is R or call["attn_bias"].ndim < call["query"].ndim
                if is_broadcast:
                    continue
            for name in outputs_of_gradient:
                entry = entries.get(name, R)
                results.append(P("sum") if entry is R else entry)
        else:
            results += [R if _is_bookkeeping(m, call) else S(d, group) for m in call.outputs]
        # A row names results by their number: "out0", "out1".
        for i, entry in enumerate(results):
            entries[f"out{i}"] = entry
        yield call.row(entries)


def _attend(local_call: LocalCall) -> LocalFunction | None:
    """Return a function that gives the operator this rank's rows of a causal mask.

    The operator gets them as an ordinary mask. Return None, which runs the operator itself, if the
    mask is not causal or the sequence is not sharded.
    """
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
        local_query = args[place]
        device = local_query.device
        # Example: on the rank with queries 4..7, row `i` of the shard reads keys up to `4 + i`.
        everywhere = torch.ones((queries, keys), dtype=torch.bool, device=device)
        is_later = everywhere.triu_(start + 1)
        mask = torch.zeros((queries, keys), dtype=local_query.dtype, device=device)
        mask.masked_fill_(is_later, -torch.inf)
        return attend(*args, **kwargs | {"attn_mask": mask})

    return run


_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable"
)
# Kernels refuse empty shards. Gradients are linear in the gradient of the output, under both of its
# names.
ATTENTION: Table = family(
    {
        f"{_KERNELS} {backward(_KERNELS)}": Rule(
            attention, _attend, skip_empty=True, linear="grad_out grad_out_"
        )
    }
)
