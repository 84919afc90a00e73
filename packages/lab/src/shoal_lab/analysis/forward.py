"""The first module with a wrong value: its output, or the gradient at its output.

A value of the ranks is right if it is the value of one device, or a part of it, or partial: right
after a sum over axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shoal_mesh.internal import missing_all_reduce

from ..records import LocalValue, Output, RankRecord
from .combinations import describe_ranks, explain_copies, sharded_axes
from .copies import Expected, RankCopy, Setting
from .explanations import CertificationFinding, FittingExplanation
from .find_index import find_index
from .grid import MeshGrid


class _ValueKey(NamedTuple):
    """One value of a module.

    Attributes:
        path: the path of the module.
        kind: "output" or "gradient".
        run: the number of earlier runs of the module.
    """

    path: str
    kind: str
    run: int


@dataclass(frozen=True, slots=True)
class FirstModule:
    """The first module with a wrong value.

    Attributes:
        path: the path of the module.
        kind: "output", or "gradient" for the gradient at the output.
        explanation: the explanation of the difference, with its axes.
    """

    path: str
    kind: str
    explanation: FittingExplanation

    def __str__(self) -> str:
        """Return the line of the report."""
        value = "output" if self.kind == "output" else "gradient at the output"
        return f"{value} of {self.path}: {self.explanation.text}"


def find_first_module(
    records: Sequence[RankRecord], reference: RankRecord, setting: Setting
) -> FirstModule | None:
    """Find the first wrong output in the order of the forward, or else the first wrong gradient.

    Gradients are in the order of the backward.

    Args:
        records: the records of the ranks, with outputs of modules.
        reference: the record of one device.
        setting: grid and tolerances.

    Returns:
        The module; None if all values that can be compared are right.
    """
    by_rank = [dict(_values_by_key(record.outputs)) for record in records]
    wholes = dict(_values_by_key(reference.outputs))
    keys = list(wholes)
    forward = [key for key in keys if key.kind == "output"]
    backward = [key for key in reversed(keys) if key.kind == "gradient"]
    search = _ModuleSearch(by_rank, wholes, setting)
    found = search.first_of(forward) or search.unfinished_sum(forward)
    return found or _ModuleSearch(by_rank, wholes, setting).first_of(backward)


def _values_by_key(outputs: Sequence[Output]) -> Iterator[tuple[_ValueKey, LocalValue]]:
    """Yield outputs by path, kind and number of the call."""
    counts = dict[tuple[str, str], int]()
    for output in outputs:
        number = counts.get((output.path, output.kind), 0)
        counts[output.path, output.kind] = number + 1
        yield _ValueKey(output.path, output.kind, number), output.value


class _ModuleSearch:
    """One pass over the values of a step, in the order in which they were computed."""

    def __init__(
        self,
        by_rank: Sequence[Mapping[_ValueKey, LocalValue]],
        wholes: Mapping[_ValueKey, LocalValue],
        setting: Setting,
    ) -> None:
        self._by_rank = by_rank
        self._wholes = wholes
        self._setting = setting
        # the module of the last partial value, and the axes over which it is to be summed
        self._partial: tuple[str, tuple[str, ...]] | None = None
        # The indices of a dim that right values have on a rank, by rank, size of the whole dim, and
        # local size.
        self._slices = dict[tuple[int, int, int], Tensor]()

    def first_of(self, keys: Sequence[_ValueKey]) -> FirstModule | None:
        """Return the first module with a wrong value, or None."""
        for key in keys:
            values = {rank: found[key] for rank, found in enumerate(self._by_rank) if key in found}
            whole = self._wholes[key].tensor
            if not values or not whole.numel() or not whole.ndim:
                continue
            explanation = self._judge(key, values, whole)
            if explanation is not None:
                return FirstModule(key.path, key.kind, explanation)
        return None

    def unfinished_sum(self, keys: Sequence[_ValueKey]) -> FirstModule | None:
        """Return the last module if its output is partial, so that a sum is missing; or None."""
        if self._partial is None or self._partial[0] != keys[-1].path:
            return None
        return FirstModule(keys[-1].path, "output", self._missing_sum())

    def _missing_sum(self) -> FittingExplanation:
        """Explain a wrong value by the last partial value, which was not summed."""
        assert self._partial is not None, "a sum is missing after a partial value"
        path, axes = self._partial
        text = missing_all_reduce(axes, where=path)
        return FittingExplanation("missing reduction", axes, text)

    def _judge(
        self, key: _ValueKey, values: Mapping[int, LocalValue], whole: Tensor
    ) -> FittingExplanation | None:
        """Return None for values that are right or partial, else the explanation."""
        setting = self._setting
        allowed = setting.tolerance * float(whole.norm())
        copies = self._place(values, whole, key.kind, allowed)
        if copies is not None:
            missing = _describe_uncovered(copies, whole, allowed)
            if missing is None:
                self._note_slices(copies, whole)
                return None
            axes = _differing_axes(values, setting)
            return FittingExplanation(
                "forward",
                axes,
                f"{missing}: each rank of {', '.join(axes)} has the part of another rank",
            )
        for axes in setting.grid.subsets():
            summed = _sum_values(values, axes, setting.grid)
            if summed is None:
                continue
            placed = self._place(summed, whole, key.kind, allowed)
            if placed is not None:
                self._note_slices(placed, whole)
                self._partial = (key.path, axes)
                return None
        copies = self._place_by_slices(values, whole)
        if copies is None:
            # shards of shards, and parts of sums of shards, are not compared
            return None
        return self._explain(key, copies, whole)

    def _place(
        self, values: Mapping[int, LocalValue], whole: Tensor, kind: str, allowed: float
    ) -> list[RankCopy] | None:
        """Find the values of all ranks in the whole value, by metadata or by values.

        Gradients may be a multiple of it, because the loss of a rank is a mean over fewer rows.

        Args:
            values: the values by rank.
            whole: the value of one device.
            kind: "output" or "gradient".
            allowed: the allowed difference.
        """
        grid = self._setting.grid
        factors = [1.0]
        if kind == "gradient":
            for axes in grid.subsets():
                factors += [float(grid.size_of(axes)), 1 / grid.size_of(axes)]
        for factor in factors:
            copies = self._place_multiple(values, factor * whole, factor * allowed)
            if copies is not None:
                return copies
        return None

    def _place_multiple(
        self, values: Mapping[int, LocalValue], whole: Tensor, allowed: float
    ) -> list[RankCopy] | None:
        """Find the values of all ranks in one whole value."""
        copies = list[RankCopy]()
        slack = self._setting.tolerance * float(whole.abs().max())
        for rank, value in values.items():
            index = value.index
            if value.pending:
                return None
            if index is not None and value.shape == tuple(whole.shape):
                difference = float((value.tensor - whole.flatten()[index]).norm())
                if difference > allowed:
                    return None
            else:
                index = find_index(value.tensor, whole, slack)
            if index is None:
                return None
            copies.append(RankCopy(rank, "", value.tensor, index))
        return copies

    def _note_slices(self, copies: Sequence[RankCopy], whole: Tensor) -> None:
        """Record the indices that a right value has on each rank along each dim."""
        for copy in copies:
            if copy.index.ndim != whole.ndim or not copy.index.numel():
                continue
            places = torch.unravel_index(copy.index, whole.shape)
            for dim, place in enumerate(places):
                line = place.movedim(dim, 0).flatten(1)[:, 0]
                self._slices[copy.rank, whole.shape[dim], len(line)] = line

    def _place_by_slices(
        self, values: Mapping[int, LocalValue], whole: Tensor
    ) -> list[RankCopy] | None:
        """Place wrong values at the indices that right values of the same sizes had."""
        positions = torch.arange(whole.numel()).view(whole.shape)
        copies = list[RankCopy]()
        for rank, value in values.items():
            index = positions
            if value.tensor.ndim != whole.ndim:
                return None
            for dim, (size, local_size) in enumerate(
                zip(whole.shape, value.tensor.shape, strict=True)
            ):
                if size == local_size:
                    continue
                line = self._slices.get((rank, size, local_size))
                if line is None:
                    return None
                index = index.index_select(dim, line)
            copies.append(RankCopy(rank, "", value.tensor, index))
        return copies

    def _explain(
        self, key: _ValueKey, copies: Sequence[RankCopy], whole: Tensor
    ) -> FittingExplanation:
        """Explain a wrong value by the last partial value, or else by its own values."""
        setting = self._setting
        explanations = explain_copies(copies, Expected(whole), setting, "output")
        if self._partial is not None:
            return self._missing_sum()
        if explanations:
            first = explanations[0]
            axes = first.axes or sharded_axes(copies, setting)
            return FittingExplanation("forward", axes, first.text)
        wrong = [
            copy.rank for copy in copies if not setting.is_close(copy.values, copy.part_of(whole))
        ]
        axes, ranks_text = describe_ranks(wrong, [copy.rank for copy in copies], setting)
        axes = axes or sharded_axes(copies, setting)
        return FittingExplanation("forward", axes, f"differs {ranks_text}")


def _sum_values(
    values: Mapping[int, LocalValue], axes: tuple[str, ...], grid: MeshGrid
) -> dict[int, LocalValue] | None:
    """Sum the values of the ranks along some axes; None if shapes differ, or all are equal."""
    summed = dict[int, LocalValue]()
    has_different_values = False
    for ranks in grid.groups(axes):
        group = [values[rank] for rank in ranks if rank in values]
        if not group:
            continue
        first = group[0].tensor
        if any(value.tensor.shape != first.shape for value in group):
            return None
        if any(not torch.allclose(value.tensor, first) for value in group):
            has_different_values = True
        total = torch.stack([value.tensor for value in group]).sum(0)
        for rank in (rank for rank in ranks if rank in values):
            summed[rank] = LocalValue(total, group[0].shape, group[0].index)
    return summed if has_different_values else None


def _describe_uncovered(copies: Sequence[RankCopy], whole: Tensor, allowed: float) -> str | None:
    """Describe elements of a sharded value that no rank has; None if there are no such elements."""
    if all(copy.values.shape == whole.shape for copy in copies):
        return None
    is_covered = torch.zeros(whole.numel(), dtype=torch.bool)
    for copy in copies:
        is_covered[copy.index.flatten()] = True
    if bool(is_covered.all()):
        return None
    missing = whole.flatten()[~is_covered]
    present = whole.flatten()[is_covered]
    # Elements that occur several times in the whole may all have been found at one position. So
    # elements only count as missing if they are not equal to present ones; a sample is compared.
    distances = torch.cdist(missing[:256, None], present[:4096, None])
    nearest = distances.min(1).values
    if bool((nearest <= allowed).all()):
        return None
    count = int((~is_covered).sum())
    return f"{count} of {whole.numel()} elements of one device are missing on all ranks"


def _differing_axes(values: Mapping[int, LocalValue], setting: Setting) -> tuple[str, ...]:
    """Return the axes along which ranks have equal values."""
    alike = list[str]()
    for axis in setting.grid.names:
        for ranks in setting.grid.groups((axis,)):
            group = [values[rank].tensor for rank in ranks if rank in values]
            if len(group) > 1 and all(_are_alike(tensor, group[0]) for tensor in group):
                alike.append(axis)
                break
    return tuple(alike)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have about the same values."""
    return one.shape == other.shape and torch.allclose(one, other)


def explain_forward(
    findings: Sequence[CertificationFinding], first: FirstModule
) -> list[CertificationFinding]:
    """Give the explanation of the first wrong module to findings without a better one."""
    explained = list[CertificationFinding]()
    for finding in findings:
        kinds = {explanation.kind for explanation in finding.explanations}
        if kinds <= {"scaled", "forward"} and first.kind == "output":
            cause = replace(first.explanation, text=str(first))
            finding = replace(finding, explanations=(cause,))
        explained.append(finding)
    return explained
