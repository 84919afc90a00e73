"""Search for the row of a rule that each mesh axis gets: every sharding decision is made here.

A rule (see `rules.language.rule`) lists the ways to run an operator on shards. Each way is a row:
it has one entry (a placement) for each tensor input and output, along one mesh axis. A row is a
candidate on an axis only if some operand already has the row's placement there, so no new sharding
is introduced. All sharded entries of a row share one factor of the operator, such as `m` in
`(m, k) @ (k, n)`. A sharding of the factor therefore determines the sharding of every operand. If
several inputs already shard the factor differently, each of their shardings is tried. The price of
a combination is the time to redistribute its inputs and to communicate in the local function. If
nothing moves and nothing communicates for some combination, no combination is priced.
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
from ..rules.language.op_call import ShardingMap
from ..rules.language.rule import Entry, Row, S, with_norms

# No more combinations than this are tried: 4 axes with 5 rows each have 625.
MAX_COMBINATIONS = 1024
_REPLICATE = Replicate()


class Sharding(NamedTuple):
    """A sharding decision: input specs, output specs, and the mesh axes with communication.

    The local function communicates over these axes.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    communicating: tuple[int, ...] = ()


class Operands(NamedTuple):
    """Unchecked specs that one combination of rows gives the tensor inputs and outputs."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]


class ShardingProblem(NamedTuple):
    """The inputs, outputs and constraints of one search for an assignment of rows to mesh axes."""

    specs: tuple[Spec, ...]  # specs of the tensor inputs that are read
    # global shape, stride and dtype of every tensor output
    outputs: tuple[TensorMeta, ...]
    # Pairs (input, output or None). The input is written in place, so its layout must stay, and
    # the output that aliases it must have the same layout.
    fixed: tuple[tuple[int, int | None], ...] = ()
    # specs of `out=` arguments; output `i` must have the layout of `outs[i]`
    outs: tuple[Spec, ...] = ()
    # whether the order of elements along sharded dims does not matter (see `Rule`)
    unordered: bool = False


def assign(rows: Sequence[Row], problem: ShardingProblem, mesh: DeviceMesh) -> Sharding | None:
    """Return the cheapest assignment of rows, or of replication, to mesh axes.

    Return None if no assignment keeps the layouts of the tensors that the operator writes to.
    """
    free = assign_without_moves(rows, problem, mesh)
    if free is not None:
        return free
    rows, replicated = _with_replicated_row(rows, problem)
    choices = [[*_candidates(rows, problem, axis), replicated] for axis in range(mesh.ndim)]
    lowest: tuple[float, int] | None = None
    cheapest: Sharding | None = None
    for combination, sharding in _assignments(choices, problem, mesh):
        cost = _cost_of(combination, problem, sharding, mesh)
        if lowest is None or cost < lowest:
            lowest = cost
            cheapest = sharding
    return cheapest


def _cost_of(
    combination: Sequence[Row], problem: ShardingProblem, sharding: Sharding, mesh: DeviceMesh
) -> tuple[float, int]:
    """Return the seconds that a sharding communicates, and how many inputs it moves."""
    pairs = zip(problem.specs, sharding.inputs, strict=True)
    moves = [(spec, to) for spec, to in pairs if not spec.same_layout(to)]
    cost: float = sum(price(spec, to) for spec, to in moves)
    # collectives of the local function
    reductions: float = 0
    for axis, row in enumerate(combination):
        if row.traffic is not None:
            received = int(row.traffic(mesh.shape[axis]))
            reductions += seconds(mesh, (axis,), received)
    # Rounded to nanoseconds: for sums that differ by rounding only, the number of moves decides.
    return round(cost + reductions, 9), len(moves)


def assign_without_moves(
    rows: Sequence[Row], problem: ShardingProblem, mesh: DeviceMesh, *, communicating: bool = False
) -> Sharding | None:
    """Return the first assignment that leaves every input as it is, or None if there is none.

    Rows whose local function communicates are considered only with `communicating`.
    """
    rows, replicated = _with_replicated_row(rows, problem)
    choices = []
    for axis in range(mesh.ndim):
        staying = [row for row in rows if _stays(row, problem, axis, communicating)]
        choices_of_axis = _candidates(staying, problem, axis)
        if _stays(replicated, problem, axis):
            choices_of_axis.append(replicated)
        choices.append(choices_of_axis)
    for _, sharding in _assignments(choices, problem, mesh):
        # `_stays` checks each axis alone. The sizes of the shards, or the order of the axes, may
        # still be different.
        pairs = zip(problem.specs, sharding.inputs, strict=True)
        if all(spec.same_layout(to) for spec, to in pairs):
            return sharding
    return None


def _assignments(
    choices: Sequence[Sequence[Row]], problem: ShardingProblem, mesh: DeviceMesh
) -> Iterator[tuple[Sequence[Row], Sharding]]:
    """Yield every combination of one row per mesh axis that keeps the layouts of written tensors.

    Each combination comes with a sharding that follows it.
    """
    for combination in islice(product(*choices), MAX_COMBINATIONS):
        communicating = [axis for axis, row in enumerate(combination) if row.traffic is not None]
        for operands in _resolve(combination, problem, mesh):
            if _is_valid(problem, operands):
                sharding = Sharding(operands.inputs, operands.outputs, tuple(communicating))
                yield combination, sharding


def _with_replicated_row(
    rows: Sequence[Row], problem: ShardingProblem
) -> tuple[Sequence[Row], Row]:
    """Return the rows for a problem, and the row in which everything is replicated.

    If operands have partial p-norms, rows for any norm become rows for their norms.
    """
    norms: dict[Partial, None] = {}
    for spec in (*problem.specs, *problem.outs):
        for placement in spec.placements:
            if isinstance(placement, Partial) and norm_order(placement.reduce_op) is not None:
                norms[placement] = None
    if norms:
        rows = with_norms(rows, tuple(norms))
    replicated_inputs = (_REPLICATE,) * len(problem.specs)
    return rows, Row(replicated_inputs, (_REPLICATE,) * len(problem.outputs))


def _stays(row: Row, problem: ShardingProblem, axis: int, communicating: bool = False) -> bool:
    """Tell whether every input already has the placement that a row requires along a mesh axis.

    A row with traffic counts only if `communicating` is set.
    """
    if row.traffic is not None and not communicating:
        return False
    for entry, spec in zip(row.inputs, problem.specs, strict=True):
        if isinstance(entry, S):
            if axis not in spec.dim_shardings[entry.dim].axes:
                return False
        # equal placements are one object
        elif spec.placements[axis] is not entry:
            return False
    return True


def _candidates(rows: Sequence[Row], problem: ShardingProblem, axis: int) -> list[Row]:
    """Return rows that some operand already follows on a mesh axis and all others can follow."""
    candidates = []
    for row in rows:
        unordered = problem.unordered and is_plain(row)
        operands = [*zip(row.inputs, problem.specs, strict=True)]
        # `outs` is empty unless the call has `out=` arguments.
        results = [*zip(row.outputs, problem.outs, strict=False)]
        is_followed = any(
            _follows(entry, spec, axis, unordered) for entry, spec in operands + results
        )
        can_follow = all(_can_be_partial(entry, spec, axis) for entry, spec in operands)
        if is_followed and can_follow:
            candidates.append(row)
    return candidates


def _can_be_partial(entry: Entry, spec: Spec, axis: int) -> bool:
    """Tell whether an operand can be brought to an entry, if the entry is partial.

    A partial entry is reached from the same partial or from a replicated value, not from shards.
    Any other entry can be reached, so the result is True.
    """
    return not isinstance(entry, Partial) or spec.placements[axis] in (entry, _REPLICATE)


def is_plain(row: Row) -> bool:
    """Tell whether every sharded entry of a row shards single elements of a dim, in any order.

    Such an entry is a plain `S(dim)`: it has no units of several elements, no runs and no map.
    """
    if row.ordered:
        return False
    for entry in (*row.inputs, *row.outputs):
        if not isinstance(entry, S):
            continue
        is_single = entry.unit == 1 and entry.runs == 1
        if entry.map is not None or not is_single:
            return False
    return True


def _follows(entry: Entry, spec: Spec, axis: int, unordered: bool) -> bool:
    """Tell whether an operand is sharded or partial on a mesh axis as an entry requires."""
    if not isinstance(entry, S):
        # equal placements are one object
        return isinstance(entry, Partial) and spec.placements[axis] is entry
    sharding = spec.dim_shardings[entry.dim]
    if axis not in sharding.axes:
        return False
    if isinstance(sharding, DimSharding):
        return entry.runs == 1
    # A strided dim consists of equal runs that are sharded alike. The entry must have as many runs,
    # unless the order of elements does not matter.
    return unordered or sharding.runs_of(axis) == entry.runs


def _resolve(
    combination: Sequence[Row], problem: ShardingProblem, mesh: DeviceMesh
) -> Iterator[Operands]:
    """Yield specs that a combination of rows requires: one result per sharding of its factors."""
    input_metas = [spec.tensor_meta for spec in problem.specs]
    axes_of_rows = _axes_by_row(combination)
    choices = [_factor_shardings(row, axes, problem, mesh) for row, axes in axes_of_rows]
    for chosen in product(*choices):
        shardings: FactorShardings = {}
        for (row, axes), sharding in zip(axes_of_rows, chosen, strict=True):
            # All axes of a row get the same pair.
            shardings |= dict.fromkeys(axes, (row, sharding))
        inputs = _place([row.inputs for row in combination], input_metas, shardings, mesh)
        if inputs is None:
            continue
        outputs = _place([row.outputs for row in combination], problem.outputs, shardings, mesh)
        if outputs is None:
            continue
        pairs = zip(problem.specs, inputs, strict=True)
        kept = [spec if spec.same_layout(to) else to for spec, to in pairs]
        yield Operands(tuple(kept), outputs)


def _axes_by_row(combination: Sequence[Row]) -> list[tuple[Row, tuple[int, ...]]]:
    """Return the rows that shard an input, each with the axes to which it is assigned.

    For (m, k) @ (k, n) with m sharded by axes 0 and 2 they are [(row of m, (0, 2))].
    """
    rows: dict[int, Row] = {}
    axes_of: dict[int, list[int]] = {}
    for axis, row in enumerate(combination):
        if any(isinstance(entry, S) for entry in row.inputs):
            rows[id(row)] = row
            axes_of.setdefault(id(row), []).append(axis)
    return [(row, tuple(axes_of[key])) for key, row in rows.items()]


def _place(
    entries_by_axis: Sequence[Sequence[Entry]],
    metas: Sequence[TensorMeta],
    shardings: FactorShardings,
    mesh: DeviceMesh,
) -> tuple[Spec, ...] | None:
    """Return specs of inputs or outputs from the entries of each axis; None if some do not fit."""
    specs: list[Spec] = []
    for i, meta in enumerate(metas):
        entries = [entries_of_axis[i] for entries_of_axis in entries_by_axis]
        by_dim = shard_dims(entries, shardings, meta.shape)
        if by_dim is None:
            return None
        specs.append(Spec.sharded(mesh, placements_of(entries, by_dim), meta, by_dim))
    return tuple(specs)


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
        # Example: a dim of 24 elements in 2 runs of units of 3 has a factor of 4.
        length = spec.shape[entry.dim] // (entry.unit * entry.runs)
        sharding = _factor_sharding(entry, spec.dim_shardings[entry.dim], axes, unordered)
        if sharding is not None:
            shardings[sharding] = None
    if not shardings and length is not None:
        default: list[Placement] = [Shard(0)] * mesh.ndim
        shardings[shard_dim(length, axes, default, mesh.shape)] = None
    # A row that is `even` allows even shardings only; other rows allow all.
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
    if level is None:
        return None
    # `axes` must be the outermost axes, in any order; axes inside them are left out.
    outermost = level.axes[: len(axes)]
    if set(outermost) != set(axes):
        return None
    # Example: by axes 0 and 1 of (2, 2), 8 elements are sharded as (2, 2, 2, 2). By axis 0 alone
    # they are sharded as (4, 4). In units of 2 elements, the factor is sharded as (2, 2).
    return level.outer(len(axes)).divided(entry.unit)


FactorShardings = dict[int, tuple[Row, AnyDimSharding]]


def placements_of(
    entries: Sequence[Entry], by_dim: Mapping[int, AnyDimSharding]
) -> tuple[Placement, ...]:
    """Return the placements of an operand from its entries and the shardings of its dims."""
    of_dim = {dim: sharding.placements(dim) for dim, sharding in by_dim.items()}
    placements: list[Placement] = []
    for axis, entry in enumerate(entries):
        placements.append(of_dim[entry.dim][axis] if isinstance(entry, S) else entry)
    return tuple(placements)


def shard_dims(
    entries: Sequence[Entry], shardings: FactorShardings, shape: Sequence[int]
) -> dict[int, AnyDimSharding] | None:
    """Return the sharding of each dim of an operand; None if two rows of one dim do not fit."""
    by_dim: dict[int, AnyDimSharding] = {}
    rows: dict[int, list[Row]] = {}
    for axis, entry in enumerate(entries):
        if not isinstance(entry, S):
            continue
        dim = entry.dim
        row, factor = shardings[axis]
        # `seen` has the rows that already shard the dim. A row that several axes have counts once,
        # because its factor's sharding is over all of these axes.
        seen = rows.setdefault(dim, [])
        if any(row is other for other in seen):
            continue
        sharding = _sharding_of_entry(entry, factor, shape[dim])
        # An earlier row has sharded the dim by other axes.
        if seen and sharding is not None:
            sharding = _combine(entry, by_dim[dim], sharding, shape[dim])
        if sharding is None:
            return None
        seen.append(row)
        by_dim[dim] = sharding
    return by_dim


def _sharding_of_entry(entry: S, factor: AnyDimSharding, length: int) -> AnyDimSharding | None:
    """Return the sharding of a dim of `length` elements whose factor has the sharding `factor`."""
    # Only entries of single elements (see `is_plain`) get a strided factor.
    if isinstance(factor, StridedDimSharding):
        return factor
    if entry.map is not None:
        return entry.map(factor)
    sharding = factor.scaled(entry.unit)
    if entry.runs == 1:
        return sharding
    # The dim consists of `runs` equal runs, each with this sharding.
    return fold_levels({entry.runs: sharding}, length)


def _combine(
    entry: S, one: AnyDimSharding, other: AnyDimSharding, length: int
) -> AnyDimSharding | None:
    """Combine two shardings of one dim by two rows; return None if they do not fit.

    Args:
        entry: the entry of the second row for this dim.
        one: the sharding by the rows before.
        other: the sharding by the second row.
        length: the number of elements of the dim.
    """
    if isinstance(entry.map, ShardingMap):
        if entry.map.exclusive:
            return None
        if entry.map.intersects:
            return _intersect_shardings(one, other, length)
    return _join_shardings(one, other, length)


def _join_shardings(
    one: AnyDimSharding, other: AnyDimSharding, length: int
) -> AnyDimSharding | None:
    """Combine the shardings that two rows give one dim; None if they do not fit.

    There are two cases. If their numbers of runs differ, they become levels of a strided dim. If
    one of them gives all elements to one coordinate, the shards are intersected.
    """
    levels = _levels_of(one)
    other_levels = _levels_of(other)
    if not levels.keys() & other_levels.keys():
        return fold_levels(levels | other_levels, length)
    for outer, inner in ((one, other), (other, one)):
        # Example: by one row coordinate 1 has all 4 elements, sizes (0, 4); another row shards the
        # elements as (3, 1).
        if isinstance(outer, DimSharding) and outer.step == length:
            return _intersect_shardings(outer, inner, length)
    return None


def _levels_of(sharding: AnyDimSharding) -> dict[int, DimSharding]:
    """Return the sharding of one run by number of runs."""
    return dict(sharding.levels) if isinstance(sharding, StridedDimSharding) else {1: sharding}


def _intersect_shardings(
    outer: AnyDimSharding, inner: AnyDimSharding, length: int
) -> DimSharding | None:
    """Return the sharding by the intersections of two shardings of one dim."""
    if not isinstance(outer, DimSharding) or not isinstance(inner, DimSharding):
        return None
    # Example: 6 elements sharded as (3, 3) and as (2, 4). The ranks have (2, 1, 0, 3).
    sizes = []
    pairs = product(spans(outer.sizes), spans(inner.sizes))
    for (start, stop), (other_start, other_stop) in pairs:
        common = min(stop, other_stop) - max(start, other_start)
        sizes.append(max(0, common))
    assert sum(sizes) == length, "the shards of both shardings cover the dim"
    axis_sizes = outer.axis_sizes + inner.axis_sizes
    return DimSharding(outer.axes + inner.axes, axis_sizes, tuple(sizes))


def _is_valid(problem: ShardingProblem, operands: Operands) -> bool:
    """Tell whether written tensors keep their layouts and no spec mixes incompatible reductions.

    The only two different reductions that a spec may have are `sum` and `avg`, because they
    commute.
    """
    inputs, outputs = operands
    for spec in (*inputs, *outputs):
        ops = {op for _, op in spec.partials}
        if len(ops) > 1 and ops != {"sum", "avg"}:
            return False
    kept = []
    for i, output in problem.fixed:
        kept.append((problem.specs[i], inputs[i]))
        if output is not None:
            kept.append((problem.specs[i], outputs[output]))
    kept += zip(problem.outs, outputs, strict=False)
    return all(spec.same_layout(chosen) for spec, chosen in kept)
