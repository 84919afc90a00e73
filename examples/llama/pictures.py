"""The example's two pictures: the loss curves, and each parameter's placement on the mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from shoal_dtensor import DTensor


def draw_losses(path: Path, curves: Mapping[str, Sequence[float]], start: int) -> None:
    """Draw the loss curves in one diagram, and below them the difference of the first two."""
    figure, (above, below) = plt.subplots(
        2, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )
    steps = range(start, start + len(next(iter(curves.values()))))
    for (name, losses), style in zip(curves.items(), ("-", "--", ":"), strict=False):
        above.plot(steps, losses, style, label=name)
    above.set_ylabel("loss (nats per byte)")
    above.legend()
    first, second, *_ = curves.values()
    below.semilogy(
        steps, [max(abs(a - b), 1e-12) for a, b in zip(first, second, strict=True)], color="gray"
    )
    below.set(xlabel="step", ylabel="difference (nats)\nequal: 1e-12")
    _save(figure, path)


def draw_layout(path: Path, weights: Mapping[str, Tensor], mesh: tuple[int, int]) -> None:
    """Draw each parameter as a rectangle, divided into its shards along "tensor".

    Each shard is labeled with its ranks.
    """
    parameters = {name: weight for name, weight in weights.items() if isinstance(weight, DTensor)}
    blocks = [name for name in parameters if re.match(r"blocks\.[1-9]", name)]
    # all blocks have the layout of the first one
    for name in blocks:
        del parameters[name]
    columns = math.ceil(math.sqrt(len(parameters) * 1.6))
    rows = math.ceil(len(parameters) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.3 * columns, 2.1 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.axis("off")
    for axis, (name, weight) in zip(axes.flat, parameters.items(), strict=False):
        _draw_parameter(axis, name, weight, mesh)
    size = " x ".join(map(str, mesh))
    figure.suptitle(
        f"Which ranks of the {size} mesh (data, tensor) hold which part of a weight (the first "
        "block only)"
    )
    _save(figure, path)


def _draw_parameter(axis: Axes, name: str, weight: DTensor, mesh: tuple[int, int]) -> None:
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(mesh[0] * mesh[1]):
        # on both axes, or on "tensor" alone
        coordinate = divmod(rank, mesh[1])[-weight.spec.mesh.ndim :]
        holders.setdefault(weight.spec.box(coordinate), []).append(rank)
    height, width = (
        weight.shape[0],
        weight.shape[1] if weight.ndim > 1 else max(1, weight.shape[0] // 8),
    )
    for number, (box, ranks) in enumerate(sorted(holders.items())):
        (top, bottom), (left, right) = box[0], box[1] if len(box) > 1 else (0, width)
        color = plt.get_cmap("Set2")(number % 8)
        axis.add_patch(
            Rectangle((left, top), right - left, bottom - top, facecolor=color, edgecolor="white")
        )
        axis.text(
            (left + right) / 2,
            (top + bottom) / 2,
            ",".join(map(str, ranks)),
            ha="center",
            va="center",
            fontsize=7,
        )
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_title(
        f"{name.removesuffix('.weight')}\n{'x'.join(map(str, weight.shape))}", fontsize=7
    )


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
