"""`ShrinkingTrials`: runs of smaller programs, with reasons why they do not show the failure.

May import: certification, errors, report.
"""

from __future__ import annotations

from collections.abc import Mapping

from .certification import Certification, ProgramFailure
from .errors import CertifyError
from .report import MeshResult

# Characters of an error that a reason has at most.
_LONGEST = 100


class ShrinkingTrials:
    """Runs of programs that are smaller than one that fails.

    Args:
        failed: the failure that a smaller program must repeat.

    Attributes:
        reasons: for each smaller program that does not repeat the failure, the reason.
    """

    def __init__(self, failed: MeshResult) -> None:
        self.reasons = dict[str, str]()
        self._quantities = {finding.quantity for finding in failed.findings}

    def run(
        self, certification: Certification, mesh: Mapping[str, int], change: str
    ) -> MeshResult | None:
        """Run a smaller program; return its result if it fails in the same quantity, or None.

        Args:
            certification: the program and its reference.
            mesh: axis sizes by name.
            change: the size that is smaller, for the reason.
        """
        try:
            result = certification.run(mesh)
        except ProgramFailure as failure:
            # The program does not support these sizes.
            self.reasons[change] = _first_line(failure.error)
            return None
        except CertifyError as error:
            self.reasons[change] = _first_line(error)
            return None
        if not result.findings:
            self.reasons[change] = "equal to one device"
            return None
        if not any(finding.quantity in self._quantities for finding in result.findings):
            self.reasons[change] = "another failure"
            return None
        # The larger programs are tried again from here.
        self.reasons.clear()
        return result


def _first_line(error: Exception) -> str:
    """Return the kind of an error and the start of its message."""
    cause = error.__cause__ if isinstance(error, CertifyError) else error
    shown = cause or error
    lines = str(shown).strip().splitlines()
    return f"{type(shown).__name__}: {lines[0][:_LONGEST]}" if lines else type(shown).__name__
