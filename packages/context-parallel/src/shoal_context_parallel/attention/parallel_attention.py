"""`context_parallel_attention`: scaled dot-product attention of a sharded sequence.

Three methods bring keys and values to the queries: the ring and the all-gather of
`block_attention`, and Ulysses.

May import: argument_checks, attention_kernels, block_attention, ulysses.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from shoal_dtensor.errors import StyleTypeError
from shoal_mesh import DeviceMesh
from shoal_mesh.internal import require

from ..context_options import ContextOptions, Method
from ..sequence_layout import AttentionMask, Documents, SequenceLayout
from .argument_checks import QKV, check_attention, comm_of_one_axis
from .attention_kernels import BlockKernel, kernel_of
from .block_attention import AttentionTask, rotated_attention
from .ulysses import attend_by_heads


def context_parallel_attention(  # noqa: PLR0913  # arguments of torch's function and of sharding
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: DeviceMesh,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    method: Method = "allgather",
    layout: SequenceLayout | Literal["contiguous", "head_tail"] = "contiguous",
    window: tuple[int | None, int | None] = (None, None),
    documents: Documents | None = None,
) -> Tensor:
    """Compute this rank's rows of `F.scaled_dot_product_attention` of the global sequence.

    The backward is supported too.

    The methods are:

    - "allgather" gathers keys and values once. A rank holds the keys and values of the sequence.
    - "ring" sends keys and values one rank's block at a time, overlapped with the computation. A
      rank holds two blocks.
    - "ulysses" exchanges queries, keys, values and outputs by all-to-alls, so that a rank computes
      some heads of the whole sequence.

    Args:
        query: (..., heads, local length, width): this rank's positions, in the order of the layout.
        key: (..., heads, local length, width).
        value: (..., heads, local length, width of values).
        mesh: a mesh with one axis.
        attn_mask: broadcastable to (..., heads, local length, length of the sequence): this rank's
            rows of a mask whose columns are in global order. It is a bool mask (True: read), or
            values that are added to the scores. The mask gets no gradient.
        is_causal: whether queries read only keys up to their own global position.
        scale: factor of the scores; `1 / sqrt(width)` if left out.
        enable_gqa: whether several query heads may share a head of keys.
        method: how keys and values reach the queries.
        layout: the positions that each rank holds: a layout, or the name of a layout if all ranks
            hold equally many positions.
        window: (left, right), the numbers of keys before and after its own position that a query
            reads; None for no bound.
        documents: documents of a packed sequence; queries read keys of their own document only.

    Raises:
        LayoutError: if shapes, layout and mesh do not fit each other.
        StyleTypeError: if an argument is of a wrong type.
        UnsupportedAttentionError: if `attn_mask` requires a gradient, or is passed with
            `method="ulysses"`.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> with fake_world(1):
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     out = context_parallel_attention(q, k, v, mesh, is_causal=True, method="ring")
        >>> whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(out, whole, atol=1e-6)
        True
    """
    options = ContextOptions(method, layout, window, documents)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        require(flag, bool, f"attention: {name} is True or False", StyleTypeError)
    numbers = (int, float, torch.SymFloat, type(None))
    require(scale, numbers, "attention: scale is a number or None", StyleTypeError)
    qkv = QKV(query, key, value)
    # raises LayoutError for a mesh with several axes
    comm_of_one_axis(mesh)
    return sharded_attention(
        qkv, attn_mask, is_causal, scale, enable_gqa=enable_gqa, mesh=mesh, options=options
    )


def sharded_attention(  # noqa: PLR0913  # arguments of scaled_dot_product_attention
    qkv: QKV,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    mesh: DeviceMesh,
    options: ContextOptions,
) -> Tensor:
    """Compute `context_parallel_attention` on a mesh of one axis, with its options as one value."""
    comm = mesh.comm(0)
    layout = check_attention(qkv, attn_mask, enable_gqa, comm, options=options)
    query, key, value = qkv
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    key_heads = key.shape[-3]
    added_mask = None
    if attn_mask is not None:
        added_mask = _fold_mask(attn_mask, query, key_heads, layout.length)
    q, k, v = map(_with_one_batch_dim, qkv)
    mask = AttentionMask(is_causal, options.window, options.documents)
    kernel = BlockKernel(
        scale,
        mask.reach,
        added_mask,
        unmasked=kernel_of(q, v, masked=False),
        masked=kernel_of(q, v, masked=True),
    )
    if options.method == "ulysses":
        # After the exchange of heads each rank holds the whole sequence: a ring of one block, which
        # sends nothing.
        whole_sequence = SequenceLayout.contiguous(layout.length, 1)
        task = AttentionTask(whole_sequence, comm, mask, kernel, rotation="ring", batch=q.shape[0])
        out = attend_by_heads(q, k, v, task, layout=layout, mesh=mesh)
    else:
        # On one rank the ring sends nothing, and needs no copy of the keys.
        rotation = options.method if comm.size > 1 else "ring"
        task = AttentionTask(layout, comm, mask, kernel, rotation=rotation, batch=q.shape[0])
        out = rotated_attention(q, k, v, task)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _with_one_batch_dim(tensor: Tensor) -> Tensor:
    """Return a tensor as (batch, heads, local length, width)."""
    if tensor.ndim == 4:
        return tensor
    return tensor.reshape(-1, *tensor.shape[-3:])


def _fold_mask(mask: Tensor, query: Tensor, key_heads: int, columns: int) -> Tensor:
    """Return the mask that is added to the scores of folded tensors.

    Args:
        mask: broadcastable to (..., heads, rows, columns); a bool mask, or values to add.
        query: (..., heads, rows, width).
        key_heads: number of heads of keys.
        columns: length of the whole sequence.

    Returns:
        (n or 1, group or 1, rows, columns) for queries (n, group, rows, width): n counts batch rows
        times heads of keys, and `group` query heads share a head of keys.
    """
    if mask.dtype == torch.bool:
        zeros = query.new_zeros(mask.shape)
        mask = zeros.masked_fill_(~mask, -math.inf)
    mask = mask.to(query.dtype)
    *batch, heads, rows, _ = query.shape
    has_batch_dim = mask.ndim >= 4
    has_mask_per_head = mask.shape[-3:-2] == (heads,)
    if not has_batch_dim and not has_mask_per_head:
        return mask.expand(1, 1, rows, columns)
    folded = math.prod(batch) * key_heads
    if mask.shape[-3] == 1:
        # All heads have the mask of their batch row, so a group of query heads needs it once.
        of_key_heads = mask.expand(*batch, key_heads, rows, columns)
        return of_key_heads.reshape(folded, 1, rows, columns)
    of_query_heads = mask.expand(*batch, heads, rows, columns)
    return of_query_heads.reshape(folded, heads // key_heads, rows, columns)
