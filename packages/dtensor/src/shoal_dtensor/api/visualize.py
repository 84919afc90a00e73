"""A text picture of which rank holds which shard of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from ..argument_types import check_type
from ..errors import PlacementError
from ..layout.spec import Spec
from ..layout.tensor_meta import Box
from ..tensor.dtensor import DTensor

__all__ = ["draw_sharding", "visualize_sharding"]


def visualize_sharding(dtensor: DTensor | Spec, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which shard of a 1-D or 2-D tensor, once, on the mesh's first rank.

    Args:
        dtensor: the tensor, or only its spec.
        header: a line to print above.
        use_rich: accepted for torch's sake; the picture is text either way.

    Raises:
        PlacementError: if the tensor has more than two dims.
    """
    check_type("visualize_sharding", "dtensor", dtensor, (DTensor, Spec), "a DTensor or its spec")
    spec = dtensor._spec if isinstance(dtensor, DTensor) else dtensor
    picture = draw_sharding(spec)
    if spec.coordinate is not None and not any(spec.coordinate):
        print("\n".join(line for line in (header, picture) if line))  # noqa: T201  # printing is what was asked for


def draw_sharding(spec: Spec) -> str:
    """The picture that `visualize_sharding` prints: rows and columns of element ranges, ranks in the cells.

    Raises:
        PlacementError: if the tensor has more than two dims.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Replicate, Shard
        >>> print(draw_sharding(Spec(abstract_mesh((2, 2)), (Shard(0), Replicate()), (5, 4))))
               0:4
        0:3    0,1
        3:5    2,3
    """
    if spec.ndim > 2:
        raise PlacementError(f"visualize_sharding: expected a tensor of one or two dims, got shape {tuple(spec.shape)}")
    holders: dict[Box, list[int]] = {}
    for coordinate in product(*(range(size) for size in spec.mesh.shape)):
        box = spec.box(coordinate)
        if all(stop > start for start, stop in box):
            rows_first = ((0, 1), *box) if spec.ndim < 2 else box
            holders.setdefault(rows_first[-2:], []).append(spec.mesh.rank_at(coordinate))
    rows = sorted({box[0] for box in holders})
    columns = sorted({box[1] for box in holders})
    cells = [[",".join(map(str, holders.get((row, column), []))) for column in columns] for row in rows]
    return _grid([_range(row) for row in rows], [_range(column) for column in columns], cells)


def _range(interval: tuple[int, int]) -> str:
    return f"{interval[0]}:{interval[1]}"


def _grid(rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [["", *columns], *([name, *line] for name, line in zip(rows, cells, strict=True))]
    widths = [max(6, *(len(line[i]) + 1 for line in lines)) for i in range(len(columns) + 1)]
    return "\n".join(
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
