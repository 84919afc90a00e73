"""Explanations of redistributions, and pictures of layouts and plans.

Nothing is run; specs on an `abstract_mesh` need no process group. Pictures are text, rich's or
matplotlib's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

from torch import Tensor

from shoal_mesh.errors import MissingExtraError
from shoal_mesh.internal import html_text, require

from ..argument_types import suggests_keywords
from ..errors import ArgumentTypeError, PlacementError
from ..layout.boxes import Box
from ..layout.dim_sharding import ShardOrder
from ..layout.partition_spec import Placements
from ..layout.placements import Partial
from ..layout.spec import Spec
from ..layout.spec_text import INK, color_of_rank, holders, rank_table
from ..redistribute.plan import alternatives
from ..redistribute.steps import Plan, Step, format_bytes, format_seconds, layout
from ..redistribute.traffic import least_bytes, plan_traffic
from ..tensor.dtensor import DTensor
from ..tensor.spec_arguments import target_spec


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Explanation:
    """The cheapest plans between two specs."""

    chosen: Plan  # the plan that `redistribute` runs
    rejected: tuple[Plan, ...]  # the runners-up, cheapest first
    # lower bound on the bytes that a rank receives, averaged over the ranks
    least_bytes: float

    def as_data(self) -> dict[str, Any]:
        """Return everything as plain lists, numbers and strings (for JSON)."""
        mesh = self.chosen.src.mesh
        chosen = self.chosen
        data: dict[str, Any] = {"src": layout(chosen.src), "dst": layout(chosen.dst)}
        mesh = chosen.src.mesh
        data["mesh"] = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        data["shape"] = list(chosen.src.shape)
        data["least_bytes"] = self.least_bytes
        data["chosen"] = _plan_as_data(chosen)
        data["rejected"] = [_plan_as_data(plan) for plan in self.rejected]
        return data

    def __repr__(self) -> str:
        head = f"{self.chosen}\n  must move at least {format_bytes(self.least_bytes)} a rank"
        if 0 < self.chosen.floor < self.chosen.seconds * (1 - 1e-9):
            floor = format_seconds(self.chosen.floor)
            head += (
                "; the search stopped early, so this is an estimate: no plan takes less than "
                f"{floor}"
            )
        lines = [head]
        if self.rejected:
            lines.append("rejected:")
        for plan in self.rejected:
            slower = plan.seconds / self.chosen.seconds if self.chosen.seconds else float("inf")
            steps = ", then ".join([step.line() for step in plan.steps])
            peak = format_bytes(plan.peak_bytes)
            cost = f"{format_seconds(plan.seconds)} ({slower:.2f} x)"
            sent = format_bytes(plan.bytes_sent)
            lines.append(f"  {cost}, {sent}, peak {peak}: {steps}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks display."""
        return html_text(repr(self))

    def picture(self, ax: Any = None) -> Any:
        """Draw a heat map of the bytes that each rank sends to each other; return its axes.

        Args:
            ax: matplotlib axes to draw on; new ones when left out.

        Raises:
            MissingExtraError: if matplotlib is not installed.
        """
        if ax is None:
            ax = _figure(5, 4).add_subplot()
        ranks = self.chosen.src.mesh.size()
        matrix = [[0.0] * ranks for _ in range(ranks)]
        for (sender, receiver), count in plan_traffic(self.chosen).items():
            matrix[sender][receiver] = count / 2**20
        image = ax.imshow(matrix, cmap="viridis", vmin=0.0)
        ax.figure.colorbar(image, ax=ax, label="MiB")
        steps = ", ".join(step.name for step in self.chosen.steps) or "nothing to do"
        between = f"{layout(self.chosen.src)} -> {layout(self.chosen.dst)}"
        ax.set(xlabel="to rank", ylabel="from rank", title=f"{between}\n{steps}")
        return ax


def explain(
    src: Spec | DTensor,
    dst: Spec | Placements,
    *,
    count: int = 4,
    shard_order: ShardOrder | None = None,
    **options: Any,
) -> Explanation:
    """Return the plan from `src` to `dst` and up to `count - 1` runners-up; runs nothing.

    Args:
        src: a tensor, or its spec.
        dst: the spec to redistribute to, or the placements, one per mesh axis or as a
            `PartitionSpec`.
        count: the number of plans.
        shard_order: with placements, the axes of each dim that is sharded by several axes,
            outermost first.
        options: `topology`, `memory_limit` in bytes, as for `redistribute.plan`.

    Raises:
        PlacementError: if the placements do not fit the mesh or the tensor.
        RedistributeError: if the specs describe different tensors, or no plan stays within the
            memory limit.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Partial, Replicate
        >>> src = Spec(abstract_mesh((4, 2), ("dp", "tp")), (Partial(), Replicate()), (1024, 1024))
        >>> why = explain(src, src.with_(placements=(Replicate(), Replicate())))
        >>> # half of it each, over dp, then together over tp
        >>> [step.name for step in why.chosen.steps]
        ['Slice', 'AllReduce', 'AllGather']
    """
    require(src, (Spec, DTensor), "explain: src is a DTensor or its spec", ArgumentTypeError)
    source = src.spec if isinstance(src, DTensor) else src
    target = dst if isinstance(dst, Spec) else target_spec(source, None, dst, shard_order)
    chosen, *rejected = alternatives(source, target, count, **options)
    return Explanation(chosen, tuple(rejected), least_bytes(source, target))


def _plan_as_data(plan: Plan) -> dict[str, Any]:
    return {
        "seconds": plan.seconds,
        "floor": plan.floor,
        "bytes": plan.bytes_sent,
        "peak_bytes": plan.peak_bytes,
        "steps": [_step_as_data(step) for step in plan.steps],
    }


def _step_as_data(step: Step) -> dict[str, Any]:
    axes = [step.src.mesh.axis_names[axis] for axis in step.axes]
    data: dict[str, Any] = {"step": step.name, "axes": axes, "detail": step.detail().strip()}
    data["from"] = layout(step.src)
    data["to"] = layout(step.dst)
    data["seconds"] = step.seconds
    data["bytes"] = step.bytes
    return data


# --- pictures -------------------------------------------------------------------------------------

_STEP = 2.6  # inches for the picture of one layout


def _figure(width: float, height: float) -> Any:
    """Return a matplotlib figure of this size in inches; MissingExtraError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "pictures are drawn with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


@suggests_keywords()
def visualize_sharding(dtensor: DTensor | Spec, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which shard of a 1-D or 2-D tensor, once, on the mesh's first rank.

    Args:
        dtensor: the tensor, or only its spec.
        header: a line to print above.
        use_rich: print with rich, in a notebook as HTML. Each part has the color of its first rank.

    Raises:
        MissingExtraError: if rich is requested and not installed.
        PlacementError: if the tensor has more than two dims.

    Example:
        >>> from shoal_dtensor import Shard
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_mesh import init_device_mesh
        >>> with fake_world(2):
        ...     visualize_sharding(Spec(init_device_mesh("cpu", (2,)), (Shard(0),), (3,)))
               0:2    2:3
        0:1    0      1
    """
    require(
        dtensor,
        (DTensor, Spec),
        "visualize_sharding: dtensor is a DTensor or its spec",
        ArgumentTypeError,
    )
    spec = dtensor._spec if isinstance(dtensor, DTensor) else dtensor
    table = rank_table(spec)
    if spec.coordinate is None or any(spec.coordinate):
        return
    if not use_rich:
        lines = [line for line in (header, table.text()) if line]
        print("\n".join(lines))  # noqa: T201  # what was asked for
        return
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise MissingExtraError(
            "use_rich=True prints with rich, which is not installed: pip install rich"
        ) from error
    colored = Table("", *table.columns, title=header or None, show_lines=True)
    for name, cells in zip(table.rows, table.cells, strict=True):
        texts = []
        for cell in cells:
            colored_cell = f"[black on {table.color(cell)}] {cell} [/]"
            texts.append(colored_cell if cell else "")
        colored.add_row(name, *texts)
    Console().print(colored)


def draw_sharding(spec: Spec) -> str:
    """Return the text that `visualize_sharding` prints.

    Rows and columns are element ranges, with the ranks in the cells.

    Args:
        spec: the spec of a tensor with one or two dims; no process group is needed.

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
    return rank_table(spec).text()


@suggests_keywords()
def draw_layout(tensor: DTensor | Spec, ax: Any = None, title: str = "") -> Any:
    """Draw the tensor as a rectangle, with a color and the ranks for each part; return the axes.

    Args:
        tensor: a tensor of any number of dims; the dims before the last two are drawn as one, from
            top to bottom.
        ax: matplotlib axes to draw on; the axes of a new figure when left out.
        title: title of the picture; the placements when left out.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    spec = tensor.spec if isinstance(tensor, DTensor) else tensor
    if ax is None:
        ax = _figure(3, 3).add_subplot()
    from matplotlib.patches import Rectangle

    rows = prod(spec.shape[:-1])
    columns = spec.shape[-1] if spec.ndim else 1
    partials = [p for p in spec.placements if isinstance(p, Partial)]
    note = "; ".join([f"partial {p.reduce_op}" for p in partials])
    for box, ranks in holders(spec).items():
        color = color_of_rank(ranks[0])
        rectangles = _rectangles(box, spec.shape)
        for rectangle in rectangles:
            corner = (rectangle.left, rectangle.top)
            patch = Rectangle(
                corner, rectangle.width, rectangle.height, facecolor=color, edgecolor="white", lw=2
            )
            ax.add_patch(patch)
        names = ", ".join(map(str, ranks))
        count = len(ranks)
        if count > 8:
            names = f"{ranks[0]}, ... {ranks[-1]} ({count})"
        text = f"{names}\n{note}" if note else names
        last = rectangles[-1]
        x = last.left + last.width / 2
        y = last.top + last.height / 2
        ax.text(x, y, text, ha="center", va="center", fontsize=8, color=INK)
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=(0, columns), yticks=(0, rows))
    ax.tick_params(labelsize=7)
    ax.set_title(title or layout(spec), fontsize=8)
    return ax


class _Rectangle(NamedTuple):
    """A run of rows of a matrix, in some of its columns."""

    top: int
    left: int
    height: int
    width: int


def _rectangles(box: Box, shape: tuple[int, ...]) -> list[_Rectangle]:
    """Return a box as rectangles of a matrix whose rows are all dims but the last."""
    rows = [0]
    outer = zip(shape[:-1], box[:-1], strict=True)
    for size, (start, stop) in outer:
        rows = [row * size + index for row in rows for index in range(start, stop)]
    runs: list[tuple[int, int]] = []
    # Example: in a tensor of (2, 4, n), the box (0:2, 1:3) has the rows 1, 2, 5 and 6, which are
    # the runs (1, 3) and (5, 7).
    for row in rows:
        top = row
        if runs and runs[-1][1] == row:
            top, _ = runs.pop()
        runs.append((top, row + 1))
    left, right = box[-1] if box else (0, 1)
    return [_Rectangle(top, left, bottom - top, right - left) for top, bottom in runs]


@suggests_keywords()
def draw_layouts(tensors: Mapping[str, Tensor | Spec], columns: int = 4) -> Any:
    """Draw the layouts of a model, or of any named tensors, and return the matplotlib figure.

    Equal layouts are drawn once, with their number.

    Args:
        tensors: `dict(model.named_parameters())`, a state dict, or specs by name; plain tensors are
            left out.
        columns: the number of pictures side by side.

    Raises:
        MissingExtraError: if matplotlib is not installed.
        PlacementError: if none of the tensors is a DTensor.
    """
    names: dict[Spec, list[str]] = {}
    for name, tensor in tensors.items():
        spec = tensor.spec if isinstance(tensor, DTensor) else tensor
        if isinstance(spec, Spec):
            names.setdefault(spec, []).append(name)
    if not names:
        raise PlacementError(
            "draw_layouts: expected at least one DTensor or spec as keyword argument, got none"
        )
    lines = ceil(len(names) / columns)
    figure = _figure(_STEP * columns, (_STEP + 0.2) * lines)
    for number, (spec, same) in enumerate(names.items()):
        others = len(same) - 1
        count = f" and {others} with the same layout" if others else ""
        shape = " x ".join(map(str, spec.shape))
        ax = figure.add_subplot(lines, columns, number + 1)
        title = f"{same[0]}{count}\n{shape}  {layout(spec)}"
        draw_layout(spec, ax, title)
    figure.suptitle(repr(next(iter(names)).mesh), fontsize=9)
    return figure


def draw_plan(plan: Plan) -> Any:
    """Draw a redistribution and return the matplotlib figure.

    It shows the layouts before and after every step, with the step's bytes and expected time.

    Args:
        plan: the plan of `explain(...).chosen`, or of `redistribute.plan`.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    specs = [plan.src, *(step.dst for step in plan.steps)]
    figure = _figure(_STEP * len(specs), _STEP + 0.4)
    for i, spec in enumerate(specs, 1):
        ax = draw_layout(spec, figure.add_subplot(1, len(specs), i))
        if i > 1:
            step = plan.steps[i - 2]
            ax.set_xlabel(_caption(step), fontsize=8)
    cost = f"{format_bytes(plan.bytes_sent)}, {format_seconds(plan.seconds)}"
    total = f"{cost}, peak {format_bytes(plan.peak_bytes)}"
    ends = f"{layout(plan.src)} -> {layout(plan.dst)}"
    figure.suptitle(f"{ends}: {total}", fontsize=9)
    return figure


def _caption(step: Step) -> str:
    """Return the text below the layout after a step: its name, axes and cost."""
    axes = " x ".join([step.src.mesh.axis_names[axis] for axis in step.axes])
    head = f"after {step.name} over {axes}" if axes else f"after {step.name}"
    if not step.communicates:
        return f"{head}\nlocal"
    return f"{head}\n{format_bytes(step.bytes)}, {format_seconds(step.seconds)}"
