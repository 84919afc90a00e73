"""`RoutedAttention`: a block in which `F.scaled_dot_product_attention` is that of a sharded sequence.

May import: errors, parallel_attention, sequence_layout.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_dtensor.errors import LayoutError, StyleError
from shoal_dtensor.internal import UNSEEN, ReplacedAttention, layout_of, note_layout, unwatched, unwatched_functions
from shoal_mesh import DeviceMesh, all_gather

from .errors import UnsupportedAttentionError
from .parallel_attention import ContextOptions, check_attention, sharded_attention
from .sequence_layout import SequenceLayout


class RoutedAttention(ReplacedAttention):
    """Inside, `F.scaled_dot_product_attention` takes and returns this rank's positions, on a mesh of one axis."""

    def __init__(self, mesh: DeviceMesh, options: ContextOptions) -> None:
        super().__init__(self.attend)
        self.mesh, self.comm = mesh, mesh.comm(0)
        self.options = options
        self._agreed = self.comm.size == 1

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.multi_head_attention_forward:
            raise UnsupportedAttentionError(
                "nn.MultiheadAttention inside of context parallelism: its attention is no call of "
                "F.scaled_dot_product_attention from outside of torch. Project queries, keys and values with Linear "
                "modules and call F.scaled_dot_product_attention"
            )
        if func is torch.diff and sys._getframe(1).f_code.co_name == "find_packed_sequence_indices":
            return self._jumps(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _jumps(self, position_ids: Tensor, **how: Any) -> Tensor:
        """What transformers takes for differences of neighbouring positions: where it is not 1, a document begins."""
        layout = self.options.layout
        length = position_ids.shape[-1]
        if isinstance(layout, str):
            layout = self.options.layout_of(length, self.comm)
        if layout.sizes[self.comm.rank] != length:
            return torch.diff(position_ids, **how)  # refused by all ranks at the first attention
        if self.options.documents is not None:  # which are known
            return torch.ones_like(position_ids)
        return position_ids - layout.positions(self.comm.rank, position_ids.device) + 1

    def _agree(self, qkv: Any, attn_mask: Tensor | None, enable_gqa: bool, options: ContextOptions) -> None:
        """Raise on all ranks what is wrong with the arguments of some, at the first attention of a block."""
        failure: StyleError | None = None
        try:
            check_attention(qkv, attn_mask, enable_gqa, self.comm, options)
        except StyleError as error:
            failure = error
        with unwatched():  # a selective checkpoint compares with a recomputation, which asks no more
            failed = torch.tensor([failure is not None], dtype=torch.int32, device=qkv[0].device)
            wrong = all_gather(failed, self.comm).nonzero().flatten().tolist()
        if wrong:
            raise failure or LayoutError(
                f"attention of a sharded sequence: the arguments of ranks {wrong} along {'x'.join(self.comm.axes)} do "
                "not fit; their errors say what is wrong, and nothing of it was sent"
            )
        self._agreed = True

    def attend(  # noqa: PLR0913  # the signature of scaled_dot_product_attention
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention of the global sequence, at this rank's positions."""
        if dropout_p:
            raise UnsupportedAttentionError(
                f"dropout of attention weights (dropout_p={dropout_p}) over a sharded sequence: no rank has the "
                "weights that one device would draw for. Use dropout_p=0, and dropout after the output projection"
            )
        qkv: Any = query, key, value
        options = self.options
        spec = query.spec if isinstance(query, DTensor) else None
        if spec is not None or any(isinstance(x, DTensor) for x in (*qkv, attn_mask)):
            options = self._options_of(qkv, attn_mask)
            qkv = tuple(x.to_local(grad_placements=x.placements) for x in qkv)
        with unwatched_functions():
            if not self._agreed:
                self._agree(qkv, attn_mask, enable_gqa, options)
            out = sharded_attention(qkv, attn_mask, is_causal, scale, enable_gqa, self.mesh, options)
            if spec is not None:
                shape = torch.Size((*spec.shape[:-1], out.shape[-1]))
                stride = torch.empty(shape, device="meta").stride()
                placed = spec.mesh, spec.placements
                return DTensor.from_local(out, *placed, run_check=False, shape=shape, stride=stride)
        layout = layout_of(query)
        if layout is not UNSEEN and out.shape == query.shape:
            note_layout(out, layout)
        return out

    def _options_of(self, tensors: Sequence[Any], attn_mask: object) -> ContextOptions:
        """The options for DTensors: sharded along the sequence on the axis of the sequence, if their mesh has it."""
        specs = [x.spec if isinstance(x, DTensor) else None for x in tensors]
        first = specs[0]
        if (
            first is None
            or isinstance(attn_mask, DTensor)
            or any(spec is None or (spec.mesh, spec.placements) != (first.mesh, first.placements) for spec in specs)
        ):
            raise LayoutError(
                "attention of a sharded sequence takes query, key and value all plain or all DTensors of one layout, "
                f"and a plain attn_mask; got {', '.join(str(spec or 'a plain tensor') for spec in specs)}"
            )
        sequence = len(first.shape) - 2
        options = self.options
        for axis, placement in enumerate(first.placements):
            own = tuple(first.mesh.comm(axis).line) == tuple(self.comm.line)
            along = isinstance(placement, Shard) and placement.dim >= sequence
            if own and placement == Shard(sequence):
                layout = SequenceLayout.contiguous(first.shape[sequence], self.comm.size)
                if options.layout not in ("contiguous", layout):
                    raise LayoutError(
                        f"DTensors that are {placement} hold contiguous positions, this block has the layout "
                        f"{options.layout}; pass plain local tensors"
                    )
                options = replace(options, layout=layout)
            elif own or along or not isinstance(placement, Shard | Replicate):
                raise LayoutError(
                    f"attention of a sharded sequence takes DTensors that are Shard({sequence}) on the axis of the "
                    f"sequence and sharded by batch or heads, or replicated, on others; got {first}"
                )
        return options
