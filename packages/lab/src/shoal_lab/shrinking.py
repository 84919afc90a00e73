"""Search for a smaller mesh, and smaller sizes, with which a program still fails in the same way."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from .analysis.explanations import Finding
from .report import MeshResult, Report, describe_mesh

if TYPE_CHECKING:
    from .certify import Certification

# Lines of the source of a program that a report prints at most.
_LINES = 60


def shrink_failure(certification: Certification, report: Report) -> None:
    """Look for the smallest failure, and decide explanations by it.

    An explanation that fits on a large mesh may not fit on a smaller one: explanations that do not
    name the axes of the smallest failing mesh are dropped.

    Args:
        certification: the program and its reference.
        report: with at least one failure; its text of the smallest program is written.
    """
    failed = next(result for result in report.results if result.findings)
    smallest = failed
    if certification.job.function is not None:
        smallest = _shrink_mesh(certification, failed)
        certification, smallest = _shrink_sizes(certification, smallest)
        for result in report.results:
            result.findings = [_decide(finding, smallest) for finding in result.findings]
    report.smallest = _describe(certification, smallest)


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
        for name in mesh:
            if mesh[name] > size:
                smaller = mesh | {name: size}
                if any(other > 1 for other in smaller.values()):
                    yield smaller


def _try(certification: Certification, mesh: dict[str, int]) -> MeshResult | None:
    """Run a smaller program; None if it does not run at all, which is another failure."""
    try:
        return certification.run(mesh)
    except Exception:  # noqa: BLE001  # a size that the program does not support raises anything
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


def _decide(finding: Finding, smallest: MeshResult) -> Finding:
    """Keep the explanations whose axes the smallest failing mesh has."""
    active = {name for name, size in smallest.mesh.items() if size > 1}
    explanations = finding.explanations
    if len(explanations) < 2:
        return finding
    kept = tuple(fits for fits in explanations if fits.axes and set(fits.axes) <= active)
    return replace(finding, explanations=kept) if kept else finding


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
