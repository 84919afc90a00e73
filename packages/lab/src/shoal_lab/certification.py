"""`Certification`: comparisons of a program on ranks with its reference on one device.

Each comparison runs the program on the ranks of a mesh and the reference on one device, both under
observation, and has `analysis` compare the records.

May import: analysis, errors, observe, ranks, records, report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from .analysis.find_grid import find_grid
from .analysis.forward import explain_forward, find_first_module
from .analysis.verdict import Verdict, compare_records
from .errors import CertifyError
from .observe.batches import concatenate
from .observe.observer import Observation
from .ranks import RankJob, observe_job
from .records import RankRecord
from .report import MeshResult


class ProgramFailure(Exception):
    """An error of the program on its ranks.

    Args:
        error: the error.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Certification:
    """A program, its reference, and the records of the reference's runs so far.

    Attributes:
        job: the program.
        reference: the program that runs on one device.
        tolerance: the allowed relative difference that the user has chosen, or None.
    """

    job: RankJob
    reference: RankJob
    tolerance: float | None
    _references: dict[Any, RankRecord] = field(default_factory=dict)

    def run(self, mesh: Mapping[str, int], *, locates: bool = True) -> MeshResult:
        """Compare the program on one mesh with one device.

        Args:
            mesh: axis sizes by name.
            locates: whether to run both again after a failure, to find the first module that
                differs.

        Raises:
            ProgramFailure: the program fails on the ranks.
            CertifyError: the program fails on one device, or nothing could be compared.
        """
        started = time.perf_counter()
        try:
            records = observe_job(self.job, mesh, prod(mesh.values()), Observation())
        except Exception as error:
            raise ProgramFailure(error) from error
        batches = concatenate([record.batches for record in records])
        # One device applies dropout only if its masks can be equal to the ranks' masks.
        observation = Observation(applies_dropout=records[0].uses_shoal, batches=batches)
        reference = self._run_reference(mesh, observation)
        grid = find_grid(mesh, records)
        verdict = compare_records(records, reference, grid, tolerance=self.tolerance)
        # An unexplained finding may come from a forward that used the parameters from before the
        # last step. In the first step there are no such parameters.
        may_be_stale = any(
            finding.step > 0 and not finding.explanations for finding in verdict.findings
        )
        if may_be_stale:
            stale = self._run_reference(mesh, replace(observation, uses_stale_parameters=True))
            verdict = compare_records(
                records, reference, grid, stale=stale, tolerance=self.tolerance
            )
        if not verdict.compared and not verdict.findings:
            reason = verdict.not_compared[0] if verdict.not_compared else "no parameters were found"
            raise CertifyError(
                "certify: nothing could be compared. Either no module with parameters ran with "
                "gradients, or no parameter of one device matches the parameters of the ranks: "
                f"{reason}"
            )
        axes = dict(zip(grid.names, grid.sizes, strict=True))
        result = MeshResult(
            axes,
            findings=verdict.findings,
            compared=verdict.compared,
            not_compared=verdict.not_compared,
            tolerance=verdict.setting.tolerance,
            given=dict(mesh),
        )
        if locates and verdict.findings:
            self._locate(result, verdict, mesh, observation)
        result.seconds = time.perf_counter() - started
        return result

    def _run_reference(self, mesh: Mapping[str, int], observation: Observation) -> RankRecord:
        """Return the record of the reference on one rank.

        A run with the same choices is not repeated: its record is returned again. Runs that use
        batches recorded on the ranks are always repeated.
        """
        single = dict.fromkeys(mesh, 1)
        key = (
            tuple(single),
            observation.applies_dropout,
            observation.uses_stale_parameters,
            observation.outputs_of_step,
            self.reference.sizes,
            self.reference.arguments,
        )
        if not observation.batches and key in self._references:
            return self._references[key]
        try:
            record = observe_job(self.reference, single, 1, observation)[0]
        except Exception as error:
            raise CertifyError(
                "certify: the program ran on the ranks, but not on one device: "
                f"{type(error).__name__}: {error}. Pass a reference, or let the program choose "
                "its rows of a global batch by rank"
            ) from error
        if not observation.batches:
            self._references[key] = record
        return record

    def _locate(
        self,
        result: MeshResult,
        verdict: Verdict,
        mesh: Mapping[str, int],
        observation: Observation,
    ) -> None:
        """Find the first module with different values; it explains findings without a cause."""
        step = verdict.findings[0].step
        records = observe_job(
            self.job, mesh, prod(mesh.values()), Observation(outputs_of_step=step)
        )
        reference = self._run_reference(mesh, replace(observation, outputs_of_step=step))
        first = find_first_module(records, reference, verdict.setting)
        if first is None:
            return
        result.first_module = f"step {step}: {first}"
        result.findings = explain_forward(result.findings, first)
