"""Equal blocks of a regular grid into one flat buffer and back: tensors and integers, no communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ...layout.spec import Spec


def grid_of(fine: Spec, coarse: Spec, dims: Sequence[int]) -> list[int]:
    """For each of `dims`, how many shards of the finer sharding make one of the coarser."""
    return [fine.dim_sharding(d).shards // coarse.dim_sharding(d).shards for d in dims]


def join(flat: Tensor, grid: Sequence[int], block: Sequence[int], dims: Sequence[int]) -> Tensor:
    """Blocks of a regular grid over `dims`, one after the other, as one tensor with (block, element) dim pairs."""
    order: list[int] = []
    for dim in range(len(block)):
        if dim in dims:
            order.append(list(dims).index(dim))
        order.append(len(grid) + dim)
    return flat.view(*grid, *block).permute(order)


def split(local: Tensor, grid: Sequence[int], block: Sequence[int], dims: Sequence[int]) -> Tensor:
    """The blocks of a regular grid over `dims`, one after the other in a flat tensor."""
    pairs: list[int] = []
    outer: list[int] = []
    inner: list[int] = []
    for dim, length in enumerate(block):
        if dim in dims:
            outer.append(len(pairs))
            pairs.append(grid[list(dims).index(dim)])
        inner.append(len(pairs))
        pairs.append(length)
    return local.reshape(pairs).permute(*outer, *inner).reshape(-1)
