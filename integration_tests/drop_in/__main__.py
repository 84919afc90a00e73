"""`python -m integration_tests.drop_in [AREA ...]`: the differences between both libraries.

They are printed as a list and a count.
"""

from __future__ import annotations

import sys

from integration_tests.case_runner import run_cases
from integration_tests.drop_in.signatures import differences
from integration_tests.drop_in.snippets import compare, snippets

from shoal_mesh.testing import fake_world

if __name__ == "__main__":
    cases = snippets(*sys.argv[1:])
    verdicts = run_cases(compare, cases, 120.0)
    for case, verdict in zip(cases, verdicts, strict=True):
        if verdict or case.row:
            sys.stdout.write(
                f"[{case.row or 'no row'}] {case.area}: {case.code!r}\n    "
                f"{verdict or 'the same now'}\n"
            )
    with fake_world(4):
        signatures = differences()
    sys.stdout.write("".join(f"[{row or 'no row'}] {line}\n" for row, line in signatures))
    count = sum(map(bool, verdicts))
    without = sum(
        bool(verdict) != bool(case.row) for case, verdict in zip(cases, verdicts, strict=True)
    )
    sys.stdout.write(
        f"{count} of {len(cases)} snippets differ, {without} otherwise than docs/differences.md "
        f"says; {len(signatures)} differences of signatures, "
        f"{sum(not row for row, _ in signatures)} without a row there\n"
    )
    sys.exit(bool(without or not all(row for row, _ in signatures)))
