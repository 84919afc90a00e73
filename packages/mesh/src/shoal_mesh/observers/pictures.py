"""Pictures over time: when collectives ran, and how much memory tensors took on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..errors import MissingExtraError

_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")


class Timed(Protocol):
    """What the picture reads of a record of a collective."""

    op: str
    axes: tuple[str, ...]
    backward: bool
    started: float
    seconds: float


def new_axes(ax: Any, width: float, height: float) -> Any:
    """These matplotlib axes, or those of a new figure of so many inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "pictures are drawn with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def draw_timeline(trace: Sequence[Timed], ax: Any = None) -> Any:
    """Collectives as bars over time: a row for the mesh axes, a colour for the operation; those of a backward are pale.

    Args:
        trace: the records of a `CommDebugMode`.
        ax: matplotlib axes to draw on; those of a new figure when left out.

    Returns:
        The axes.
    """
    rows = list(dict.fromkeys("x".join(record.axes) for record in trace))
    ops = list(dict.fromkeys(record.op for record in trace))
    ax = new_axes(ax, 9, 1.2 + 0.6 * max(1, len(rows)))
    for op, color in zip(ops, _COLORS * len(ops), strict=False):
        for backward in (False, True):
            mine = [record for record in trace if record.op == op and record.backward is backward]
            name = f"{op} (backward)" if backward else op
            ax.barh(
                [rows.index("x".join(record.axes)) for record in mine],
                [record.seconds * 1e3 for record in mine],
                left=[record.started * 1e3 for record in mine],
                height=0.7,
                color=color,
                alpha=0.45 if backward else 1.0,
                label=f"{len(mine)} x {name}" if mine else None,
            )
    ax.set_yticks(range(len(rows)), rows)
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_xlabel("milliseconds since the start")
    if trace:
        ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=3, frameon=False)
    ax.set_title("collectives by mesh axes")
    return ax


def draw_memory(samples: Mapping[str, Sequence[tuple[float, int]]], ax: Any = None) -> Any:
    """Memory of tensors over a step, a line for each rank.

    Args:
        samples: by the name of a line, `MemoryTrace.samples` of a rank.
        ax: matplotlib axes to draw on; those of a new figure when left out.

    Returns:
        The axes.
    """
    ax = new_axes(ax, 9, 3.5)
    for name, line in samples.items():
        seconds, counts = zip(*line, strict=True) if line else ((), ())
        mib = [count / 2**20 for count in counts]
        peak = f", peak {max(mib):.1f} MiB" if mib else ""
        ax.step([second * 1e3 for second in seconds], mib, where="post", label=f"{name}{peak}", linewidth=1.2)
    ax.set_xlabel("milliseconds since the start")
    ax.set_ylabel("MiB of tensors")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize="small", frameon=False)
    return ax
