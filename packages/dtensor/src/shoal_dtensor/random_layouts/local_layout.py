"""The layout of a plain local tensor between styles, kept on the tensor while a watch is active.

It is an attribute of the tensor object: it lives as long as the tensor, and costs nothing where nobody watches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._torch.compiling import is_compiling
from .._torch.tensors import TensorNote
from ..layout.spec import Spec
from ..layout.tensor_meta import dense_stride

_ATTRIBUTE = "_shoal_layout"


@dataclass(frozen=True, slots=True)
class LocalLayout(TensorNote):
    """What is known of a local tensor."""

    spec: Spec | None = None  # its global tensor; None if that is unknown, or if nothing says that it is sharded
    unknown: str = ""  # why the layout is unknown; empty otherwise
    # whether it holds random numbers that every rank drew alike, along the axes on which `spec` is replicated
    drawn: bool = False
    # of a fused output, the specs of the blocks that lie behind each other along the last dim
    blocks: tuple[Spec, ...] = ()


PLAIN = LocalLayout()
"""Of results that nothing says to be sharded."""


def layout_of(tensor: Tensor) -> LocalLayout | None:
    """What is known of a tensor; None for one that no watched function returned.

    That of a DTensor on some of the axes tells how its local shard is placed on all of them.
    """
    layout: LocalLayout | None = getattr(tensor, _ATTRIBUTE, None) or None
    if layout is None or layout.spec is None or layout.spec.local_shape == tensor.shape:
        return layout
    return layout if hasattr(tensor, "device_mesh") else LocalLayout(unknown="its shape was changed in place")


def spec_of(value: Any) -> Spec | None:
    """The spec of the global tensor of which a local one is known to be a shard; None of anything else."""
    layout = layout_of(value) if isinstance(value, Tensor) else None
    return None if layout is None else layout.spec


def note_layout(tensor: Tensor, layout: LocalLayout) -> None:
    """Leave a layout on a tensor."""
    setattr(tensor, _ATTRIBUTE, layout)


def _memory_order(tensor: Tensor) -> list[int]:
    """The dims, those with large strides first; of two with one stride, that of size 1 is the inner one."""
    if is_compiling():  # strides are symbols, which cannot be sorted; nothing is watched there
        return list(range(tensor.ndim))
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], -tensor.shape[dim]))


def global_stride(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a dense global tensor whose dims lie in memory as those of the local one."""
    return dense_stride(shape, tuple(_memory_order(local)))


def in_memory_as(like: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, its dims in memory as those of another one: draws into it fill the same elements."""
    if is_compiling():
        return tensor
    order = _memory_order(like)
    if order == _memory_order(tensor):
        return tensor
    held = tensor.new_empty([tensor.shape[dim] for dim in order])
    return held.permute([order.index(dim) for dim in range(tensor.ndim)]).copy_(tensor)
