"""The order of the mesh axes that shard one tensor dim, in integers only.

Placements have one entry per mesh axis. If several axes shard a dim, they do so from left to right,
the leftmost axis outermost. An axis that shards the dim after axes to its right has a placement
with the number of its outer shards: the shards that these axes make before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ..errors import PlacementError


def order_of_axes(
    dim: int, outer_shards: Mapping[int, int], mesh_shape: Sequence[int] | Mapping[int, int]
) -> tuple[int, ...]:
    """Return the axes of a dim, outermost first.

    The order is ascending, except that an axis with n > 1 outer shards follows axes to its right
    that make n shards. Axes of one rank come as late as possible.

    For example, `{0: 2, 1: 1}` on a mesh of (4, 2) gives (1, 0).

    Args:
        dim: the tensor dim, for messages.
        outer_shards: the number of outer shards of each axis that shards the dim.
        mesh_shape: the ranks along each axis.

    Raises:
        PlacementError: if no leading part of the axes to the right makes this number of shards.
    """
    order: tuple[int, ...] = ()
    for axis in sorted(outer_shards, reverse=True):
        wanted = outer_shards[axis]
        count = 1
        position = 0
        while count != wanted and position < len(order):
            count *= mesh_shape[order[position]]
            position += 1
        if count != wanted:
            sizes = [mesh_shape[other] for other in order]
            placement = f"StridedShard(dim={dim}, split_factor={wanted})"
            raise PlacementError(
                f"mesh axis {axis}: its placement, {placement}, means that axes to its right "
                f"make {wanted} shards of dim {dim} first; but the axes to its right that shard "
                f"the dim have sizes {sizes}, and no leading part of these sizes multiplies to "
                f"{wanted}. Use a factor that is such a product, or pad the dim to a multiple of "
                f"{wanted}: alone on a dim that it divides, a factor counts equal runs"
            )
        order = (*order[:position], axis, *order[position:])
    return order


def shards_before(axes: Sequence[int], axis_sizes: Sequence[int]) -> dict[int, int]:
    """Return for each axis of a dim the number of shards that axes to its right make before it.

    For example, in axes (2, 0, 1) of sizes (3, 2, 2), axis 2 makes 3 shards before axes 0 and 1, so
    the result is {2: 1, 0: 3, 1: 3}.
    """
    counts: dict[int, int] = {}
    for position, axis in enumerate(axes):
        outer = zip(axes[:position], axis_sizes[:position], strict=True)
        counts[axis] = prod([size for other, size in outer if other > axis])
    return counts
