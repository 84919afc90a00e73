"""`compare_records`: comparison of the records of all ranks with the record of one device.

The comparison ends at the first step with a difference, because later steps follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..records import LocalValue, RankRecord, StepRecord, Values
from .clipping import explain_clip
from .combinations import explain_copies
from .copies import Expected, RankCopy, Setting, is_right, relative_difference
from .explanations import CertificationFinding, FittingExplanation
from .find_index import find_index
from .grid import MeshGrid
from .losses import explain_losses, relate_losses
from .masks import compare_masks
from .placing import ValuePlace, place_parameters, place_replaced


@dataclass(slots=True)
class Verdict:
    """The result of one comparison.

    Attributes:
        findings: the tensors that differ, at the first step with a difference.
        compared: the number of logical tensors that were compared.
        not_compared: tensors that could not be compared, with the reason.
        setting: the grid, and the tolerances that were used.
    """

    findings: list[CertificationFinding]
    compared: int
    not_compared: list[str]
    setting: Setting


class _Quantity(NamedTuple):
    """The values of one kind, of all parameters.

    Attributes:
        by_rank: the values of each rank.
        reference: the values of one device.
        history: the values of one device at the earlier steps.
    """

    by_rank: Sequence[Values]
    reference: Values
    history: Sequence[Values]


def tolerance_of(epsilon: float) -> float:
    """Return the allowed relative difference for values with a rounding unit (`torch.finfo.eps`).

    Example:
        >>> tolerance_of(torch.finfo(torch.float64).eps)
        1e-09
    """
    if epsilon < 1e-12:
        return 1e-9
    return min(0.1, max(1e-4, 8 * epsilon))


def compare_records(
    ranks: Sequence[RankRecord],
    reference: RankRecord,
    grid: MeshGrid,
    stale: RankRecord | None = None,
    tolerance: float | None = None,
) -> Verdict:
    """Compare the records of all ranks with the record of one device.

    Args:
        ranks: the records of the ranks, in their order.
        reference: the record of the same program on one device with the whole batch.
        grid: the axes of the ranks.
        stale: the record of one device whose forwards used the parameters of the step before.
        tolerance: the allowed relative difference; None derives it from the dtypes.
    """
    epsilon = max(record.epsilon for record in (*ranks, reference))
    allowed = tolerance_of(epsilon) if tolerance is None else tolerance
    comparison = _TensorComparison(ranks, reference, Setting(grid, allowed), stale)
    comparison.run()
    return Verdict(
        comparison.findings, comparison.compared, comparison.not_compared, comparison.setting
    )


class _TensorComparison:
    """The comparison of all quantities, step by step; `run` fills `findings`."""

    def __init__(
        self,
        ranks: Sequence[RankRecord],
        reference: RankRecord,
        setting: Setting,
        stale: RankRecord | None,
    ) -> None:
        self.ranks = ranks
        self.reference = reference
        self.setting = setting
        self.stale = stale
        self.findings = list[CertificationFinding]()
        self.compared = 0
        self.not_compared = list[str]()
        self.places = place_parameters(ranks, reference, setting.grid)

    def run(self) -> None:
        """Compare the quantities in the order of their computation, until there is a finding."""
        first = self.reference.steps[0].before if self.reference.steps else {}
        self._note_unplaced(
            0, [record.steps[0].before for record in self.ranks if record.steps], first
        )
        steps = len(self.reference.steps)
        counts = sorted({len(record.steps) for record in self.ranks})
        for step in range(min(steps, *counts)):
            self._prepare(step)
            if step:
                now = [
                    (record.steps[step].before, record.steps[step].replaced)
                    for record in self.ranks
                ]
                self._place_replaced(step, now, self.reference.steps[step].before)
            comparisons = (
                self._parameters,
                self._states_before,
                self._gradients,
                self._states,
            )
            for compare in comparisons:
                compare(step)
                if self.findings:
                    return
        self.findings += compare_masks(self.ranks, self.setting.grid)
        if counts != [steps]:
            text = (
                f"the optimizer stepped {' or '.join(map(str, counts))} times on the ranks, but "
                f"{steps} times on one device"
            )
            explanation = FittingExplanation("missing", (), text)
            self.findings.append(
                CertificationFinding(
                    counts[0], "steps", "the program", 1.0, explanations=(explanation,)
                )
            )
            return
        self._prepare(max(steps - 1, 0))
        if not self.findings:
            self._final_parameters(steps)
        self._compare_returned(steps)

    def _prepare(self, step: int) -> None:
        """Set the floor, the number of backwards and the relations of losses of a step."""
        if step >= len(self.reference.steps):
            return
        record = self.reference.steps[step]
        norms = [float(value.tensor.norm()) for value in record.gradients.values()]
        floor = 1e-3 * self.setting.tolerance * max(norms, default=0.0)
        steps = [rank.steps[step] for rank in self.ranks]
        relations = relate_losses(steps, record, self.setting.grid)
        self.setting = replace(
            self.setting,
            floor=floor,
            backwards=max(len(record.unreduced), 1),
            loss_by_axis=relations,
        )

    def _place_replaced(
        self, step: int, ranks: Sequence[tuple[Values, set[str]]], wholes: Values
    ) -> None:
        """Find the parameters that the program has replaced since the step before."""
        self.places = place_replaced(self.places, ranks, wholes, self.setting)
        self._note_unplaced(step, [values for values, _ in ranks], wholes)

    def _note_unplaced(self, step: int, by_rank: Sequence[Values], wholes: Values) -> None:
        """Report parameters without a place; parameters with a known name are findings."""
        for rank, name in self.places.unplaced:
            if name in wholes and not name.startswith("optimizer."):
                shape = tuple(by_rank[rank][name].tensor.shape)
                text = (
                    f"no part of the parameter of one device {tuple(wholes[name].tensor.shape)} "
                    f"has the initial values that rank {rank} has {shape}"
                )
                axes = self._sharded_axes(name, by_rank)
                explanation = FittingExplanation("random", axes, text)
                if name not in {finding.name for finding in self.findings}:
                    self.findings.append(
                        CertificationFinding(
                            step, "parameter", name, 1.0, explanations=(explanation,)
                        )
                    )
            else:
                self.not_compared.append(
                    f"{name} on rank {rank}: no parameter of one device has matching values"
                )
        for rank, name in self.places.ambiguous:
            self.not_compared.append(f"{name} on rank {rank}: constant values match several shards")

    def _sharded_axes(self, name: str, by_rank: Sequence[Values]) -> tuple[str, ...]:
        """Return the axes along which the initial values of a parameter differ."""
        grid = self.setting.grid
        differing = list[str]()
        for axis in grid.names:
            for ranks in grid.groups((axis,)):
                values = [by_rank[rank].get(name) for rank in ranks]
                tensors = [value.tensor for value in values if value is not None]
                if any(not _equal(tensor, tensors[0]) for tensor in tensors):
                    differing.append(axis)
                    break
        return tuple(differing)

    # --- quantities -----------------------------------------------------------------------------

    def _parameters(self, step: int) -> None:
        """Compare the parameters before a step."""
        values = [record.steps[step].before for record in self.ranks]
        wholes = self.reference.steps[step].before
        history = [earlier.before for earlier in self.reference.steps[:step]]
        # if parameters are wrong before step 1, the update of step 0 was wrong
        self._compare(max(step - 1, 0), "parameter", _Quantity(values, wholes, history))

    def _final_parameters(self, steps: int) -> None:
        """Compare the parameters at the end."""
        values = [record.after for record in self.ranks]
        now = [(record.after, record.replaced_after) for record in self.ranks]
        self._place_replaced(max(steps - 1, 0), now, self.reference.after)
        history = [earlier.before for earlier in self.reference.steps]
        quantity = _Quantity(values, self.reference.after, history)
        self._compare(max(steps - 1, 0), "parameter", quantity)

    def _gradients(self, step: int) -> None:
        """Compare the gradients at the optimizer's step."""
        steps = [record.steps[step] for record in self.ranks]
        record = self.reference.steps[step]
        values = [_with_zeros(rank_step) for rank_step in steps]
        wholes = _with_zeros(record)
        history = [earlier.gradients for earlier in self.reference.steps[:step]]
        self._compare(step, "gradient", _Quantity(values, wholes, history))
        if not self.findings:
            return
        clip = explain_clip(self._copies_of_gradients(step), wholes, record, self.setting)
        uneven = explain_losses(steps, record, self.setting.grid)
        for number, finding in enumerate(self.findings):
            kinds = {explanation.kind for explanation in finding.explanations}
            if clip and kinds <= {"scaled", "too large", "too small", "some ranks"}:
                self.findings[number] = replace(finding, explanations=clip)
            elif uneven and kinds <= {"scaled"}:
                self.findings[number] = replace(finding, explanations=uneven)

    def _copies_of_gradients(self, step: int) -> dict[str, list[RankCopy]]:
        """Return the copies of the gradients of a step, by logical name."""
        return self._gather([_with_zeros(record.steps[step]) for record in self.ranks])

    def _states_before(self, step: int) -> None:
        """Compare the state that an optimizer has before its first step, as after a resume."""
        values = [record.steps[step].states_before for record in self.ranks]
        self._compare_states(step, values, self.reference.steps[step].states_before)

    def _states(self, step: int) -> None:
        """Compare the state of the optimizer after a step."""
        values = [record.steps[step].states for record in self.ranks]
        self._compare_states(step, values, self.reference.steps[step].states)

    def _compare_states(self, step: int, by_rank: Sequence[Values], wholes: Values) -> None:
        """Compare the states of optimizers, one key after the other."""
        keys = dict.fromkeys(name.rpartition(" ")[2] for name in wholes)
        for key in keys:
            values = [_states_of(states, key) for states in by_rank]
            history = [_states_of(earlier.states, key) for earlier in self.reference.steps[:step]]
            quantity = _Quantity(values, _states_of(wholes, key), history)
            self._compare(step, f"optimizer state {key}", quantity)

    def _compare_returned(self, steps: int) -> None:
        """Compare the values that the program returned."""
        for name, whole in self.reference.returned.items():
            copies = list[RankCopy]()
            for rank, record in enumerate(self.ranks):
                value = record.returned.get(name)
                if value is None:
                    continue
                index = value.index
                if index is None and value.tensor.numel() == whole.tensor.numel():
                    index = torch.arange(whole.tensor.numel()).view(value.tensor.shape)
                if index is None:
                    slack = self.setting.tolerance * float(whole.tensor.abs().max())
                    index = find_index(value.tensor, whole.tensor, slack)
                if index is not None:
                    copies.append(RankCopy(rank, name, value.tensor, index))
            expected = Expected(whole.tensor)
            self._judge(max(steps - 1, 0), "returned value", name, copies, expected=expected)

    # --- comparison of one quantity -------------------------------------------------------------

    def _compare(self, step: int, kind: str, quantity: _Quantity) -> None:
        """Compare the values of one kind (parameter, gradient, ...) of all parameters."""
        copies = self._gather(quantity.by_rank)
        stale = self._stale_gradients(step) if kind == "gradient" else {}
        microbatches = self.reference.steps[step].unreduced if kind == "gradient" else []
        for name, whole in quantity.reference.items():
            if name not in copies or not copies[name]:
                continue
            before = [past[name].tensor for past in quantity.history if name in past]
            # A program may have replaced the parameter by one of another shape.
            earlier = [tensor for tensor in before if tensor.shape == whole.tensor.shape]
            parts = [part[name].tensor for part in microbatches if name in part]
            is_complete = len(parts) == len(microbatches)
            expected = Expected(
                whole.tensor, earlier, parts if is_complete else (), stale.get(name)
            )
            self._judge(step, kind, name, copies[name], expected=expected)

    def _judge(
        self, step: int, kind: str, name: str, copies: Sequence[RankCopy], *, expected: Expected
    ) -> None:
        """Compare the copies of one tensor with its expected values; explain them if wrong."""
        copies = [copy for copy in copies if copy.values.shape == copy.index.shape]
        if not copies:
            return
        self.compared += 1
        setting = self.setting
        if kind != "gradient":
            # the floor of the setting is for gradients
            setting = replace(setting, floor=setting.tolerance * 1e-6)
        if is_right(copies, expected.now, setting):
            return
        family = "optimizer state" if kind.startswith("optimizer") else kind
        explanations = explain_copies(copies, expected, setting, family)
        difference = relative_difference(copies, expected.now)
        self.findings.append(
            CertificationFinding(step, kind, name, difference, explanations=explanations)
        )

    def _stale_gradients(self, step: int) -> dict[str, Tensor]:
        """Return the gradients of one device with parameters of the step before."""
        if self.stale is None or step >= len(self.stale.steps):
            return {}
        gradients = self.stale.steps[step].gradients
        return {name: value.tensor for name, value in gradients.items()}

    def _gather(self, by_rank: Sequence[Values]) -> dict[str, list[RankCopy]]:
        """Collect the copies of each logical parameter."""
        copies = dict[str, list[RankCopy]]()
        for rank, values in enumerate(by_rank):
            for name, value in values.items():
                place = self.places.by_rank[rank].get(name)
                if place is None:
                    continue
                summed = _sum_pending(value, name, by_rank)
                index = _index_of(summed, place, self.reference)
                if index is not None:
                    copy = RankCopy(rank, name, summed.tensor, index)
                    copies.setdefault(place.name, []).append(copy)
        return copies


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and values."""
    return one.shape == other.shape and torch.equal(one, other)


def _with_zeros(step: StepRecord) -> Values:
    """Return the gradients of a step, with zeros for trained parameters without a gradient."""
    values = dict(step.gradients)
    for name, parameter in step.before.items():
        if name in step.trained and name not in values:
            zeros = torch.zeros_like(parameter.tensor)
            values[name] = LocalValue(zeros, parameter.shape, parameter.index)
    return values


def _states_of(states: Values, key: str) -> Values:
    """Return the states of one key, by parameter."""
    values = Values()
    for name, value in states.items():
        parameter, _, other = name.rpartition(" ")
        if other == key:
            values[parameter] = value
    return values


def _sum_pending(value: LocalValue, name: str, by_rank: Sequence[Values]) -> LocalValue:
    """Return the sum of a partial value over its ranks; other values are returned unchanged."""
    if not value.pending:
        return value
    total = torch.stack([by_rank[rank][name].tensor for rank in value.pending]).sum(0)
    return LocalValue(total, value.shape, value.index)


def _index_of(value: LocalValue, place: ValuePlace, reference: RankRecord) -> Tensor | None:
    """Return the positions of a value's elements, from its metadata or from its parameter's place.

    Returns None if the value does not have the size of the parameter.
    """
    if value.index is not None:
        return value.index
    if value.tensor.shape == place.index.shape:
        return place.index
    if value.tensor.numel() == 1:
        # a scalar state such as the number of steps
        return torch.zeros(value.tensor.shape, dtype=torch.int64)
    if value.tensor.numel() == place.index.numel():
        return place.index.view(value.tensor.shape)
    return None
