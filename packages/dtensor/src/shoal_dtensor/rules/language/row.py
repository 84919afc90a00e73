"""Rows: the ways to run an operator along one mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from ...errors import ShoalTensorError
from ...layout.placements import Partial, Replicate

if TYPE_CHECKING:
    from ...layout.dim_sharding import DimSharding

ShardingMap = Callable[["DimSharding"], "DimSharding"]


@dataclass(frozen=True, slots=True)
class S:
    """The axis shards tensor dim `dim`, at multiples of `unit` elements.

    Behind a row stands one factor of the operator.  An entry `S(dim, unit)` says that `unit` consecutive elements
    of the dim belong to one step of the factor, so all S entries of a row are sharded at the same factor steps.  With
    `runs`, the dim is so many equal runs, and the factor is what one of them holds (see `StridedDimSharding`).

    Attributes:
        dim: the tensor dim.
        unit: elements of the dim per step of the factor.
        runs: equal runs of the dim that are all sharded alike.
        map: for outputs whose shards are not multiples of the input's (of a slice, each shard keeps what it has of the
            selected range), and for inputs sharded as such outputs: from the factor's sharding to this dim's, over
            the same axes.  `unit` is not used then.
    """

    dim: int
    unit: int = 1
    runs: int = 1
    map: ShardingMap | None = None

    def __repr__(self) -> str:
        extras = [f"unit={self.unit}"] * (self.unit != 1) + [f"runs={self.runs}"] * (self.runs != 1)
        mapped = [] if self.map is None else [f"map={self.map}"]
        return f"S({', '.join([str(self.dim), *extras, *mapped])})"


R: Final = Replicate()
P = Partial
Entry = Replicate | Partial | S

ANY_NORM: Final[Partial] = Partial._intern({"reduce_op": "norm?"})
"""In a row: a partial p-norm, of the order that the inputs have; `with_norms` puts the orders in its place."""

Traffic = Callable[[int], float]
"""Bytes that each rank receives in a row's own collectives, given the number of ranks of the axis."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run an operator along one mesh axis; written by `OpCall.row`, with entries by argument name.

    Attributes:
        inputs: one entry per tensor input, in schema order, lists expanded, None arguments left out.
        outputs: one entry per tensor output, in order, lists expanded, None outputs left out.
        even: whether every shard must have the same size.
        traffic: bytes that each rank receives in the local function's collectives, given the number of ranks; None if
            it starts none.  The result of a view operator whose row communicates does not alias its input.
        ordered: whether it matters where along the factor a shard is, in a rule that is `unordered` otherwise.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    even: bool = False
    traffic: Traffic | None = None
    ordered: bool = False


def with_norms(rows: Iterable[Row], norms: Sequence[Partial]) -> list[Row]:
    """Rows with a copy for each of `norms` in the place of every one that names `ANY_NORM`.

    Args:
        rows: of a rule, some of which have `ANY_NORM` among their entries.
        norms: the partial placements to put there.
    """
    result: list[Row] = []
    for row in rows:
        if ANY_NORM not in (*row.inputs, *row.outputs):
            result.append(row)
            continue
        for norm in norms:
            inputs, outputs = ([norm if e is ANY_NORM else e for e in entries] for entries in (row.inputs, row.outputs))
            result.append(replace(row, inputs=tuple(inputs), outputs=tuple(outputs)))
    return result


class RowError(ShoalTensorError, ValueError):
    """A row names an argument that the operator does not have, or gives a list the wrong number of entries."""


@lru_cache(maxsize=256)
def partial_rows(partials: tuple[Partial, ...], together: frozenset[int], tensors: int, results: int) -> list[Row]:
    """A row for each partial placement, which the inputs `together` and all results have."""
    return [
        Row(tuple([partial if i in together else R for i in range(tensors)]), (partial,) * results)
        for partial in partials
    ]
