"""Types of a plain tensor along one mesh axis: R, I, V, P or S(i).

The type of a tensor implies the type of its gradient (`backward_type`), so a checked forward
determines the types of the backward.

| type | values along the axis | gradient |
|---|---|---|
| R, replicated | equal; each rank may use them differently | P |
| I, invariant | equal, and so is the computation that uses them | I |
| V, varying | may differ | V |
| P, partial | addends of a pending sum | R |
| S(i) | V, and shard i of a global tensor | S(i) |

Parts of a tensor may have types of their own (`Parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from ...errors import ArgumentTypeError
from ...layout.placements import Interned, Partial, Placement, Replicate, Shard as ShardPlacement


class AxisType(Interned):
    """A type without a dim: one of R, I, V and P, or a pending reduction other than a sum.

    Attributes:
        name: `"R"`, `"I"`, `"V"` or `"P"`.
        reduce_op: the pending reduction of P, `"sum"` for the type `P` itself; empty otherwise.
    """

    __slots__ = ("name", "reduce_op")
    name: str
    reduce_op: str

    def __init__(self, name: str, reduce_op: str = "") -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "reduce_op", reduce_op)

    def backward_type(self) -> AxisType:
        """Return the type of the gradient of a tensor of this type."""
        if self is R:
            return P
        return R if self.name == "P" else self

    def __repr__(self) -> str:
        return self.name if self.reduce_op in ("", "sum") else f"P({self.reduce_op})"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _type_named, (self.name, self.reduce_op)


class Shard(Interned):
    """The type S(dim): a varying tensor that is a shard along `dim` of a global tensor.

    Negative dims count from the end; `resolve` makes them positive.

    Attributes:
        dim: the tensor dim that the axis shards.
    """

    __slots__ = ("dim",)
    dim: int

    def __new__(cls, dim: int) -> Shard:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ArgumentTypeError(f"S(dim): expected an int, got {dim!r}")
        return _shard(dim)

    def backward_type(self) -> Shard:
        """Return the type of the gradient, which is sharded alike."""
        return self

    def resolve(self, ndim: int) -> Shard:
        """Return the type with a dim that counts from the front, for a tensor of `ndim` dims."""
        return Shard(self.dim + ndim) if self.dim < 0 else self

    def __repr__(self) -> str:
        return f"S({self.dim})"

    def __reduce__(self) -> tuple[type[Shard], tuple[int]]:
        return Shard, (self.dim,)


@cache
def _shard(dim: int) -> Shard:
    shard = object.__new__(Shard)
    object.__setattr__(shard, "dim", dim)
    return shard


class FoldedShard(Interned):
    """The type of a shard whose dim a reshape folded into the dim before; inferred, never written.

    Example: a tensor of (batch, heads, length) is sharded by heads and reshaped to (batch * heads,
    length). Each rank holds one run of dim 0 for each batch entry.

    Attributes:
        placement: the placement along the axis, which counts the runs.
        dim: the tensor dim.
    """

    __slots__ = ("dim", "placement")
    placement: Placement
    dim: int

    def __new__(cls, placement: Placement, dim: int) -> FoldedShard:
        return _folded_shard(placement, dim)

    def backward_type(self) -> FoldedShard:
        """Return the type of the gradient, which is sharded alike."""
        return self

    def __repr__(self) -> str:
        return f"S({self.dim}) in runs"


@cache
def _folded_shard(placement: Placement, dim: int) -> FoldedShard:
    folded = object.__new__(FoldedShard)
    object.__setattr__(folded, "placement", placement)
    object.__setattr__(folded, "dim", dim)
    return folded


R: Final = AxisType("R")
I: Final = AxisType("I")  # noqa: E741  # the public name of the type
V: Final = AxisType("V")
P: Final = AxisType("P", "sum")
S = Shard
AnyAxisType = AxisType | Shard | FoldedShard
SHARDS = (Shard, FoldedShard)
# the size and the type of one part of a tensor
Run = tuple[int, AnyAxisType]


class Parts(AxisType):
    """The type of a tensor whose parts along one dim have types of their own.

    Examples of such tensors:

    - A projection to 512 latent features and 64 rotary features, (batch, length, 576): all ranks
      continue with the latent features alike, I, and each rank's heads read the rotary features on
      their own, R.
    - A fused projection to gate and up, sharded each: the local features are a shard of gate, S(2),
      and behind it a shard of up, S(2). Together they are no shard of the fused features.

    A program takes the parts apart by `split` or by slices.

    Attributes:
        dim: the tensor dim, counted from the front.
        runs: the size and the type of each part: R, I, V, or S(dim).
    """

    __slots__ = ("dim", "runs")
    dim: int
    runs: tuple[Run, ...]

    def __new__(cls, dim: int, runs: tuple[Run, ...]) -> Parts:
        return _parts(dim, runs)

    def __init__(self, dim: int, runs: tuple[Run, ...]) -> None:
        """Do nothing: equal types are one object, which is complete."""

    @property
    def is_replicated(self) -> bool:
        """True if all parts are equal on all ranks."""
        return all(axis_type in (R, I) for _, axis_type in self.runs)

    def backward_type(self) -> Parts:
        """Return the type of the gradient, whose parts are the gradients of the parts."""
        return Parts(
            self.dim, tuple([(size, axis_type.backward_type()) for size, axis_type in self.runs])
        )

    def between(self, first: int, last: int, dim: int) -> tuple[Run, ...] | None:
        """Return the parts of elements from `first` to before `last`; None if one is incomplete.

        Parts that are equal on all ranks may be incomplete.

        Args:
            first: the first position.
            last: the position behind the last one.
            dim: the dim along which the positions are afterwards.
        """
        found: list[Run] = []
        begin = 0
        for size, axis_type in self.runs:
            end = begin + size
            common = min(end, last) - max(begin, first)
            if 0 < common < size and axis_type not in (R, I):
                return None
            moved = Shard(dim) if isinstance(axis_type, Shard) else axis_type
            if common > 0:
                found.append((common, moved))
            begin = end
        return tuple(found)

    def __repr__(self) -> str:
        begin = 0
        texts = []
        for size, axis_type in self.runs:
            texts.append(f"{axis_type}[{begin}:{begin + size}]")
            begin += size
        return f"{' '.join(texts)} along dim {self.dim}"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Parts, (self.dim, self.runs)


@cache
def _parts(dim: int, runs: tuple[Run, ...]) -> Parts:
    parts = object.__new__(Parts)
    object.__setattr__(parts, "name", "parts")
    object.__setattr__(parts, "reduce_op", "")
    object.__setattr__(parts, "dim", dim)
    object.__setattr__(parts, "runs", runs)
    return parts


def joined_type(dim: int, runs: Sequence[Run]) -> AnyAxisType:
    """Return the type of a tensor with these parts: `Parts`, or the type of the only part.

    Neighbors that are both R or both I are one part.

    Args:
        dim: the tensor dim along which the parts are joined, counted from the front.
        runs: the size and the type of each part: R, I, V, or S(dim).

    Example:
        >>> joined_type(1, [(4, I), (4, I), (2, R)])
        I[0:8] R[8:10] along dim 1
        >>> joined_type(1, [(4, I), (4, I)])
        I
    """
    merged: list[Run] = []
    for size, axis_type in runs:
        if merged and merged[-1][1] is axis_type and axis_type in (R, I):
            merged[-1] = (merged[-1][0] + size, axis_type)
        elif size > 0:
            merged.append((size, axis_type))
    if not merged:
        # without elements, R and I are the same
        return R
    return merged[0][1] if len(merged) == 1 else Parts(dim, tuple(merged))


@cache
def pending(reduce_op: str) -> AxisType:
    """Return the type of addends of a reduction that is still to be done.

    Args:
        reduce_op: `"sum"` for `P` itself, or `"max"`, `"min"`, `"avg"`, ...
    """
    return P if reduce_op == "sum" else AxisType("P", reduce_op)


def _type_named(name: str, reduce_op: str) -> AxisType:
    return pending(reduce_op) if name == "P" else {"R": R, "I": I, "V": V}[name]


def local_type(axis_type: AnyAxisType) -> AxisType:
    """Return the type without its dim: V for S(i) and parts of it, otherwise the type itself."""
    if isinstance(axis_type, Parts) and not axis_type.is_replicated:
        return V
    return axis_type if isinstance(axis_type, AxisType) else V


def placement_of(axis_type: AnyAxisType) -> Placement | None:
    """Return the placement that a type stands for in the rule tables; None for V."""
    if isinstance(axis_type, FoldedShard):
        return axis_type.placement
    if isinstance(axis_type, Shard):
        return ShardPlacement(axis_type.dim)
    if axis_type.name == "P":
        return Partial(axis_type.reduce_op)
    return None if axis_type is V else Replicate()


def type_of_placement(placement: Placement) -> AnyAxisType | None:
    """Return the type of a placement; None for placements that no type describes."""
    if isinstance(placement, Partial):
        return pending(placement.reduce_op)
    if type(placement) is ShardPlacement:
        return Shard(placement.dim)
    return R if placement.is_replicate() else None
