"""Sharding of fused scaled-dot-product attention, on one mesh axis: by batch and by head, forward and backward.

Where several query heads share a head of keys, they go along with it.  Queries may also be cut along their sequence
while keys and values are whole; where a causal mask asks for positions, only the kernel that takes a mask instead.
Kernels whose random state is an output (dropout inside) are whole: their streams cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..spec import TensorMeta
from .local import cutting, or_empty, zeros
from .notation import linear_rows
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["ATTENTION"]

QUERY_SIDE = ("query", "grad_out", "grad_out_", "out", "logsumexp")
KEY_SIDE = ("key", "value")
MASKS = ("attn_mask", "attn_bias", "dropout_mask")
GRADIENTS = ("query", "key", "value", "attn_bias")


def _names(call: OpCall) -> list[str]:
    return [a.name for a in call.op._schema.arguments if isinstance(call.get(a.name), TensorMeta)]


def _cut(call: OpCall, name: str, dim: int, share: int = 1) -> Entry:
    """How argument `name` lies when dim `dim` of the query is cut; masks broadcast from the right."""
    meta = call[name]
    query = call["query"]
    if name in MASKS:
        own = dim - (query.ndim - meta.ndim)
        return S(own, share) if own >= 0 and meta.shape[own] != 1 else R
    if name in KEY_SIDE and dim < query.ndim - 2:
        return S(dim)
    return S(dim, share) if name in QUERY_SIDE and meta.ndim > dim else R


def _dims(call: OpCall) -> list[tuple[int, int]]:
    """Dims of the query that may be cut, batch and heads, each with how many query heads share one of keys."""
    query, key, value = call["query"].shape, call["key"].shape, call["value"].shape
    if call.get("dropout_p"):
        return []
    alike = [d for d in range(len(query) - 2) if key[d] == value[d] and key[d] and query[d] % key[d] == 0]
    return [(d, query[d] // key[d]) for d in alike if query[d] == key[d] or d == len(query) - 3]


def _sequence(call: OpCall) -> list[int]:
    """The dim along which queries follow each other, if it may be cut."""
    query, masked = call["query"], "attn_mask" in call.bound
    dim = query.ndim - 2
    if call.get("dropout_p") or (call["is_causal"] and not masked):
        return []
    if "logsumexp" in call.bound:  # other kernels are told the longest sequence or pad the log-sum
        return [dim] if masked else []
    return [dim] if all(_unused(m, call) or m.shape[dim] == query.shape[dim] for m in call.outputs) else []


def _unused(meta: TensorMeta, call: OpCall) -> bool:
    """Whether an output is bookkeeping (random state, sequence lengths) rather than attention."""
    return meta.ndim < int(call["query"].ndim) - 1


def _forward(call: OpCall) -> list[Row]:
    names = _names(call)
    rows = []
    for d, share in (*_dims(call), *((d, 1) for d in _sequence(call))):
        made: list[Entry] = [R if _unused(m, call) else S(d, share) for m in call.outputs]
        rows.append(Row(tuple(_cut(call, name, d, share) for name in names), tuple(made)))
    return rows


def _backward(call: OpCall) -> list[Row]:
    """Gradients lie as their inputs, those of whole keys and values are summed; a mask that broadcasts has no row."""
    names = _names(call)
    rows = []
    for d, share in (*_dims(call), *((d, 1) for d in _sequence(call))):
        made = [_cut(call, name, d, share) for name, _ in zip(GRADIENTS, call.outputs, strict=False)]
        masked = len(made) < 4 or (made[3] is not R and call.outputs[3].ndim == call["query"].ndim)
        if masked:
            outputs = tuple(P("sum") if entry is R else entry for entry in made)
            rows.append(Row(tuple(_cut(call, name, d, share) for name in names), outputs))
    if names and names[0] in QUERY_SIDE:
        rows += linear_rows((0,), len(names), len(call.outputs))
    return rows


# --- queries in pieces under a causal mask -------------------------------------------------------------------------


def _masked(decided: LocalCall) -> Callable[[Tensor], Tensor] | None:
    """A function of this rank's queries that makes their rows of a causal mask; None where none is needed."""
    call = decided.call
    query = decided.inputs[_names(call).index("query")]
    dim = query.ndim - 2
    if not call["is_causal"] or not cutting(query, (dim,)):
        return None
    start, held, keys = query.offset(dim), query.local_shape[dim], call["key"].shape[dim]

    def mask(like: Tensor) -> Tensor:
        behind = torch.ones((held, keys), dtype=torch.bool, device=like.device).triu_(start + 1)
        return torch.zeros((held, keys), dtype=like.dtype, device=like.device).masked_fill_(behind, -torch.inf)

    return mask


def _attend(decided: LocalCall) -> LocalFunction | None:
    mask, op = _masked(decided), decided.call.op
    if mask is None:
        return or_empty(decided)

    def run(query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float | None = None, **__: Any) -> Any:
        return op(query, key, value, attn_mask=mask(query), scale=scale)

    return or_empty(decided, run)


def _attend_backward(decided: LocalCall) -> LocalFunction | None:
    """A rank without queries adds nothing to the gradients of keys and values."""
    mask, op = _masked(decided), decided.call.op
    if any(0 in spec.local_shape for spec in decided.outputs):
        return zeros(decided)
    if mask is None:
        return None

    def run(gradient: Tensor, query: Tensor, *rest: Any, scale: float | None = None, **_: Any) -> Any:
        return op(gradient, query, *rest[:4], 0.0, False, attn_mask=mask(query), scale=scale)

    return run


_FORWARD = Rule(_forward, _attend)
_BACKWARD = Rule(_backward, _attend_backward)

ATTENTION: Table = family(
    {
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention": _FORWARD,
        "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention": _FORWARD,
        "_scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable": _FORWARD,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _BACKWARD,
        "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention_backward": _BACKWARD,
        "_scaled_dot_product_cudnn_attention_backward": _BACKWARD,
        "_scaled_dot_product_fused_attention_overrideable_backward": _BACKWARD,
    }
)
