"""Giving each mesh axis one row of a rule: the search behind every sharding decision.

A row is a candidate on an axis only if some input already has the row's placement on it: no new
sharding is introduced. A combination of rows fixes every operand's sharding, because all sharded
entries of a row share one factor. If several inputs shard that factor differently, each of their
shardings is tried. The price of a combination is the price of its inputs' redistribution. If a
combination exists for which nothing moves and nothing communicates, no other combination is priced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import NamedTuple

from shoal_mesh import DeviceMesh

from ..layout.boxes import spans
from ..layout.dim_sharding import (
    AnyDimSharding,
    DimSharding,
    StridedDimSharding,
    fold_levels,
    shard_dim,
)
from ..layout.placements import Partial, Placement, Replicate, Shard, norm_order
from ..layout.spec import Spec
from ..layout.tensor_meta import TensorMeta
from ..redistribute.plan import price, seconds
from ..rules.language.rule import Entry, Row, S, with_norms

# No more combinations than this are tried: 4 axes with 5 rows each have 625.
MAX_COMBINATIONS = 1024
_REPLICATE = Replicate()


class Sharding(NamedTuple):
    """Input specs, output specs, and the mesh axes over which the local function communicates."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    communicating: tuple[int, ...] = ()


class ShardingProblem(NamedTuple):
    """The inputs, outputs and constraints of one search for an assignment of rows to mesh axes."""

    specs: tuple[Spec, ...]  # of every tensor input that is read
    # global shape, stride and dtype of every tensor output
    outputs: tuple[TensorMeta, ...]
    # pairs (input, output or None): this input is written in place, so its layout must stay, and
    # the output that aliases it has the same
    fixed: tuple[tuple[int, int | None], ...] = ()
    # specs of `out=` arguments; output `i` must have the layout of `outs[i]`
    outs: tuple[Spec, ...] = ()
    # whether the order of elements along sharded dims does not matter (see `Rule`)
    unordered: bool = False


def assign(rows: Sequence[Row], problem: ShardingProblem, mesh: DeviceMesh) -> Sharding | None:
    """Return the cheapest assignment of rows, or of replication, to mesh axes.

    Return None if no assignment keeps the layouts of the tensors that the operator writes to.
    """
    if (free := unmoved(rows, problem, mesh)) is not None:
        return free
    rows, whole = _with_whole(rows, problem)
    choices = [[*_candidates(rows, problem, axis), whole] for axis in range(mesh.ndim)]
    lowest: tuple[float, int] | None = None
    cheapest: Sharding | None = None
    for combination, sharding in _assignments(choices, problem, mesh):
        moves = [
            (a, b)
            for a, b in zip(problem.specs, sharding.inputs, strict=True)
            if not a.same_layout(b)
        ]
        cost = sum(price(a, b) for a, b in moves) + sum(
            # reductions of the local function
            seconds(mesh, (axis,), int(row.traffic(mesh.shape[axis])))
            for axis, row in enumerate(combination)
            if row.traffic is not None
        )
        order = (round(cost, 9), len(moves))
        if lowest is None or order < lowest:
            lowest = order
            cheapest = sharding
    return cheapest


def unmoved(
    rows: Sequence[Row], problem: ShardingProblem, mesh: DeviceMesh, *, communicating: bool = False
) -> Sharding | None:
    """Return the first assignment that leaves every input as it is, or None if there is none.

    Rows whose local function communicates are considered only with `communicating`.
    """
    rows, whole = _with_whole(rows, problem)
    choices = []
    for axis in range(mesh.ndim):
        staying = _candidates(
            [row for row in rows if _stays(row, problem, axis, communicating)], problem, axis
        )
        choices.append([*staying, whole] if _stays(whole, problem, axis) else staying)
    for _, sharding in _assignments(choices, problem, mesh):
        if all(a.same_layout(b) for a, b in zip(problem.specs, sharding.inputs, strict=True)):
            return sharding
    return None


def _assignments(
    choices: Sequence[Sequence[Row]], problem: ShardingProblem, mesh: DeviceMesh
) -> Iterator[tuple[Sequence[Row], Sharding]]:
    """Yield every combination of one row per mesh axis that keeps the layouts of written tensors.

    Each combination comes with a sharding that follows it.
    """
    for combination in islice(product(*choices), MAX_COMBINATIONS):
        communicating = tuple(
            [axis for axis, row in enumerate(combination) if row.traffic is not None]
        )
        for inputs, outputs in _resolve(combination, problem, mesh):
            if _is_valid(problem, inputs, outputs):
                yield combination, Sharding(inputs, outputs, communicating)


def _with_whole(rows: Sequence[Row], problem: ShardingProblem) -> tuple[Sequence[Row], Row]:
    """Return the rows for the norms of the problem, and the row in which everything is replicated."""
    partials = [
        p
        for spec in (*problem.specs, *problem.outs)
        for p in spec.placements
        if isinstance(p, Partial)
    ]
    norms = dict.fromkeys(
        partial for partial in partials if norm_order(partial.reduce_op) is not None
    )
    whole = Row((_REPLICATE,) * len(problem.specs), (_REPLICATE,) * len(problem.outputs))
    return with_norms(rows, tuple(norms)) if norms else rows, whole


def _stays(row: Row, problem: ShardingProblem, axis: int, communicating: bool = False) -> bool:
    """Tell whether every input already has the placement that a row requires along a mesh axis.

    A row with traffic counts only if `communicating` is set.
    """
    return (row.traffic is None or communicating) and all(
        axis in spec.dim_shardings[entry.dim].axes
        if isinstance(entry, S)
        else spec.placements[axis] is entry
        for entry, spec in zip(row.inputs, problem.specs, strict=True)
    )


def _candidates(rows: Sequence[Row], problem: ShardingProblem, axis: int) -> list[Row]:
    """Return the rows that some operand already follows on a mesh axis and all others can follow."""
    candidates = []
    for row in rows:
        unordered = problem.unordered and is_plain(row)
        operands = [*zip(row.inputs, problem.specs, strict=True)]
        results = [*zip(row.outputs, problem.outs, strict=False)]
        is_followed = True in [
            _is_placed_so(entry, spec, axis, unordered) for entry, spec in operands + results
        ]
        # A partial entry is reached from the same partial or from a replicated value, not from
        # shards.
        if is_followed and all(
            not isinstance(entry, Partial) or spec.placements[axis] in (entry, _REPLICATE)
            for entry, spec in operands
        ):
            candidates.append(row)
    return candidates


def is_plain(row: Row) -> bool:
    """Tell whether every sharded entry of a row stands for single elements of a dim, in any order."""
    entries = [entry for entry in (*row.inputs, *row.outputs) if isinstance(entry, S)]
    return not row.ordered and all(
        entry.unit == entry.runs == 1 and entry.map is None for entry in entries
    )


def _is_placed_so(entry: Entry, spec: Spec, axis: int, unordered: bool) -> bool:
    if not isinstance(entry, S):
        return isinstance(entry, Partial) and spec.placements[axis] is entry
    sharding = spec.dim_shardings[entry.dim]
    if axis not in sharding.axes:
        return False
    return (
        entry.runs == 1
        if isinstance(sharding, DimSharding)
        else unordered or sharding.runs_of(axis) == entry.runs
    )


def _resolve(
    combination: Sequence[Row], problem: ShardingProblem, mesh: DeviceMesh
) -> Iterator[tuple[tuple[Spec, ...], tuple[Spec, ...]]]:
    """Yield the specs that a combination of rows requires: one result per sharding of its factors."""
    # Rows that shard, with the axes that take them: (m, k) @ (k, n) with m by axes 0 and 2 is {row
    # of m: [0, 2]}.
    axes_of: dict[int, tuple[Row, list[int]]] = {}
    for axis, row in enumerate(combination):
        if any(isinstance(entry, S) for entry in row.inputs):
            axes_of.setdefault(id(row), (row, []))[1].append(axis)
    metas = (*(spec.tensor_meta for spec in problem.specs), *problem.outputs)
    operands = [(*row.inputs, *row.outputs) for row in combination]
    for chosen in product(
        *(_factor_shardings(row, tuple(axes), problem, mesh) for row, axes in axes_of.values())
    ):
        pairs = zip(axes_of.values(), chosen, strict=True)
        shardings = {axis: (row, sharding) for (row, axes), sharding in pairs for axis in axes}
        specs: list[Spec] = []
        for i, meta in enumerate(metas):
            entries = [of_row[i] for of_row in operands]
            by_dim = placed(entries, shardings, meta.shape)
            if by_dim is None:
                break
            specs.append(Spec.sharded(mesh, placements_of(entries, by_dim), meta, by_dim))
        else:
            kept = [
                a if a.same_layout(b) else b for a, b in zip(problem.specs, specs, strict=False)
            ]
            yield tuple(kept), tuple(specs[len(kept) :])


def _factor_shardings(
    row: Row, axes: tuple[int, ...], problem: ShardingProblem, mesh: DeviceMesh
) -> list[AnyDimSharding]:
    """Return the shardings by `axes` that an operand already has for a row's factor.

    If no operand has one, return the sharding of `torch.chunk`.
    """
    shardings: dict[AnyDimSharding, None] = {}
    length: int | None = None
    unordered = problem.unordered and is_plain(row)
    for entry, spec in zip(row.inputs, problem.specs, strict=True):
        if not isinstance(entry, S) or entry.map is not None:
            continue
        length = spec.shape[entry.dim] // (entry.unit * entry.runs)  # 24 in 2 runs of units of 3: 4
        sharding = _factor_sharding(entry, spec.dim_shardings[entry.dim], axes, unordered)
        if sharding is not None:
            shardings[sharding] = None
    if not shardings and length is not None:
        default: list[Placement] = [Shard(0)] * mesh.ndim
        shardings[shard_dim(length, axes, default, mesh.shape)] = None
    return [sharding for sharding in shardings if sharding.even or not row.even]


def _factor_sharding(
    entry: S, sharding: AnyDimSharding, axes: tuple[int, ...], unordered: bool
) -> AnyDimSharding | None:
    """Return the sharding by `axes` of the factor behind an entry of an operand.

    Return None if these axes do not shard it.
    """
    if isinstance(sharding, StridedDimSharding) and unordered:
        return sharding if set(sharding.axes) == set(axes) else None
    if isinstance(sharding, StridedDimSharding):
        level = sharding.level(entry.runs)
    else:
        level = sharding if entry.runs == 1 else None
    # By `axes` alone, which must be the outermost ones, in any order.
    if level is None or set(level.axes[: len(axes)]) != set(axes):
        return None
    return level.outer(len(axes)).divided(entry.unit)


DimShardings = dict[int, tuple[Row, AnyDimSharding]]


def placements_of(
    entries: Sequence[Entry], by_dim: Mapping[int, AnyDimSharding]
) -> tuple[Placement, ...]:
    """Return the placements of an operand from its entries and the shardings of its dims."""
    of_dim = {dim: sharding.placements(dim) for dim, sharding in by_dim.items()}
    return tuple([of_dim[e.dim][axis] if isinstance(e, S) else e for axis, e in enumerate(entries)])


def placed(
    entries: Sequence[Entry], shardings: DimShardings, shape: Sequence[int]
) -> dict[int, AnyDimSharding] | None:
    """Return the sharding of each dim of an operand; None if two rows of one dim do not fit."""
    by_dim: dict[int, AnyDimSharding] = {}
    rows: dict[int, list[Row]] = {}
    for axis, entry in enumerate(entries):
        if not isinstance(entry, S):
            continue
        row, factor = shardings[axis]
        seen = rows.setdefault(entry.dim, [])
        if any(row is other for other in seen):
            continue
        # of the dim, when the factor behind its entry is sharded so
        sharding: AnyDimSharding | None
        if isinstance(factor, StridedDimSharding):
            sharding = factor  # only plain entries get one
        elif entry.map is not None:
            sharding = entry.map(factor)
        else:
            sharding = factor.scaled(entry.unit)
            sharding = (
                sharding
                if entry.runs == 1
                else fold_levels({entry.runs: sharding}, shape[entry.dim])
            )
        if seen and sharding is not None:
            join = _shared if getattr(entry.map, "intersects", False) else _joined
            exclusive = getattr(entry.map, "exclusive", False)
            sharding = None if exclusive else join(by_dim[entry.dim], sharding, shape[entry.dim])
        if sharding is None:
            return None
        seen.append(row)
        by_dim[entry.dim] = sharding
    return by_dim


def _joined(one: AnyDimSharding, other: AnyDimSharding, length: int) -> AnyDimSharding | None:
    """Combine the shardings that two rows give one dim; None if they do not fit.

    They are combined as levels of a strided dim, or as their intersection if one of them puts all
    elements on one coordinate.
    """
    levels = [dict(s.levels) if isinstance(s, StridedDimSharding) else {1: s} for s in (one, other)]
    if not levels[0].keys() & levels[1].keys():
        return fold_levels(levels[0] | levels[1], length)
    for outer, inner in ((one, other), (other, one)):
        # (0, 4) of a selected element, and (3, 1) in it
        if isinstance(outer, DimSharding) and outer.step == length:
            return _shared(outer, inner, length)
    return None


def _shared(outer: AnyDimSharding, inner: AnyDimSharding, length: int) -> DimSharding | None:
    """Return the sharding by the intersections of two shardings of one dim."""
    if not isinstance(outer, DimSharding) or not isinstance(inner, DimSharding):
        return None
    # 6 elements as (3, 3) and as (2, 4): ranks have (2, 1, 0, 3)
    parts = product(spans(outer.sizes), spans(inner.sizes))
    sizes = tuple(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in parts)
    assert sum(sizes) == length, "shards of one dim by rows and by columns"
    return DimSharding(outer.axes + inner.axes, outer.axis_sizes + inner.axis_sizes, sizes)


def _is_valid(problem: ShardingProblem, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> bool:
    """Tell whether written tensors keep their layouts and no spec mixes incompatible reductions.

    The only two different reductions that a spec may have are `sum` and `avg`, because they
    commute.
    """
    kinds = [{op for _, op in spec.partials} for spec in (*inputs, *outputs)]
    if any(len(ops) > 1 and ops != {"sum", "avg"} for ops in kinds):
        return False
    kept = [(problem.specs[i], inputs[i]) for i, _ in problem.fixed]
    kept += [
        (problem.specs[i], outputs[output]) for i, output in problem.fixed if output is not None
    ]
    kept += zip(problem.outs, outputs, strict=False)
    return all(spec.same_layout(got) for spec, got in kept)
