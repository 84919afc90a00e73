"""`certify`: run a program on ranks and on one device, and compare all that training computes.

May import: analysis, errors, observe, ranks, records, report, shrinking.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from .analysis.find_grid import find_grid
from .analysis.forward import explain_forward, find_first_module
from .analysis.grid import Grid
from .analysis.verdict import Verdict, compare_records
from .errors import CertifyError, CertifyTypeError
from .observe.batches import concatenate
from .observe.observer import Observation
from .ranks import Job, observe_job
from .records import RankRecord
from .report import MeshResult, Report
from .shrinking import shrink_failure

Program = Callable[..., Any] | str | PathLike[str]


def certify(
    program: Program,
    reference: Callable[..., Any] | None = None,
    *,
    meshes: Sequence[Mapping[str, int]],
    arguments: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    dtype: str = "float64",
    tolerance: float | None = None,
    shrink: bool = True,
) -> Report:
    """Compare a training program on meshes with the same training on one device.

    The program runs unchanged on ranks of this machine, and is observed: parameters at the first
    forward of each step and at the end, gradients and the optimizer's state at the optimizer's
    step. Every logical tensor must equal that of one device; where it does not, the report names
    the combination that explains the values of all ranks. Data loaders give one device the
    concatenated batches of the ranks; a program without data loaders picks its rows of a global
    batch whose size does not depend on the number of ranks.

    Args:
        program: a function that is called on every rank with the mesh, a dict of axis sizes by
            name, where the ranks are in row-major order and the default process group is up. Or
            the path of a script, which runs as under torchrun. A function may return values by
            name: each rank must return the whole value of one device, or a DTensor.
        reference: a function that trains on one device, with or without the mesh as its argument;
            by default the program itself on one rank, with a mesh of sizes 1.
        meshes: axis sizes by name. For a script, names of axes are found in its device meshes and
            process groups if there is one axis.
        arguments: of the script.
        sizes: keyword arguments of program and reference, such as the number of layers; they are
            halved to find a smaller failing program.
        dtype: the default dtype of both runs, or "" to leave torch's.
        tolerance: the allowed difference relative to the norm of a value; by default 1e-9 for
            float64, and what the coarsest dtype of the values allows otherwise.
        shrink: after a failure, look for a smaller mesh and smaller sizes that fail.

    Returns:
        The report, one result for each mesh.

    Raises:
        CertifyTypeError: an argument of a wrong type.
        CertifyError: no mesh, a size that is not positive, a reference for a script, or a reference
            that fails where the ranks succeed.

    Example:
        >>> def train(mesh):
        ...     model = torch.nn.Linear(4, 2)
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     torch.optim.SGD(model.parameters(), lr=0.1).step()
        >>> print(certify(train, meshes=[{"dp": 2}]))
        mesh dp=2: 6 values compared within 1e-09: equal to one device
    """
    job = _make_job(program, (tuple(arguments), dtype, sizes or {}))
    certification = Certification(job, _make_reference(job, reference, sizes or {}), tolerance)
    _check_meshes(meshes)
    report = Report()
    for mesh in meshes:
        report.results.append(certification.run(mesh))
    if shrink and not report.passed:
        shrink_failure(certification, report)
    return report


def _make_job(program: Program, choices: tuple[tuple[str, ...], str, Mapping[str, int]]) -> Job:
    """Make the job of a function or a script."""
    arguments, dtype, sizes = choices
    if isinstance(program, str | PathLike):
        path = Path(fspath(program))
        if not path.is_file():
            raise CertifyError(f"certify: the script {path} does not exist")
        return Job(script=str(path), arguments=arguments, dtype=dtype)
    if not callable(program):
        raise CertifyTypeError(
            "certify: expected program to be a function or the path of a script, got "
            f"{type(program).__name__}"
        )
    return Job(function=program, dtype=dtype, sizes=tuple(sizes.items()))


def _make_reference(
    job: Job, reference: Callable[..., Any] | None, sizes: Mapping[str, int]
) -> Job:
    """Make the job of one device."""
    if reference is None:
        return job
    if not callable(reference):
        kind = type(reference).__name__
        raise CertifyTypeError(f"certify: expected reference to be a function, got {kind}")
    if job.function is None:
        raise CertifyError(
            "certify: a script is its own reference, on one rank; got a script and a reference. "
            "Certify a function, or leave the reference out"
        )
    try:
        inspect.signature(reference).bind({}, **sizes)
        takes_mesh = True
    except TypeError:
        takes_mesh = False
    return replace(job, function=reference, takes_mesh=takes_mesh)


def _check_meshes(meshes: Sequence[Mapping[str, int]]) -> None:
    """Raise for meshes that have no ranks."""
    if not isinstance(meshes, Sequence) or not all(isinstance(mesh, Mapping) for mesh in meshes):
        raise CertifyTypeError(
            "certify: expected meshes to be a list of dicts of axis sizes, such as "
            f"[{{'dp': 2, 'tp': 2}}], got {meshes!r}"
        )
    if not meshes:
        raise CertifyError("certify: meshes is empty; give at least one mesh")
    for mesh in meshes:
        if not mesh or not all(isinstance(size, int) and size > 0 for size in mesh.values()):
            raise CertifyError(f"certify: the sizes of a mesh must be positive, got {dict(mesh)}")


@dataclass(slots=True)
class Certification:
    """A program, its reference, and the runs of the reference that were made.

    Attributes:
        job: the program.
        reference: the program of one device.
        tolerance: the user's, or None.
    """

    job: Job
    reference: Job
    tolerance: float | None
    _references: dict[Any, RankRecord] = field(default_factory=dict)

    def run(self, mesh: Mapping[str, int], *, locates: bool = True) -> MeshResult:
        """Compare the program on one mesh with one device.

        Args:
            mesh: axis sizes by name.
            locates: after a failure, run both again to find the first module that differs.
        """
        started = time.perf_counter()
        records = observe_job(self.job, mesh, prod(mesh.values()), Observation())
        batches = concatenate([record.batches for record in records])
        observation = Observation(applies_dropout=records[0].shoal, batches=batches)
        reference = self._run_reference(mesh, observation)
        grid = find_grid(mesh, records)
        verdict = compare_records(records, reference, grid, tolerance=self.tolerance)
        if any(finding.step and not finding.explanations for finding in verdict.findings):
            stale = self._run_reference(mesh, replace(observation, uses_stale_parameters=True))
            verdict = compare_records(
                records, reference, grid, stale=stale, tolerance=self.tolerance
            )
        axes = dict(zip(grid.names, grid.sizes, strict=True))
        result = MeshResult(
            axes,
            verdict.findings,
            verdict.compared,
            verdict.not_compared,
            verdict.setting.tolerance,
        )
        if locates and verdict.findings:
            self._locate(result, verdict, observation)
        result.seconds = time.perf_counter() - started
        return result

    def _run_reference(self, mesh: Mapping[str, int], observation: Observation) -> RankRecord:
        """Run the reference on one rank, once for each set of choices without recorded batches."""
        single = dict.fromkeys(mesh, 1)
        key = (
            tuple(single),
            observation.applies_dropout,
            observation.uses_stale_parameters,
            observation.outputs_of_step,
            self.reference.sizes,
        )
        if not observation.batches and key in self._references:
            return self._references[key]
        try:
            record = observe_job(self.reference, single, 1, observation)[0]
        except Exception as error:
            raise CertifyError(
                "certify: the program ran on the ranks, but not on one device: "
                f"{type(error).__name__}: {error}. Give a reference, or let the program pick its "
                "rows of a global batch by rank"
            ) from error
        if not observation.batches:
            self._references[key] = record
        return record

    def _locate(self, result: MeshResult, verdict: Verdict, observation: Observation) -> None:
        """Find the first module whose values differ, and explain by it what nothing else explains."""
        step = verdict.findings[0].step
        grid = verdict.setting.grid
        records = observe_job(self.job, result.mesh, grid.count, Observation(outputs_of_step=step))
        reference = self._run_reference(result.mesh, replace(observation, outputs_of_step=step))
        first = find_first_module(records, reference, verdict.setting)
        if first is None:
            return
        result.first_module = f"step {step}: {first}"
        result.findings = explain_forward(result.findings, first)
