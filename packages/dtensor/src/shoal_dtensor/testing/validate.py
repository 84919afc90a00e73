"""`validate`: compares every row of an operator's rule with a brute-force computation.

It works on plain tensors and without process groups.

A row claims that inputs with its placements along a mesh axis give outputs with its placements. The
claim is tried for several axis sizes and shardings (even, uneven, ragged, with empty shards) and
for pairs of rows on two axes, including pairs that shard one dim together. In each case the inputs
are placed as the rows require, and the local function runs once per coordinate, on threads, so that
it may communicate. The outputs are compared with the claims of the rows, and the axes of its
collectives with the axes that the rows declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import pytree
from ..dispatch.assign import is_plain, placed, placements_of
from ..dispatch.propagate import elements_of
from ..layout.dim_sharding import AnyDimSharding, DimSharding, chunk_sizes, fold_levels
from ..layout.placements import Partial, Placement
from ..layout.spec import Spec
from ..layout.tensor_meta import TensorMeta
from ..rng.state import count_as_checked
from ..rules.all_rules import TABLE
from ..rules.language.rule import (
    Entry,
    LocalCall,
    OpCall,
    R,
    Row,
    Rule,
    S,
    flatten,
    local_function,
    with_norms,
)
from .simulate import coordinates, deal, gather, part_of
from .thread_ranks import Simulation, on_threads, thread_meshes

Kernel = Callable[..., Any] | None
# of each mesh axis, for the factor of its row
Shardings = Mapping[int, AnyDimSharding | None]


@dataclass
class Report:
    """The result of validating one call.

    Attributes:
        checked: the number of cases (rows, mesh shape, shardings) that ran.
        wrong: one line for each case whose result contradicts the rows, or that started a
            collective over an axis whose row declares no traffic.
        idle: one line for each row that declares traffic and started no collective in any case.
    """

    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


def validate(
    op: Any,
    *args: Any,
    rule: Rule | None = None,
    ways: Sequence[int] = (2, 3, 4),
    pairs: bool = True,
    exact: bool = True,
    kernel: Kernel = None,
    **kwargs: Any,
) -> Report:
    """Check every row that a rule gives for one call.

    Args:
        op: an operator overload.
        args: its global arguments.
        rule: the rule; the rule of the standing tables when left out.
        ways: sizes of the mesh axis to try.
        pairs: whether to try pairs of rows on a 2 x 2 mesh too.
        exact: False compares shapes and dtypes only (operators whose values are undefined).
        kernel: a function that computes the operator if it does not have a kernel for this device.
        kwargs: its keyword arguments.

    Returns:
        How many cases ran, which were wrong, and which rows declare traffic that they never start.

    Example:
        >>> validate(torch.ops.aten.relu.default, torch.randn(5, 2)).wrong
        []
    """
    trial = CallTrial(op, args, kwargs, rule or TABLE[op], exact=exact, kernel=kernel)
    report = Report()
    # started for each case, they take as long as it
    with ThreadPoolExecutor(max((4, *ways))) as trial.threads:
        for row in trial.rows:
            cases = [(n, sharding) for n in ways for sharding in _shardings(trial, row, (n,))]
            used = [trial.try_out(report, (n,), (row,), {0: sharding}) for n, sharding in cases]
            if row.traffic is not None and cases and not any(used):
                where = f"{op} {_format_call(trial.call)} {_format_rows((row,))}"
                report.idle.append(f"{where}: declares traffic, starts no collective")
        for first, second in product(trial.rows, trial.rows) if pairs else ():
            for shardings in _pair_shardings(trial, first, second):
                trial.try_out(report, (2, 2), (first, second), shardings)
    return report


def _shardings(
    trial: CallTrial, row: Row, shape: tuple[int, ...], axes: tuple[int, ...] = (0,)
) -> Iterator[AnyDimSharding | None]:
    """Yield shardings of a row's factor.

    They are as `torch.chunk` makes them, ragged, with empty shards, and with everything on one
    coordinate.
    """
    steps = trial.steps(row)
    if steps is None:
        yield None
        return
    n = prod(shape)
    # odd, so that windows of an even stride cross the border
    first = min(steps, steps // 2 | 1)
    sizes = [
        chunk_sizes(steps, n),
        (*(0,) * (n - 1), steps),
        (first, *(0,) * (n - 2), steps - first),
    ]
    for one in dict.fromkeys(sizes):
        if len(set(one)) == 1 or not row.even:
            yield DimSharding(axes, shape, one)
    if (
        trial.rule.unordered
        and is_plain(row)
        and trial.rule.kind != "each"
        and not row.even
        and steps % 2 == 0
    ):
        yield fold_levels({2: DimSharding(axes, shape, chunk_sizes(steps // 2, n))}, steps)


def _pair_shardings(
    trial: CallTrial, first: Row, second: Row
) -> Iterator[dict[int, AnyDimSharding | None]]:
    if first is second:
        for sharding in _shardings(trial, first, (2, 2), (0, 1)):
            yield {0: sharding, 1: sharding}
        return
    entries = [*zip(first.inputs + first.outputs, second.inputs + second.outputs, strict=True)]
    if any(isinstance(a, Partial) and isinstance(b, Partial) and a != b for a, b in entries):
        return  # reductions of two kinds do not commute
    shardings = [
        [*_shardings(trial, row, (2,), (axis,))] for axis, row in enumerate((first, second))
    ]
    if any(isinstance(a, S) and isinstance(b, S) and a.dim == b.dim for a, b in entries):
        # Both rows shard one dim, so a sharding that fits one row depends on the other. Everything
        # on the first coordinate is tried too.
        for of_row in shardings:
            if isinstance(one := of_row[0] if of_row else None, DimSharding) and one.length:
                of_row.append(
                    DimSharding(one.axes, one.axis_sizes, (one.length, *(0,) * (one.shards - 1)))
                )
        pairs = [*product(*shardings)]
    else:
        pairs = [*zip(*shardings, strict=False)]
    for one, other in pairs:
        yield {0: one, 1: other}


# what rows about any norm are tried with
NORMS = (Partial("norm2"), Partial("norm3.5"), Partial("norm-1.5"))
# of the default generators, on every rank and on the single device
SEED = 0


class CallTrial:
    """One call of an operator with global tensors, to be run in shards."""

    def __init__(
        self,
        op: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        rule: Rule,
        *,
        exact: bool = True,
        kernel: Kernel = None,
    ) -> None:
        self.op = op
        self.rule = rule
        self.exact = exact
        self.kwargs: dict[str, Any] = dict(kwargs)
        self.threads: Executor | None = None
        self.meshes_of = cache(thread_meshes)
        self.kernel: Any = kernel or op
        self.outs: tuple[Any, ...] = tuple(a.name for a in op._schema.arguments if a.is_out)
        read = {name: value for name, value in kwargs.items() if name not in self.outs}
        self.leaves, self.tree = pytree.tree_flatten((args, read))
        self.tensors: list[Tensor] = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        outs = [t.clone() for t in flatten([kwargs[name] for name in self.outs])]
        self.results: tuple[Any, list[Tensor]] = _alone(partial(self._run, self.tensors, outs))
        args, kwargs = pytree.tree_map(_meta, (args, self.kwargs))
        outputs = tuple(map(_meta, flatten([self.results[0]])))
        self.call: OpCall = OpCall(
            op, args, kwargs, tuple(map(_meta, self.tensors)), outputs=outputs
        )
        listed = _rows_of_lists(rule, self.call) if rule.kind == "each" else rule.rows_of(self.call)
        # Written inputs have the placement of the result already: the propagator refuses other
        # rows.
        written = [(i, o) for i, o in self.call.fixed if o is not None]
        self.rows: list[Row] = [
            row
            for row in with_norms(listed, NORMS)
            if not row.outputs or all(row.inputs[i] == row.outputs[o] for i, o in written)
        ]

    def _run(
        self,
        tensors: Sequence[Tensor],
        outs: Sequence[Tensor],
        function: Callable[..., Any] | None = None,
    ) -> tuple[Any, list[Tensor]]:
        """Return the result on copies of `tensors`, and the copies afterwards."""
        copies = [t.clone() for t in tensors]
        numbered = iter(copies)

        def fresh(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return value.clone_state()
            return next(numbered) if isinstance(value, Tensor) else value

        args, kwargs = pytree.tree_unflatten(map(fresh, self.leaves), self.tree)
        targets = iter(outs)
        kwargs |= {
            name: pytree.tree_map(lambda _: next(targets), self.kwargs[name]) for name in self.outs
        }
        return (function or self.kernel)(*args, **kwargs), copies

    def steps(self, row: Row) -> int | None:
        """Return the number of steps that the row's factor has; None if it shards nothing."""
        pairs = [*zip(row.inputs, self.tensors, strict=True)]
        sharded = [(e, t.shape[e.dim]) for e, t in pairs if isinstance(e, S) and e.map is None]
        return next(
            (length // (entry.unit * entry.runs) for entry, length in reversed(sharded)), None
        )

    def try_out(
        self, report: Report, shape: tuple[int, ...], rows: tuple[Row, ...], shardings: Shardings
    ) -> set[int]:
        """Run one case and record errors; return the mesh axes of its local functions' collectives."""
        meshes = self.meshes_of(shape)
        simulation = Simulation.of(meshes[0])
        simulation.used.clear()
        for mesh in meshes:
            # a collective of the first random operator, not of the rule
            count_as_checked(mesh)
        # of each operand, along the mesh axes
        entries = zip(*(row.inputs + row.outputs for row in rows), strict=True)
        operands = [*zip((*self.call.tensors, *self.call.outputs), entries, strict=True)]
        n = len(self.tensors)
        try:
            layouts = [_layout(*operand, rows, shardings) for operand in operands]
            terms = [
                deal(t, placements, shape)
                for t, (placements, *_) in zip(self.tensors, layouts, strict=False)
            ]
        except NotImplementedError:
            return set()
        report.checked += 1
        specs = [tuple([Spec.sharded(mesh, *layout) for layout in layouts]) for mesh in meshes]
        of_ranks = [LocalCall(self.call, each[:n], each[n:]) for each in specs]
        try:
            communicates = any(row.traffic is not None for row in rows)
            functions = [
                partial(self._run_local, local_call, terms, communicates) for local_call in of_ranks
            ]
            results = (
                on_threads(functions, meshes, SEED, self.threads)
                if communicates
                else [*map(_alone, functions)]
            )
            problems = [*self._problems(results, of_ranks[0])]
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        used = {axis for ranks in simulation.used for axis in simulation.axes_of(ranks)}
        if undeclared := used - {axis for axis, row in enumerate(rows) if row.traffic is not None}:
            problems.insert(
                0, f"communicates over axes {sorted(undeclared)}, whose rows declare no traffic"
            )
        if problems:
            sizes = {
                axis: sharding.placements(0)
                for axis, sharding in shardings.items()
                if sharding is not None
            }
            report.wrong.append(
                f"{self.op} {_format_call(self.call)} {_format_rows(rows)} in shards {sizes} on "
                f"{shape}: {problems[0]}"
            )
        return used

    def _run_local(
        self, local_call: LocalCall, terms: Sequence[Any], communicates: bool
    ) -> tuple[Any, list[Tensor]]:
        """Run the rule's local function on one rank's shards, as `_run` does."""
        shards = []
        for by_coordinate, spec in zip(terms, local_call.inputs, strict=True):
            assert spec.coordinate is not None, "every rank is in the mesh"
            shards.append(part_of(by_coordinate[spec.coordinate], spec, spec.coordinate))
        targets = [
            torch.empty(spec.local_shape, dtype=spec.dtype, device="cpu")
            for spec in local_call.outputs
            if self.outs
        ]
        return self._run(shards, targets, local_function(self.rule, local_call, communicates))

    def _problems(self, results: Sequence[Any], local_call: LocalCall) -> Iterator[str]:
        """Describe the differences: outputs first, then the inputs that the operator writes."""
        expected = list(flatten([self.results[0]]))
        inputs = self.results[1]
        got = [list(flatten([result[0]])) for result in results]
        if (
            not expected
            and not self.call.written
            and any(result[0] != self.results[0] for result in results)
        ):
            yield f"results {[result[0] for result in results]}, expected {self.results[0]}"
        after = [result[1] for result in results]
        written = self.call.written
        compared = [
            (f"output {i}", value, got, i, local_call.outputs[i])
            for i, value in enumerate(expected)
        ]
        compared += [
            (f"written input {i}", inputs[i], after, i, local_call.inputs[i]) for i in written
        ]
        for name, value, of_ranks, i, spec in compared:
            part_at = {
                c: of_rank[i] for c, of_rank in zip(coordinates(spec), of_ranks, strict=True)
            }
            misshapen = [
                c
                for c, t in part_at.items()
                if (t.shape, t.dtype) != (spec.local_shape_at(c), value.dtype)
            ]
            for c in misshapen:
                shape = tuple(part_at[c].shape)
                dtype = part_at[c].dtype
                yield f"{name} at {c}: {shape} {dtype}, should be {tuple(spec.local_shape_at(c))} {value.dtype}"
            wide = torch.complex128 if value.is_complex() else torch.float64
            totals = (
                gather(part_at, spec.placements, spec.mesh.shape)
                if self.exact and not misshapen
                else {}
            )
            for c, total in totals.items():
                wanted = part_of(value, spec, c)
                equal = torch.equal(total, wanted)  # as most are, which is sooner seen
                if not equal and not torch.allclose(
                    total.to(wide), wanted.to(wide), 1e-6, 1e-7, equal_nan=True
                ):
                    yield f"{name} at {c}: {total.tolist()}, should be {wanted.tolist()}"


def _alone(function: Callable[[], Any]) -> Any:
    """Return the result of a function that starts no collective; a collective raises."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.default_generator.manual_seed(SEED)
        return function()


def _meta(value: Any) -> Any:
    return (
        TensorMeta(tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, Tensor)
        else value
    )


def _layout(
    meta: TensorMeta, entries: Sequence[Entry], rows: Sequence[Row], shardings: Shardings
) -> tuple[tuple[Placement, ...], TensorMeta, dict[int, AnyDimSharding]]:
    """Return the placements, meta and dim shardings that entries of rows give a tensor.

    The sharding of each axis's factor is given.
    """
    fitting: dict[int, tuple[Row, AnyDimSharding]] = {}
    for axis, entry in enumerate(entries):
        if not isinstance(entry, S):
            continue
        sharding = shardings[axis]
        steps = meta.shape[entry.dim] // (entry.unit * entry.runs)
        assert sharding is not None, "a row with sharded entries has a factor"
        if isinstance(sharding, DimSharding) and entry.map is None and sharding.length != steps:
            # The elements of a `foreach` call differ in size.
            sharding = DimSharding(
                sharding.axes, sharding.axis_sizes, chunk_sizes(steps, len(sharding.sizes))
            )
        fitting[axis] = rows[axis], sharding
    by_dim = placed(entries, fitting, meta.shape)
    if by_dim is None:
        raise NotImplementedError("two rows shard one dim, and their shardings do not fit together")
    return placements_of(entries, by_dim), meta, by_dim


def _rows_of_lists(rule: Rule, call: OpCall) -> Iterator[Row]:
    """Yield rows of a `foreach` call in which all elements take the row of the same number."""
    elements = [*elements_of(call)]
    for rows in zip(*(rule.rows_of(element) for element, _, _ in elements), strict=False):
        inputs: dict[int, Entry] = dict.fromkeys(range(len(call.tensors)), R)
        outputs: dict[int, Entry] = dict.fromkeys(range(len(call.outputs)), R)
        for row, (_, indices, results) in zip(rows, elements, strict=True):
            inputs |= zip(indices, row.inputs, strict=True)
            outputs |= zip(results, row.outputs, strict=True)
        yield replace(rows[0], inputs=tuple(inputs.values()), outputs=tuple(outputs.values()))


def _format_call(call: OpCall) -> str:
    """Format shapes and arguments of a call in one line."""
    shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in call.tensors]
    others = {
        n: v for n, v in call.bound.items() if not [*flatten(v)] and v not in (None, [], False)
    }
    return f"({', '.join(shapes)}) {others}"


def _format_rows(rows: Sequence[Row]) -> str:
    """Format rows in one line: entries of inputs, an arrow, entries of outputs."""
    return " and ".join(
        f"{' '.join(map(str, row.inputs))} -> {' '.join(map(str, row.outputs))}" for row in rows
    )
