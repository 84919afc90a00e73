"""Giving each mesh axis one row of a rule: the search behind every sharding decision.

A row is a candidate on an axis only if some input already lies so there: no fresh sharding is invented.  A combination
of rows fixes every operand's cuts, because all sharded entries of a row share one factor; where several inputs cut that
factor differently, each of their cuts is tried.  The price of a combination is what its inputs' redistribution takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import NamedTuple, TypeGuard

from shoal_mesh import DeviceMesh

from .chunks import Cut, cut_dim
from .folded import AnyCut, FoldedCut, folded
from .placements import Partial, Placement, Replicate, Shard, norm_order
from .redistribute import cost, seconds
from .rules import Entry, Row, S, with_norms
from .spec import Spec, TensorMeta

__all__ = ["Assignment", "Operands", "assign", "cut_behind", "is_plain", "placed"]

# More combinations than this are cut down to each axis's cheapest rows: 4 axes with 5 rows each make 625.
MAX_COMBINATIONS = 1024


class Assignment(NamedTuple):
    """A decided sharding: the spec that each input must have and each output has, and whether rows move data."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    traffic: bool = False


@dataclass(frozen=True, slots=True)
class Operands:
    """What an assignment is for.

    Attributes:
        specs: of every tensor input that is read.
        outputs: global shape, stride and dtype of every tensor output.
        fixed: pairs (input, output or None): this input is written in place, so its layout must stay, and the
            output that aliases it has the same.
        outs: specs of `out=` arguments; output `i` must lie as `outs[i]` does.
        unordered: whether the order of elements along cut dims does not matter (see `Rule`).
    """

    specs: tuple[Spec, ...]
    outputs: tuple[TensorMeta, ...]
    fixed: tuple[tuple[int, int | None], ...] = ()
    outs: tuple[Spec, ...] = ()
    unordered: bool = False


def assign(rows: Sequence[Row], operands: Operands, mesh: DeviceMesh) -> Assignment | None:
    """The cheapest assignment of rows to mesh axes, or None if none keeps the written tensors' layouts.

    Args:
        rows: the rule's rows for this call; the all-replicate row is implied.
        operands: input specs, global outputs and the constraints of in-place and `out=` forms.
        mesh: the mesh of all operands.
    """
    norms = dict.fromkeys(p for spec in (*operands.specs, *operands.outs) for p in spec.placements if _is_norm(p))
    rows = with_norms(rows, tuple(norms)) if norms else rows
    whole = Row((Replicate(),) * len(operands.specs), (Replicate(),) * len(operands.outputs))
    choices = [[*_candidates(rows, operands, axis), whole] for axis in range(mesh.ndim)]
    best: tuple[float, int] | None = None
    found: Assignment | None = None
    for combination in islice(product(*choices), MAX_COMBINATIONS):
        for inputs, outputs in _resolve(combination, operands, mesh):
            if not _keeps(operands, inputs, outputs) or any(_mixes(spec) for spec in (*inputs, *outputs)):
                continue
            changed = [i for i, (a, b) in enumerate(zip(operands.specs, inputs, strict=True)) if not a.same_layout(b)]
            total = sum(cost(operands.specs[i], inputs[i]) for i in changed) + _traffic(combination, mesh)
            price = (round(total, 9), len(changed))
            if best is None or price < best:
                best, found = price, Assignment(inputs, outputs, any(row.traffic for row in combination))
    return found


def _candidates(rows: Sequence[Row], operands: Operands, axis: int) -> list[Row]:
    """The rows that some operand already follows on a mesh axis."""
    found = []
    lying = [*operands.specs, *operands.outs]
    for row in rows:
        entries = [*row.inputs, *row.outputs[: len(operands.outs)]] if operands.outs else row.inputs
        whole = operands.unordered and is_plain(row)
        follows = any(_lies_so(entry, spec, axis, whole) for entry, spec in zip(entries, lying, strict=False))
        if follows and all(_reaches(entry, spec, axis) for entry, spec in zip(row.inputs, operands.specs, strict=True)):
            found.append(row)
    return found


def is_plain(row: Row) -> bool:
    """Whether every sharded entry is a whole dim, element for element, in any order."""
    entries = [entry for entry in (*row.inputs, *row.outputs) if isinstance(entry, S)]
    return not row.ordered and all(entry.unit == entry.runs == 1 and entry.cut is None for entry in entries)


def _lies_so(entry: Entry, spec: Spec, axis: int, whole: bool) -> bool:
    if isinstance(entry, S):
        cut = spec.cuts[entry.dim]
        if axis not in cut.axes:
            return False
        return entry.runs == 1 if isinstance(cut, Cut) else whole or cut.runs_of(axis) == entry.runs
    return isinstance(entry, Partial) and spec.placements[axis] is entry


def _reaches(entry: Entry, spec: Spec, axis: int) -> bool:
    """A partial entry is reached from the same partial or from a replicated value, not by spreading out shards."""
    if isinstance(entry, Partial):
        return spec.placements[axis] is entry or isinstance(spec.placements[axis], Replicate)
    return True


def _resolve(
    combination: Sequence[Row], operands: Operands, mesh: DeviceMesh
) -> Iterator[tuple[tuple[Spec, ...], tuple[Spec, ...]]]:
    """The specs that a combination asks for: one result per way to cut its factors."""
    axes_of: dict[int, list[int]] = {}
    row_of: dict[int, Row] = {}
    for axis, row in enumerate(combination):
        if any(isinstance(entry, S) for entry in row.inputs):
            axes_of.setdefault(id(row), []).append(axis)
            row_of[id(row)] = row
    ways = [_factor_cuts(row_of[key], tuple(axes), operands, mesh) for key, axes in axes_of.items()]
    for chosen in product(*ways):
        cuts = {
            axis: (row_of[key], cut) for (key, axes), cut in zip(axes_of.items(), chosen, strict=True) for axis in axes
        }
        inputs = [_operand(i, spec, combination, cuts) for i, spec in enumerate(operands.specs)]
        outputs = [_output(i, meta, combination, cuts, mesh) for i, meta in enumerate(operands.outputs)]
        if None not in inputs and None not in outputs:
            yield tuple(s for s in inputs if s is not None), tuple(s for s in outputs if s is not None)


def _factor_cuts(row: Row, axes: tuple[int, ...], operands: Operands, mesh: DeviceMesh) -> list[AnyCut]:
    """The cuts of a row's factor by `axes` that some operand already has, else the one of `torch.chunk`."""
    found: dict[AnyCut, None] = {}
    length: int | None = None
    whole = operands.unordered and is_plain(row)
    for entry, spec in zip(row.inputs, operands.specs, strict=True):
        if not isinstance(entry, S) or entry.cut is not None:
            continue
        length = spec.shape[entry.dim] // (entry.unit * entry.runs)
        steps = _factor_cut(entry, spec.cuts[entry.dim], axes, whole)
        if steps is not None:
            found[steps] = None
    if not found and length is not None:
        default: list[Placement] = [Shard(0)] * mesh.ndim
        found[cut_dim(length, axes, default, mesh.shape)] = None
    return [cut for cut in found if cut.even or not row.even]


def _factor_cut(entry: S, cut: AnyCut, axes: tuple[int, ...], whole: bool) -> AnyCut | None:
    """How `axes` cut the factor behind an entry of an operand whose dim is cut so; None if they do not."""
    if isinstance(cut, FoldedCut):
        if whole:
            return cut if set(cut.axes) == set(axes) else None
        level = cut.level(entry.runs)
    else:
        level = cut if entry.runs == 1 else None
    outer = _leading(level, axes) if level is not None else None
    return outer.divided(entry.unit) if outer is not None else None


def _leading(cut: Cut, axes: tuple[int, ...]) -> Cut | None:
    """The part of a cut that is made by `axes`, if those are its outermost ones in any order; None otherwise."""
    count = len(axes)
    if set(cut.axes[:count]) != set(axes) or len(cut.axes) < count:
        return None
    inner = 1
    for size in cut.axis_sizes[count:]:
        inner *= size
    sizes = tuple(sum(cut.sizes[i : i + inner]) for i in range(0, len(cut.sizes), inner))
    return Cut(cut.axes[:count], cut.axis_sizes[:count], sizes)


Cuts = dict[int, tuple[Row, AnyCut]]


def _operand(index: int, spec: Spec, combination: Sequence[Row], cuts: Cuts) -> Spec | None:
    found = placed([row.inputs[index] for row in combination], cuts, spec.shape)
    if found is None:
        return None
    placements, by_dim = found
    if all(by_dim.get(dim, _WHOLE) == (cut if cut.axes else _WHOLE) for dim, cut in enumerate(spec.cuts)) and all(
        (a is b) or not (isinstance(a, Partial) or isinstance(b, Partial))
        for a, b in zip(placements, spec.placements, strict=True)
    ):
        return spec
    order = tuple((dim, cut.axes) for dim, cut in sorted(by_dim.items()))
    return spec.with_(placements=placements, shard_order=order)


def _output(index: int, meta: TensorMeta, combination: Sequence[Row], cuts: Cuts, mesh: DeviceMesh) -> Spec | None:
    found = placed([row.outputs[index] for row in combination], cuts, meta.shape)
    if found is None:
        return None
    placements, by_dim = found
    order = tuple((dim, cut.axes) for dim, cut in sorted(by_dim.items()))
    return Spec(mesh, placements, meta.shape, meta.stride, meta.dtype, order)


_WHOLE = Cut((), (), ())


def placed(
    entries: Sequence[Entry], cuts: Cuts, shape: Sequence[int]
) -> tuple[list[Placement], dict[int, AnyCut]] | None:
    """The placements and cuts that one operand's entries mean; None if two rows cut one dim and do not fit."""
    by_dim: dict[int, AnyCut] = {}
    rows: dict[int, list[Row]] = {}
    for axis, entry in enumerate(entries):
        if not isinstance(entry, S):
            continue
        row, factor = cuts[axis]
        known = rows.setdefault(entry.dim, [])
        if any(row is other for other in known):
            continue
        cut = cut_behind(entry, factor, shape[entry.dim])
        both = cut
        if known and cut is not None:
            joined = _shared if getattr(entry.cut, "meets", False) else _joined
            both = None if getattr(entry.cut, "alone", False) else joined(by_dim[entry.dim], cut, shape[entry.dim])
        if both is None:
            return None
        known.append(row)
        by_dim[entry.dim] = both
    placements: list[Placement] = [
        by_dim[entry.dim].placements(entry.dim)[axis] if isinstance(entry, S) else entry
        for axis, entry in enumerate(entries)
    ]
    return placements, by_dim


def cut_behind(entry: S, factor: AnyCut, length: int) -> AnyCut | None:
    """How a dim of `length` elements is cut when the factor behind its entry is cut so."""
    if isinstance(factor, FoldedCut):
        return factor  # only plain entries get one
    if entry.cut is not None:
        return entry.cut(factor)
    cut = factor.scaled(entry.unit)
    return cut if entry.runs == 1 else folded({entry.runs: cut}, length)


def _joined(one: AnyCut, other: AnyCut, length: int) -> AnyCut | None:
    """A dim cut by two rows: one of them in runs that the other leaves whole, or nested; None if neither."""
    levels = [dict(cut.levels) if isinstance(cut, FoldedCut) else {1: cut} for cut in (one, other)]
    if not levels[0].keys() & levels[1].keys():
        return folded(levels[0] | levels[1], length)
    return _nested(one, other) if isinstance(one, Cut) and isinstance(other, Cut) else None


def _nested(one: Cut, other: Cut) -> Cut | None:
    """A dim cut by two rows: possible where one of them leaves everything with one coordinate (a selected element)."""
    for outer, inner in ((one, other), (other, one)):
        if all(size in (0, outer.length) for size in outer.sizes):
            sizes = tuple(n if whole else 0 for whole in outer.sizes for n in inner.sizes)
            return Cut(outer.axes + inner.axes, outer.axis_sizes + inner.axis_sizes, sizes)
    return None


def _shared(outer: AnyCut, inner: AnyCut, length: int) -> Cut | None:
    """A dim cut in two ways by one operator, where a rank has what lies in both of its pieces."""
    if not isinstance(outer, Cut) or not isinstance(inner, Cut):
        return None
    ends = [[(start, start + size) for start, size in zip(c.offsets, c.sizes, strict=True)] for c in (outer, inner)]
    sizes = tuple(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in product(*ends))
    assert sum(sizes) == length, "pieces of one dim by rows and by columns"
    return Cut(outer.axes + inner.axes, outer.axis_sizes + inner.axis_sizes, sizes)


def _keeps(operands: Operands, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> bool:
    """Whether written tensors stay as they lie."""
    for index, output in operands.fixed:
        if not inputs[index].same_layout(operands.specs[index]):
            return False
        if output is not None and not outputs[output].same_layout(operands.specs[index]):
            return False
    return all(out.same_layout(got) for out, got in zip(operands.outs, outputs, strict=False))


def _is_norm(placement: Placement) -> TypeGuard[Partial]:
    return isinstance(placement, Partial) and norm_order(placement.reduce_op) is not None


def _mixes(spec: Spec) -> bool:
    """Whether a spec has reductions whose order would matter: rows of two axes may each be right, but not together."""
    kinds = {op for _, op in spec.partials}
    return len(kinds) > 1 and not kinds <= {"sum", "avg"}


def _traffic(combination: Sequence[Row], mesh: DeviceMesh) -> float:
    """Seconds that the local algorithms' own reductions take."""
    return sum(seconds(mesh, (axis,), row.traffic) for axis, row in enumerate(combination) if row.traffic)
