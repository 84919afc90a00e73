"""Search for a local tensor in the whole tensor by its values.

The local tensor may be the whole tensor, a block of it, rows of it in any order, or a slice of the
flattened tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# A block is compared at most at this many positions at which the whole tensor has the block's first
# element.
_POSITIONS = 512


def find_index(local: Tensor, whole: Tensor, tolerance: float = 0.0) -> Tensor | None:
    """Find the elements of a local tensor in the whole tensor.

    Args:
        local: the values of one rank, as float64.
        whole: the values of one device, as float64.
        tolerance: the allowed difference of an element.

    Returns:
        The positions of the elements in the flattened whole tensor, as int64 in the shape of
        `local`. None if nothing fits, or if the whole tensor is constant, so that every block fits.

    Example:
        >>> whole = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> find_index(whole[1:], whole)
        tensor([[2, 3],
                [4, 5]])
    """
    positions = torch.arange(whole.numel()).view(whole.shape)
    if local.shape == whole.shape and _close(local, whole, tolerance):
        return positions
    if not local.numel():
        return torch.zeros(local.shape, dtype=torch.int64)
    if not whole.numel() or whole.max() == whole.min():
        return None
    if local.ndim == whole.ndim:
        # A block of one dim is found here, too. If it is not, the last search finds nothing either.
        for search in (_find_block, _find_slices, _find_slices_of_blocks):
            index = search(local, whole, tolerance)
            if index is not None:
                return index
    elif whole.ndim > 1 and local.ndim > 1 and local.shape[-1] == whole.shape[-1]:
        # a local (4, 8, 16) in a whole (32, 16): rows of 16 elements
        width = whole.shape[-1]
        local_rows = local.reshape(-1, width)
        whole_rows = whole.reshape(-1, width)
        index = _find_slices(local_rows, whole_rows, tolerance)
        return None if index is None else index.view(local.shape)
    if local.ndim == 1:
        # a slice of the flattened tensor
        return _find_block(local, whole.flatten(), tolerance)
    return None


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether all elements are equal within the tolerance."""
    return bool(((one - other).abs() <= tolerance).all())


def _find_block(local: Tensor, whole: Tensor, tolerance: float) -> Tensor | None:
    """Find a contiguous block by the places of its first element."""
    first = local.flatten()[0]
    places = ((whole - first).abs() <= tolerance).nonzero()
    for place in places[:_POSITIONS].tolist():
        slices = tuple(
            slice(start, start + size) for start, size in zip(place, local.shape, strict=True)
        )
        block = whole[slices]
        if block.shape == local.shape and _close(block, local, tolerance):
            return torch.arange(whole.numel()).view(whole.shape)[slices]
    return None


def _find_slices(local: Tensor, whole: Tensor, tolerance: float) -> Tensor | None:
    """Find the slices of a local tensor along one dim, in any order; slices may repeat."""
    for dim in range(whole.ndim):
        others = [size for other, size in enumerate(whole.shape) if other != dim]
        local_others = [size for other, size in enumerate(local.shape) if other != dim]
        if others != local_others:
            continue
        rows = match_rows(local.movedim(dim, 0), whole.movedim(dim, 0), tolerance)
        if rows is not None:
            positions = torch.arange(whole.numel()).view(whole.shape)
            return positions.index_select(dim, rows)
    return None


def match_rows(local: Tensor, whole: Tensor, tolerance: float) -> Tensor | None:
    """Return for every local row the index of an equal row of the whole tensor.

    Returns None if a row has no equal row.
    """
    flat_local = local.reshape(local.shape[0], -1)
    flat_whole = whole.reshape(whole.shape[0], -1)
    # The product of a row with a random vector is its key. Rows with nearly equal keys are
    # compared.
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(flat_whole.shape[1], generator=generator, dtype=torch.float64)
    keys = flat_whole @ vector
    order = keys.argsort(stable=True)
    # The most by which the keys of equal rows differ: each element of a row may differ by the
    # tolerance, and the products have rounding errors. The epsilon of float64 is 2e-16; 1e-13
    # leaves room for the sum over a long row.
    sum_of_weights = float(vector.abs().sum())
    largest_key = float(flat_whole.abs().max()) * sum_of_weights
    slack = tolerance * sum_of_weights + 1e-13 * largest_key
    found: list[int] = []
    uses: dict[int, int] = {}
    sorted_keys = keys[order].contiguous()
    for row, key in zip(flat_local, (flat_local @ vector).tolist(), strict=True):
        bounds = torch.tensor([key - slack, key + slack], dtype=torch.float64)
        start, stop = torch.searchsorted(sorted_keys, bounds, right=False).tolist()
        # `stop` is the first key at or above the upper bound. It may be equal to the bound.
        candidates = order[start : stop + 1].tolist()
        matches = [index for index in candidates if _close(row, flat_whole[index], tolerance)]
        if not matches:
            return None
        # if the whole tensor has equal rows, take the one that was used least
        best = min(matches, key=lambda match: (uses.get(match, 0), match))
        uses[best] = uses.get(best, 0) + 1
        found.append(best)
    return torch.tensor(found, dtype=torch.int64)


def _find_slices_of_blocks(local: Tensor, whole: Tensor, tolerance: float) -> Tensor | None:
    """Find slices along one dim, in any order, inside of a contiguous block along another dim."""
    sharded = [dim for dim in range(whole.ndim) if local.shape[dim] != whole.shape[dim]]
    if len(sharded) != 2:
        return None
    positions = torch.arange(whole.numel()).view(whole.shape)
    for dim in sharded:
        for start in _starts(local.shape[dim], whole.shape[dim]):
            block = whole.narrow(dim, start, local.shape[dim])
            # The index refers to the flattened block.
            index = _find_slices(local, block, tolerance)
            if index is not None:
                positions_of_block = positions.narrow(dim, start, local.shape[dim])
                return positions_of_block.flatten()[index]
    return None


def _starts(size: int, whole_size: int) -> Iterator[int]:
    """Yield the starts of consecutive blocks of a size, and of the block at the end."""
    if not 0 < size <= whole_size:
        return
    yield from range(0, whole_size - size + 1, size)
    if whole_size % size:
        yield whole_size - size
