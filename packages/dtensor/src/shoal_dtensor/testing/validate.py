"""`validate`: every row of an operator's rule against brute force, on plain tensors and without process groups.

A row claims: inputs that lie so along a mesh axis give outputs that lie so.  The claim is tried for several axis sizes
and cuts (even, uneven, ragged, with empty pieces) and for pairs of rows on two axes, those that cut one dim together
among them: the inputs are laid out as the rows say, the local function runs once per coordinate (on threads, so that
it may communicate), and what the outputs' entries mean is compared with the operator on the global tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh

from ..assign import is_plain, placed
from ..chunks import Cut, chunk_sizes
from ..folded import AnyCut, FoldedCut, folded
from ..placements import Partial
from ..rules import Entry, LocalCall, OpCall, Row, Rule, S, flatten, with_norms
from ..rules.default import TABLE
from ..spec import Spec, TensorMeta
from .calls import Call
from .parts import deal, gather
from .ranks import ThreadMesh, on_threads, thread_meshes
from .simulate import part_of

__all__ = ["Report", "Trial", "validate"]

Coordinate = tuple[int, ...]


@dataclass
class Report:
    """What validating one call found.

    Attributes:
        checked: how many cases (rows, mesh shape, cuts) ran.
        wrong: one line for each case whose result was not what the rows say.
    """

    checked: int = 0
    wrong: list[str] = field(default_factory=list)


def validate(
    op: Any,
    *args: Any,
    rule: Rule | None = None,
    ways: Sequence[int] = (2, 3, 4),
    pairs: bool = True,
    exact: bool = True,
    kernel: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Check every row that a rule gives for one call.

    Args:
        op: an operator overload.
        args: its global arguments.
        rule: the rule; that of the standing tables when left out.
        ways: sizes of the mesh axis to try.
        pairs: whether to try pairs of rows on a 2 x 2 mesh too.
        exact: False compares shapes and dtypes only (operators whose values are undefined).
        kernel: what computes the operator where it has no kernel for this device.
        kwargs: its keyword arguments.

    Example:
        >>> validate(torch.ops.aten.relu.default, torch.randn(5, 2)).wrong
        []
    """
    trial = Trial(Call(op, args, kwargs), rule or TABLE[op], exact=exact, kernel=kernel)
    report = Report()
    for row in trial.rows:
        for n in ways:
            for cut in _cuts(trial, row, (n,)):
                trial.try_out(report, (n,), (row,), {0: cut})
    for first, second in product(trial.rows, trial.rows) if pairs else ():
        for cuts in _pair_cuts(trial, first, second):
            trial.try_out(report, (2, 2), (first, second), cuts)
    return report


def _cuts(trial: Trial, row: Row, shape: tuple[int, ...], axes: tuple[int, ...] = (0,)) -> Iterator[AnyCut | None]:
    """Cuts of a row's factor: as torch.chunk does, ragged, with empty pieces, everything on one coordinate."""
    steps = trial.steps(row)
    if steps is None:
        yield None
        return
    n = prod(shape)
    sizes = [chunk_sizes(steps, n), (*(0,) * (n - 1), steps), (steps - steps // 3, *(0,) * (n - 2), steps // 3)]
    for one in dict.fromkeys(sizes):
        if len(set(one)) == 1 or not row.even:
            yield Cut(axes, shape, one)
    if trial.rule.unordered and is_plain(row) and not trial.rule.each and not row.even and steps % 2 == 0:
        yield folded({2: Cut(axes, shape, chunk_sizes(steps // 2, n))}, steps)


def _pair_cuts(trial: Trial, first: Row, second: Row) -> Iterator[dict[int, AnyCut | None]]:
    if first is second:
        for cut in _cuts(trial, first, (2, 2), (0, 1)):
            yield {0: cut, 1: cut}
    elif not _mix(first, second):
        cuts = [[*_cuts(trial, row, (2,), (axis,))] for axis, row in enumerate((first, second))]
        if _meet(first, second):  # what fits together there depends on both
            cuts = [[*of_row, *_on_the_first(of_row)] for of_row in cuts]
        for one, other in product(*cuts) if _meet(first, second) else zip(*cuts, strict=False):
            yield {0: one, 1: other}


def _mix(first: Row, second: Row) -> bool:
    """Whether two rows ask for reductions of two kinds, which do not commute."""
    return any(isinstance(a, Partial) and isinstance(b, Partial) and a != b for a, b in _pairs(first, second))


def _meet(first: Row, second: Row) -> bool:
    """Whether two rows cut one dim of an operand."""
    return any(isinstance(a, S) and isinstance(b, S) and a.dim == b.dim for a, b in _pairs(first, second))


def _pairs(first: Row, second: Row) -> Iterator[tuple[Entry, Entry]]:
    return zip(first.inputs + first.outputs, second.inputs + second.outputs, strict=True)


def _on_the_first(cuts: Sequence[AnyCut | None]) -> Iterator[Cut]:
    """Everything on the first coordinate."""
    for cut in cuts[:1]:
        if isinstance(cut, Cut) and cut.length:
            yield Cut(cut.axes, cut.axis_sizes, (cut.length, *(0,) * (len(cut.sizes) - 1)))


NORMS = (Partial("norm2"), Partial("norm3.5"), Partial("norm-1.5"))  # what rows about any norm are tried with
SEED = 0  # of the default generators, on every rank and on the single device


class Trial:
    """One call of an operator with global tensors, to be run in pieces."""

    def __init__(self, call: Call, rule: Rule, *, exact: bool = True, kernel: Callable[..., Any] | None = None) -> None:
        op, args, kwargs = call.op, call.args, call.kwargs
        self.op, self.args, self.kwargs, self.rule = op, args, dict(kwargs), rule
        self.exact, self.kernel = exact, kernel or op
        self.outs = tuple(a.name for a in op._schema.arguments if a.is_out)
        read = [*args, *(value for name, value in kwargs.items() if name not in self.outs)]
        self.tensors: list[Tensor] = [*flatten(read)]
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            self.results = self._run(self.tensors, [t.clone() for t in flatten([kwargs[name] for name in self.outs])])
        metas = tuple(_meta(t) for t in self.tensors)
        outputs = tuple(_meta(t) for t in flatten([self.results[0]]))
        self.call = OpCall(op, _mapped(_meta, args), _mapped(_meta, self.kwargs), metas, outputs)
        self.rows = self._rows()

    def _rows(self) -> list[Row]:
        found = _rows_of_lists(self.rule, self.call) if self.rule.each else self.rule.rows(self.call)
        rows = with_norms(found, NORMS)
        return [row for row in rows if self._keeps_written(row)]

    def _keeps_written(self, row: Row) -> bool:
        """Whether written inputs already lie as the result does; the propagator refuses other rows."""
        if not self.call.written or not row.outputs:
            return True
        pairs = zip(self.call.written, self.call.rewritten, strict=False)
        return all(row.inputs[i] == row.outputs[o] for i, o in pairs)

    def _run(
        self, tensors: Sequence[Tensor], outs: Sequence[Tensor], function: Callable[..., Any] | None = None
    ) -> tuple[Any, list[Tensor]]:
        """The result on copies of `tensors`, and the copies afterwards."""
        copies = [t.clone() for t in tensors]
        numbered = iter(copies)

        def fresh(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return value.clone_state()
            return next(numbered) if isinstance(value, Tensor) else value

        args = _mapped(fresh, self.args)
        kwargs = _mapped(fresh, {name: value for name, value in self.kwargs.items() if name not in self.outs})
        targets = iter(outs)
        kwargs |= {name: _mapped(lambda _: next(targets), self.kwargs[name]) for name in self.outs}
        return (function or self.kernel)(*args, **kwargs), copies

    def steps(self, row: Row) -> int | None:
        """How many steps the row's factor has; None if it cuts nothing."""
        found = None
        for tensor, entry in zip(self.tensors, row.inputs, strict=True):
            if isinstance(entry, S) and entry.cut is None:
                found = tensor.shape[entry.dim] // (entry.unit * entry.runs)
        return found

    def try_out(
        self, report: Report, shape: tuple[int, ...], rows: tuple[Row, ...], cuts: dict[int, AnyCut | None]
    ) -> None:
        """Run one case and note it."""
        meshes = thread_meshes(shape)
        coordinates = [mesh.get_coordinate() for mesh in meshes]
        try:
            inputs = [self._dealt(i, rows, cuts, shape, coordinates) for i in range(len(self.tensors))]
            self._outputs(meshes[0], rows, cuts)
        except NotImplementedError:
            return
        report.checked += 1
        try:
            functions = [
                partial(
                    self._run,
                    [parts[coordinate] for parts in inputs],
                    self._targets(mesh, rows, cuts),
                    self._local(mesh, rows, cuts),
                )
                for mesh, coordinate in zip(meshes, coordinates, strict=True)
            ]
            results = on_threads(functions, meshes, SEED)
            problems = [*self._problems(results, meshes, rows, cuts)]
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        if problems:
            sizes = {axis: cut.placements(0) for axis, cut in cuts.items() if cut is not None}
            report.wrong.append(f"{self.op} {_tell(self.call)} {_show(rows)} cut {sizes} on {shape}: {problems[0]}")

    def _dealt(
        self, index: int, rows: Sequence[Row], cuts: Mapping[int, AnyCut | None], shape: Coordinate, where: Any
    ) -> dict[Coordinate, Tensor]:
        entries = [row.inputs[index] for row in rows]
        shares = deal(self.tensors[index], entries, shape)
        spec = _spec(thread_meshes(shape)[0], _meta(self.tensors[index]), entries, rows, cuts)
        return {c: part_of(shares[c], spec, c) for c in where}

    def _targets(self, mesh: ThreadMesh, rows: Sequence[Row], cuts: Mapping[int, AnyCut | None]) -> list[Tensor]:
        """This rank's `out=` arguments."""
        specs = self._outputs(mesh, rows, cuts)
        return [torch.empty(spec.local_shape, dtype=spec.dtype) for spec in specs] if self.outs else []

    def _outputs(self, mesh: ThreadMesh, rows: Sequence[Row], cuts: Mapping[int, AnyCut | None]) -> list[Spec]:
        return [_spec(mesh, t, [row.outputs[i] for row in rows], rows, cuts) for i, t in enumerate(self.call.outputs)]

    def _local(
        self, mesh: ThreadMesh, rows: Sequence[Row], cuts: Mapping[int, AnyCut | None]
    ) -> Callable[..., Any] | None:
        if self.rule.local is None:
            return None
        inputs = [_spec(mesh, t, [row.inputs[i] for row in rows], rows, cuts) for i, t in enumerate(self.call.tensors)]
        return self.rule.local(LocalCall(self.call, tuple(inputs), tuple(self._outputs(mesh, rows, cuts))))

    def _problems(
        self,
        results: Sequence[Any],
        meshes: Sequence[ThreadMesh],
        rows: Sequence[Row],
        cuts: Mapping[int, AnyCut | None],
    ) -> Iterator[str]:
        """What differs: outputs first, then the inputs that the operator writes."""
        expected = list(flatten([self.results[0]]))
        got = [list(flatten([result[0]])) for result in results]
        if not expected and not self.call.written and any(result[0] != self.results[0] for result in results):
            yield f"results {[result[0] for result in results]}, expected {self.results[0]}"
        for i, value in enumerate(expected):
            entries = [row.outputs[i] for row in rows]
            spec = _spec(meshes[0], _meta(value), entries, rows, cuts)
            yield from self._differences(f"output {i}", value, [one[i] for one in got], entries, meshes, spec)
        for i in self.call.written:
            entries = [row.inputs[i] for row in rows]
            after = [result[1][i] for result in results]
            spec = _spec(meshes[0], _meta(self.results[1][i]), entries, rows, cuts)
            yield from self._differences(f"written input {i}", self.results[1][i], after, entries, meshes, spec)

    def _differences(
        self,
        name: str,
        value: Tensor,
        got: Sequence[Tensor],
        entries: Sequence[Entry],
        meshes: Sequence[ThreadMesh],
        spec: Spec,
    ) -> Iterator[str]:
        coordinates = [mesh.get_coordinate() for mesh in meshes]
        for c, part in zip(coordinates, got, strict=True):
            if part.shape != spec.local_shape_at(c) or part.dtype != value.dtype:
                yield f"{name} at {c}: {tuple(part.shape)} {part.dtype}, should be {tuple(spec.local_shape_at(c))}"
                return
        if not self.exact:
            return
        totals = gather(dict(zip(coordinates, got, strict=True)), entries, meshes[0].shape)
        for c, total in totals.items():
            wanted = part_of(value, spec, c)
            if not torch.allclose(*_comparable(total, wanted), rtol=1e-6, atol=1e-7, equal_nan=True):
                yield f"{name} at {c}: {total.tolist()}, should be {wanted.tolist()}"
                return


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` on every leaf of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_mapped(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return function(value)


def _comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return a.to(wide), b.to(wide)


def _meta(value: Any) -> Any:
    return TensorMeta(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _spec(
    mesh: ThreadMesh,
    meta: TensorMeta,
    entries: Sequence[Entry],
    rows: Sequence[Row],
    cuts: Mapping[int, AnyCut | None],
) -> Spec:
    """The spec that entries of some rows mean for a tensor, given the cut of each axis's factor.

    Raises:
        NotImplementedError: if two rows cut one dim in ways that do not fit together.
    """
    fitting = {
        axis: (rows[axis], _fitting(cuts[axis], meta.shape[entry.dim] // (entry.unit * entry.runs), entry))
        for axis, entry in enumerate(entries)
        if isinstance(entry, S)
    }
    found = placed(entries, fitting, meta.shape)
    if found is None:
        raise NotImplementedError("two rows cut one dim, and their cuts do not fit together")
    placements, by_dim = found
    order = tuple((dim, cut.axes) for dim, cut in sorted(by_dim.items()))
    return Spec(cast("DeviceMesh", mesh), placements, meta.shape, meta.stride, meta.dtype, order)


def _fitting(cut: AnyCut | None, steps: int, entry: S) -> AnyCut:
    """The cut; that of torch.chunk if the elements of a `foreach` call differ in size."""
    assert cut is not None, "a row with sharded entries has a factor"
    if isinstance(cut, FoldedCut) or entry.cut is not None or cut.length == steps:
        return cut
    return Cut(cut.axes, cut.axis_sizes, chunk_sizes(steps, len(cut.sizes)))


def _rows_of_lists(rule: Rule, call: OpCall) -> list[Row]:
    """Rows of a `foreach` call whose elements all take the row of the same number."""
    values = [*call.args, *call.kwargs.values()]
    names = [None] * len(call.args) + list(call.kwargs)
    count = max(len(v) for v in values if isinstance(v, list))
    each: list[list[Row]] = []
    for i in range(count):
        element = [v[i] if isinstance(v, list) and v else v for v in values]
        tensors = tuple(flatten(element))
        args = tuple(v for v, name in zip(element, names, strict=True) if name is None)
        kwargs = {name: v for v, name in zip(element, names, strict=True) if name is not None}
        outputs = call.outputs[i::count]
        each.append(list(rule.rows(OpCall(call.op, args, kwargs, tensors, outputs))))
    return [_joined(values, rows) for rows in zip(*each, strict=False)]


def _joined(values: Sequence[Any], rows: Sequence[Row]) -> Row:
    """One row of the whole call out of one row per element."""
    entries = [iter(row.inputs) for row in rows]
    inputs: list[Entry] = []
    for value in values:
        if isinstance(value, list) and value and isinstance(value[0], TensorMeta):
            inputs += [next(one) for one in entries]
        elif isinstance(value, TensorMeta):
            shared = [next(one) for one in entries]
            inputs.append(shared[0])
    outputs = zip(*(row.outputs for row in rows), strict=True)
    return Row(tuple(inputs), tuple(entry for together in outputs for entry in together))


def _tell(call: OpCall) -> str:
    shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in call.tensors]
    others = {n: v for n, v in call.bound.items() if not [*flatten(v)] and v not in (None, [], False)}
    return f"({', '.join(shapes)}) {others}"


def _show(rows: Sequence[Row]) -> str:
    return " and ".join(f"{' '.join(map(_brief, row.inputs))} -> {' '.join(map(_brief, row.outputs))}" for row in rows)


def _brief(entry: Entry) -> str:
    if isinstance(entry, S):
        runs = f",{entry.runs} runs" if entry.runs != 1 else ""
        return f"S({entry.dim}{f',x{entry.unit}' if entry.unit != 1 else ''}{runs})"
    return str(entry)
