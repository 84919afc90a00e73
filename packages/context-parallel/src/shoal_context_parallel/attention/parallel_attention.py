"""`context_parallel_attention`: scaled dot-product attention of a sharded sequence.

Three methods bring keys and values to the queries. The ring and the all-gather are in
`block_attention`. Ulysses, in this file, exchanges positions for heads by an all-to-all: from some
positions of all heads to all positions of some heads, and back. For example, with 8 query heads, 2
heads of keys and 4 ranks, rank 1 gets the query heads 2 and 3, and head 0 of the keys, which rank 0
gets too. If the number of ranks does not divide the number of heads, heads are distributed as by
`torch.chunk`, and some ranks may have none.

May import: attention_kernels, block_attention, head_shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import Shard, Spec
from shoal_dtensor.errors import LayoutError, LayoutTypeError
from shoal_dtensor.internal import (
    apply,
    check_device_mesh,
    first_order_only,
    redistribute_shards,
    unwatched,
)
from shoal_mesh import Comm, DeviceMesh, purpose

from ..errors import UnsupportedAttentionError
from ..sequence_layout import (
    AttentionMask,
    Documents,
    LayoutName,
    Range,
    SequenceLayout,
    layout_named,
    order_gathered,
)
from .attention_kernels import BlockKernel, kernel_of
from .block_attention import Task, rotated_attention
from .head_shares import HeadShares

Method = Literal["allgather", "ring", "ulysses"]
# Source and target of each tensor of an exchange.
Moves = list[tuple[Spec, Spec]]


class QKV(NamedTuple):
    """Queries, keys and values of one attention, (..., heads, local length, width)."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Options for attention of a sharded sequence, see `context_parallel_attention`."""

    method: Method = "allgather"
    layout: SequenceLayout | LayoutName = "contiguous"
    window: tuple[int | None, int | None] = (None, None)
    documents: Documents | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise LayoutError(
                f"the method of context parallelism must be one of {', '.join(get_args(Method))}; "
                f"got {self.method!r}"
            )
        if isinstance(self.layout, str) and self.layout not in get_args(LayoutName):
            raise LayoutError(
                f"a layout's name must be 'contiguous' or 'head_tail', got {self.layout!r}"
            )
        if not isinstance(self.layout, str | SequenceLayout):
            raise LayoutTypeError(
                "the layout of context parallelism must be a SequenceLayout, 'contiguous' or "
                f"'head_tail'; got {type(self.layout).__name__}"
            )
        # The constructor raises LayoutError if the window is wrong.
        AttentionMask(window=self.window)

    def also(self, mask: AttentionMask) -> ContextOptions:
        """Return these options combined with another mask.

        Documents of the mask take the place of the options' documents.
        """
        left, right = self.window
        other_left, other_right = mask.window
        window = (_smaller(left, other_left), _smaller(right, other_right))
        documents = self.documents if mask.documents is None else mask.documents
        return replace(self, window=window, documents=documents)

    def layout_of(self, local_length: int, comm: Comm) -> SequenceLayout:
        """Return the layout of a sequence from the number of positions that this rank holds."""
        layout = self.layout
        if isinstance(layout, str):
            layout = layout_named(layout, local_length * comm.size, comm.size)
        axis = f"the {comm.size} ranks along {'x'.join(comm.axes)}"
        if layout.ranks != comm.size:
            raise LayoutError(
                f"the sequence layout is for {layout.ranks} ranks and does not fit {axis}"
            )
        held = layout.sizes[comm.rank]
        if held != local_length:
            raise LayoutError(
                f"attention of a sequence of {layout.length} positions over {axis}: this rank "
                f"holds {held} positions, but got {local_length} queries. Attention of other "
                "tensors (cross-attention, another sequence) belongs outside of context "
                "parallelism"
            )
        if self.documents is not None and self.documents.length != layout.length:
            raise LayoutError(
                f"documents= covers {self.documents.length} positions, but the sequence has "
                f"{layout.length}"
            )
        return layout


def _smaller(bound: int | None, other: int | None) -> int | None:
    """Return the smaller of two bounds; None means unbounded."""
    if bound is None or other is None:
        return other if bound is None else bound
    return min(bound, other)


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
        UnsupportedAttentionError: if `attn_mask` requires a gradient, or is passed with
            `method="ulysses"`.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     q, k, v = torch.randn(3, 1, 2, 5, 4)
        ...     out = context_parallel_attention(q, k, v, init_device_mesh("cpu", (1,)), is_causal=True, method="ring")
        >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
        True
    """
    options = ContextOptions(method, layout, window, documents)
    qkv = QKV(query, key, value)
    axis_of(mesh)
    return sharded_attention(
        qkv, attn_mask, is_causal, scale, enable_gqa=enable_gqa, mesh=mesh, options=options
    )


def axis_of(mesh: DeviceMesh) -> Comm:
    """Return the communicator of a mesh with one axis; raise LayoutError if it has several."""
    check_device_mesh("context parallelism", mesh)
    if mesh.ndim != 1:
        axes = dict(zip(mesh.axis_names or (), mesh.shape, strict=False))
        raise LayoutError(
            "context parallelism needs a mesh of one axis, but the mesh has "
            f"{axes or mesh.shape}; pass the sub-mesh of one axis"
        )
    return mesh.comm(0)


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
    added_mask = None
    if attn_mask is not None:
        added_mask = _folded_mask(attn_mask, query, key.shape[-3], layout.length)
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
        # after the exchange a rank has the whole sequence: a ring of one block
        whole_sequence = SequenceLayout.contiguous(layout.length, 1)
        task = Task(whole_sequence, comm, mask, kernel, rotation="ring", batch=q.shape[0])
        out = _attend_by_heads(q, k, v, task, layout=layout, mesh=mesh)
    else:
        rotation = options.method if comm.size > 1 else "ring"
        task = Task(layout, comm, mask, kernel, rotation=rotation, batch=q.shape[0])
        out = rotated_attention(q, k, v, task)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _with_one_batch_dim(tensor: Tensor) -> Tensor:
    """Return a tensor as (batch, heads, local length, width)."""
    if tensor.ndim == 4:
        return tensor
    return tensor.reshape(-1, *tensor.shape[-3:])


def _attend_by_heads(
    q: Tensor, k: Tensor, v: Tensor, whole: Task, layout: SequenceLayout, mesh: DeviceMesh
) -> Tensor:
    """Compute attention of this rank's heads over the whole sequence (Ulysses).

    Tensors (batch, all heads, local length, width) are exchanged for (batch, own heads, global
    length, width), and the output is exchanged back.
    """
    heads = q.shape[1]
    shares = HeadShares.of(heads, k.shape[1], mesh.size())
    sent_heads = sum(stop - start for start, stop in shares.keys)
    is_repeated = sent_heads > k.shape[1]
    if is_repeated:
        # if several ranks read a head of keys, each of them gets a copy
        k = _concatenate_shares(k, shares.keys)
        v = _concatenate_shares(v, shares.keys)
    key_heads = k.shape[1]
    move_q = _heads_for_positions(q, heads, shares.queries, layout, mesh=mesh)
    move_k = _heads_for_positions(k, key_heads, shares.keys, layout, mesh=mesh)
    move_v = _heads_for_positions(v, key_heads, shares.keys, layout, mesh=mesh)
    with unwatched():
        exchanged = apply(HeadExchange, [move_q, move_k, move_v], q, k, v)
    # In dim 2 the positions of the ranks follow one another, as after an all-gather.
    q, k, v = [order_gathered(tensor, layout, 2) for tensor in exchanged]
    rank = mesh.comm(0).rank
    keys_of_queries = shares.keys_of_queries(rank)
    if keys_of_queries is not None:
        # The rank's query heads are not complete groups, so each gets a copy of its head of keys.
        index = torch.tensor(keys_of_queries, device=q.device)
        k = k.index_select(1, index)
        v = v.index_select(1, index)
    if q.shape[1]:
        out = rotated_attention(q, k, v, whole)
    else:
        # Without heads the result is empty. It depends on q, k and v, so that backward runs the
        # exchanges of their gradients here too.
        out = q @ k.transpose(-1, -2) @ v
    shards = [layout.shard(out, 2, rank) for rank in range(layout.ranks)]
    rows = torch.cat(shards, 2)
    source, target = _heads_for_positions(out, heads, shares.queries, layout, mesh=mesh)
    with unwatched():
        (result,) = apply(HeadExchange, [(target, source)], rows)
    attended: Tensor = result
    return attended


def _concatenate_shares(tensor: Tensor, shares: Sequence[Range]) -> Tensor:
    """Return the heads of rank after rank; a head that several ranks read is repeated."""
    return torch.cat([tensor[:, start:stop] for start, stop in shares], 1)


def _heads_for_positions(
    tensor: Tensor, heads: int, shares: Sequence[Range], layout: SequenceLayout, *, mesh: DeviceMesh
) -> tuple[Spec, Spec]:
    """Return the specs S(sequence) and S(heads) of a tensor with so many heads.

    The ranks' positions follow one another.
    """
    batch = tensor.shape[0]
    width = tensor.shape[-1]
    shape = (batch, heads, layout.length, width)
    by_position = Shard(2, sizes=layout.sizes)
    heads_of_ranks = tuple(stop - start for start, stop in shares)
    by_head = Shard(1, sizes=heads_of_ranks)
    source = Spec(mesh, [by_position], shape, None, dtype=tensor.dtype)
    return source, source.with_(placements=[by_head])


class HeadExchange(Function):
    """Function S(sequence) -> S(heads), or back, of several tensors by one all-to-all.

    Gradients are exchanged in the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, moves: Moves, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.moves = moves
        return _exchange(tensors, moves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_order_only(
            "attention of a sharded sequence cannot be differentiated twice: call backward() "
            "without create_graph=True"
        )
        back = [(target, source) for source, target in ctx.moves]
        return None, *_exchange(grads, back)


def _exchange(tensors: Sequence[Tensor], moves: Moves) -> tuple[Tensor, ...]:
    with purpose("attention: exchange heads for positions"):
        pending = redistribute_shards([tensor.contiguous() for tensor in tensors], moves)
        return tuple(pending.wait())


def check_attention(
    qkv: QKV, attn_mask: Tensor | None, enable_gqa: bool, comm: Comm, options: ContextOptions
) -> SequenceLayout:
    """Check arguments, which may differ by rank; return the layout of the sequence.

    Nothing is sent.
    """
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
        if rows not in (1, batch):
            raise LayoutError(f"documents= has {rows} batch rows, but the batch has {batch}")
    return layout


def _fit_together(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    """Tell whether the shapes fit one attention call."""
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


def _folded_mask(mask: Tensor, query: Tensor, key_heads: int, columns: int) -> Tensor:
    """Return the mask that is added to the scores of folded tensors.

    The shape is (n or 1, group or 1, rows, columns).
    """
    if mask.dtype == torch.bool:
        zeros = query.new_zeros(mask.shape)
        mask = zeros.masked_fill_(~mask, -math.inf)
    mask = mask.to(query.dtype)
    *batch, heads, rows, _ = query.shape
    has_heads = mask.ndim >= 4 or mask.shape[-3:-2] == (heads,)
    if not has_heads:
        return mask.expand(1, 1, rows, columns)
    # A head of keys has one mask, or one for each query head of its group.
    mask_heads = heads
    group = heads // key_heads
    if mask.shape[-3] == 1:
        mask_heads = key_heads
        group = 1
    folded = math.prod(batch) * key_heads
    expanded = mask.expand(*batch, mask_heads, rows, columns)
    return expanded.reshape(folded, group, rows, columns)
