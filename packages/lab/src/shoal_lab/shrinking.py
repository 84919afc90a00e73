"""Search for a smaller mesh, and smaller sizes, with which a program still fails in the same way.

May import: analysis, certification, ranks, report, script_arguments, trials.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from .analysis.explanations import CertificationFinding, FittingExplanation
from .certification import Certification
from .ranks import RankJob
from .report import CertificationReport, MeshResult, describe_mesh
from .script_arguments import certify_command, fixed_axes, halve_integers
from .trials import ShrinkingTrials

# the most lines of a program's source that a report prints
_LINES = 60
# Kinds of explanations whose axes are only a guess from the ranks on which values differ.
_KINDS_WITH_GUESSED_AXES = ("forward", "scaled", "permuted", "random")


def shrink_failure(certification: Certification, report: CertificationReport) -> None:
    """Look for the smallest failing program, and drop explanations that it contradicts.

    Several explanations may fit on a large mesh. For each axis, the program runs again on a mesh
    with more than one rank along this axis only. If this run does not fail, the explanations that
    name the axis are dropped.

    Args:
        certification: the program and its reference.
        report: a report with at least one failure. Its `smallest` is set, and its findings may
            change.
    """
    failed = next(result for result in report.results if result.findings)
    can_resize_one_axis = _can_resize_one_axis(certification.job, failed)
    alone: dict[str, MeshResult] = {}
    if can_resize_one_axis:
        alone = _failures_of_single_axes(certification, failed)
    _drop_contradicted_explanations(report, failed, alone, can_resize_one_axis=can_resize_one_axis)
    smallest = min(alone.values(), key=_size_of, default=failed)
    mesh_trials = ShrinkingTrials(failed)
    size_trials = ShrinkingTrials(failed)
    smallest = _shrink_mesh(
        certification, mesh_trials, smallest, can_resize_one_axis=can_resize_one_axis
    )
    smallest_program, smallest = _shrink_sizes(certification, size_trials, smallest)
    # The first line is the command that reproduces the failure.
    command, *details = _describe(smallest_program, smallest)
    lines = [command]
    if not can_resize_one_axis:
        # The arguments of a script contain the size of an axis dp as `{dp}` (`script_arguments`).
        names = " or ".join(f"{{{name}}}" for name in failed.given)
        lines.append(f"  # no argument has {names}: only the number of ranks was reduced")
    reasons = mesh_trials.reasons | size_trials.reasons
    if reasons:
        tried = [f"{change} ({reason})" for change, reason in reasons.items()]
        lines.append(f"  # smaller programs that do not fail in this way: {'; '.join(tried)}")
    lines += details
    report.smallest = "\n".join(lines)


def _drop_contradicted_explanations(
    report: CertificationReport,
    failed: MeshResult,
    alone: dict[str, MeshResult],
    *,
    can_resize_one_axis: bool,
) -> None:
    """Replace the findings on meshes with the axes of `failed` by the result of `_decide`.

    Args:
        report: the report. Its results change.
        failed: the first failure.
        alone: by axis, the failure with more than one rank along this axis only.
        can_resize_one_axis: whether the program ran with each axis alone.
    """
    active = [name for name, size in failed.mesh.items() if size > 1]
    if len(active) == 1:
        # The failure itself is the run with this axis alone, also if no axis can be resized.
        alone = {active[0]: failed}
    elif not can_resize_one_axis:
        return
    axis_names = list(failed.mesh)
    for result in report.results:
        if list(result.mesh) == axis_names:
            result.findings = [_decide(finding, alone, active) for finding in result.findings]


def _can_resize_one_axis(job: RankJob, failed: MeshResult) -> bool:
    """Tell whether the program can run with another size of a single axis of the mesh.

    A function gets the mesh. A script gets sizes in its arguments, and may compute the size of one
    axis from the others and the number of ranks. Therefore one axis may be missing in the arguments
    (`fixed_axes`): `--tp 2` with 4 ranks gives dp = 2, and dp = 1 with 2 ranks.
    """
    if job.function is not None:
        return True
    # `given` has the axes that the caller of `certify` named, `mesh` those of the script's mesh.
    is_named = list(failed.given) == list(failed.mesh)
    return is_named and len(fixed_axes(job.arguments, failed.given)) <= 1


def _size_of(result: MeshResult) -> int:
    """Return the number of ranks of a result."""
    return prod(result.mesh.values())


def _failures_of_single_axes(
    certification: Certification, failed: MeshResult
) -> dict[str, MeshResult]:
    """Run the program with more than one rank along one axis only; return the failures by axis."""
    active = [name for name, size in failed.given.items() if size > 1]
    # The failure itself is the run with more than one rank along this axis only.
    if len(active) == 1:
        return {active[0]: failed}
    failures: dict[str, MeshResult] = {}
    trials = ShrinkingTrials(failed)
    for name in active:
        mesh = dict.fromkeys(failed.given, 1) | {name: failed.given[name]}
        # None if the program does not fail, or fails in another way
        result = trials.run(certification, mesh, name)
        if result is not None:
            failures[name] = result
    return failures


def _shrink_mesh(
    certification: Certification,
    trials: ShrinkingTrials,
    smallest: MeshResult,
    *,
    can_resize_one_axis: bool,
) -> MeshResult:
    """Reduce axis after axis to a divisor, as long as the program fails in the same way.

    A script whose axes are not in its arguments gets fewer ranks.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        start = smallest.given
        if not can_resize_one_axis:
            # All ranks form one axis: only their number is reduced.
            start = {"ranks": _size_of(smallest)}
        for mesh in _smaller_meshes(start):
            result = trials.run(certification, mesh, f"mesh {describe_mesh(mesh)}")
            if result is not None:
                smallest = result
                is_smaller = True
                break
    return smallest


def _smaller_meshes(mesh: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield meshes with one axis smaller, the smallest sizes first.

    The mesh of one rank is left out, because the program is assumed to be right on one rank.
    """
    for size in range(1, max(mesh.values())):
        for name, current in mesh.items():
            is_divisor = current > size and current % size == 0
            smaller = mesh | {name: size}
            if is_divisor and any(other > 1 for other in smaller.values()):
                yield smaller


def _shrink_sizes(
    certification: Certification, trials: ShrinkingTrials, smallest: MeshResult
) -> tuple[Certification, MeshResult]:
    """Halve the sizes that program and reference take, one after the other."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for change, smaller in _smaller_sizes(certification):
            result = trials.run(smaller, smallest.given, change)
            if result is not None:
                certification = smaller
                smallest = result
                is_smaller = True
                break
    return certification, smallest


def _smaller_sizes(certification: Certification) -> Iterator[tuple[str, Certification]]:
    """Yield the certification with one size halved, of a function or in a script's arguments."""
    job = certification.job
    reference = certification.reference
    if job.function is None:
        for change, arguments in halve_integers(job.arguments):
            # The reference of a script is the same script, on one device.
            script = replace(job, arguments=arguments)
            yield change, replace(certification, job=script, reference=script)
        return
    sizes = dict(job.sizes)
    for name, size in sizes.items():
        if size < 2:
            continue
        halved = tuple((sizes | {name: size // 2}).items())
        smaller_job = replace(job, sizes=halved)
        smaller_reference = replace(reference, sizes=halved)
        smaller = replace(certification, job=smaller_job, reference=smaller_reference)
        yield f"{name}={size // 2}", smaller


def _decide(
    finding: CertificationFinding, alone: dict[str, MeshResult], active: list[str]
) -> CertificationFinding:
    """Choose the explanations of a finding by the axes that suffice for the failure.

    An axis suffices if the program fails with more than one rank along this axis only. If there are
    several explanations, the ones that name other axes are dropped. If there is no explanation, or
    one whose axes are a guess, the finding gets the axis that suffices. If no axis suffices for any
    failure, the finding gets all axes together.

    Args:
        finding: the finding.
        alone: by axis, the failure with more than one rank along this axis only.
        active: the axes of more than one rank.
    """
    name = finding.name
    # The axes that suffice for this finding. It may be empty if `alone` is not: then the failures
    # with one axis have other findings only.
    failing: list[str] = []
    for axis, result in alone.items():
        if name in {other.name for other in result.findings}:
            failing.append(axis)
    axes = tuple(failing)
    if len(finding.explanations) > 1:
        kept = tuple(fits for fits in finding.explanations if set(fits.axes) <= set(axes))
        return replace(finding, explanations=kept) if kept and axes else finding
    if alone and len(axes) != 1:
        # The finding occurs with several axes alone, or with none of them.
        return finding
    # If `alone` is empty, the program does not fail with any axis alone.
    cause = axes if alone else tuple(active)
    if not cause:
        return finding
    over = " and ".join(cause)
    if not finding.explanations:
        text = (
            f"differs by {finding.difference:.1e}; no combination of the ranks' values explains "
            f"it, but it occurs only with more than one rank along {over}"
        )
        return replace(finding, explanations=(FittingExplanation("unexplained", cause, text),))
    first = finding.explanations[0]
    if first.kind in _KINDS_WITH_GUESSED_AXES and first.axes != cause:
        text = f"{first.text} (it occurs only with more than one rank along {over})"
        return replace(finding, explanations=(replace(first, axes=cause, text=text),))
    return finding


def _describe(certification: Certification, smallest: MeshResult) -> list[str]:
    """Return a call that reproduces the failure, and the source of the program."""
    job = certification.job
    # One finding is enough to recognize the failure.
    finding = f"  # mesh {describe_mesh(smallest.mesh)}: {smallest.findings[0]}"
    if job.function is None:
        options: list[str] = []
        # None keeps the dtypes of the script.
        if job.dtype != "float64":
            options += ["--dtype", job.dtype or "keep"]
        if certification.tolerance is not None:
            options += ["--tolerance", repr(certification.tolerance)]
        if job.device is not None:
            options += ["--device", job.device]
        command = certify_command(job.script, smallest.given, options, job.arguments)
        return [f"  {command}", finding, "  # constants in the script are unchanged"]
    name = getattr(job.function, "__name__", repr(job.function))
    sizes = f", sizes={dict(job.sizes)}" if job.sizes else ""
    lines = [f"  certify({name}, meshes=[{smallest.mesh}]{sizes})", finding]
    try:
        source = inspect.getsource(job.function).splitlines()
    except (OSError, TypeError):
        source = []
    return [*lines, *(f"  {line}" for line in source[:_LINES])]
