"""A `Spec` for people: one line of text, and a table of ranks and their elements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from ..errors import PlacementError
from .boxes import Box, volume
from .placements import Partial


def describe(spec: Any) -> str:
    """Return a spec in one line: dtype, sizes with the axes that shard them, pending reductions."""
    names = spec.mesh.axis_names
    dims = []
    for n, sharding in zip(spec.shape, spec.dim_shardings, strict=True):
        axes = ",".join([names[axis] for axis in sharding.axes])
        sharded = f"{n}@({axes}){_sizes(sharding)}"
        dims.append(sharded if axes else str(n))
    partials = [f", partial {op} over {names[axis]}" for axis, op in spec.partials]
    axes_with_sizes = zip(names, spec.mesh.shape, strict=True)
    mesh = ", ".join([f"{name}={size}" for name, size in axes_with_sizes])
    # bfloat16 -> bf16, float32 -> f32, uint8 -> u8, bool -> bool
    dtype_name = str(spec.dtype).removeprefix("torch.")
    dtype = re.sub(r"^(bf|f|u|i|c)[a-z]+", r"\1", dtype_name)
    sizes = ", ".join(dims)
    reductions = "".join(partials)
    return f"Spec({dtype}[{sizes}]{reductions} on ({mesh}))"


def _sizes(sharding: Any) -> str:
    """Return the text for the sizes of a sharding; "" if it is even."""
    if hasattr(sharding, "levels"):  # a StridedDimSharding
        return f" strided of {list(sharding.shape)}"
    if sharding.even:
        return ""
    # The first size determines the others, and there may be thousands.
    if sharding.ragged is None and sharding.shards > 16:
        return f"=[{sharding.step}, ...]"
    return f"={list(sharding.sizes)}"


# --- which ranks hold which elements --------------------------------------------------------------

COLORS = ("#8dd3c7", "#fdb462", "#bebada", "#fb8072", "#b3de69", "#80b1d3", "#fccde5", "#d9d9d9")
INK = "#222222"  # the color of text on these colors
# With more ranks, a notebook does not show a table.
_MOST_RANKS = 1024


def color_of_rank(rank: int) -> str:
    """Return the color of a rank, the same in all tables and pictures.

    Neighbors have different colors, and so have the first ranks of blocks of equal size.

    Example:
        >>> color_of_rank(0) == color_of_rank(1), color_of_rank(0) == color_of_rank(8)
        (False, False)
    """
    octal_digits = map(int, f"{rank:o}")
    return COLORS[sum(octal_digits) % len(COLORS)]


class RankTable(NamedTuple):
    """A table of the ranks that hold each part of a tensor of one or two dims."""

    # element ranges of the first dim, such as `0:4`
    rows: Sequence[str]
    columns: Sequence[str]  # element ranges of the second dim
    # the ranks that hold these elements, such as `0,1`
    cells: Sequence[Sequence[str]]

    def color(self, cell: str) -> str:
        """Return the color of the first rank of a cell; none for a cell that no rank holds."""
        return color_of_rank(int(cell.split(",", maxsplit=1)[0])) if cell else "none"

    def text(self) -> str:
        """Return rows and columns of element ranges, with ranks in the cells."""
        lines = [["", *self.columns]]
        for name, cells in zip(self.rows, self.cells, strict=True):
            lines.append([name, *cells])
        widths = []
        for column in zip(*lines, strict=True):
            longest = max(map(len, column))
            widths.append(max(6, longest + 1))
        padded = []
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            padded.append(" ".join(cells).rstrip())
        return "\n".join(padded)


def holders(spec: Any) -> dict[Box, list[int]]:
    """Return the ranks that hold each non-empty box of the tensor, boxes in order."""
    ranks: dict[Box, list[int]] = {}
    for coordinate in product(*map(range, spec.mesh.shape)):
        for box, _ in spec.boxes(coordinate):
            if volume(box):
                ranks.setdefault(box, []).append(spec.mesh.rank_at(coordinate))
    return dict(sorted(ranks.items()))


def rank_table(spec: Any) -> RankTable:
    """Return the table of a tensor of one or two dims; raise PlacementError if it has more."""
    if spec.ndim > 2:
        raise PlacementError(
            "visualize_sharding: expected a tensor of one or two dims, got shape "
            f"{tuple(spec.shape)}"
        )
    # Missing dims are filled with (0, 1): one row, or one column.
    ranks_of = {}
    for box, ranks in holders(spec).items():
        cell = ((0, 1), (0, 1), *box)[-2:]
        ranks_of[cell] = ranks
    rows = sorted({row for row, _ in ranks_of})
    columns = sorted({column for _, column in ranks_of})
    cells = []
    for row in rows:
        holders_in_row = [ranks_of.get((row, column), []) for column in columns]
        cells.append([",".join(map(str, ranks)) for ranks in holders_in_row])
    return RankTable(_ranges(rows), _ranges(columns), cells)


def _ranges(intervals: Sequence[tuple[int, int]]) -> list[str]:
    return [f"{start}:{stop}" for start, stop in intervals]


def spec_html(spec: Any) -> str:
    """Return the HTML for notebooks: the spec in words and, for one or two dims, a table.

    The table has the ranks that hold each part.
    """
    from html import escape  # 2 ms, for notebooks only

    head = f"<code>{escape(repr(spec))}</code>"
    if spec.ndim > 2 or spec.mesh.size() > _MOST_RANKS:
        return head
    table = rank_table(spec)
    headings = "".join(f"<th>{name}</th>" for name in table.columns)
    lines = [f"<tr><th></th>{headings}</tr>"]
    style = "color:#222;text-align:center;padding:0.4em 1em;background:"
    for name, cells in zip(table.rows, table.cells, strict=True):
        columns = [f'<td style="{style}{table.color(cell)}">{cell}</td>' for cell in cells]
        lines.append(f"<tr><th>{name}</th>{''.join(columns)}</tr>")
    caption = "elements, and the ranks that hold them"
    if any(isinstance(placement, Partial) for placement in spec.placements):
        caption = "ranks hold summands of these elements"
    return f"{head}<table><caption>{caption}</caption>{''.join(lines)}</table>"
