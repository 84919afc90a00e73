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
        mesh: axis sizes by name, as the user gave them. {"ranks": n} stands for n ranks without
            named axes, and only this mesh is replaced by the program's own axes.
        records: the records of the ranks, with the meshes and groups that the program made.

    Example:
        >>> str(find_grid({"dp": 2, "tp": 2}, []))
        'dp=2, tp=2'
    """
    named_grid = MeshGrid.of(mesh)
    has_named_axes = tuple(mesh) != ("ranks",)
    if has_named_axes or not records:
        return named_grid
    # Meshes and groups are made on all ranks alike, so the record of one rank is enough.
    record = records[0]
    best = named_grid
    for names, ranks in record.meshes:
        grid = _grid_of_mesh(names, ranks)
        if grid is None or grid.count != named_grid.count:
            continue
        # Prefer the mesh with most axes, and the last one among equals. A mesh of the program with
        # one axis takes the place of `named_grid`, which has one axis, too.
        if len(grid.names) >= len(best.names):
            best = grid
    if best is not named_grid:
        return best
    return _grid_of_groups(record.groups, named_grid.count) or named_grid


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
    size_by_stride = dict[int, int]()
    for ranks in groups:
        # A group of all ranks is not an axis, and groups without rank 0 are on the other lines of
        # an axis.
        if 0 not in ranks or len(ranks) == count:
            continue
        distances = {after - before for before, after in pairwise(ranks)}
        if len(distances) != 1:
            continue
        [stride] = distances
        # If several groups have one stride, the first one counts.
        if stride not in size_by_stride:
            size_by_stride[stride] = len(ranks)
    strides = sorted(size_by_stride, reverse=True)
    sizes = [size_by_stride[stride] for stride in strides]
    if not sizes or prod(sizes) != count or strides != _row_major_strides(sizes):
        return None
    names = list[str]()
    for stride, size in zip(strides, sizes, strict=True):
        names.append(f"groups like {tuple(range(0, stride * size, stride))}")
    return MeshGrid(tuple(names), tuple(sizes))


def _row_major_strides(sizes: Sequence[int]) -> list[int]:
    """Return the distances between neighbours along each axis: [6, 3, 1] for sizes (2, 2, 3)."""
    return [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
