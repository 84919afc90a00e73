"""Global indices as a rank sees them that holds an interval of the indexed dim."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import Spec

__all__ = ["checked", "inside"]


def checked(index: Tensor, length: int) -> Tensor:
    """Indices into `length` elements, negative ones counted from the end.

    A piece looks up only what falls into it, so nobody else would notice an index that falls nowhere.

    Raises:
        IndexError: if one is out of range; on an accelerator the device reports it later, as plain indexing does.
    """
    fine = ((index >= -length) & (index < length)).all()
    if index.device.type == "cpu" and not fine:
        wrong = index[(index < -length) | (index >= length)].reshape(-1)[0].item()
        raise IndexError(f"index {wrong} is out of bounds for a dim of {length} elements")
    if index.device.type != "cpu":
        torch.ops.aten._assert_async.msg(fine, f"index out of bounds for a dim of {length} elements")
    return torch.where(index < 0, index + length, index)


def inside(index: Tensor, spec: Spec, dim: int) -> tuple[Tensor, Tensor]:
    """The local positions of global indices into a cut dim (0 where they are elsewhere), and whether they are local."""
    start, held = spec.offset(dim), spec.local_shape[dim]
    at = checked(index, spec.shape[dim]) - start
    mine = (at >= 0) & (at < held)
    return at.masked_fill(~mine, 0), mine
