"""Arguments of attention that are DTensors: their layouts, local shards and results.

May import: context_options, sequence_layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor import DTensor, Placement, Replicate, Shard, Spec
from shoal_dtensor.errors import LayoutError
from shoal_mesh import Comm

from .context_options import ContextOptions
from .sequence_layout import SequenceLayout


def options_of_dtensors(
    qkv: Sequence[Any], attn_mask: object, options: ContextOptions, comm: Comm
) -> ContextOptions:
    """Return the options of a block for an attention of DTensors.

    If the mesh of the DTensors has the axis of the block, they must be sharded along the sequence
    on it. Their positions are contiguous then.

    Args:
        qkv: queries, keys and values (..., heads, length, width).
        attn_mask: the mask, which must not be a DTensor.
        options: the options of the block.
        comm: the communicator along the axis of the block.

    Raises:
        LayoutError: if not all of the three are DTensors of one layout, or if a rank would hold
            other positions than the block's layout has, or parts of heads.
    """
    specs = specs_of(qkv)
    spec = specs[0]
    if spec is None or isinstance(attn_mask, DTensor) or not are_placed_alike(specs):
        got = ", ".join("a plain tensor" if spec is None else str(spec) for spec in specs)
        raise LayoutError(
            "attention of a sharded sequence: query, key and value must be all plain tensors "
            f"or all DTensors of one layout, and attn_mask must be plain; got {got}"
        )
    sequence_dim = len(spec.shape) - 2
    for axis, placement in enumerate(spec.placements):
        ranks_of_axis = tuple(spec.mesh.comm(axis).line)
        is_axis_of_block = ranks_of_axis == tuple(comm.line)
        if is_axis_of_block and placement == Shard(sequence_dim):
            layout = SequenceLayout.contiguous(spec.shape[sequence_dim], comm.size)
            if options.layout not in ("contiguous", layout):
                raise LayoutError(
                    f"DTensors with the placement {placement} hold contiguous positions, but "
                    f"this context_parallel block has the layout {options.layout}; pass plain "
                    "local tensors"
                )
            options = replace(options, layout=layout)
        elif is_axis_of_block or not keeps_sequences_whole(spec, placement, sequence_dim):
            raise LayoutError(
                f"attention of a sharded sequence: DTensors must be Shard({sequence_dim}) on the "
                "axis of the sequence, and on other axes replicated or sharded by batch or "
                f"heads; got {spec}"
            )
    return options


def specs_of(tensors: Sequence[Any]) -> list[Spec | None]:
    """Return the specs of DTensors, and None for plain tensors."""
    return [tensor.spec if isinstance(tensor, DTensor) else None for tensor in tensors]


def are_placed_alike(specs: Sequence[Spec | None]) -> bool:
    """Tell whether all tensors are DTensors with the same placements on the same mesh."""
    layouts = set()
    for spec in specs:
        if spec is None:
            return False
        layouts.add((spec.mesh, spec.placements))
    return len(layouts) == 1


def keeps_sequences_whole(spec: Spec, placement: Placement, sequence_dim: int) -> bool:
    """Tell whether an axis with this placement leaves whole sequences of whole heads on a rank."""
    if isinstance(placement, Replicate):
        return True
    # A placement that names an order of axes is a `StridedShard`.
    if spec.is_strided or not placement.is_shard():
        return False
    dim: int = placement.dim  # type: ignore[attr-defined]  # it shards a dim
    # The dims before the sequence are batch and heads; the dim after it is the width of a head.
    return dim < sequence_dim


def local_shard(tensor: Any) -> Tensor:
    """Return the local shard of a DTensor, whose gradient has the same placements."""
    local: Tensor = tensor.to_local(grad_placements=tensor.placements)
    return local


def wrap_like(query: Spec, out: Tensor) -> DTensor:
    """Wrap the local output of an attention as a DTensor placed like the queries.

    Its width is that of the values, which may differ from the width of the queries.
    """
    shape = torch.Size((*query.shape[:-1], out.shape[-1]))
    contiguous_stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        out, query.mesh, query.placements, shape=shape, stride=contiguous_stride
    )
