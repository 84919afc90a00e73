"""Placements that leave matrices whole, each on one rank, with equal memory on all ranks.

May import: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from shoal_dtensor import Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import shard_sizes


def owned_shards(
    parameters: Iterable[nn.Parameter], ranks: int
) -> Callable[[nn.Parameter], Shard | None]:
    """Return a `shard_placement_fn` that gives each matrix to one rank, by memory.

    An optimizer that needs whole matrices, such as Muon, then steps without communication. Matrices
    are assigned from the largest to the smallest, each to the rank with the fewest bytes so far.
    Other parameters are sharded by their first dim, so that each rank has whole matrices of a stack
    (the weights of experts). Pass the parameters of one unit if all ranks are to send equally many
    bytes in the unit's gather, or the parameters of the whole model if all ranks are to have equal
    memory.

    Args:
        parameters: the parameters to place, in the same order on all ranks.
        ranks: the number of ranks that shard.

    Returns:
        A function from a parameter to its placement; None for parameters that are not among those
        given.

    Raises:
        LayoutError: if `ranks` is not a positive integer.

    Example:
        >>> layers = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 2))
        >>> placement_of = owned_shards(layers.parameters(), 2)
        >>> [placement_of(layer.weight).sizes for layer in layers]
        [(6, 0), (0, 4), (0, 2)]
        >>> placement_of(layers[0].bias)
        Shard(dim=0)
    """
    _check_ranks(ranks)
    distinct = list(dict.fromkeys(parameters))
    matrices = [param for param in distinct if param.ndim == 2]
    bytes_of_ranks = [0] * ranks
    placements: dict[nn.Parameter, Shard] = {}
    for param in distinct:
        if param.ndim == 2 or not param.ndim:
            continue
        placements[param] = Shard(0)
        bytes_of_row = param.nbytes // max(param.shape[0], 1)
        for rank, rows in enumerate(shard_sizes(param.shape[0], Shard(0), ranks)):
            bytes_of_ranks[rank] += rows * bytes_of_row
    # a stable sort, so that all ranks assign equally large matrices in the same order
    for param in sorted(matrices, key=lambda matrix: -matrix.nbytes):
        owner = bytes_of_ranks.index(min(bytes_of_ranks))
        bytes_of_ranks[owner] += param.nbytes
        sizes = [0] * ranks
        sizes[owner] = param.shape[0]
        placements[param] = Shard(0, sizes=tuple(sizes))
    return placements.get


def _check_ranks(ranks: object) -> None:
    if not isinstance(ranks, int) or ranks < 1:
        raise LayoutError(f"owned_shards: expected a positive number of ranks, got {ranks!r}")
