"""`context_parallel_attention`: scaled dot-product attention of a sharded sequence.

Ulysses exchanges positions for heads by an all-to-all: from some positions of all heads to all
positions of some heads, and back. With 8 query heads, 2 heads of keys and 4 ranks, rank 1 gets
query heads 2 and 3 and head 0 of the keys, which rank 0 gets too. If the ranks do not divide the
heads, heads are distributed as by `torch.chunk`: some ranks may have none.

May import: block_attention, errors, sequence_layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import Shard, Spec
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    apply,
    check_device_mesh,
    first_order_only,
    redistribute_shards,
    shard_sizes,
    spans,
    unwatched,
)
from shoal_mesh import Comm, DeviceMesh, purpose

from .block_attention import BlockKernel, Task, kernel_of, rotated_attention
from .errors import UnsupportedAttentionError
from .sequence_layout import AttentionMask, Documents, Range, SequenceLayout

QKV = tuple[Tensor, Tensor, Tensor]
Method = Literal["allgather", "ring", "ulysses"]
Moves = list[tuple[Spec, Spec]]


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Options for attention of a sharded sequence, see `context_parallel_attention`."""

    method: Method = "allgather"
    layout: SequenceLayout | Literal["contiguous", "head_tail"] = "contiguous"
    window: tuple[int | None, int | None] = (None, None)
    documents: Documents | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise LayoutError(
                f"methods of context parallelism are {', '.join(get_args(Method))}; got "
                f"{self.method!r}"
            )
        if isinstance(self.layout, str) and self.layout not in ("contiguous", "head_tail"):
            raise LayoutError(
                f"layouts with a name are contiguous and head_tail, got {self.layout!r}"
            )
        AttentionMask(window=self.window)

    def also(self, mask: AttentionMask) -> ContextOptions:
        """Return these options combined with another mask.

        Documents of the mask take the place of the options' documents.
        """
        sides = []
        for own, other in zip(self.window, mask.window, strict=True):
            bounds = [side for side in (own, other) if side is not None]
            sides.append(min(bounds, default=None))
        documents = self.documents if mask.documents is None else mask.documents
        return replace(self, window=(sides[0], sides[1]), documents=documents)

    def layout_of(self, local_length: int, comm: Comm) -> SequenceLayout:
        """Return the layout of a sequence from the number of positions that this rank holds."""
        layout = self.layout
        if isinstance(layout, str):
            layout = getattr(SequenceLayout, layout)(local_length * comm.size, comm.size)
        axis = f"the {comm.size} ranks along {'x'.join(comm.axes)}"
        if layout.ranks != comm.size:
            raise LayoutError(f"a sequence layout for {layout.ranks} ranks does not fit {axis}")
        if layout.sizes[comm.rank] != local_length:
            raise LayoutError(
                f"attention of a sequence of {layout.length} positions over {axis}: this rank "
                f"holds {layout.sizes[comm.rank]} of them, but its queries are {local_length}. "
                "Attention of other tensors (cross-attention, another sequence) belongs outside of "
                "context parallelism"
            )
        if self.documents is not None and self.documents.length != layout.length:
            raise LayoutError(
                f"documents of {self.documents.length} positions in a sequence of {layout.length}"
            )
        return layout


def context_parallel_attention(  # noqa: PLR0913  # those of scaled_dot_product_attention, and what is sharded
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

    "allgather" gathers keys and values once; a rank holds the keys and values of the sequence.
    "ring" moves keys and values too, one rank's block at a time, overlapped with the computation; a
    rank holds two blocks. "ulysses" moves queries, keys, values and outputs, heads for positions,
    all to all; a rank holds the sequence of its heads.

    Args:
        query: (..., heads, local length, width): this rank's positions, in the order of the layout.
        key: (..., heads, local length, width).
        value: (..., heads, local length, width of values).
        mesh: with one axis.
        attn_mask: broadcastable to (..., heads, local length, length of the sequence): this rank's
            rows of a mask whose columns are in global order; a bool mask (True: read), or values
            that are added to the scores. The mask gets no gradient.
        is_causal: queries read keys up to their own global position.
        scale: of the scores; `1 / sqrt(width)` if left out.
        enable_gqa: several query heads may share a head of keys.
        method: how keys and values reach the queries.
        layout: the positions that each rank holds: a layout, or the name of a layout for ranks that
            hold equally many.
        window: (left, right): keys before and behind the query's own position that it may read;
            None: no bound.
        documents: documents of a packed sequence; queries read keys of their own document only.

    Raises:
        LayoutError: if shapes, layout and mesh do not fit each other.
        UnsupportedAttentionError: `attn_mask` that requires grad, or with `method="ulysses"`.

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
    qkv = (query, key, value)
    axis_of(mesh)
    return sharded_attention(
        qkv, attn_mask, is_causal, scale, enable_gqa=enable_gqa, mesh=mesh, options=options
    )


def axis_of(mesh: DeviceMesh) -> Comm:
    """Return the communicator of a mesh with one axis; raise LayoutError if it has several."""
    check_device_mesh("context parallelism", mesh)
    if mesh.ndim != 1:
        raise LayoutError(
            "context parallelism acts on one mesh axis, the mesh has "
            f"{dict(zip(mesh.axis_names or (), mesh.shape, strict=False)) or mesh.shape}; pass the "
            "sub-mesh of one axis"
        )
    return mesh.comm(0)


def sharded_attention(  # noqa: PLR0913  # those of scaled_dot_product_attention
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
    (query, key, value) = qkv
    mask = AttentionMask(is_causal, options.window, options.documents)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v = (x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    added = (
        None if attn_mask is None else _folded_mask(attn_mask, query, key.shape[-3], layout.length)
    )
    kernel = BlockKernel(
        scale, mask.reach, added, *(kernel_of(q, v, masked=masked) for masked in (False, True))
    )
    if options.method == "ulysses":
        whole = Task(
            SequenceLayout.contiguous(layout.length, 1),
            comm,
            mask,
            kernel,
            rotation="ring",
            batch=q.shape[0],
        )
        out = _in_heads(q, k, v, whole, layout=layout, mesh=mesh)
    else:
        rotation = options.method if comm.size > 1 else "ring"
        out = rotated_attention(
            q, k, v, Task(layout, comm, mask, kernel, rotation=rotation, batch=q.shape[0])
        )
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _in_heads(
    q: Tensor, k: Tensor, v: Tensor, whole: Task, layout: SequenceLayout, mesh: DeviceMesh
) -> Tensor:
    """Compute attention of this rank's heads over the whole sequence (Ulysses).

    Tensors (batch, all heads, local length, width) are exchanged for (batch, own heads, global
    length, width), and the output is exchanged back.
    """
    heads = q.shape[1]
    shared = k.shape[1]
    rank = mesh.comm(0).rank
    group: int = heads // max(shared, 1)
    # 6 query heads, 3 of keys and 4 ranks: queries (0, 2) (2, 4) (4, 6) (6, 6), keys (0, 1) (1, 2)
    # (2, 3) (0, 0).
    queries = spans(shard_sizes(heads, Shard(0), mesh.size()))
    keys = [(a // group, -(-b // group)) if a < b else (0, 0) for a, b in queries]

    def move(like: Tensor, shares: Sequence[Range], count: int) -> tuple[Spec, Spec]:
        """Return the specs S(sequence) and S(heads) of a tensor with `count` heads.

        The ranks' positions follow one another.
        """
        shape = (like.shape[0], count, layout.length, like.shape[-1])
        sizes = tuple(b - a for a, b in shares)
        source = Spec(mesh, [Shard(2, sizes=layout.sizes)], shape, None, dtype=like.dtype)
        return source, source.with_(placements=[Shard(1, sizes=sizes)])

    # several ranks read a head: a copy for each
    if sum(b - a for a, b in keys) > shared:
        k, v = (torch.cat([x[:, a:b] for a, b in keys], 1) for x in (k, v))
    moves = [
        move(x, own, x.shape[1]) for x, own in zip((q, k, v), (queries, keys, keys), strict=True)
    ]
    with unwatched():
        moved = apply(_Exchange, moves, q, k, v)
    q, k, v = (layout.in_order(x.split(layout.sizes, 2), 2) for x in moved)
    first, last = queries[rank]
    count = keys[rank][1] - keys[rank][0]
    if count and (first % group or (last - first) != count * group):
        # Groups do not fit the rank's heads: a head of keys for every query head.
        own = torch.arange(first, last, device=q.device) // group - keys[rank][0]
        k, v = k.index_select(1, own), v.index_select(1, own)
    # Without heads the product is empty, and takes part in the exchanges of backward.
    out = rotated_attention(q, k, v, whole) if q.shape[1] else q @ k.transpose(-1, -2) @ v
    rows = torch.cat([layout.shard(out, 2, each) for each in range(layout.ranks)], 2)
    source, target = move(out, queries, heads)
    with unwatched():
        (result,) = apply(_Exchange, [(target, source)], rows)
    return result  # type: ignore[no-any-return]  # of torch


class _Exchange(Function):
    """Function S(sequence) -> S(heads), or back, of several tensors by one all-to-all.

    Gradients are exchanged in the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, moves: Moves, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.moves = moves
        return _moved(tensors, moves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_order_only("attention of a sharded sequence has first derivatives only")
        return None, *_moved(grads, [(target, source) for source, target in ctx.moves])


def _moved(tensors: Sequence[Tensor], moves: Moves) -> tuple[Tensor, ...]:
    with purpose("attention: heads for positions"):
        return tuple(redistribute_shards([tensor.contiguous() for tensor in tensors], moves).wait())


def check_attention(
    qkv: QKV, attn_mask: Tensor | None, enable_gqa: bool, comm: Comm, options: ContextOptions
) -> SequenceLayout:
    """Check arguments, which may differ by rank; return the layout of the sequence.

    Nothing is sent.
    """
    query, key, value = qkv
    heads, shared = (x.shape[-3] if x.ndim >= 3 else 0 for x in (query, key))
    fits = (
        query.ndim == key.ndim == value.ndim >= 3
        and key.shape[:-1] == value.shape[:-1]
        and query.shape[:-3] == key.shape[:-3]
        and query.shape[-2:] == key.shape[-2:]
        and (heads == shared or (enable_gqa and shared > 0 and heads % shared == 0))
    )
    if not fits:
        raise LayoutError(
            "attention of a sharded sequence takes query, key and value of (..., heads, local "
            "length, width) with one length and batch, as many heads of keys as of queries, or "
            "with enable_gqa a divisor of them; got "
            f"{', '.join(str(tuple(x.shape)) for x in qkv)}{'' if enable_gqa else ' without enable_gqa'}"
        )
    layout = options.layout_of(query.shape[-2], comm)
    if attn_mask is not None:
        _check_mask(attn_mask, query.shape[-2], layout, options.method)
    batch = math.prod(query.shape[:-3])
    documents = options.documents
    if documents is not None and len(documents.rows) not in (1, batch):
        raise LayoutError(f"documents of {len(documents.rows)} batch rows in a batch of {batch}")
    return layout


def _check_mask(mask: Tensor, rows: int, layout: SequenceLayout, method: Method) -> None:
    if mask.ndim < 2 or mask.shape[-2] not in (1, rows) or mask.shape[-1] != layout.length:
        raise LayoutError(
            f"attn_mask has this rank's {rows} rows and all {layout.length} columns in global "
            f"order, got {tuple(mask.shape)}; shard its rows as the queries are. A model of "
            "transformers makes masks of a rank's own columns for padding and for packed "
            "documents: leave out attention_mask, give documents=, and as position_ids the rank's "
            "own, layout.positions(rank)"
        )
    if method == "ulysses" or mask.requires_grad:
        raise UnsupportedAttentionError(
            "attn_mask with a gradient, or with method='ulysses', where no rank has all rows of "
            "its heads; use method='ring' and a constant mask, or say what the mask means: "
            "is_causal, window=, documents="
        )


def _folded_mask(mask: Tensor, query: Tensor, shared: int, columns: int) -> Tensor:
    """Return the mask that is added to the scores of folded tensors.

    The shape is (n or 1, group or 1, rows, columns).
    """
    if mask.dtype == torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
    mask = mask.to(query.dtype)
    (*batch, heads, rows, _) = query.shape
    if mask.ndim < 4 and mask.shape[-3:-2] != (heads,):
        return mask.expand(1, 1, rows, columns)
    # A head of keys has one mask, or one for each query head of its group.
    own, group = (shared, 1) if mask.shape[-3] == 1 else (heads, heads // shared)
    return mask.expand(*batch, own, rows, columns).reshape(
        math.prod(batch) * shared, group, rows, columns
    )
