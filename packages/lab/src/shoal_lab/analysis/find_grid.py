"""`find_grid`: the axes of a program's ranks, from the user's mesh or from the program's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

from ..records import RankRecord
from .grid import MeshGrid


def find_grid(mesh: Mapping[str, int], records: Sequence[RankRecord]) -> MeshGrid:
    """Return the grid of the ranks.

    Args:
        mesh: axis sizes by name, as the user gave them. Only a mesh {"ranks": n} is replaced by the
            program's own axes.
        records: the records of the ranks, with the meshes and groups that the program made.

    Example:
        >>> str(find_grid({"dp": 2, "tp": 2}, []))
        'dp=2, tp=2'
    """
    named_grid = MeshGrid.of(mesh)
    if len(mesh) > 1 or not records or tuple(mesh) != ("ranks",):
        return named_grid
    best = named_grid
    for names, ranks in records[0].meshes:
        grid = _grid_of_mesh(names, ranks)
        if (
            grid is not None
            and grid.count == named_grid.count
            and len(grid.names) >= len(best.names)
        ):
            best = grid
    if best is not named_grid:
        return best
    return _grid_of_groups(records[0].groups, named_grid.count) or named_grid


def _grid_of_mesh(names: tuple[str, ...], ranks: Any) -> MeshGrid | None:
    """Return the grid of a mesh; None unless its ranks are 0, 1, 2, ... in row-major order."""
    tensor = torch.tensor(ranks)
    if tensor.flatten().tolist() != list(range(tensor.numel())):
        return None
    return MeshGrid(names, tuple(tensor.shape))


def _grid_of_groups(groups: Sequence[tuple[int, ...]], count: int) -> MeshGrid | None:
    """Return the grid whose axes are the program's process groups; None if they form no grid.

    Ranks (0, 1) and (2, 3) are an axis of stride 1; ranks (0, 2) and (1, 3) one of stride 2. An
    axis is named by the group with rank 0.
    """
    # stride -> size
    axes = dict[int, int]()
    for ranks in groups:
        steps = {after - before for before, after in pairwise(ranks)}
        if 0 in ranks and len(steps) == 1 and len(ranks) < count:
            axes.setdefault(steps.pop(), len(ranks))
    strides = sorted(axes, reverse=True)
    sizes = [axes[stride] for stride in strides]
    if not sizes or prod(sizes) != count:
        return None
    names = list[str]()
    for stride, size in zip(strides, sizes, strict=True):
        names.append(f"groups like {tuple(range(0, stride * size, stride))}")
    grid = MeshGrid(tuple(names), tuple(sizes))
    expected = [prod(sizes[position + 1 :]) for position in range(len(sizes))]
    return grid if expected == strides else None
