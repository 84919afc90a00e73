"""`check_attention`: checks of the arguments of attention, before any message is sent."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from shoal_dtensor.errors import LayoutError, StyleTypeError
from shoal_dtensor.internal import check_device_mesh
from shoal_mesh import Comm, DeviceMesh
from shoal_mesh.internal import require

from ..context_options import ContextOptions, Method
from ..errors import UnsupportedAttentionError
from ..sequence_layout import SequenceLayout


class QKV(NamedTuple):
    """Queries, keys and values of one attention, (..., heads, local length, width)."""

    query: Tensor
    key: Tensor
    value: Tensor


def comm_of_one_axis(mesh: DeviceMesh) -> Comm:
    """Return the communicator of a mesh with one axis; raise LayoutError if it has several."""
    check_device_mesh("context parallelism", mesh)
    if mesh.ndim != 1:
        axes = dict(zip(mesh.axis_names or (), mesh.shape, strict=False))
        raise LayoutError(
            "context parallelism needs a mesh of one axis, but the mesh has "
            f"{axes or mesh.shape}; pass the sub-mesh of one axis"
        )
    return mesh.comm(0)


def check_attention(
    qkv: QKV, attn_mask: Tensor | None, enable_gqa: bool, comm: Comm, options: ContextOptions
) -> SequenceLayout:
    """Check the arguments of this rank; return the layout of the sequence.

    Nothing is sent, so other ranks do not learn of an error here.

    Raises:
        LayoutError: if shapes, layout and axis do not fit each other.
        StyleTypeError: if an argument is not a tensor.
        UnsupportedAttentionError: if `attn_mask` requires a gradient, or the method is "ulysses".
    """
    for name, tensor in zip(QKV._fields, qkv, strict=True):
        require(tensor, Tensor, f"attention: {name} is a tensor", StyleTypeError)
    require(attn_mask, Tensor | None, "attention: attn_mask is a tensor or None", StyleTypeError)
    query, key, value = qkv
    if not _fit_together(query, key, value, enable_gqa=enable_gqa):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in qkv)
        without_gqa = "" if enable_gqa else " without enable_gqa"
        raise LayoutError(
            "attention of a sharded sequence: query, key and value must have the shape (..., "
            "heads, local length, width) with equal batch and length, and equal numbers of heads "
            "(with enable_gqa, the number of key heads divides the number of query heads); got "
            f"{shapes}{without_gqa}"
        )
    local_length = query.shape[-2]
    layout = options.layout_of(local_length, comm)
    if attn_mask is not None:
        _check_mask(attn_mask, local_length, layout, options.method)
    if options.documents is not None:
        batch = math.prod(query.shape[:-3])
        rows = len(options.documents.rows)
        # One row of documents stands for all batch rows.
        if rows not in (1, batch):
            raise LayoutError(f"documents= has {rows} batch rows, but the batch has {batch}")
    return layout


def _fit_together(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    """Tell whether shapes (..., heads, local length, width) fit one attention call."""
    if query.ndim < 3 or query.ndim != key.ndim:
        return False
    if key.shape[:-1] != value.shape[:-1]:
        return False
    same_batch = query.shape[:-3] == key.shape[:-3]
    same_length_and_width = query.shape[-2:] == key.shape[-2:]
    if not same_batch or not same_length_and_width:
        return False
    heads = query.shape[-3]
    key_heads = key.shape[-3]
    if heads == key_heads:
        return True
    return enable_gqa and key_heads > 0 and heads % key_heads == 0


def _check_mask(mask: Tensor, rows: int, layout: SequenceLayout, method: Method) -> None:
    """Refuse a mask that does not have this rank's rows and all columns."""
    # torch broadcasts a mask with one row over all queries.
    has_rows = mask.ndim >= 2 and mask.shape[-2] in (1, rows)
    if not has_rows or mask.shape[-1] != layout.length:
        raise LayoutError(
            f"attn_mask must have this rank's {rows} rows and all {layout.length} columns in "
            f"global order, got {tuple(mask.shape)}; shard its rows as the queries are sharded. "
            "Models of transformers make masks for padding and packed documents with this rank's "
            "columns only: leave out attention_mask, pass documents=, and pass "
            "layout.positions(rank) as position_ids"
        )
    if method == "ulysses" or mask.requires_grad:
        raise UnsupportedAttentionError(
            "attn_mask cannot require a gradient, and method='ulysses' does not take it, because "
            "no rank has all mask rows of its heads; use method='ring' and a constant mask, or "
            "describe the mask by is_causal, window= or documents="
        )
