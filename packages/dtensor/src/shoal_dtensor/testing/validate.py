"""`validate`: compares every row of an operator's rule with a brute-force computation.

It needs plain tensors only, and no process groups.

A row claims that inputs with its placements along a mesh axis give outputs with its placements. The
claim is tried for several axis sizes and shardings (even, uneven, ragged, with empty shards) and
for pairs of rows on two axes, including pairs that shard one dim together. In each case the inputs
are placed as the rows require, and the local function runs once per coordinate, on threads, so that
it may communicate. The outputs are compared with the claims of the rows, and the axes of its
collectives with the axes that the rows declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal_mesh.lab import Simulation, thread_meshes

from .._torch.operators import signature_of
from .._torch.tensors import pytree
from ..dispatch.assign import is_plain, placements_of, shard_dims
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

Kernel = Callable[..., Any] | None
# for each mesh axis, the sharding of its row's factor
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
        rule: the rule; the rule of the process's table when left out.
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
    # Threads are reused, because starting them would take as long as a case.
    with ThreadPoolExecutor(max((4, *ways))) as trial.threads:
        for row in trial.rows:
            _try_row(trial, report, row, ways)
        if pairs:
            for first, second in product(trial.rows, trial.rows):
                for shardings in _pair_shardings(trial, first, second):
                    trial.try_out(report, (2, 2), (first, second), shardings)
    return report


def _try_row(trial: CallTrial, report: Report, row: Row, ways: Sequence[int]) -> None:
    """Try every sharding of one row, and record it if its traffic never starts."""
    communicates = []
    for ranks in ways:
        for sharding in _shardings(trial, row, (ranks,)):
            used = trial.try_out(report, (ranks,), (row,), {0: sharding})
            communicates.append(bool(used))
    if row.traffic is not None and communicates and not any(communicates):
        case = f"{trial.op} {_format_call(trial.call)} {_format_rows((row,))}"
        report.idle.append(f"{case}: declares traffic but does not start a collective")


def _shardings(
    trial: CallTrial, row: Row, shape: tuple[int, ...], axes: tuple[int, ...] = (0,)
) -> Iterator[AnyDimSharding | None]:
    """Yield shardings of a row's factor.

    One is the sharding of `torch.chunk`, the others are ragged, with empty shards, or with all
    elements on one coordinate.
    """
    steps = trial.steps(row)
    if steps is None:
        yield None
        return
    ranks = prod(shape)
    # An odd size, so that windows with an even stride cross the border.
    first = min(steps, steps // 2 | 1)
    between = (0,) * (ranks - 2)
    even = chunk_sizes(steps, ranks)
    all_on_last = (0, *between, steps)
    uneven = (first, *between, steps - first)
    candidates = [even, all_on_last, uneven]
    for sizes in dict.fromkeys(candidates):
        is_even = len(set(sizes)) == 1
        if is_even or not row.even:
            yield DimSharding(axes, shape, sizes)
    is_unordered = trial.rule.unordered and is_plain(row) and trial.rule.kind != "each"
    if is_unordered and not row.even and steps % 2 == 0:
        half = DimSharding(axes, shape, chunk_sizes(steps // 2, ranks))
        yield fold_levels({2: half}, steps)


def _pair_shardings(
    trial: CallTrial, first: Row, second: Row
) -> Iterator[dict[int, AnyDimSharding | None]]:
    """Yield the shardings of two rows on a mesh of (2, 2), by axis: one row along each axis.

    A row that is paired with itself has one sharding over both axes.
    """
    if first is second:
        for sharding in _shardings(trial, first, (2, 2), (0, 1)):
            yield {0: sharding, 1: sharding}
        return
    entries_of_first = first.inputs + first.outputs
    entries_of_second = second.inputs + second.outputs
    entries = [*zip(entries_of_first, entries_of_second, strict=True)]
    # Reductions of two kinds do not commute, so such rows are not combined.
    if any(isinstance(a, Partial) and isinstance(b, Partial) and a != b for a, b in entries):
        return
    shardings_of_first = [*_shardings(trial, first, (2,), (0,))]
    shardings_of_second = [*_shardings(trial, second, (2,), (1,))]
    pairs: Iterable[tuple[AnyDimSharding | None, AnyDimSharding | None]]
    if any(isinstance(a, S) and isinstance(b, S) and a.dim == b.dim for a, b in entries):
        # Both rows shard one dim, so a sharding that fits one row depends on the other. Everything
        # on the first coordinate is tried too.
        _add_all_on_first(shardings_of_first)
        _add_all_on_first(shardings_of_second)
        pairs = product(shardings_of_first, shardings_of_second)
    else:
        pairs = zip(shardings_of_first, shardings_of_second, strict=False)
    for one, other in pairs:
        yield {0: one, 1: other}


def _add_all_on_first(shardings: list[AnyDimSharding | None]) -> None:
    """Add a sharding that has all elements on the first coordinate, over the axes of the others."""
    like = shardings[0] if shardings else None
    if isinstance(like, DimSharding) and like.length:
        sizes = (like.length, *(0,) * (like.shards - 1))
        shardings.append(DimSharding(like.axes, like.axis_sizes, sizes))


# the norms that replace `ANY_NORM` in rows
NORMS = (Partial("norm2"), Partial("norm3.5"), Partial("norm-1.5"))
# the seed of the default generators, on every rank and on the single device
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
        self.outs: tuple[Any, ...] = tuple(a.name for a in signature_of(op).arguments if a.is_out)
        read = {name: value for name, value in kwargs.items() if name not in self.outs}
        self.leaves, self.tree = pytree.tree_flatten((args, read))
        self.tensors: list[Tensor] = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        out_arguments = [kwargs[name] for name in self.outs]
        outs = [t.clone() for t in flatten(out_arguments)]
        self.results: tuple[Any, list[Tensor]] = _alone(
            partial(self._run_on_copies, self.tensors, outs)
        )
        args, kwargs = pytree.tree_map(_meta, (args, self.kwargs))
        result, _ = self.results
        inputs = tuple(map(_meta, self.tensors))
        outputs = tuple(map(_meta, flatten([result])))
        self.call: OpCall = OpCall(op, args, kwargs, inputs, outputs=outputs)
        listed = _rows_of_lists(rule, self.call) if rule.kind == "each" else rule.rows_of(self.call)
        # Only rows in which written inputs have the placement of the result; `propagate` refuses
        # the others.
        self.rows: list[Row] = [row for row in with_norms(listed, NORMS) if self._keeps_writes(row)]

    def _keeps_writes(self, row: Row) -> bool:
        """Tell whether every input that is written has the placement of the output that it is."""
        if not row.outputs:
            return True
        written = [(i, output) for i, output in self.call.fixed if output is not None]
        return all(row.inputs[i] == row.outputs[output] for i, output in written)

    def _run_on_copies(
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
        for name in self.outs:
            kwargs[name] = pytree.tree_map(lambda _: next(targets), self.kwargs[name])
        run = function or self.kernel
        return run(*args, **kwargs), copies

    def steps(self, row: Row) -> int | None:
        """Return the number of steps that the row's factor has; None if it shards nothing."""
        pairs = [*zip(row.inputs, self.tensors, strict=True)]
        for entry, tensor in reversed(pairs):
            if isinstance(entry, S) and entry.map is None:
                return tensor.shape[entry.dim] // (entry.unit * entry.runs)
        return None

    def try_out(
        self, report: Report, shape: tuple[int, ...], rows: tuple[Row, ...], shardings: Shardings
    ) -> set[int]:
        """Run a case, record errors, and return mesh axes of its local functions' collectives."""
        meshes = self.meshes_of(shape)
        simulation = Simulation.of(meshes[0])
        simulation.used_groups.clear()
        for mesh in meshes:
            # Otherwise the first random operator would run a collective that is not the rule's.
            count_as_checked(mesh)
        # the entries of each row; below they are transposed to the entries of each operand
        entries_of_rows = [row.inputs + row.outputs for row in rows]
        metas = (*self.call.tensors, *self.call.outputs)
        operands = zip(metas, zip(*entries_of_rows, strict=True), strict=True)
        try:
            layouts = [_layout(meta, entries, rows, shardings) for meta, entries in operands]
            terms = []
            for tensor, layout in zip(self.tensors, layouts, strict=False):
                terms.append(deal(tensor, layout.placements, shape))
        except NotImplementedError:
            return set()
        report.checked += 1
        calls = []
        for mesh in meshes:
            specs = tuple([Spec.sharded(mesh, *layout) for layout in layouts])
            inputs = specs[: len(self.tensors)]
            calls.append(LocalCall(self.call, inputs, specs[len(self.tensors) :]))
        declared = {axis for axis, row in enumerate(rows) if row.traffic is not None}
        problems = self._run_on_ranks(calls, terms, simulation, communicates=bool(declared))
        used = {axis for ranks in simulation.used_groups for axis in simulation.axes_of(ranks)}
        undeclared = used - declared
        if undeclared:
            problem = (
                f"communicates over axes {sorted(undeclared)}, whose rows do not declare traffic"
            )
            problems.insert(0, problem)
        if problems:
            sizes = {}
            for axis, sharding in shardings.items():
                if sharding is not None:
                    sizes[axis] = sharding.placements(0)
            case = f"{self.op} {_format_call(self.call)} {_format_rows(rows)}"
            report.wrong.append(f"{case} in shards {sizes} on {shape}: {problems[0]}")
        return used

    def _run_on_ranks(
        self,
        calls: Sequence[LocalCall],
        terms: Sequence[Any],
        simulation: Simulation,
        *,
        communicates: bool,
    ) -> list[str]:
        """Run the rule's local functions on all ranks; return the differences and errors."""
        functions = [partial(self._run_local, call, terms, communicates) for call in calls]
        try:
            if communicates:
                results = simulation.run(functions, SEED, self.threads)
            else:
                results = [_alone(function) for function in functions]
            return [*self._problems(results, calls[0])]
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]

    def _run_local(
        self, local_call: LocalCall, terms: Sequence[Any], communicates: bool
    ) -> tuple[Any, list[Tensor]]:
        """Run the rule's local function on one rank's shards, as `_run` does."""
        shards = []
        for by_coordinate, spec in zip(terms, local_call.inputs, strict=True):
            assert spec.coordinate is not None, "every rank is in the mesh"
            shards.append(part_of(by_coordinate[spec.coordinate], spec, spec.coordinate))
        targets = []
        if self.outs:
            targets = [
                torch.empty(spec.local_shape, dtype=spec.dtype, device="cpu")
                for spec in local_call.outputs
            ]
        return self._run_on_copies(
            shards, targets, local_function(self.rule, local_call, communicates)
        )

    def _problems(self, results: Sequence[Any], local_call: LocalCall) -> Iterator[str]:
        """Describe the differences: outputs first, then the inputs that the operator writes."""
        expected_result, inputs = self.results
        got = [result for result, _ in results]
        after = [copies for _, copies in results]
        expected = list(flatten([expected_result]))
        has_tensors = expected or self.call.written
        if not has_tensors and any(result != expected_result for result in got):
            yield f"results {got}, expected {expected_result}"
        outputs_of_ranks = [list(flatten([result])) for result in got]
        for i, value in enumerate(expected):
            parts = [outputs[i] for outputs in outputs_of_ranks]
            yield from self._differences(f"output {i}", value, parts, local_call.outputs[i])
        for i in self.call.written:
            parts = [copies[i] for copies in after]
            yield from self._differences(
                f"written input {i}", inputs[i], parts, local_call.inputs[i]
            )

    def _differences(
        self, name: str, value: Tensor, parts: Sequence[Tensor], spec: Spec
    ) -> Iterator[str]:
        """Describe the differences between the parts of the ranks and those of the global value."""
        part_at = dict(zip(coordinates(spec), parts, strict=True))
        is_misshapen = False
        for coordinate, part in part_at.items():
            shape = spec.local_shape_at(coordinate)
            if (part.shape, part.dtype) != (shape, value.dtype):
                is_misshapen = True
                got = f"{tuple(part.shape)} {part.dtype}"
                expected = f"{tuple(shape)} {value.dtype}"
                yield f"{name} at {coordinate}: {got}, should be {expected}"
        if is_misshapen or not self.exact:
            return
        totals = gather(part_at, spec.placements, spec.mesh.shape)
        for coordinate, total in totals.items():
            wanted = part_of(value, spec, coordinate)
            if not _is_close(total, wanted):
                yield f"{name} at {coordinate}: {total.tolist()}, should be {wanted.tolist()}"


def _is_close(total: Tensor, wanted: Tensor) -> bool:
    # Most tensors are equal, which is faster to test.
    if torch.equal(total, wanted):
        return True
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    return torch.allclose(total.to(wide), wanted.to(wide), 1e-6, 1e-7, equal_nan=True)


def _alone(function: Callable[[], Any]) -> Any:
    """Return the result of a function on the single device; a collective in it raises."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.default_generator.manual_seed(SEED)
        return function()


def _meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return TensorMeta(tuple(value.shape), value.stride(), value.dtype)


class _TrialLayout(NamedTuple):
    """The arguments of `Spec.sharded` after the mesh."""

    placements: tuple[Placement, ...]
    meta: TensorMeta
    by_dim: dict[int, AnyDimSharding]


def _layout(
    meta: TensorMeta, entries: Sequence[Entry], rows: Sequence[Row], shardings: Shardings
) -> _TrialLayout:
    """Return the layout that the entries of rows give a tensor.

    `shardings` has the sharding of each axis's factor.
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
            sizes = chunk_sizes(steps, len(sharding.sizes))
            sharding = DimSharding(sharding.axes, sharding.axis_sizes, sizes)
        fitting[axis] = (rows[axis], sharding)
    by_dim = shard_dims(entries, fitting, meta.shape)
    if by_dim is None:
        raise NotImplementedError("two rows shard one dim, and their shardings do not fit together")
    return _TrialLayout(placements_of(entries, by_dim), meta, by_dim)


def _rows_of_lists(rule: Rule, call: OpCall) -> Iterator[Row]:
    """Yield rows of a `foreach` call in which all elements take the row of the same number."""
    elements = [*elements_of(call)]
    rows_of_elements = [rule.rows_of(element.call) for element in elements]
    for rows in zip(*rows_of_elements, strict=False):
        inputs: dict[int, Entry] = dict.fromkeys(range(len(call.tensors)), R)
        outputs: dict[int, Entry] = dict.fromkeys(range(len(call.outputs)), R)
        for row, (_, indices, results) in zip(rows, elements, strict=True):
            inputs |= zip(indices, row.inputs, strict=True)
            outputs |= zip(results, row.outputs, strict=True)
        yield replace(rows[0], inputs=tuple(inputs.values()), outputs=tuple(outputs.values()))


def _format_call(call: OpCall) -> str:
    """Format shapes and arguments of a call in one line."""
    shapes = []
    for tensor in call.tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shapes.append(f"{dtype}{list(tensor.shape)}")
    others = {}
    for name, value in call.arguments.items():
        has_tensors = next(flatten(value), None) is not None
        if not has_tensors and value not in (None, [], False):
            others[name] = value
    return f"({', '.join(shapes)}) {others}"


def _format_rows(rows: Sequence[Row]) -> str:
    """Format rows in one line: entries of inputs, an arrow, entries of outputs."""
    texts = []
    for row in rows:
        inputs = " ".join(map(str, row.inputs))
        outputs = " ".join(map(str, row.outputs))
        texts.append(f"{inputs} -> {outputs}")
    return " and ".join(texts)
