"""Which rank holds which shard of a tensor, as text, in the colours of a terminal, and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_mesh.errors import MissingExtraError

from ..argument_types import check_type
from ..layout.rank_table import RankTable, rank_table
from ..layout.spec import Spec
from ..tensor.dtensor import DTensor


def visualize_sharding(dtensor: DTensor | Spec, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which shard of a 1-D or 2-D tensor, once, on the mesh's first rank.

    Args:
        dtensor: the tensor, or only its spec.
        header: a line to print above.
        use_rich: in colours, one for each set of ranks, with rich; in a notebook as HTML.

    Raises:
        MissingExtraError: if rich is asked for and not installed.
        PlacementError: if the tensor has more than two dims.
    """
    check_type("visualize_sharding", "dtensor", dtensor, (DTensor, Spec), "a DTensor or its spec")
    spec = dtensor._spec if isinstance(dtensor, DTensor) else dtensor
    table = rank_table(spec)
    if spec.coordinate is None or any(spec.coordinate):
        return
    if use_rich:
        _print_rich(table, header)
    else:
        picture = _grid(table.rows, table.columns, table.cells)
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
    table = rank_table(spec)
    return _grid(table.rows, table.columns, table.cells)


def _print_rich(table: RankTable, header: str) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise MissingExtraError("use_rich=True prints with rich, which is not installed: pip install rich") from error
    shown = Table("", *table.columns, title=header or None, show_lines=True)
    for name, cells in zip(table.rows, table.cells, strict=True):
        shown.add_row(name, *(f"[black on {table.color(cell)}] {cell} [/]" if cell else "" for cell in cells))
    Console().print(shown)


def _grid(rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [["", *columns], *([name, *line] for name, line in zip(rows, cells, strict=True))]
    widths = [max(6, *(len(line[i]) + 1 for line in lines)) for i in range(len(columns) + 1)]
    return "\n".join(
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
