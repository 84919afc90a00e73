"""Draws the figures of the pages into `docs/_static`: `python tools/draw.py`.

Layouts are what `Spec` says they are.

Figures are SVG without a background. Their ink is a gray that is readable on white and on the dark
scheme's background; a color always names a rank, except in the bars of benchmarks.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

from shoal_dtensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    draw_layout,
    draw_plan,
    explain,
)
from shoal_dtensor.layout.spec_text import color_of_rank
from shoal_mesh import abstract_mesh

HERE = Path(__file__).parents[1] / "docs" / "_static"
# contrast 4.2 on white, 4.4 on the dark scheme's #131416
INK = "#7a7a7a"
# on the colors of ranks
DARK = "#222222"
# by hand, torch, shoal
RIVALS = ("#8a8a8a", "#c0504d", "#2f7fb8")

mpl.rcParams |= {
    "svg.hashsalt": "shoal",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
}


def save(figure: Any, name: str) -> None:
    """Write one SVG, the same bytes whenever the picture is the same."""
    HERE.mkdir(exist_ok=True)
    path = HERE / f"{name}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def draw_layouts() -> None:
    """Draw the same matrix under six pairs of placements of a 2 x 2 mesh."""
    mesh = abstract_mesh((2, 2), ("data", "tensor"))
    whole, rows, columns = Replicate(), Shard(0), Shard(1)
    cases: tuple[tuple[Placement, Placement], ...] = (
        (whole, whole),
        (rows, whole),
        (whole, columns),
        (rows, columns),
        (rows, rows),
        (whole, Partial()),
    )
    figure, axes = plt.subplots(2, 3, figsize=(7.5, 4.8), layout="constrained")
    for axis, placements in zip(axes.flat, cases, strict=True):
        title = ", ".join(repr(placement).replace("dim=", "") for placement in placements)
        draw_layout(Spec(mesh, placements, (8, 6)), axis, f"[{title}]")
    figure.suptitle(
        "An 8 x 6 tensor on a mesh (data=2, tensor=2): which ranks hold which elements", fontsize=10
    )
    save(figure, "layouts")


def draw_redistribution() -> None:
    """Draw a plan of several steps, with the layout after each."""
    mesh = abstract_mesh((4, 2), ("data", "tensor"))
    src = Spec(mesh, (Partial(), Replicate()), (1024, 1024))
    figure = draw_plan(explain(src, src.with_(placements=(Replicate(), Replicate()))).chosen)
    figure.set_size_inches(8, 2.7)
    save(figure, "redistribution")


def draw_exchange() -> None:
    """Draw a plan of one collective over both axes."""
    mesh = abstract_mesh((2, 2), ("data", "tensor"))
    src = Spec(mesh, (Shard(0), Shard(1)), (1024, 1024))
    figure = draw_plan(explain(src, src.with_(placements=(Replicate(), Shard(0)))).chosen)
    figure.set_size_inches(6, 2.9)
    save(figure, "plan")


def draw_mesh() -> None:
    """Draw a 2 x 4 mesh with the communicators of both axes."""
    figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
    for row in range(2):
        frame = Rectangle((-0.4, row - 0.32), 3.8, 0.64, fill=False, edgecolor=INK, lw=2)
        axis.add_patch(frame)
        for column in range(4):
            rank = row * 4 + column
            axis.plot(column, row, "o", ms=30, color=color_of_rank(rank))
            axis.text(column, row, str(rank), ha="center", va="center", fontsize=12, color=DARK)
        ranks = f"{row * 4}-{row * 4 + 3}"
        axis.text(3.6, row, f'solid: mesh["tensor"] on ranks {ranks}', va="center")
    for column in range(4):
        corner = (column - 0.28, -0.45)
        axis.add_patch(Rectangle(corner, 0.56, 1.9, fill=False, edgecolor=INK, lw=1.5, ls="--"))
    axis.text(1.5, 1.65, 'dashed: mesh["data"], four communicators of two ranks', ha="center")
    axis.set(xlim=(-0.6, 6.9), ylim=(1.9, -0.6))
    axis.axis("off")
    save(figure, "mesh")


def draw_spec() -> None:
    """Draw one layout: the global tensor, and the part that each rank holds."""
    mesh = abstract_mesh((2, 2), ("data", "tensor"))
    spec = Spec(mesh, (Shard(0), Replicate()), (8, 6))
    figure, axes = plt.subplots(
        1, 5, figsize=(8, 2.6), layout="constrained", width_ratios=(1.6, 1, 1, 1, 1)
    )
    draw_layout(spec, axes[0], "the global tensor:\n[Shard(0), Replicate()]")
    for rank, axis in enumerate(axes[1:]):
        data, tensor = divmod(rank, 2)
        (box,) = (box for box, _ in spec.boxes((data, tensor)))
        (top, bottom), (left, right) = box
        corner = (left, top)
        patch = Rectangle(corner, right - left, bottom - top, facecolor=color_of_rank(rank))
        axis.add_patch(patch)
        label = f"x[{top}:{bottom},\n{left}:{right}]"
        middle = ((left + right) / 2, (top + bottom) / 2)
        axis.text(*middle, label, ha="center", va="center", fontsize=8, color=DARK)
        axis.set(xlim=(0, 6), ylim=(8, 0), xticks=(), yticks=())
        axis.set_title(f"rank {rank}\ndata {data}, tensor {tensor}", fontsize=8)
    save(figure, "spec")


# package, its purpose, and its box: left, bottom, width, height; a box stands on its dependencies
STACK = (
    ("mesh", "grids of ranks, process groups, collectives", 0, 0, 10, 0.8),
    ("dtensor", "sharded tensors, redistribution, random numbers", 0, 1, 10, 0.8),
    ("spmd-types", "types of\nplain tensors", 0, 2, 1.5, 1.8),
    ("shard-api", "ShardedTensor\nand its plans", 1.7, 2, 1.6, 1.8),
    ("context-parallel", "attention of long sequences", 3.5, 2, 3.1, 0.8),
    ("data-parallel", "FSDP, HSDP, DDP, ZeRO-1", 6.8, 2, 3.2, 1.8),
    ("tp-styles", "tensor and expert parallelism", 3.5, 3, 3.1, 0.8),
    ("transfer", "weights from a trainer to a server", 1.7, 4, 3.5, 0.8),
    ("same-bits", "the same bits on\nany number of ranks", 5.4, 4, 2.6, 1.0),
    ("lab", "certification", 8.2, 4, 1.8, 0.8),
    ("models", "Hugging Face models, files, plans", 1.7, 5, 3.5, 0.8),
)


def draw_stack() -> None:
    """Draw the packages, each on top of the packages that it needs."""
    figure, axis = plt.subplots(figsize=(9, 4.8), layout="constrained")
    for name, purpose, left, bottom, width, height in STACK:
        box = FancyBboxPatch(
            (left, bottom), width, height, "round,pad=0.04", facecolor="none", edgecolor=INK, lw=1.2
        )
        axis.add_patch(box)
        middle = (left + width / 2, bottom + height / 2)
        axis.text(*middle, f"shoal-{name}\n{purpose}", ha="center", va="center", fontsize=9)
    axis.set(xlim=(-0.1, 10.1), ylim=(-0.1, 6.0))
    axis.axis("off")
    save(figure, "stack")


def draw_matrix(
    axis: Any, left: float, size: tuple[float, float], *, split: str, title: str
) -> None:
    """Draw a matrix in the middle of the row: whole, or split over four ranks.

    Args:
        axis: where to draw.
        left: its left edge.
        size: width and height.
        split: `columns`, `rows`, `summands` of the same size, or `` for a whole matrix.
        title: text below.
    """
    width, height = size
    bottom = -height / 2
    if not split:
        whole = Rectangle((left, bottom), width, height, facecolor="none", edgecolor=INK, lw=1.2)
        axis.add_patch(whole)
    for rank in range(4) if split else ():
        corner, part = (left + width * rank / 4, bottom), (width / 4, height)
        if split == "rows":
            corner, part = (left, bottom + height * (3 - rank) / 4), (width, height / 4)
        if split == "summands":
            corner, part = (left + 0.12 * rank, bottom - 0.12 * rank), size
        axis.add_patch(
            Rectangle(corner, *part, facecolor=color_of_rank(rank), edgecolor=DARK, lw=0.6)
        )
        middle = (corner[0] + part[0] / 2, corner[1] + part[1] / 2)
        if split == "summands":
            # the part that the next summand does not cover
            middle = (corner[0] + 0.06, corner[1] + part[1] - 0.1)
        axis.text(*middle, str(rank), ha="center", va="center", fontsize=7, color=DARK)
    axis.text(left + width / 2, -1.25, title, ha="center", va="top", fontsize=8)


def draw_lowered_block() -> None:
    """Draw a feed-forward block on 4 ranks as matrices, colored by the rank that holds a part."""
    figure, axis = plt.subplots(figsize=(9, 2.7), layout="constrained")
    draw_matrix(axis, 0, (0.6, 1), split="", title="x\n(tokens, 64)")
    axis.text(0.85, 0, "@", ha="center", va="center", fontsize=11)
    draw_matrix(axis, 1.1, (2, 0.6), split="columns", title="column-wise weight\n(64, 256)")
    axis.text(3.45, 0, "gelu", ha="center", va="center", fontsize=8)
    draw_matrix(axis, 3.8, (2, 1), split="columns", title="hidden\n(tokens, 256)")
    axis.text(6.05, 0, "@", ha="center", va="center", fontsize=11)
    draw_matrix(axis, 6.3, (0.6, 2), split="rows", title="row-wise\nweight\n(256, 64)")
    axis.text(7.25, 0, "=", ha="center", va="center", fontsize=11)
    draw_matrix(axis, 7.6, (0.6, 1), split="summands", title="a summand\non each rank")
    arrow = {"arrowstyle": "->", "color": INK}
    axis.annotate("", (9.6, 0), (8.7, 0), arrowprops=arrow)
    axis.text(9.15, 0.12, "all-reduce", ha="center", fontsize=8)
    draw_matrix(axis, 9.8, (0.6, 1), split="", title="y\n(tokens, 64)")
    axis.set(xlim=(-0.4, 10.7), ylim=(-1.9, 1.2))
    axis.axis("off")
    save(figure, "lowered-block")


def measured(page: str) -> list[list[str]]:
    """Return the table between `<!-- measured -->` and `<!-- end -->` of a page, header first."""
    text = (HERE.parent / page).read_text()
    table = text.partition("<!-- measured -->")[2].partition("<!-- end -->")[0]
    rows = []
    for line in table.splitlines():
        if line.startswith("|") and not line.startswith("|-"):
            cells = line.split("|")[1:-1]
            rows.append([cell.strip().replace("`", "") for cell in cells])
    return rows


def draw_benchmarks() -> None:
    """Draw speeds of the two tables of measurements, relative to the first in each measured row."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, page in zip(axes, ("benchmarks.md", "how-to/inference.md"), strict=True):
        header, *rows = measured(page)
        for place, (label, *cells) in enumerate(rows):
            values = [float(cell.replace(",", "")) if cell else None for cell in cells]
            base = next(value for value in values if value)
            for rival, value in enumerate(values):
                if not value:
                    continue
                # of times, less is faster
                speed = base / value if "seconds" in label else value / base
                height = place + 0.26 * (rival - 1)
                name = header[1 + rival] if place in (0, len(rows) - 1) else None
                axis.barh(height, speed, 0.24, color=RIVALS[rival], label=name)
                axis.text(speed, height, f" {speed:.2f}", va="center", fontsize=9)
        axis.set_yticks(range(len(rows)), [fill(row[0], 24) for row in rows], fontsize=9)
        axis.invert_yaxis()
        axis.set_xlabel("speed relative to the first bar; more is better", fontsize=9)
        named = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        axis.legend(
            named.values(),
            named.keys(),
            fontsize=9,
            ncols=3,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            frameon=False,
            columnspacing=0.8,
            handlelength=1,
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.15)
    save(figure, "benchmarks")


def main() -> None:
    """Draw all figures."""
    draw_benchmarks()
    draw_layouts()
    draw_redistribution()
    draw_exchange()
    draw_mesh()
    draw_spec()
    draw_stack()
    draw_lowered_block()


if __name__ == "__main__":
    main()
