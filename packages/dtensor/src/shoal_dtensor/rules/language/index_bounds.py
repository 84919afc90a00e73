"""Global indices as a rank sees them that holds an interval of the indexed dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..._torch import TRACED

if TYPE_CHECKING:
    from ...layout.spec import Spec
    from ...layout.tensor_meta import TensorMeta


def adds_up(source: TensorMeta) -> bool:
    """Whether lookups along a sharded dim can: torch only moves numbers of other dtypes, which are gathered."""
    small_float = source.dtype.is_floating_point and source.dtype.itemsize == 1
    return not small_float and source.dtype not in (torch.uint16, torch.uint32, torch.uint64)


def check_bounds(index: Tensor, is_valid: Tensor, length: int) -> None:
    """Refuse indices into `length` elements that are out of range.

    A rank looks up only the indices that fall into its shard, so no kernel would notice one that falls nowhere.  Ranks
    with empty shards check too: all ranks with the same indices raise.

    Args:
        index: global indices; is_valid: for each of them whether it is in range.

    Raises:
        IndexError: if one is not. On an accelerator the device reports it later, as plain indexing does; compiled code
            raises RuntimeError when it runs.
    """
    message = f"out of bounds for a dim of {length} elements"
    if index.device.type != "cpu" or isinstance(index, TRACED):
        torch.ops.aten._assert_async.msg(is_valid.all(), f"index {message}")
    elif not is_valid.all():
        raise IndexError(f"index {index[~is_valid].reshape(-1)[0].item()} is {message}")


def from_the_front(index: Tensor, length: int) -> Tensor:
    """Indices into `length` elements, those that count from the end (-1 is the last) counted from the front.

    Raises:
        IndexError: see `check_bounds`.

    Example:
        >>> from_the_front(torch.tensor([-1, 2]), 5)
        tensor([4, 2])
    """
    check_bounds(index, (index >= -length) & (index < length), length)
    return torch.where(index < 0, index + length, index)


def local_positions(index: Tensor, spec: Spec, dim: int) -> tuple[Tensor, Tensor]:
    """The local positions of global indices into a sharded dim, and whether they are local; others get position 0.

    Of 8 elements on 2 ranks, the indices 1, 5, -1 are positions 0, 1, 3 on rank 1, and only the first is not local.
    """
    start, held = spec.offset(dim), spec.local_shape[dim]
    position = from_the_front(index, spec.shape[dim]) - start
    is_local = (position >= 0) & (position < held)
    return position.masked_fill(~is_local, 0), is_local


def moved_between_boxes(
    index: Tensor, source: Sequence[int], target: Sequence[int], shift: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Flat positions in one box as flat positions in another, and whether they are in it; others get one of its edge.

    Args:
        index: positions in the row-major order of the elements of the first box.
        source: its sizes.
        target: the sizes of the other box.
        shift: for every dim how much larger a position in the other box is.

    Example:
        Element 7 of a (3, 4) tensor is row 1, column 3; on the rank with columns 2..3 it is row 1, column 1: element 3.

        >>> moved_between_boxes(torch.tensor([7, 4]), (3, 4), (3, 2), (0, -2))
        (tensor([3, 2]), tensor([ True, False]))
    """
    position, is_inside, step = torch.zeros_like(index), torch.ones_like(index, dtype=torch.bool), 1
    for size, length, by in zip(*map(reversed, (source, target, shift)), strict=True):
        place = index % size + by
        is_inside &= (place >= 0) & (place < length)
        position, index, step = position + place.clamp(0, max(length - 1, 0)) * step, index // size, step * length
    return position, is_inside
