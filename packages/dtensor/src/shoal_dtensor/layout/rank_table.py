"""Which ranks hold which elements, as a table of one or two dims: its cells, as text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ..errors import PlacementError
from .boxes import Box
from .placements import Partial

if TYPE_CHECKING:
    from .spec import Spec


COLORS = ("#8dd3c7", "#fdb462", "#bebada", "#fb8072", "#b3de69", "#80b1d3", "#fccde5", "#d9d9d9")
_LARGEST = 1024  # ranks that a notebook shows as a table


class RankTable(NamedTuple):
    """A table of ranks.

    Attributes:
        rows: element ranges of the first dim, as `0:4`.
        columns: of the second.
        cells: the ranks that hold them, as `0,1`.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]

    def color(self, cell: str) -> str:
        """One colour for each set of ranks; none for a cell that no rank holds."""
        sets = list(dict.fromkeys(text for line in self.cells for text in line if text))
        return COLORS[sets.index(cell) % len(COLORS)] if cell else "none"

    def text(self) -> str:
        """Rows and columns of element ranges, ranks in the cells."""
        lines = [["", *self.columns], *([name, *cells] for name, cells in zip(self.rows, self.cells, strict=True))]
        widths = [max(6, *(len(cell) + 1 for cell in column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def holders(spec: Spec) -> dict[Box, list[int]]:
    """The ranks that hold each box of the tensor, boxes in order; empty ones are left out."""
    found: dict[Box, list[int]] = {}
    for coordinate in product(*map(range, spec.mesh.shape)):
        for box, _ in spec.boxes(coordinate):
            if all(stop > start for start, stop in box):
                found.setdefault(box, []).append(spec.mesh.rank_at(coordinate))
    return dict(sorted(found.items()))


def rank_table(spec: Spec) -> RankTable:
    """The table of a tensor of one or two dims.

    Raises:
        PlacementError: if the tensor has more than two dims.
    """
    if spec.ndim > 2:
        raise PlacementError(f"visualize_sharding: expected a tensor of one or two dims, got shape {tuple(spec.shape)}")
    found = {((0, 1), (0, 1), *box)[-2:]: ranks for box, ranks in holders(spec).items()}
    rows = sorted({row for row, _ in found})
    columns = sorted({column for _, column in found})
    cells = [[",".join(map(str, found.get((row, column), []))) for column in columns] for row in rows]
    return RankTable([f"{a}:{b}" for a, b in rows], [f"{a}:{b}" for a, b in columns], cells)


def spec_html(spec: Spec) -> str:
    """What notebooks show: the spec in words, and of one or two dims a table of the ranks that hold each part."""
    head = f"<code>{escape(repr(spec))}</code>"
    if spec.ndim > 2 or spec.mesh.size() > _LARGEST:
        return head
    table = rank_table(spec)
    lines = ["<tr><th></th>" + "".join(f"<th>{name}</th>" for name in table.columns) + "</tr>"]
    for name, cells in zip(table.rows, table.cells, strict=True):
        style = "color:#222;text-align:center;padding:0.4em 1em;background:"
        line = "".join(f'<td style="{style}{table.color(cell)}">{cell}</td>' for cell in cells)
        lines.append(f"<tr><th>{name}</th>{line}</tr>")
    sums = any(isinstance(placement, Partial) for placement in spec.placements)
    note = "ranks hold summands of these elements" if sums else "elements, and the ranks that hold them"
    return f"{head}<table><caption>{note}</caption>{''.join(lines)}</table>"
