"""What an operator may do on one mesh axis: the vocabulary of every rule table.

A rule reads global shapes and arguments and returns rows; a row says how each tensor input and
output lies along one mesh axis.  Rules know no mesh, cost or communication: the propagator
gives each mesh axis one row and prices what the inputs need to get there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from .._torch import OpOverload
from ..chunks import Cut
from ..placements import Partial, Replicate
from ..spec import Spec, TensorMeta

__all__ = [
    "ANY_NORM",
    "CutMap",
    "Entry",
    "LocalCall",
    "LocalFunction",
    "OpCall",
    "P",
    "R",
    "Row",
    "Rule",
    "S",
    "Table",
    "flatten",
    "with_norms",
]


CutMap = Callable[[Cut], Cut]


@dataclass(frozen=True, slots=True)
class S:
    """The axis cuts tensor dim `dim`, at multiples of `unit` elements.

    Behind a row stands one factor of the operator.  An entry `S(dim, unit)` says that `unit` consecutive elements
    of the dim belong to one step of the factor, so all S entries of a row are cut at the same factor steps.  With
    `runs`, the dim is so many equal runs, and the factor is what one of them holds (see `FoldedCut`).

    Attributes:
        dim: the tensor dim.
        unit: elements of the dim per step of the factor.
        runs: equal runs of the dim that are all cut alike.
        cut: for outputs whose pieces are no multiple of the input's (slices keep what each piece has of the selected
            range), and inputs that lie as such outputs: from the factor's cut to this dim's cut, over the same axes.
            `unit` is not looked at then.
    """

    dim: int
    unit: int = 1
    runs: int = 1
    cut: CutMap | None = None


R: Final = Replicate()
P = Partial
Entry = Replicate | Partial | S

ANY_NORM: Final[Partial] = Partial._intern({"reduce_op": "norm?"})
"""In a row: a partial p-norm, of whatever order the inputs have; `with_norms` puts the orders in its place."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run an operator along one mesh axis.

    Attributes:
        inputs: one entry per tensor input, in schema order, lists expanded, None arguments left out.
        outputs: one entry per tensor output, in order, lists expanded, None outputs left out.
        even: whether every coordinate must hold equally much.
        traffic: bytes per rank that the local algorithm itself moves over the axis (0 for most).  The result of a
            view operator whose row has traffic does not alias its input.
        ordered: whether it matters where along the factor a piece lies, in a rule that is `unordered` otherwise.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    even: bool = False
    traffic: int = 0
    ordered: bool = False


@dataclass(frozen=True)
class OpCall:
    """One call of an operator on global tensors, values left out.

    Attributes:
        op: the overload.
        args: positional arguments, each tensor replaced by its `TensorMeta`.
        kwargs: keyword arguments, likewise.
        tensors: the tensor inputs that the operator reads, flattened in schema order; `out=` arguments are not among
            them (the propagator makes them lie as the outputs do), so a rule serves the functional and the out form.
        outputs: the global tensor outputs, flattened; empty when the shapes depend on data.

    Example:
        `call["dim"]` is the argument named `dim` of the operator's schema, or its default.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    bound: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bound: dict[str, Any] = {}
        for i, argument in enumerate(self.op._schema.arguments):
            if i < len(self.args) and not argument.kwarg_only:
                bound[argument.name] = self.args[i]
            elif argument.name in self.kwargs:
                bound[argument.name] = self.kwargs[argument.name]
            elif argument.has_default_value():
                bound[argument.name] = argument.default_value
        object.__setattr__(self, "bound", bound)

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument named `name`, or `default` if the schema has none."""
        return self.bound.get(name, default)

    @property
    def written(self) -> tuple[int, ...]:
        """Indices (into `tensors`) of the inputs that the operator reads and writes (in-place operators)."""
        found: list[int] = []
        position = 0
        for argument in self.op._schema.arguments:
            if argument.is_out:
                continue
            count = sum(1 for _ in flatten(self.bound.get(argument.name)))
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += range(position, position + count)
            position += count
        return tuple(found)

    @property
    def rewritten(self) -> tuple[int, ...]:
        """Indices of the outputs that are inputs written in place; `out=` targets are not among them."""
        schema = self.op._schema
        targets = {name for a in schema.arguments if a.is_out and a.alias_info for name in a.alias_info.before_set}
        marks = [r.alias_info for r in schema.returns]
        return tuple(i for i, m in enumerate(marks) if m is not None and m.is_write and not targets & m.before_set)

    def dim(self, name: str = "dim", of: int = 0) -> int:
        """The dim argument `name`, resolved to a non-negative dim of tensor input `of`."""
        ndim = max(self.tensors[of].ndim, 1)
        value = self.bound[name]
        return int(value) % ndim

    def dims(self, name: str = "dim", of: int = 0) -> tuple[int, ...]:
        """The dims argument `name` (an int, a list, or None or empty for all), resolved and ascending."""
        ndim = self.tensors[of].ndim
        value = self.bound.get(name)
        if value is None or (isinstance(value, list | tuple) and not value):
            return tuple(range(ndim))
        values = value if isinstance(value, list | tuple) else (value,)
        return tuple(sorted({int(v) % max(ndim, 1) for v in values} if ndim else ()))


LocalFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call whose sharding is decided, as seen by the rank that runs it.

    Attributes:
        call: the global call.
        inputs: spec of every tensor input as the local function gets it (after redistribution), flattened.
        outputs: spec of every tensor output, flattened.
    """

    call: OpCall
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operator may be sharded.

    Attributes:
        rows: the rows for a call; the row where everything is replicated is always implied.
        local: for operators whose local call differs from the global one (shape arguments, offsets, masks,
            uneven means): given the decided call, the function to run instead of the operator, with the
            operator's own arguments (tensors local); None to run the operator itself.
        by_value: whether numbers among the arguments influence `rows` or `local`.  Where they do not (pointwise
            and optimizer operators), only their types key the cache, so a learning rate adds no entry per step.
        each: for `foreach` operators: lists are walked in step, and `rows` describes one element's call.
        dynamic: whether output shapes depend on data; the local function's outputs are then taken as they come.
        copies: for view operators: whether the local function's result does not alias its input.
        unordered: whether only the sizes of pieces matter, not where in the dim they lie, to every row whose entries
            are plain `S(dim)` and to `local` under them.  Such rows also run on folded dims (see `FoldedCut`).
    """

    rows: Callable[[OpCall], Sequence[Row]]
    local: Callable[[LocalCall], LocalFunction | None] | None = None
    by_value: bool = True
    each: bool = False
    dynamic: bool = False
    copies: bool = False
    unordered: bool = False


Table = dict[OpOverload, Rule]


def with_norms(rows: Sequence[Row], norms: Sequence[Partial]) -> list[Row]:
    """Rows with a copy for each of `norms` in the place of every one that speaks of `ANY_NORM`."""
    found: list[Row] = []
    for row in rows:
        if ANY_NORM not in (*row.inputs, *row.outputs):
            found.append(row)
        for norm in norms if ANY_NORM in (*row.inputs, *row.outputs) else ():
            inputs, outputs = (
                tuple(norm if entry is ANY_NORM else entry for entry in entries)
                for entries in (row.inputs, row.outputs)
            )
            found.append(Row(inputs, outputs, row.even, row.traffic))
    return found


def flatten(value: Any) -> Iterator[Any]:
    """The tensors (or `TensorMeta`s) in an argument or result, in order; lists are walked, None is skipped."""
    if isinstance(value, Tensor | TensorMeta):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)
