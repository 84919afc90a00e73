"""Placements along one mesh axis: `Shard`, `Replicate` or `Partial`.

Placements are immutable and interned: equal placements are the same object, so they are compared
and hashed by identity. They do no arithmetic; `dim_sharding` computes the sizes of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import Any, ClassVar, NoReturn, Self
from weakref import WeakValueDictionary

from shoal_mesh.internal import constant_when_compiled

from ..errors import ArgumentTypeError, PlacementError

REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")


# Methods of torch's placements that move data.
_TORCH_METHODS = {
    "_compute_padding_info",
    "_custom_chunk",
    "_get_shard_pad_size",
    "_local_shard_size",
    "_make_replicate_tensor",
    "_make_shard_tensor",
    "_maybe_pad_tensor",
    "_maybe_unpad_tensor",
    "_maybe_unpad_tensor_with_sizes",
    "_pad_for_new_shard_dim",
    "_partition_value",
    "_reduce_shard_tensor",
    "_reduce_shard_value",
    "_reduce_value",
    "_replicate_tensor",
    "_replicate_to_shard",
    "_replicate_to_strided_shard",
    "_select_shard",
    "_select_split_tensor",
    "_shard_tensor",
    "_split_tensor",
    "_split_tensor_helper",
    "_to_new_shard_dim",
    "_to_replicate_tensor",
    "_unpad_for_new_shard_dim",
}
_USE_INSTEAD = (
    "placements are data without methods that communicate; use distribute_tensor, "
    "DTensor.redistribute or the collectives of shoal_mesh, Shard(dim, sizes=...) for other "
    "sizes of shards, and register_rule for custom operators"
)


class Interned:
    """Base of immutable values whose equal instances are one object and hash by identity."""

    __slots__ = ()
    # the end of the error at an assignment: how to get a changed value
    _CHANGED_BY: ClassVar[str] = ""

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} is immutable: cannot set {name!r}{self._CHANGED_BY}"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot delete {name!r}")

    def __eq__(self, other: object) -> bool:
        return self is other

    # `__eq__` would remove the inherited hash, which is by identity.
    __hash__ = object.__hash__

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Placement(Interned):
    """Base of the placements; never instantiated itself."""

    __slots__ = ("__weakref__",)
    _interned: ClassVar[WeakValueDictionary[tuple[Any, ...], Any]] = WeakValueDictionary()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        unused = sorted(name for name in vars(cls) if name in _TORCH_METHODS)
        if unused:
            raise PlacementError(
                f"{cls.__name__} overrides {', '.join(unused)}, which would never be called: "
                f"{_USE_INSTEAD}"
            )

    @classmethod
    def _intern(cls, fields: dict[str, Any]) -> Self:
        """Return the only placement of this class with these fields."""
        key = (cls, *fields.values())
        placement: Self | None = Placement._interned.get(key)
        if placement is None:
            placement = object.__new__(cls)
            for name, value in fields.items():
                object.__setattr__(placement, name, value)
            Placement._interned[key] = placement
        return placement

    def is_shard(self, dim: int | None = None) -> bool:
        """Tell whether this axis shards a tensor dim (`dim`, when one is given)."""
        return isinstance(self, (Shard, StridedShard)) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Tell whether every rank along this axis holds the same values."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Tell whether values are to be reduced over this axis (by `reduce_op`, when given)."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Return the source text of this value in code that torch.compile generates."""
        return repr(self), {type(self).__name__: type(self)}


@constant_when_compiled
class Shard(Placement):
    """The placement that shards tensor dim `dim`; coordinate `i` holds the `i`-th shard.

    Args:
        dim: the tensor dim; negative counts from the end and is resolved when a tensor is known.
        sizes: how many elements each coordinate holds (a ragged shard). When left out, they are
            the sizes of `torch.chunk`: ceil-sized shards, trailing ones smaller or empty. When
            outer axes shard the same dim, `sizes` lists every shard so far, outermost axis slowest.
        multiple_of: divide only at multiples of this number of elements (attention heads,
            quantization blocks).

    Raises:
        ArgumentTypeError: if `dim` is not an integer.
        PlacementError: if a size is negative, `multiple_of` is below 1, or both are given.

    Example:
        >>> Shard(0), Shard(0, sizes=(3, 1)), Shard(-1, multiple_of=64)
        (Shard(dim=0), Shard(dim=0, sizes=(3, 1)), Shard(dim=-1, multiple_of=64))
        >>> Shard(0) is Shard(0)
        True
    """

    __slots__ = ("dim", "multiple_of", "sizes")
    __match_args__ = ("dim",)
    dim: int
    sizes: tuple[int, ...] | None
    multiple_of: int

    def __new__(
        cls, dim: int, *, sizes: Sequence[int] | None = None, multiple_of: int = 1
    ) -> Shard:
        if not isinstance(dim, int):
            raise ArgumentTypeError(f"Shard: dim must be an int, got {dim!r}")
        if sizes is not None:
            sizes = tuple(int(size) for size in sizes)
            if multiple_of != 1:
                raise PlacementError(
                    f"Shard: pass sizes or multiple_of, not both (got {sizes} and {multiple_of})"
                )
            if any(size < 0 for size in sizes):
                raise PlacementError(f"Shard: sizes must not be negative, got {sizes}")
        if multiple_of < 1:
            raise PlacementError(f"Shard: multiple_of must be at least 1, got {multiple_of}")
        return cls._intern({"dim": int(dim), "sizes": sizes, "multiple_of": int(multiple_of)})

    def on_dim(self, dim: int) -> Shard:
        """Return the same sharding of another tensor dim."""
        if dim == self.dim:
            return self
        return Shard(dim, sizes=self.sizes, multiple_of=self.multiple_of)

    @staticmethod
    def local_shard_size_and_offset(
        curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        """Return the size of shard `rank` of `num_chunks` of `torch.chunk`, and its first index.

        Example:
            >>> Shard.local_shard_size_and_offset(10, 4, 3)
            (1, 9)
        """
        step = -(-curr_local_size // num_chunks)
        offset = min(rank * step, curr_local_size)
        return min(step, curr_local_size - offset), offset

    _local_shard_size_and_offset = local_shard_size_and_offset  # torch's older spelling

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _shard, (self.dim, self.sizes, self.multiple_of)

    def __repr__(self) -> str:
        more = f", sizes={self.sizes}" if self.sizes is not None else ""
        more += f", multiple_of={self.multiple_of}" if self.multiple_of != 1 else ""
        return f"Shard(dim={self.dim}{more})"

    def __str__(self) -> str:
        more = f",{list(self.sizes)}" if self.sizes is not None else ""
        more += f",x{self.multiple_of}" if self.multiple_of != 1 else ""
        return f"S({self.dim}{more})"


@constant_when_compiled
class StridedShard(Placement):
    """The placement that shards dim `dim` after axes to its right, or in several equal runs.

    Without `sizes` it expresses an order of axes, like torch's `_StridedShard`: mesh axes to its
    right whose sizes multiply to `split_factor` shard the dim before it does. A parameter of
    `fully_shard` on top of tensor parallelism has the placements `(StridedShard(0, split_factor=2),
    Shard(0))`: the second axis shards dim 0 into 2 shards, then the first axis shards each of them.

    With `sizes` the dim is `split_factor` equal runs, and coordinate `i` holds the `i`-th shard of
    each run. A reshape that folds a sharded dim into the dim before it gives this placement:
    `(batch, sequence) -> (batch * sequence)` with the sequence sharded gives `StridedShard(0,
    split_factor=batch, sizes=...)`.

    A factor without `sizes` also counts runs if the tensor dim is a multiple of it and each axis
    that shards the dim has the same factor.

    Args:
        dim: the tensor dim.
        split_factor: number of shards that axes to the right have made before; with `sizes` the
            number of runs, 1 for a dim that is not divided into runs.
        sf: short for `split_factor`, as torch spells it.
        sizes: elements of one run that each coordinate holds. When outer axes shard the runs,
            `sizes` lists every shard so far, outermost axis slowest.
        multiple_of: divide only at multiples of this number of elements, as in `Shard`.
        outer_shards: with `sizes`, number of shards that axes to the right have made of each run
            before. It is used for ragged shards in an order of axes that is not ascending.

    Raises:
        PlacementError: if `split_factor`, `multiple_of` or `outer_shards` is below 1 or a size is
            negative, if `sizes` and `multiple_of` are both given, or `outer_shards`
            without `sizes`.
        ArgumentTypeError: if `split_factor` and `sf` are both given.

    Example:
        >>> StridedShard(0, split_factor=2, sizes=(3, 2)) # of 10 elements, rank 0 has 0..2 and 5..7
        StridedShard(dim=0, sf=2, sizes=(3, 2))
        >>> isinstance(StridedShard(0, split_factor=2), Shard)
        False
    """

    __slots__ = ("dim", "multiple_of", "outer_shards", "sizes", "split_factor")
    __match_args__ = ("dim",)
    dim: int
    split_factor: int
    sizes: tuple[int, ...] | None
    multiple_of: int
    outer_shards: int

    def __new__(
        cls,
        dim: int,
        *,
        split_factor: int = 1,
        sf: int | None = None,
        sizes: Sequence[int] | None = None,
        multiple_of: int = 1,
        outer_shards: int = 1,
    ) -> StridedShard:
        if sf is not None and split_factor != 1:
            raise ArgumentTypeError(
                f"StridedShard: pass split_factor or sf, not both (got {split_factor} and {sf})"
            )
        split_factor = split_factor if sf is None else sf
        counts = {
            "split_factor": split_factor,
            "multiple_of": multiple_of,
            "outer_shards": outer_shards,
        }
        for name, count in counts.items():
            if count < 1:
                raise PlacementError(f"StridedShard: {name} must be at least 1, got {count}")
        if sizes is None and outer_shards != 1:
            raise PlacementError(
                f"StridedShard: outer_shards={outer_shards} needs sizes; without sizes use "
                "split_factor"
            )
        if sizes is not None:
            sizes = tuple(int(size) for size in sizes)
            if multiple_of != 1:
                raise PlacementError(
                    f"StridedShard: pass sizes or multiple_of, not both (got {sizes} and "
                    f"{multiple_of})"
                )
            if any(size < 0 for size in sizes):
                raise PlacementError(f"StridedShard: sizes must not be negative, got {sizes}")
        return cls._intern({"dim": int(dim), "sizes": sizes, **counts})

    def on_dim(self, dim: int) -> StridedShard:
        """Return the same sharding of another tensor dim."""
        if dim == self.dim:
            return self
        return StridedShard(
            dim,
            split_factor=self.split_factor,
            sizes=self.sizes,
            multiple_of=self.multiple_of,
            outer_shards=self.outer_shards,
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        fields: tuple[Any, ...] = (self.dim, self.split_factor, self.sizes)
        if self.multiple_of != 1 or self.outer_shards != 1:
            fields = (*fields, self.multiple_of, self.outer_shards)
        return _strided_shard, fields

    def __repr__(self) -> str:
        more = f", sizes={self.sizes}" if self.sizes is not None else ""
        more += f", multiple_of={self.multiple_of}" if self.multiple_of != 1 else ""
        more += f", outer_shards={self.outer_shards}" if self.outer_shards != 1 else ""
        return f"StridedShard(dim={self.dim}, sf={self.split_factor}{more})"

    def __str__(self) -> str:
        more = f",{list(self.sizes)}" if self.sizes is not None else ""
        more += f",x{self.multiple_of}" if self.multiple_of != 1 else ""
        more += f",in{self.outer_shards}" if self.outer_shards != 1 else ""
        return f"SS({self.dim},{self.split_factor}{more})"


@constant_when_compiled
class Replicate(Placement):
    """The placement of equal values on every rank along the axis.

    The values are the whole tensor, or the part of it that the placements of other axes determine.

    Example:
        >>> Replicate() is Replicate()
        True
    """

    __slots__ = ()

    def __new__(cls) -> Replicate:
        return cls._intern({})

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Replicate, ()

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@constant_when_compiled
class Partial(Placement):
    """The placement of values that are still to be reduced over the axis.

    Args:
        reduce_op: one of `REDUCE_OPS`, or `norm` and an order: with `"norm2"` the value is the
            square root of the sum of the squares of the ranks' values, with `"norm3.5"` likewise
            for any order but 0 and 1 (sums) and the infinities (extrema). The ranks' values are not
            negative, unless only one rank has a value other than 0.

    Raises:
        ArgumentTypeError: if it is not a string.
        PlacementError: if the reduction is unknown.

    Example:
        >>> Partial(), Partial("max"), Partial("norm2.0")
        (Partial(sum), Partial(max), Partial(norm2))
    """

    __slots__ = ("reduce_op",)
    __match_args__ = ("reduce_op",)
    ALL_REDUCE_OPS = ("sum", "avg", "min", "max", "product")
    LINEAR_REDUCE_OPS = ("sum", "avg")
    reduce_op: str

    def __new__(cls, reduce_op: str = "sum") -> Partial:
        if not isinstance(reduce_op, str):
            raise ArgumentTypeError(f"Partial: reduce_op must be a str, got {reduce_op!r}")
        if reduce_op not in REDUCE_OPS:
            reduce_op = _norm_op(reduce_op)
        return cls._intern({"reduce_op": reduce_op})

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Partial, (self.reduce_op,)

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Partial({self.reduce_op!r})", {"Partial": Partial}

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


@cache
def norm_order(reduce_op: str) -> float | None:
    """Return the order of a p-norm (0.5 for "norm0.5"); None for any other reduction."""
    return float(reduce_op[4:]) if str(reduce_op).startswith("norm") else None


# Orders whose norm is another reduction.
_SIMPLER = {0.0: "sum", 1.0: "sum", inf: "max", -inf: "min"}


def _norm_op(name: str) -> str:
    """Return the one spelling of a norm's name."""
    try:
        order = float(name.removeprefix("norm")) if str(name).startswith("norm") else None
    except ValueError:
        order = None
    # NaN differs from itself.
    if order is None or order != order:
        raise PlacementError(
            f"Partial: reduce_op must be one of {', '.join(REDUCE_OPS)}, or norm and an order "
            f"('norm2'), got {name!r}"
        )
    if order in _SIMPLER:
        raise PlacementError(f"Partial: {name!r} is Partial({_SIMPLER[order]!r})")
    is_exact_integer = order.is_integer() and abs(order) < 2**53
    return f"norm{int(order) if is_exact_integer else order!r}"


def _shard(dim: int, sizes: tuple[int, ...] | None, multiple_of: int) -> Shard:
    return Shard(dim, sizes=sizes, multiple_of=multiple_of)


def _strided_shard(
    dim: int,
    split_factor: int,
    sizes: tuple[int, ...] | None = None,
    multiple_of: int = 1,
    outer_shards: int = 1,
) -> StridedShard:
    return StridedShard(
        dim,
        split_factor=split_factor,
        sizes=sizes,
        multiple_of=multiple_of,
        outer_shards=outer_shards,
    )


class Absent:
    """A name of torch's class that does not exist here.

    Reading it, from an instance or the class, raises an error that names the replacement.
    """

    def __init__(self, instead: str, name: str = "") -> None:
        self._instead = instead
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self._name}: {self._instead}")


for _name in _TORCH_METHODS:
    setattr(Placement, _name, Absent(_USE_INSTEAD, _name))

PICKLED = (Replicate, Partial, _shard, _strided_shard)  # the globals of pickled placements
