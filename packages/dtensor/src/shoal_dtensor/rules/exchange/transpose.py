"""Transposed shards: an operator along a sharded dim runs on whole columns, in two all-to-alls instead of a gather.

A (6, 4) tensor sharded by rows on 2 ranks, and what each rank has after `to_columns`:

    rank 0: rows 0..2 of columns a b c d        rank 0: rows 0..5 of columns a b
    rank 1: rows 3..5 of columns a b c d        rank 1: rows 0..5 of columns c d

A rank sends half of its 12 elements, not all of them. `to_shards` is the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from torch import Tensor

from shoal_mesh import Comm, DeviceMesh, all_gather_v, all_to_all_blocks

from ...layout.dim_sharding import DimSharding, chunk_sizes
from ...layout.spec import Spec

Columnwise = Callable[[Tensor], Sequence[Tensor]]


class ShardTranspose:
    """The exchange between shards, which have some rows of all columns, and all rows of some columns.

    Args:
        spec: of the input.
        dim: its sharded dim, along which columns run.
    """

    __slots__ = ("columns", "dim", "index", "mesh", "rest", "sharding")

    def __init__(self, spec: Spec, dim: int) -> None:
        self.sharding: DimSharding = spec.dim_sharding(dim)
        self.dim: int = dim
        self.mesh: DeviceMesh = spec.mesh
        self.index: int = self.sharding.index(spec.coordinate or (0,) * spec.mesh.ndim)
        self.rest: list[int] = [n for d, n in enumerate(spec.local_shape) if d != dim]
        self.columns: tuple[int, ...] = chunk_sizes(prod(self.rest), len(self.sharding.sizes))

    @property
    def comm(self) -> Comm:
        """The communicator of the shards; asked for when the function runs, so that a plan needs no process group."""
        return self.mesh.comm(self.sharding.axes)

    def to_columns(self, x: Tensor) -> Tensor:
        """This rank's columns, `(columns, length)`, from its shard."""
        rows = x.movedim(self.dim, -1).reshape(prod(self.rest), self.sharding.sizes[self.index])
        result = x.new_empty(self.columns[self.index], sum(self.sharding.sizes))
        blocks = [[block] for block in rows.split_with_sizes(self.columns)]
        all_to_all_blocks(blocks, self.comm, [[part] for part in result.split_with_sizes(self.sharding.sizes, 1)])
        return result

    def to_shards(self, columns: Tensor, sharding: DimSharding) -> Tensor:
        """This rank's shard of a result sharded as `sharding`, from its columns `(columns, length)`."""
        size = sharding.sizes[self.index]
        result = columns.new_empty(prod(self.rest), size)
        blocks = [[block] for block in columns.split_with_sizes(sharding.sizes, 1)]
        all_to_all_blocks(blocks, self.comm, [[part] for part in result.split_with_sizes(self.columns)])
        return result.view(*self.rest, size).movedim(-1, self.dim).contiguous()

    def to_all(self, values: Tensor) -> Tensor:
        """One value per column, `(columns,)` here, as all columns' values on every rank."""
        return all_gather_v(values.contiguous(), self.comm, self.columns).view(self.rest)


def by_columns(spec: Spec, dim: int, results: Sequence[Spec], function: Columnwise) -> Callable[[Tensor], list[Tensor]]:
    """`function` of whole columns along a sharded dim, its results (along the same dim) sharded as `results`.

    Args:
        spec: of the input.
        dim: the sharded dim that `function` works along.
        results: of the outputs, which have the input's dims, `dim` perhaps of another length.
        function: from `(columns, length)` to as many results `(columns, new length)`.
    """
    transpose = ShardTranspose(spec, dim)
    shardings = [result.dim_sharding(dim) for result in results]

    def run(x: Tensor) -> list[Tensor]:
        outputs = function(transpose.to_columns(x))
        return [transpose.to_shards(output, sharding) for output, sharding in zip(outputs, shardings, strict=True)]

    return run


def gathered_columns(spec: Spec, dim: int, function: Columnwise, *, keepdim: bool) -> Callable[[Tensor], list[Tensor]]:
    """`function` of whole columns along a sharded dim that gives one value per column, gathered on every rank."""
    transpose = ShardTranspose(spec, dim)

    def run(x: Tensor) -> list[Tensor]:
        results = [transpose.to_all(value) for value in function(transpose.to_columns(x))]
        return [result.unsqueeze(dim) for result in results] if keepdim else results

    return run
