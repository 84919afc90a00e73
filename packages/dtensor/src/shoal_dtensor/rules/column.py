"""Running an operator along a sharded dim by turning the pieces: each rank gets some whole columns, then all turn back.

Two all-to-alls, in which a rank sends no more than its piece, replace the gather of everything on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from shoal_mesh import Comm, all_gather_v, all_to_all_v

from ..chunks import Cut, chunk_sizes
from ..spec import Spec

__all__ = ["by_columns", "gathered_columns"]

Columnwise = Callable[[Tensor], Sequence[Tensor]]


class Turn:
    """The exchange between pieces of rows of all columns and all rows of some columns.

    Args:
        spec: of the input.
        dim: its dim that is cut and that columns run along.
    """

    __slots__ = ("columns", "cut", "dim", "mesh", "piece", "rest")

    def __init__(self, spec: Spec, dim: int) -> None:
        self.cut, self.dim = spec.cut(dim), dim
        self.mesh = spec.mesh
        self.piece = self.cut.index(spec.coordinate or (0,) * spec.mesh.ndim)
        self.rest = [n for d, n in enumerate(spec.local_shape) if d != dim]
        self.columns = chunk_sizes(prod(self.rest), len(self.cut.sizes))

    @property
    def comm(self) -> Comm:
        """The communicator of the pieces; asked for when the function runs, so that a plan needs no process group."""
        return self.mesh.comm(self.cut.axes)

    def to_columns(self, x: Tensor) -> Tensor:
        """This rank's columns, `(columns, length)`, from its piece."""
        flat = x.movedim(self.dim, -1).reshape(-1)
        rows, mine = self.cut.sizes, self.columns[self.piece]
        sent = [n * rows[self.piece] for n in self.columns]
        received = [mine * n for n in rows]
        moved = all_to_all_v(flat, self.comm, sent, received)
        blocks = [block.view(mine, n) for block, n in zip(moved.split_with_sizes(received), rows, strict=True)]
        return torch.cat(blocks, 1)

    def to_pieces(self, columns: Tensor, cut: Cut) -> Tensor:
        """This rank's piece, cut as `cut` says, from its columns `(columns, length)`."""
        rows, mine = cut.sizes, self.columns[self.piece]
        flat = torch.cat([block.reshape(-1) for block in columns.split_with_sizes(rows, 1)])
        moved = all_to_all_v(flat, self.comm, [mine * n for n in rows], [n * rows[self.piece] for n in self.columns])
        return moved.view(*self.rest, rows[self.piece]).movedim(-1, self.dim).contiguous()

    def to_all(self, values: Tensor) -> Tensor:
        """One value per column, `(columns,)` here, as all columns' values on every rank."""
        return all_gather_v(values.contiguous(), self.comm, self.columns).view(self.rest)


def by_columns(spec: Spec, dim: int, results: Sequence[Spec], function: Columnwise) -> Callable[[Tensor], list[Tensor]]:
    """`function` of whole columns along a cut dim, its results (along the same dim) cut as `results` say.

    Args:
        spec: of the input; dim: the cut dim that `function` works along.
        results: of the outputs, which have the input's dims, `dim` perhaps of another length.
        function: from `(columns, length)` to as many results `(columns, new length)`.
    """
    turn = Turn(spec, dim)

    def run(x: Tensor) -> list[Tensor]:
        made = function(turn.to_columns(x))
        return [turn.to_pieces(result, target.cut(dim)) for result, target in zip(made, results, strict=True)]

    return run


def gathered_columns(spec: Spec, dim: int, function: Columnwise, *, keepdim: bool) -> Callable[[Tensor], list[Tensor]]:
    """`function` of whole columns along a cut dim that gives one value per column, gathered on every rank."""
    turn = Turn(spec, dim)

    def run(x: Tensor) -> list[Tensor]:
        results = [turn.to_all(value) for value in function(turn.to_columns(x))]
        return [result.unsqueeze(dim) for result in results] if keepdim else results

    return run
