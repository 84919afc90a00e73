"""`CertificationReport`: the findings of certification for each mesh, as data and as text.

May import: analysis, errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_mesh.internal import html_table, html_text

from .analysis.explanations import CertificationFinding
from .errors import NotCertifiedError

# the most lines of findings in the text about one mesh
_LINES = 12


@dataclass(slots=True)
class MeshResult:
    """The comparison on one mesh.

    Attributes:
        mesh: sizes of the axes of the mesh that the program has made, by its names.
        findings: one finding for each logical tensor whose values differ from the values of a run
            on one device, at the first step with a difference. A logical tensor is a global tensor
            of the program, of which each rank holds a shard, a copy or a summand.
        compared: the number of logical tensors that were compared.
        not_compared: tensors that could not be compared, with the reason.
        tolerance: the allowed difference relative to the norm of a value.
        first_module: a text about the first module whose output, or gradient at the output,
            differs; "" if no module differs, or if modules were not compared.
        seconds: the duration of the comparison.
        given: the mesh that `certify` was called with: sizes by the caller's names, which may
            differ from the names in `mesh`.

    Example:
        >>> result = MeshResult({"dp": 2}, [], 12, [], tolerance=1e-9)
        >>> print(CertificationReport([result]))
        mesh dp=2: 12 values compared within 1e-09: equal to one device
    """

    mesh: dict[str, int]
    findings: list[CertificationFinding]
    compared: int
    not_compared: list[str]
    tolerance: float
    first_module: str = ""
    seconds: float = 0.0
    given: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, repr=False)
class CertificationReport:
    """The result of `certify`.

    Attributes:
        results: the result for each mesh.
        smallest: a text about the smallest program that `certify` has found to fail, after it has
            made a failing program smaller step by step; "" if nothing failed.

    Example:
        >>> CertificationReport().passed
        True
    """

    results: list[MeshResult] = field(default_factory=list)
    smallest: str = ""

    @property
    def findings(self) -> list[CertificationFinding]:
        """The findings of all meshes."""
        return [finding for result in self.results for finding in result.findings]

    @property
    def passed(self) -> bool:
        """True if every mesh computes the same as one device."""
        return not self.findings

    def check(self) -> CertificationReport:
        """Return the report if all meshes agree with one device.

        Raises:
            NotCertifiedError: if a mesh differs; the text is the report.
        """
        if not self.passed:
            raise NotCertifiedError(str(self))
        return self

    def __repr__(self) -> str:
        """Return the report as text."""
        lines = list[str]()
        for result in self.results:
            lines += _describe_result(result)
        if self.smallest:
            lines += ["the smallest program that fails:", self.smallest]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the report as a table for notebooks."""
        header = ("mesh", "values compared", "allowed difference", "result")
        rows = []
        for result in self.results:
            mesh = describe_mesh(result.mesh)
            verdict = "equal to one device"
            if result.findings:
                verdict = f"{len(result.findings)} differ from one device"
            rows.append((mesh, result.compared, f"{result.tolerance:.0e}", verdict))
        table = html_table(rows, header=header)
        return table if self.passed else table + html_text(str(self))


def _describe_result(result: MeshResult) -> list[str]:
    """Return the lines about one mesh."""
    mesh = describe_mesh(result.mesh)
    head = f"mesh {mesh}: {result.compared} values compared within {result.tolerance:.0e}"
    lines = list[str]()
    if not result.findings:
        lines.append(f"{head}: equal to one device")
    else:
        lines.append(f"{head}: {len(result.findings)} differ from one device")
        # Findings with the same place and sentence share a line, which lists their names.
        names_by_text = dict[tuple[str, str], list[str]]()
        for finding in result.findings:
            place = f"step {finding.step}: {finding.quantity}"
            names = names_by_text.setdefault((place, finding.sentence()), [])
            names.append(finding.name)
        for (place, sentence), names in list(names_by_text.items())[:_LINES]:
            listed = ", ".join(names[:6])
            unlisted = len(names) - 6
            if unlisted > 0:
                listed += f" and {unlisted} more"
            lines.append(f"  {place} of {listed}: {sentence}")
        if len(names_by_text) > _LINES:
            lines.append(f"  ... and {len(names_by_text) - _LINES} other lines")
    if result.first_module:
        lines.append(f"  first difference: {result.first_module}")
    if result.not_compared:
        count = len(result.not_compared)
        lines.append(f"  not compared: {count}, such as {result.not_compared[0]}")
    return lines


def describe_mesh(mesh: Mapping[str, int]) -> str:
    """Return the axes and sizes of a mesh as text."""
    return ", ".join(f"{name}={size}" for name, size in mesh.items())
