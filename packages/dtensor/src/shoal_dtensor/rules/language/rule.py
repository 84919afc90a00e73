"""Sharding rules: a row function and, where needed, a local function that runs on shards.

A rule reads global shapes and arguments and yields rows; a row gives the placement of each tensor
input and output along one mesh axis. Rules do not depend on a mesh, on costs or on communication:
`propagate` chooses one row for each mesh axis and estimates the cost of redistributing the
inputs to it.

Row functions are generators that are named after the operator and make rows by `OpCall.row`. The
same function serves the functional, the in-place and the `out=` form. For operators that only write
to their inputs (`_foreach_add_`), `out` means the written inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shoal_mesh.internal import with_dependence

from ..._torch.operators import OpOverload, signature_of
from ...errors import ArgumentValueError, PlacementError
from ...layout.placements import Partial
from ...redistribute.execution.reduced_values import identity_of
from ...scopes import changed_by
from .op_call import (
    ANY_NORM as ANY_NORM,
    Entry as Entry,
    OpCall as OpCall,
    P as P,
    R as R,
    Row as Row,
    S as S,
    ShardingMap as ShardingMap,
    Traffic as Traffic,
    flatten as flatten,
)

if TYPE_CHECKING:
    from ...layout.spec import Spec

LocalFunction = Callable[..., Any]
Check = Callable[[Tensor], None]
"""Function that raises an error for wrong values of a tensor."""
Kind = Literal["plain", "each", "dynamic", "copy"]


@dataclass(frozen=True, slots=True, eq=False)
class LocalCall:
    """A call whose sharding is decided, on the rank that runs it.

    Attributes:
        call: the global call.
        inputs: the spec of every tensor input after its redistribution, flattened.
        outputs: the spec of every tensor output, flattened.
    """

    call: OpCall
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]

    def __getitem__(self, name: str) -> Spec:
        """Return the spec of the tensor argument `name`."""
        (index,) = self.call.places[name]
        return self.inputs[index]


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The sharding rule of an operator.

    Attributes:
        rows: the rows for a call; the row where everything is replicated is always implied.
        local: for operators whose local call differs from the global one (shape arguments, offsets,
            masks, uneven means): given the decided call, the function to run instead of the
            operator, with the operator's own arguments (tensors local); None to run the operator
            itself.
        skip_empty: whether a rank that has an empty shard runs nothing, because the kernel refuses
            empty tensors or has no neutral value for them. It contributes the neutral value of the
            reduction of each output (0 to a sum, -inf to a maximum). Rows that communicate run on
            every rank all the same.
        kind: the kind of an operator that is not an ordinary one. "each": a `foreach` operator:
            lists are walked in step, and `rows` describes one element's call. "dynamic": output
            shapes are data-dependent: the local function's outputs are taken as they come. "copy":
            a view operator whose local function returns a result that does not alias its input.
        by_value: whether numbers among the arguments influence `rows` or `local`. Where they do not
            (pointwise and optimizer operators), only their types key the cache, so a learning rate
            adds no entry per step.
        unordered: whether rows whose entries are plain `S(dim)`, and `local` for such rows, depend
            only on the sizes of shards and not on their positions in the dim. Such rows also run on
            strided dims (`StridedDimSharding`).
        sizes: the names of arguments that are lists of sizes, if the output sizes depend only on
            equalities among the input sizes, 0 and 1. A run on tiny tensors then gives the outputs
            for all shapes with the same equalities. None if sizes matter otherwise.
        linear: names of arguments, separated by spaces. The operator is linear in each of them
            while the others are fixed: if this argument is a partial sum or average, all
            results are too.
        moves: names of arguments, separated by spaces, whose elements the operator only moves to
            the results: if all of them are partial alike, the results are too, whatever the
            reduction.
        checks: for operators that refuse some values of an argument, such as indices: by the name
            of the argument, one function for each tensor in it, which raises an error for these
            values. It is called on a tensor that all ranks have before the tensor is sliced,
            because each rank's kernel would compare its own slice only.
    """

    rows: Callable[[OpCall], Iterable[Row]]
    local: Callable[[LocalCall], LocalFunction | None] | None = None
    kind: Kind = "plain"
    by_value: bool = True
    unordered: bool = False
    skip_empty: bool = False
    sizes: tuple[str, ...] | None = None
    linear: str = ""
    moves: str = ""
    checks: Callable[[OpCall], Mapping[str, Sequence[Check]]] | None = None

    def rows_of(self, call: OpCall) -> list[Row]:
        """Return the rows for a call, without the rows that `reducible_later` removes.

        For an operator that writes to inputs and returns nothing, return only the rows in which
        every written input already has the placement of the result.
        """
        rows = [*self.rows(call)]
        if self.linear:
            rows += call.linear(*self.linear.split())
        if self.moves:
            rows += call.keeping_partials(*self.moves.split())
        rows = reducible_later(rows, call)
        if call.schema.returns or not call.written:
            return rows
        kept = []
        for row in rows:
            written = [row.inputs[i] for i in call.written]
            if not row.outputs or written == [*row.outputs]:
                kept.append(replace(row, outputs=()))
        return kept


def reducible_later(rows: list[Row], call: OpCall) -> list[Row]:
    """Return the rows whose partial values may be reduced after a conversion to the result's dtype.

    Partial sums are not narrowed, because each addend would be rounded, and where addends cancel
    the sum would be wrong: 1e9 + 1 and -1e9 add up to 1, but to 0 if both are float32. Partial sums
    of integers are not widened, because they may have wrapped: 100 + 100 in int8. Averages of
    integers or truth values are not left pending, because n times a value may not fit into the
    dtype. Sums are not left partial for dtypes that torch can move but not add.
    """
    sources = [meta.dtype for meta in call.tensors]
    results = [meta.dtype for meta in call.outputs]
    if not results:
        results = [sources[i] for i in call.written]
    kinds = {*sources, *results}
    if len(kinds) == 1 and _has_fractions(*kinds) and all(map(adds_up, kinds)):
        return rows

    def fits(row: Row) -> bool:
        partial_inputs = _partials_of(row.inputs, sources)
        partial_outputs = _partials_of(row.outputs, results)
        for op, dtype in partial_inputs + partial_outputs:
            if op == "sum" and not adds_up(dtype):
                return False
            if op == "avg" and not _has_fractions(dtype):
                return False
        pairs = product(partial_inputs, partial_outputs)
        return all(_commutes(op, source, target) for (op, source), (_, target) in pairs)

    return [row for row in rows if fits(row)]


def _partials_of(
    entries: Sequence[Entry], dtypes: Sequence[torch.dtype]
) -> list[tuple[str, torch.dtype]]:
    """Return the reduction and dtype of each partial entry; outputs may be fewer than dtypes."""
    pairs = zip(entries, dtypes, strict=False)
    return [(entry.reduce_op, dtype) for entry, dtype in pairs if isinstance(entry, P)]


def _commutes(op: str, source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether a conversion of dtypes commutes with the reduction `op`."""
    if source == target:
        return True
    if op in ("max", "min"):
        return target.is_floating_point and not source.is_complex
    is_norm = op.startswith("norm")
    if op not in ("sum", "avg") and not is_norm:
        return False
    if is_norm and (source.is_complex or target.is_complex):
        return False
    if not _has_fractions(source) or not _has_fractions(target):
        return False
    return torch.finfo(target).eps <= torch.finfo(source).eps


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def adds_up(dtype: torch.dtype) -> bool:
    """Tell whether torch adds numbers of a dtype, and does not only move them."""
    small_float = dtype.is_floating_point and dtype.itemsize == 1
    return not small_float and dtype not in (torch.uint16, torch.uint32, torch.uint64)


def with_norms(rows: Iterable[Row], norms: Sequence[Partial]) -> list[Row]:
    """Return the rows, with one copy per norm in `norms` of each row that names `ANY_NORM`.

    Args:
        rows: the rows of a rule, some of which may have `ANY_NORM` among their entries.
        norms: the partial placements that replace `ANY_NORM`.
    """
    result: list[Row] = []
    for row in rows:
        if ANY_NORM not in (*row.inputs, *row.outputs):
            result.append(row)
            continue
        for norm in norms:
            inputs = _with_norm(row.inputs, norm)
            outputs = _with_norm(row.outputs, norm)
            result.append(replace(row, inputs=inputs, outputs=outputs))
    return result


def _with_norm(entries: Iterable[Entry], norm: Partial) -> tuple[Entry, ...]:
    return tuple([norm if entry is ANY_NORM else entry for entry in entries])


def no_rows(call: OpCall) -> Iterable[Row]:
    """Return no rows: every rank runs the operator on whole tensors."""
    return ()


# --- the functions that a rank runs ---------------------------------------------------------------


def local_function(rule: Rule, local_call: LocalCall, communicates: bool) -> LocalFunction | None:
    """Return the function that a rank runs instead of the operator; None for the operator itself.

    Args:
        rule: the rule of the operator.
        local_call: the call with its specs.
        communicates: whether a row of the decision communicates. Then every rank runs the rule's
            own function, also with empty shards.
    """
    if rule.skip_empty and not communicates and local_call.outputs:
        # Example: (3, 5) sharded by rows over 4 ranks. Rank 3 has (0, 5), so its rows of an output
        # are empty, and it adds 0 to a sum. A list is faster here than a generator.
        empty_inputs = [is_empty_shard(spec) for spec in local_call.inputs]
        lacks_input = any(empty_inputs)
        if all(_adds_nothing(spec, lacks_input) for spec in local_call.outputs):
            return contribution(local_call)
    return rule.local(local_call) if rule.local is not None else None


def is_empty_shard(spec: Spec) -> bool:
    """Tell whether this rank has no elements of a tensor that has some."""
    return 0 in spec.local_shape and 0 not in spec.shape


def _adds_nothing(output: Spec, lacks_input: bool) -> bool:
    """Tell whether this rank has no elements of an output, or only neutral values to reduce."""
    return 0 in output.local_shape or (lacks_input and bool(output.partials))


def contribution(local_call: LocalCall) -> LocalFunction:
    """Return a function that returns the neutral value of the reduction of each output.

    The function takes the operator's arguments.
    """
    call = local_call.call
    outputs = local_call.outputs
    values = [_neutral_value(spec) for spec in outputs]
    present = [i for i, place in enumerate(call.results.values()) for _ in place]
    is_list = call.schema.is_list == (True,)
    count = len(call.results)

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [*flatten([*args, *kwargs.values()])]
        filled = []
        for spec, value in zip(outputs, values, strict=True):
            stride = (1,) if spec.coordinate is None else spec.local_stride
            part = tensors[0].new_empty_strided(spec.local_shape, stride, dtype=spec.dtype)
            part.fill_(value)
            # For a compiler, the result must depend on the arguments as on the other ranks.
            if torch.compiler.is_compiling():
                part = with_dependence(part, *tensors)
            filled.append(part)
        if is_list:
            return filled
        results: list[Tensor | None] = [None] * count
        for i, tensor in zip(present, filled, strict=True):
            results[i] = tensor
        return results[0] if count == 1 else tuple(results)

    return in_every_form(call, run)


def _neutral_value(spec: Spec) -> float:
    """Return the value that does not change the result when an output is reduced."""
    if not spec.partials:
        return 0
    _, first_op = spec.partials[0]
    return identity_of(first_op, spec.dtype)


def nothing_of(local_call: LocalCall) -> LocalFunction:
    """Return the local call of ranks outside the mesh: no elements and no collectives."""
    call = local_call.call
    if call.schema.returns_only_tensors:
        if not call.schema.returns:
            return lambda *args, **kwargs: None
        return contribution(local_call)

    def run(*args: Any, **kwargs: Any) -> Any:
        raise PlacementError(
            f"{call.op} reads a value of a tensor, but this rank is outside of the mesh and does "
            "not have it"
        )

    return run


def in_every_form(call: OpCall, function: LocalFunction) -> LocalFunction:
    """Adapt `function`, written for the functional form, to the operator's form.

    The form is `out=`, in-place or functional.
    """
    outs = call.schema.outs
    if any(output is not None for _, output in call.fixed):
        return lambda x, *args, **kwargs: x.copy_(function(x, *args, **kwargs))
    if not outs:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in outs]
        results = function(*args, **kwargs)
        sources = [results] if isinstance(results, Tensor) else results
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return run


# --- tables ---------------------------------------------------------------------------------------

Table = dict[OpOverload, Rule]


def family(rules: Mapping[str, Rule], *, unordered: bool = False) -> Table:
    """Return a table of rules by overload, given rules by `aten` names.

    Each key is a space-separated list of names. A name stands for all overloads that take tensors,
    functional and `out=`, and for the overloads of the in-place twin `name_`; `name.overload`
    stands for that overload, `name.start*` for all overloads that begin with `start`, and both come
    before a plain name. Names that this version of torch lacks are skipped, and so are overloads
    that no call with a DTensor leads to: overloads with a list to write to
    (`_foreach_add.List_out`), TorchScript's own overloads for lists and dicts of tensors, and
    overloads that take a dim by its name (torch 2.11 has them; a DTensor cannot have named dims).

    Args:
        rules: rules by lists of names.
        unordered: whether all of them are `unordered` (see `Rule`).

    Raises:
        ArgumentValueError: if two rules have the same overload.

    Example:
        >>> from .notation import product
        >>> table = family({"mm": product("m k, k n -> m n")})
        >>> torch.ops.aten.mm.out in table
        True
    """
    table: Table = {}
    exact: Table = {}
    for names, listed in rules.items():
        rule = replace(listed, unordered=True) if unordered else listed
        for name in names.split():
            base, _, chosen = name.partition(".")
            if chosen:
                exact |= dict.fromkeys(_matching_overloads(base, chosen), rule)
                continue
            for op in (*_tensor_overloads(base), *_tensor_overloads(base + "_")):
                if table.setdefault(op, rule) is not rule:
                    raise ArgumentValueError(f"{op} is listed twice in one table")
    return table | exact


def backward(names: str) -> str:
    """Return the names of the gradients of operators, for `family`."""
    return " ".join(f"{name}_backward" for name in names.split())


def _matching_overloads(name: str, chosen: str) -> list[OpOverload]:
    """Return the overloads of an operator whose names match `chosen`, which may end with `*`."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return []
    matching = [overload for overload in packet.overloads() if fnmatchcase(overload, chosen)]
    return [getattr(packet, overload) for overload in matching]


def _is_dim_name(name: str, name_of_type: str) -> bool:
    """Tell whether an argument takes a dim by its name."""
    return name == "dim" and "str" in name_of_type


def _tensor_overloads(name: str) -> Iterator[Any]:
    """Yield the overloads that take tensors, and do not fill a list or take a dim by its name."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return
    for overload in packet.overloads():
        # overloads of TorchScript
        if overload in ("Dict_Tensor", "Tensor_list"):
            continue
        op = getattr(packet, overload)
        types = [(argument, str(argument.type)) for argument in signature_of(op).arguments]
        takes_tensors = any("Tensor" in name_of_type for _, name_of_type in types)
        fills_list = any(
            argument.is_out and "List" in name_of_type for argument, name_of_type in types
        )
        by_name = any(_is_dim_name(argument.name, name_of_type) for argument, name_of_type in types)
        if takes_tensors and not (fills_list or by_name):
            yield op


def merge(**tables: Table) -> Table:
    """Merge several tables, each named, into one.

    Args:
        **tables: rules by operator, under the names that the error gives.

    Raises:
        ArgumentValueError: if two of them have the same operator.
    """
    merged: Table = {}
    owner: dict[object, str] = {}
    for name, table in tables.items():
        for op, rule in table.items():
            if op in merged:
                raise ArgumentValueError(
                    f"{op} has a rule in both tables {owner[op]!r} and {name!r}"
                )
            merged[op] = rule
            owner[op] = name
    return merged


@contextmanager
def overlay(table: Table) -> Iterator[None]:
    """Put the rules of `table` before all others inside the block.

    Blocks nest. A thread does not observe the tables of another thread.

    Args:
        table: a rule for each operator overload.

    Example:
        >>> import torch
        >>> from shoal_dtensor.rules import pointwise
        >>> with overlay({torch.ops.aten.softshrink.default: pointwise()}):
        ...     pass  # softshrink runs by this rule
    """
    with changed_by(lambda scope: scope.under(table)):
        yield
