"""The pytest fixture `certified`, which certifies a program and fails the test with the report.

May import: certify, report.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .certify import certify
from .report import CertificationReport


@pytest.fixture
def certified() -> Callable[..., CertificationReport]:
    """Return a function, called like `certify`, that raises NotCertifiedError if a mesh differs.

    Example:
        >>> def test_training(certified):
        ...     certified("train.py", meshes=[{"ranks": 8}])
    """

    def check(*args: object, **kwargs: object) -> CertificationReport:
        report: CertificationReport = certify(*args, **kwargs)  # type: ignore[arg-type]  # checked
        return report.check()

    return check
