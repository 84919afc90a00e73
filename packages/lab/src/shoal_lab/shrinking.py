"""Search for a smaller mesh, and smaller sizes, with which a program still fails in the same way.

May import: analysis, certification, errors, report.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from .analysis.explanations import CertificationFinding, FittingExplanation
from .certification import Certification, ProgramFailure
from .errors import CertifyError
from .report import CertificationReport, MeshResult, describe_mesh

# Lines of the source of a program that a report prints at most.
_LINES = 60


def shrink_failure(certification: Certification, report: CertificationReport) -> None:
    """Look for the smallest failure, and decide explanations by it.

    An explanation that fits on a large mesh may not fit on a smaller one: explanations that do not
    name the axes of the smallest failing mesh are dropped.

    Args:
        certification: the program and its reference.
        report: with at least one failure; its text of the smallest program is written.
    """
    failed = next(result for result in report.results if result.findings)
    smallest = failed
    alone = dict[str, MeshResult]()
    if certification.job.function is not None:
        alone = _failures_of_single_axes(certification, failed)
        smallest = min(alone.values(), key=_size_of, default=failed)
        smallest = _shrink_mesh(certification, smallest)
        certification, smallest = _shrink_sizes(certification, smallest)
    active = [name for name, size in failed.mesh.items() if size > 1]
    is_decided = certification.job.function is not None or len(active) == 1
    if len(active) == 1:
        alone = {active[0]: failed}
    for result in report.results:
        if is_decided and list(result.mesh) == list(failed.mesh):
            result.findings = [_decide(finding, (alone, active)) for finding in result.findings]
    report.smallest = _describe(certification, smallest)


def _size_of(result: MeshResult) -> int:
    """Return the number of ranks of a result."""
    return prod(result.mesh.values())


def _failures_of_single_axes(
    certification: Certification, failed: MeshResult
) -> dict[str, MeshResult]:
    """Run the program with one axis after the other alone; return the failures by axis."""
    failures = dict[str, MeshResult]()
    active = [name for name, size in failed.mesh.items() if size > 1]
    for name in active:
        mesh = dict.fromkeys(failed.mesh, 1) | {name: failed.mesh[name]}
        result = _try(certification, mesh) if len(active) > 1 else failed
        if result is not None and _fails_alike(result, failed):
            failures[name] = result
    return failures


def _shrink_mesh(certification: Certification, failed: MeshResult) -> MeshResult:
    """Reduce axis after axis to one rank, then to two, as long as the program fails alike."""
    smallest = failed
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for mesh in _smaller_meshes(smallest.mesh):
            result = _try(certification, mesh)
            if result is not None and _fails_alike(result, failed):
                smallest = result
                is_smaller = True
                break
    return smallest


def _smaller_meshes(mesh: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield meshes with one axis smaller."""
    for size in (1, 2):
        for name, current in mesh.items():
            if current > size:
                smaller = mesh | {name: size}
                if any(other > 1 for other in smaller.values()):
                    yield smaller


def _try(certification: Certification, mesh: dict[str, int]) -> MeshResult | None:
    """Run a smaller program; None if it does not run at all, which is another failure."""
    try:
        return certification.run(mesh)
    except (ProgramFailure, CertifyError):
        # The program does not support these sizes.
        return None


def _fails_alike(result: MeshResult, failed: MeshResult) -> bool:
    """Tell whether a failure has a finding of the same quantity."""
    quantities = {finding.quantity for finding in failed.findings}
    return any(finding.quantity in quantities for finding in result.findings)


def _shrink_sizes(
    certification: Certification, smallest: MeshResult
) -> tuple[Certification, MeshResult]:
    """Halve the sizes that program and reference take, one after the other."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        sizes = dict(certification.job.sizes)
        for name, size in sizes.items():
            if size < 2:
                continue
            halved = tuple((sizes | {name: size // 2}).items())
            smaller = replace(
                certification,
                job=replace(certification.job, sizes=halved),
                reference=replace(certification.reference, sizes=halved),
            )
            result = _try(smaller, smallest.mesh)
            if result is not None and _fails_alike(result, smallest):
                certification = smaller
                smallest = result
                is_smaller = True
                break
    return certification, smallest


def _decide(
    finding: CertificationFinding, failures: tuple[dict[str, MeshResult], list[str]]
) -> CertificationFinding:
    """Decide the axes of a finding by the axes that make the program fail when they are alone.

    Several explanations: those whose axes do not fail alone are dropped. No explanation, or one
    without a certain axis: the axes that fail alone are named.
    """
    alone, active = failures
    name = finding.name
    failing = list[str]()
    for axis, result in alone.items():
        if name in {other.name for other in result.findings}:
            failing.append(axis)
    axes = tuple(failing)
    if len(finding.explanations) > 1:
        kept = tuple(fits for fits in finding.explanations if set(fits.axes) <= set(axes))
        return replace(finding, explanations=kept) if kept and axes else finding
    cause = axes if alone else tuple(active)
    if not cause or (alone and len(cause) != 1):
        return finding
    over = ", ".join(cause)
    if not finding.explanations:
        text = (
            f"differs by {finding.difference:.1e}; no combination of the ranks' values explains "
            f"it, but it occurs with more than one rank along {over} only"
        )
        return replace(finding, explanations=(FittingExplanation("unexplained", cause, text),))
    first = finding.explanations[0]
    if first.kind in ("forward", "scaled", "permuted", "random") and first.axes != cause:
        text = f"{first.text} (it occurs with more than one rank along {over} only)"
        return replace(finding, explanations=(replace(first, axes=cause, text=text),))
    return finding


def _describe(certification: Certification, smallest: MeshResult) -> str:
    """Return a call that reproduces the failure, and the source of the program."""
    job = certification.job
    lines = list[str]()
    if job.function is None:
        count = " ".join(["--ranks", str(prod(smallest.mesh.values()))])
        command = ["python -m shoal_lab certify", job.script, count, *job.arguments]
        return f"  {' '.join(command)}"
    name = getattr(job.function, "__name__", repr(job.function))
    sizes = f", sizes={dict(job.sizes)}" if job.sizes else ""
    lines.append(f"  certify({name}, meshes=[{smallest.mesh}]{sizes})")
    lines.append(f"  # mesh {describe_mesh(smallest.mesh)}: {smallest.findings[0]}")
    try:
        source = inspect.getsource(job.function).splitlines()
    except (OSError, TypeError):
        source = []
    lines += [f"  {line}" for line in source[:_LINES]]
    return "\n".join(lines)
