"""Calls of operators on global tensors, operator schemas, and rows: ways to run a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, Final

import torch

from shoal_mesh.internal import OldAttribute

from ..._torch.operators import WITH_UNMARKED_WRITES, OpOverload, signature_of
from ...errors import ArgumentValueError
from ...layout.boxes import spans
from ...layout.dim_sharding import DimSharding
from ...layout.placements import REDUCE_OPS, Partial, Replicate
from ...layout.tensor_meta import TensorMeta, flatten as flatten


class ShardingMap:
    """A map from the sharding of a factor to the sharding of a dim, over the same axes.

    Attributes:
        exclusive: whether no other row may shard the dim.
        intersects: whether another row's sharding of the dim is combined with this one by
            intersecting their shards, rather than as levels of a strided dim.

    Example:
        >>> class Reversed(ShardingMap):
        ...     def __call__(self, sharding: DimSharding) -> DimSharding:
        ...         sizes = sharding.sizes[::-1]
        ...         return DimSharding(sharding.axes, sharding.axis_sizes, sizes)
        >>> Reversed()(DimSharding((0,), (2,), (3, 1))).sizes
        (1, 3)
    """

    __slots__ = ()

    exclusive: bool = False
    intersects: bool = False

    def __call__(self, sharding: DimSharding) -> DimSharding:
        """Return the sharding of the dim."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class S:
    """The entry of a tensor whose dim `dim` the axis shards at multiples of `unit` elements.

    Every row shards one factor of the operator. An entry `S(dim, unit)` means that `unit`
    consecutive elements of the dim belong to one step of the factor, so all S entries of a row are
    sharded at the same factor steps. With `runs`, the dim consists of this number of equal runs,
    and the factor is the contents of one run (see `StridedDimSharding`).

    Attributes:
        dim: the tensor dim.
        unit: elements of the dim per step of the factor.
        runs: equal runs of the dim that are all sharded alike.
        map: a function from the sharding of the factor to the sharding of this dim, over the same
            axes. It is for outputs whose shards are not multiples of the input's shards, and for
            inputs that are sharded like such outputs. For example, each shard of a slice is the
            part of the selected range in a shard of the input. `unit` is not used then.
    """

    dim: int
    unit: int = 1
    runs: int = 1
    map: ShardingMap | Callable[[DimSharding], DimSharding] | None = None

    def __repr__(self) -> str:
        arguments = [str(self.dim)]
        if self.unit != 1:
            arguments.append(f"unit={self.unit}")
        if self.runs != 1:
            arguments.append(f"runs={self.runs}")
        if self.map is not None:
            arguments.append(f"map={self.map}")
        return f"S({', '.join(arguments)})"


R: Final = Replicate()
P = Partial
Entry = Replicate | Partial | S

ANY_NORM: Final[Partial] = Partial._intern({"reduce_op": "norm?"})
"""A partial p-norm of any order in a row; `with_norms` replaces it by the inputs' orders."""

Traffic = Callable[[int], float]
"""Function of the number of ranks: bytes that each receives in a row's own collectives."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run an operator along one mesh axis.

    `OpCall.row` makes rows from entries by argument name.

    Attributes:
        inputs: one entry per tensor input, in schema order, lists expanded, None arguments left
            out.
        outputs: one entry per tensor output, in order, lists expanded, None outputs left out.
        even: whether every shard must have the same size.
        traffic: bytes that each rank receives in the local function's collectives, given the number
            of ranks; None if it starts none. The result of a view operator whose row communicates
            does not alias its input.
        ordered: whether it matters where along the factor a shard is, in a rule that is `unordered`
            otherwise.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    even: bool = False
    traffic: Traffic | None = None
    ordered: bool = False


def entries_at(positions: Iterable[int], entry: Entry, count: int) -> list[Entry]:
    """Return the entries of a row for `count` tensors: `entry` at these positions, else R."""
    entries: list[Entry] = [R] * count
    for position in positions:
        entries[position] = entry
    return entries


@lru_cache(maxsize=256)
def partial_rows(
    partials: tuple[Partial, ...], together: frozenset[int], tensors: int, results: int
) -> list[Row]:
    """Return a row per partial placement, shared by the inputs `together` and all results."""
    rows = []
    for partial in partials:
        inputs = entries_at(together, partial, tensors)
        rows.append(Row(tuple(inputs), (partial,) * results))
    return rows


_TENSOR_KINDS = ("TensorType", "ListType")


class OpSchema:
    """The schema of one overload, in the form that rules and dispatch use.

    `add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)` reads `self`,
    `other` and `alpha`, writes `self`, and its only return is `self`.

    Args:
        op: the overload.

    Attributes:
        inputs: names of the arguments that are read, in order; `out=` arguments are not among them.
        positional: the names in `inputs` that have a position.
        defaults: the values of the arguments that have a default.
        outs: names of the `out=` arguments.
        written: names of the inputs that the operator writes to in place.
        unmarked: names of the inputs that are written in training although the schema does not mark
            them.
        returns: names of the returned tensors or lists of tensors: the schema's, else `out`, or
            `out0`, `out1`, ...
        is_list: for each of `returns` whether it is a list of tensors.
        returned_inputs: for each of `returns` the written input or `out=` argument that it is, or
            None.
        entry_names: the names that a row may use: inputs, results by their names and places, and
            `out` for all results.
        returns_only_tensors: whether nothing but tensors is returned (or nothing at all).
        is_view: whether an output aliases an input that is not written.
        is_random: whether it uses a random number generator.
    """

    def __init__(self, op: OpOverload) -> None:
        arguments = signature_of(op).arguments
        out_arguments = [argument for argument in arguments if argument.is_out]
        others = [argument for argument in arguments if not argument.is_out]
        positional = [argument for argument in arguments if not argument.kwarg_only]
        self.inputs = _names(others)
        self.positional = _names(positional)
        self.defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        self.outs = _names(out_arguments)
        marks_of = _write_marks(arguments)
        self.written = tuple(name for name in marks_of if name not in self.outs)
        has_unmarked_writes = signature_of(op).name in WITH_UNMARKED_WRITES
        self.unmarked = ("running_mean", "running_var") if has_unmarked_writes else ()
        returned = [r for r in signature_of(op).returns if r.type.kind() in _TENSOR_KINDS]
        self.returns = _names_of_returns(returned)
        self.is_list = tuple(r.type.kind() == "ListType" for r in returned)
        self.returned_inputs = tuple(_returned_input(r, marks_of) for r in returned)
        self.returns_only_tensors = len(returned) == len(signature_of(op).returns)
        self.is_view = _returns_views(returned)
        self.is_random = torch.Tag.nondeterministic_seeded in op.tags
        results = max(1, len(self.returns) or len(self.written))
        numbered = [f"out{i}" for i in range(results)]
        self.entry_names = frozenset((*self.inputs, *self.returns, "out", *numbered))


def _names(arguments: Sequence[Any]) -> tuple[str, ...]:
    return tuple(argument.name for argument in arguments)


def _write_marks(arguments: Sequence[Any]) -> dict[str, set[str]]:
    """Return the alias marks of arguments that an operator writes to, such as {"self": {"a"}}."""
    marks: dict[str, set[str]] = {}
    for argument in arguments:
        if argument.alias_info and argument.alias_info.is_write:
            marks[argument.name] = argument.alias_info.before_set
    return marks


def _names_of_returns(returned: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of the returned tensors: the schema's, else `out`, or `out0`, `out1`, ..."""
    if len(returned) == 1:
        return (returned[0].name or "out",)
    return tuple(r.name or f"out{i}" for i, r in enumerate(returned))


def _returns_views(returned: Sequence[Any]) -> bool:
    """Tell whether a returned tensor aliases an input that is not written."""
    aliases = [r.alias_info for r in returned if r.alias_info is not None]
    return not all(alias.is_write for alias in aliases)


def _returned_input(returned: Any, marks_of: Mapping[str, set[str]]) -> str | None:
    """Return the name of the written argument that is the return value; None for a new tensor."""
    if not returned.alias_info:
        return None
    for name, marks in marks_of.items():
        if marks & returned.alias_info.before_set:
            return name
    return None


@cache
def schema_of(op: OpOverload) -> OpSchema:
    """Return the schema of an overload; one value for the whole process.

    Args:
        op: such as `torch.ops.aten.mm.default`.
    """
    return OpSchema(op)


_ALL_PARTIALS = (*map(P, REDUCE_OPS), ANY_NORM)


@dataclass(frozen=True)
class OpCall:
    """One call of an operator on global tensors, without their values.

    Attributes:
        op: the overload.
        args: positional arguments, each tensor replaced by its `TensorMeta`.
        kwargs: keyword arguments, likewise.
        tensors: the tensor inputs that the operator reads, flattened in schema order; `out=`
            arguments are not among them (`propagate` gives them the layout of the outputs), so a
            rule serves the functional and the out form.
        outputs: the global tensor outputs, flattened; empty when the shapes are data-dependent.

    Example:
        `call["dim"]` is the argument named `dim` of the operator's schema, or its default.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]

    @cached_property
    def schema(self) -> OpSchema:
        """The operator's schema."""
        return schema_of(self.op)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, with defaults; `out=` arguments where they are given."""
        by_position = dict(zip(self.schema.positional, self.args, strict=False))
        return {**self.schema.defaults, **by_position, **self.kwargs}

    bound = OldAttribute("arguments")

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument named `name`, or `default` if the schema does not have it."""
        return self.arguments.get(name, default)

    def dim(self, name: str = "dim", of: int = 0) -> int:
        """Return the dim argument `name` as a non-negative dim of tensor input `of`."""
        ndim = max(self.tensors[of].ndim, 1)
        value = self.arguments[name]
        return int(value) % ndim

    def dims(self, name: str = "dim", of: int = 0) -> tuple[int, ...]:
        """Return the dims argument `name`, resolved and ascending.

        The argument is an int, a list, or None or empty for all dims.
        """
        ndim = self.tensors[of].ndim
        value = self.arguments.get(name)
        is_list = isinstance(value, list | tuple)
        if value is None or (is_list and not value):
            return tuple(range(ndim))
        if not ndim:
            return ()
        values = value if is_list else (value,)
        return tuple(sorted({int(v) % ndim for v in values}))

    # --- which tensor is which argument -----------------------------------------------------------

    @cached_property
    def places(self) -> dict[str, range]:
        """The indices in `tensors` of each argument that is read; empty for None and numbers."""
        names = self.schema.inputs
        counts = []
        for name in names:
            value = self.arguments.get(name)
            is_one = isinstance(value, TensorMeta)
            counts.append(1 if is_one else len([*flatten(value)]))
        return {name: range(*span) for name, span in zip(names, spans(counts), strict=True)}

    @cached_property
    def results(self) -> dict[str, range]:
        """The indices of each result's tensors among the outputs.

        Results are named as the schema's returns. An operator that returns nothing and writes to
        its inputs has the written inputs for results. Results that a mask argument leaves out have
        no index.
        """
        names, counts = self._names_and_counts_of_results()
        return {name: range(*span) for name, span in zip(names, spans(counts), strict=True)}

    def _names_and_counts_of_results(self) -> tuple[Sequence[str], Sequence[int]]:
        """Return the names of the results, and how many tensors each of them is."""
        schema = self.schema
        names = schema.returns
        if not names:
            counts = [len(self.places[name]) for name in schema.written]
            if len(counts) == 1:
                return ["out"], counts
            return [f"out{i}" for i in range(len(counts))], counts
        count = len(self.outputs)
        if any(schema.is_list):
            # In the call of one element, the last lists may be empty, such as the state of AMSGrad.
            if 0 < count < len(names):
                return names[:count], [1] * count
            return names, [count // len(names)] * len(names)
        if not 0 < count < len(names):
            return names, [1] * len(names)
        mask = self.get("output_mask") or self.get("grad_input_mask")
        if mask:
            return names, [int(is_wanted) for is_wanted in mask]
        return [f"out{i}" for i in range(count)], [1] * count

    @cached_property
    def written(self) -> tuple[int, ...]:
        """The indices (into `tensors`) of inputs that the operator reads and writes in place."""
        return tuple([i for name in self.schema.written for i in self.places[name]])

    @cached_property
    def updated(self) -> tuple[int, ...]:
        """The indices of inputs written although the schema does not mark them: running statistics.

        The layout of these inputs is not constrained. An input that is not sharded as the row
        requires is redistributed, written, and sent back.
        """
        if not self.get("training", True):
            return ()
        return tuple([i for name in self.schema.unmarked for i in self.places[name]])

    @cached_property
    def rewritten(self) -> tuple[int, ...]:
        """The indices of outputs that are inputs written in place, without `out=` targets."""
        return tuple([output for _, output in self.fixed if output is not None])

    @cached_property
    def fixed(self) -> tuple[tuple[int, int | None], ...]:
        """Pairs of an input written in place and the output that it is, or None."""
        outputs = {owner: i for i, owner in enumerate(self.aliased)} if self.written else {}
        return tuple([(i, outputs.get(i)) for i in self.written])

    @cached_property
    def aliased(self) -> tuple[int | None, ...]:
        """The flat index, for each output, of the tensor that the output is, or None.

        Indices beyond the inputs are `out=` arguments: for an operator with two inputs, 2 is the
        first of them.
        """
        no_alias = (None,) * len(self.outputs)
        if not any(self.schema.returned_inputs):
            return no_alias
        index = {}
        for name, place in self.places.items():
            if len(place) == 1:
                index[name] = place[0]
        for i, name in enumerate(self.schema.outs):
            index[name] = len(self.tensors) + i
        owners = [index.get(owner) if owner else None for owner in self.schema.returned_inputs]
        return tuple(owners) if len(owners) == len(self.outputs) else no_alias

    @property
    def has_data_dependent_shape(self) -> bool:
        """True if the operator returns tensors whose shapes depend on values."""
        # `unbind` of a dim without elements returns no tensors either.
        return bool(self.schema.returns) and not self.outputs and not self.schema.is_view

    # --- rows -------------------------------------------------------------------------------------

    def row(
        self,
        entries: Mapping[str, Entry | Sequence[Entry]] | None = None,
        /,
        *,
        even: bool = False,
        traffic: Traffic | None = None,
        ordered: bool = False,
        **named: Entry | Sequence[Entry],
    ) -> Row:
        """Return a row with entries by argument name; tensors without an entry are replicated.

        Inputs have the names of the schema's arguments; an entry for one that is None or a number
        is ignored. Results have the names of the schema's returns; a single unnamed one is `out`,
        several are `out0`, `out1`, ..., and `out` names all results that have no entry of their
        own. A list of tensors takes one entry for all, or a sequence with one for each. If an
        argument and a result have the same name, the argument is meant.

        Args:
            entries: `S(dim)`, `R` or `P(op)` by names that are computed; named: by names that are
                written out.
            even, traffic, ordered: see `Row`.

        Raises:
            ArgumentValueError: if the operator has no argument and no result of that name.

        Example:
            >>> import torch
            >>> shapes = ((4, 6), (6, 2), (4, 2))
            >>> a, b, c = (TensorMeta(s, (s[1], 1), torch.float32) for s in shapes)
            >>> from shoal_dtensor.rules import S
            >>> call = OpCall(torch.ops.aten.mm.default, (a, b), {}, (a, b), (c,))
            >>> row = call.row(self=S(1), mat2=S(0), out=P("sum"))
            >>> [entry.dim for entry in row.inputs], row.outputs
            ([1, 0], (Partial(sum),))
        """
        entries = {**(entries or {}), **named}
        if not entries.keys() <= self.schema.entry_names:
            unknown = ", ".join(sorted(entries.keys() - self.schema.entry_names))
            arguments = ", ".join(self.schema.inputs)
            result_names = ", ".join(self.results) or "none"
            raise ArgumentValueError(
                f"{self.op}: a row names {unknown}, but the arguments are {arguments} and the "
                f"results {result_names}"
            )
        inputs: list[Entry] = []
        for name, place in self.places.items():
            if place:
                inputs += self._entries(name, entries.get(name, R), len(place))
        entry_of_all = R if "out" in self.places else entries.get("out", R)
        results: list[Entry] = []
        for i, (name, place) in enumerate(self.results.items()):
            entry = entries.get(f"out{i}", entry_of_all)
            if name != "out" and name not in self.places:
                entry = entries.get(name, entry)
            results += self._entries(name, entry, len(place))
        return Row(tuple(inputs), tuple(results), even, traffic, ordered=ordered)

    def _entries(self, name: str, entries: Entry | Sequence[Entry], count: int) -> Sequence[Entry]:
        """Return the entries of `count` tensors, given one for all or a sequence."""
        if not isinstance(entries, list | tuple):
            return [entries] * count  # type: ignore[list-item]  # sequences are lists or tuples
        if len(entries) != count:
            raise ArgumentValueError(
                f"{self.op}: {name!r} is a list of {count} tensors, got {len(entries)} entries"
            )
        return entries

    def linear(self, *names: str) -> Iterator[Row]:
        """Yield the rows in which one given argument and all results are sums or averages."""
        for name in names:
            if self.places.get(name):
                yield from self.keeping_partials(name, ops=("sum", "avg"))

    def keeping_partials(self, *names: str, ops: Sequence[str] = REDUCE_OPS) -> Iterator[Row]:
        """Yield the rows in which these arguments and all results are partial alike.

        Use it for operators that only move elements, because they commute with every reduction,
        partial norms included. `ops` restricts the rows to the reductions that the operator
        commutes with.
        """
        together = frozenset([i for name in names for i in self.places[name]])
        count = sum([len(place) for place in self.results.values()])
        partials = _ALL_PARTIALS if ops is REDUCE_OPS else tuple(map(P, ops))
        yield from partial_rows(partials, together, len(self.tensors), count)
