"""The order of the mesh axes that shard one dim, from the shards that each makes, in integers only.

Placements have one entry per mesh axis, so they cannot say which axis of a dim is the outer one. An
axis that shards a dim after axes to its right says how many shards these make before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ..errors import PlacementError


def order_of_axes(
    dim: int, outer_shards: Mapping[int, int], mesh_shape: Sequence[int] | Mapping[int, int]
) -> tuple[int, ...]:
    """Return the axes of a dim, outermost first.

    They are ascending, but each axis comes after axes to its right that make its number of outer
    shards.

    `{0: 2, 1: 1}` on a mesh (4, 2) is (1, 0). Axes of one rank come as late as possible.

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
                f"make {wanted} shards of dim {dim} first; but the axes to its right that shard the dim have sizes "
                f"{sizes}, and no leading part of these sizes multiplies to {wanted}. Use a "
                f"factor that is such a product, or pad the dim to a multiple of {wanted}: alone "
                "on a dim that it divides, a factor counts equal runs"
            )
        order = (*order[:position], axis, *order[position:])
    return order


def shards_before(axes: Sequence[int], axis_sizes: Sequence[int]) -> dict[int, int]:
    """Return for each axis of a dim the number of shards that axes to its right make before it.

    Axes (2, 0, 1) of sizes (3, 2, 2): axis 2 makes 3 shards before axes 0 and 1, so {2: 1, 0: 3,
    1: 3}.
    """
    counts: dict[int, int] = {}
    for position, axis in enumerate(axes):
        outer = zip(axes[:position], axis_sizes[:position], strict=True)
        counts[axis] = prod([size for other, size in outer if other > axis])
    return counts
