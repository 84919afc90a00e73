"""Draws the figures of the pages into `docs/_static`: `python docs/draw.py`. Layouts are what `Spec` says they are."""

from __future__ import annotations

from collections.abc import Sequence
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
from shoal_mesh import abstract_mesh

HERE = Path(__file__).parent / "_static"
COLORS = ("#8dd3c7", "#fdb462", "#bebada", "#fb8072", "#b3de69", "#80b1d3")
INK = "#222222"


def save(figure: Any, name: str) -> None:
    """One PNG, the same bytes whenever the picture is the same."""
    HERE.mkdir(exist_ok=True)
    figure.savefig(HERE / f"{name}.png", dpi=130, metadata={"Software": None}, facecolor="white")
    plt.close(figure)


def draw_layouts() -> None:
    """The same matrix under six pairs of placements of a 2 x 2 mesh."""
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
        draw_layout(
            Spec(mesh, placements, (8, 6)),
            axis,
            f"[{', '.join(repr(p).replace('dim=', '') for p in placements)}]",
        )
    figure.suptitle(
        "An 8 x 6 tensor on a mesh (data=2, tensor=2): which ranks hold which elements", fontsize=10
    )
    save(figure, "layouts")


def draw_redistribution() -> None:
    """A plan of several steps, with the layout after each."""
    mesh = abstract_mesh((4, 2), ("data", "tensor"))
    src = Spec(mesh, (Partial(), Replicate()), (1024, 1024))
    figure = draw_plan(explain(src, src.with_(placements=(Replicate(), Replicate()))).chosen)
    figure.set_size_inches(8, 2.7)
    save(figure, "redistribution")


def draw_mesh() -> None:
    """A 2 x 4 mesh with the communicators of both axes."""
    figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
    for row in range(2):
        axis.add_patch(
            Rectangle((-0.4, row - 0.32), 3.8, 0.64, fill=False, edgecolor="#1f78b4", lw=2)
        )
        for column in range(4):
            axis.plot(column, row, "o", ms=30, color=COLORS[5])
            axis.text(column, row, str(row * 4 + column), ha="center", va="center", fontsize=12)
    for column in range(4):
        axis.add_patch(
            Rectangle(
                (column - 0.28, -0.45), 0.56, 1.9, fill=False, edgecolor="#e31a1c", lw=1.5, ls="--"
            )
        )
    axis.text(3.6, 0, 'mesh["tensor"] on ranks 0-3', color="#1f78b4", va="center")
    axis.text(3.6, 1, 'mesh["tensor"] on ranks 4-7', color="#1f78b4", va="center")
    axis.text(
        1.5, 1.65, 'mesh["data"]: four communicators of two ranks', color="#e31a1c", ha="center"
    )
    axis.set(xlim=(-0.6, 6.2), ylim=(1.9, -0.6))
    axis.axis("off")
    save(figure, "mesh")


# package, what it is for, and its box: left, bottom, width, height; a box stands on what it needs
STACK = (
    ("mesh", "grids of ranks, process groups, collectives", 0, 0, 10, 0.8),
    ("dtensor", "sharded tensors, redistribution, random numbers", 0, 1, 10, 0.8),
    ("context-parallel", "attention of long sequences", 0, 2, 3.2, 0.8),
    ("data-parallel", "FSDP, HSDP, DDP, ZeRO-1", 3.4, 2, 3.2, 1.8),
    ("shard-api", "ShardedTensor and its plans", 6.8, 2, 1.6, 0.8),
    ("spmd-types", "types of plain tensors", 8.5, 2, 1.5, 0.8),
    ("tp-styles", "tensor and expert parallelism", 0, 3, 3.2, 0.8),
    ("transfer", "weights to\na server", 6.8, 4, 3.2, 1.0),
    ("models", "Hugging Face,\nfiles, plans", 0, 4, 1.5, 1.0),
    ("same-bits", "the same bits on any number of ranks", 1.7, 4, 3.3, 1.0),
    ("lab", "certification", 5.2, 4, 1.4, 1.0),
)


def draw_stack() -> None:
    """The packages."""
    figure, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for name, purpose, left, bottom, width, height in STACK:
        color = COLORS[bottom]
        axis.add_patch(
            FancyBboxPatch(
                (left, bottom), width, height, "round,pad=0.04", facecolor=color, edgecolor=INK
            )
        )
        middle = (left + width / 2, bottom + height / 2)
        axis.text(
            *middle, f"shoal-{name}\n{purpose}", ha="center", va="center", fontsize=9, color=INK
        )
    axis.set(xlim=(-0.1, 10.1), ylim=(-0.1, 5.1))
    axis.axis("off")
    save(figure, "stack")


# boxes: texts of 8 points are 10 pixels high on a page then
IN_A_ROW = 3


def draw_flow(name: str, boxes: Sequence[tuple[str, str]], title: str) -> None:
    """Boxes in reading order; the second text of each is what goes on to the next."""
    rows = -(-len(boxes) // IN_A_ROW)
    figure, axis = plt.subplots(figsize=(2.3 * IN_A_ROW, 0.5 + 1.5 * rows), layout="constrained")
    for index, (text, goes_on) in enumerate(boxes):
        row, column = divmod(index, IN_A_ROW)
        left, bottom = column * 2.3, -1.5 * row
        color = COLORS[1] if text.startswith("*") else COLORS[5]
        axis.add_patch(
            FancyBboxPatch(
                (left, bottom), 1.5, 1, boxstyle="round,pad=0.05", facecolor=color, edgecolor="none"
            )
        )
        axis.text(
            left + 0.75,
            bottom + 0.5,
            text.lstrip("*"),
            ha="center",
            va="center",
            fontsize=8,
            color=INK,
        )
        if index + 1 == len(boxes):
            break
        if column + 1 < IN_A_ROW:
            points, place = (
                [(left + 1.57, bottom + 0.5), (left + 2.24, bottom + 0.5)],
                (left + 1.9, bottom + 0.6),
            )
        else:  # down, and back to the left
            middle = bottom - 0.25
            axis.plot(
                [left + 0.75, left + 0.75, 0.75], [bottom - 0.06, middle, middle], color=INK, lw=1
            )
            points, place = (
                [(0.75, middle), (0.75, bottom - 0.44)],
                (left / 2 + 0.75, middle + 0.06),
            )
        axis.annotate("", points[1], points[0], arrowprops={"arrowstyle": "->", "color": INK})
        axis.text(*place, goes_on, ha="center", fontsize=8, color=INK)
    axis.set(xlim=(-0.2, 2.3 * IN_A_ROW - 0.6), ylim=(-1.5 * rows + 1.3, 1.15))
    axis.set_title(fill(title, 95), fontsize=9, loc="left")
    axis.axis("off")
    save(figure, name)


FLOWS = {
    "spec": (
        "The layout of a tensor: an immutable value from which each rank computes its local shape",
        (
            ("mesh\n(data=2, tensor=2)", "and"),
            ("placements\n[Shard(0), Replicate]", "and"),
            ("global shape\n(8, 6), float32", "interned"),
            ("Spec\none object for\nequal layouts", ""),
            ("box of a rank\nrows 0:4, columns 0:6", ""),
        ),
    ),
    "plan": (
        "Redistribution: the cheapest sequence of steps is searched for, then run (orange: "
        "communicates)",
        (
            ("source\n[S(0), S(1)]", "search"),
            ("candidate steps\nlatency + bytes /\nbandwidth", "cheapest"),
            ("*Exchange\nover (data, tensor)", "run"),
            ("target\n[R, S(0)]", ""),
        ),
    ),
    "cache-hit": (
        "A cached operator call: no sharding rule is evaluated (orange: communicates)",
        (
            ("x + y\non DTensors", ""),
            ("key: operator,\nspecs, arguments", "hit"),
            ("cached\ndecision", "if a layout differs"),
            ("*redistribute\ninputs", ""),
            ("torch's kernel\non local shards", ""),
            ("DTensor with\nthe cached spec", ""),
        ),
    ),
    "lowered-block": (
        "A lowered feed-forward block on 4 ranks: local tensors, and one collective in the forward",
        (
            ("x, replicated\n(tokens, 64)", ""),
            ("column-wise Linear:\n64 of 256 features\non each rank", "sharded"),
            ("GELU", "sharded"),
            ("row-wise Linear:\na summand\non each rank", "partial sum"),
            ("*all-reduce", ""),
            ("y, replicated", ""),
        ),
    ),
}


def measured(page: str) -> list[list[str]]:
    """The table between `<!-- measured -->` and `<!-- end -->` of a page: its header, then its rows."""
    text = (
        (HERE.parent / page)
        .read_text()
        .partition("<!-- measured -->")[2]
        .partition("<!-- end -->")[0]
    )
    lines = [
        line.split("|")[1:-1]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("|-")
    ]
    return [[cell.strip().replace("`", "") for cell in line] for line in lines]


def draw_benchmarks() -> None:
    """Speeds of the two tables of measurements, relative to the first of each row that was measured."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, page in zip(axes, ("../README.md", "how-to/inference.md"), strict=True):
        header, *rows = measured(page)
        for place, (label, *cells) in enumerate(rows):
            values = [float(cell.replace(",", "")) if cell else None for cell in cells]
            base = next(value for value in values if value)
            for rival, value in enumerate(values):
                if value:
                    # of times, less is faster
                    speed = base / value if "seconds" in label else value / base
                    height = place + 0.26 * (rival - 1)
                    name = header[1 + rival] if place in (0, len(rows) - 1) else None
                    axis.barh(height, speed, 0.24, color=COLORS[rival], label=name)
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
    """All figures."""
    draw_benchmarks()
    draw_layouts()
    draw_redistribution()
    draw_mesh()
    draw_stack()
    for name, (title, boxes) in FLOWS.items():
        draw_flow(name, boxes, title)


if __name__ == "__main__":
    main()
