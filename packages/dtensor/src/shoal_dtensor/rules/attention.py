"""Sharding of fused scaled-dot-product attention, on one mesh axis: by batch and by head, forward and backward.

Queries may also be cut along their sequence when nothing depends on the position of a query (no causal mask).
Kernels whose random state is an output (dropout inside) are whole: their streams cannot be cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import TensorMeta
from .local import or_empty
from .notation import linear_rows
from .rule import Entry, OpCall, R, Row, Rule, S, Table
from .table import family

__all__ = ["ATTENTION"]

QUERY_SIDE = ("query", "grad_out", "grad_out_", "out", "logsumexp")
KEY_SIDE = ("key", "value")
MASKS = ("attn_mask", "attn_bias", "dropout_mask")


def _names(call: OpCall) -> list[str]:
    return [a.name for a in call.op._schema.arguments if isinstance(call.get(a.name), TensorMeta)]


def _cut(call: OpCall, name: str, dim: int) -> Entry:
    """How argument `name` lies when dim `dim` of the query is cut; masks broadcast from the right."""
    meta = call[name]
    query = call["query"]
    if name in MASKS:
        own = dim - (query.ndim - meta.ndim)
        return S(own) if own >= 0 and meta.shape[own] != 1 else R
    wanted = QUERY_SIDE if dim == query.ndim - 2 else (*QUERY_SIDE, *KEY_SIDE)
    return S(dim) if name in wanted and meta.ndim > dim else R


def _dims(call: OpCall) -> list[int]:
    """Dims of the query that may be cut: batch and, with equal head counts, heads."""
    query, key = call["query"], call["key"]
    free = [d for d in range(query.ndim - 2) if query.shape[d] == key.shape[d] == call["value"].shape[d]]
    return [] if call.get("dropout_p") else free


def _unused(meta: TensorMeta, call: OpCall) -> bool:
    """Whether an output is bookkeeping (random state, sequence lengths) rather than attention."""
    return meta.ndim < int(call["query"].ndim) - 1


def _forward(call: OpCall) -> list[Row]:
    names = _names(call)
    query = call["query"]
    dims = _dims(call)
    if not call["is_causal"] and not call.get("dropout_p") and _keeps_query_length(call):
        dims.append(query.ndim - 2)
    rows = []
    for d in dims:
        made: list[Entry] = [R if _unused(m, call) else S(d) for m in call.outputs]
        rows.append(Row(tuple(_cut(call, name, d) for name in names), tuple(made)))
    return rows


def _keeps_query_length(call: OpCall) -> bool:
    """Whether every output counts queries along the same dim as the query (efficient attention pads its log-sum)."""
    query = call["query"]
    dim = query.ndim - 2
    return all(_unused(m, call) or m.shape[dim] == query.shape[dim] for m in call.outputs)


def _backward(call: OpCall) -> list[Row]:
    """Gradients lie as their inputs; the gradient of a mask that broadcasts is not attempted."""
    names = _names(call)
    rows = []
    for d in _dims(call):
        made = _gradients(call, d)
        if made is not None:
            rows.append(Row(tuple(_cut(call, name, d) for name in names), tuple(made)))
    if names and names[0] in QUERY_SIDE:
        rows += linear_rows((0,), len(names), len(call.outputs))
    return rows


def _gradients(call: OpCall, dim: int) -> Sequence[Entry] | None:
    made: list[Entry] = [S(dim)] * len(call.outputs)
    for i, meta in enumerate(call.outputs):
        if i >= 3:
            entry = _cut(call, "attn_bias", dim)
            if entry is R or meta.ndim != call["query"].ndim:
                return None
            made[i] = entry
    return made


_FORWARD = Rule(_forward, or_empty)
_BACKWARD = Rule(_backward, or_empty)

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
