"""Every fault ends in a typed error within seconds, on every other rank.

The whole table runs under `slow`.
"""

from __future__ import annotations

import pytest
from integration_tests.fault_table import CASES, LIMIT, PAGE, mentions, observed

SOME = {"is killed (SIGKILL)", "has another shape", "raises ValueError"}
TYPED = {"CollectiveError", "LockstepError", "MeshMismatchError", "PeerError", "RandomStateError"}
# In gloo's thread, on whichever rank gets the message first: the other ranks name that one.
ABORTS = ("gloo", "has another shape", 1)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=() if case[0] == "shared memory" and case[1] in SOME else pytest.mark.slow
        )
        for case in CASES
        if case != ABORTS
    ],
    ids=str,
)
def test_every_other_rank_raises_and_names_the_one_at_fault(case: tuple[str, str, int]) -> None:
    seen = observed(*case)
    assert len(seen) == 2
    for each in seen.values():
        assert each["error"] in TYPED, each
        assert float(str(each["seconds"])) < LIMIT
        assert (
            each["ranks"] == [case[2]]
            or mentions(str(each["text"]), case[2])
            or "all ranks" in str(each["text"])
        )


def test_the_page_has_every_fault() -> None:
    page = PAGE.read_text()
    assert len(CASES) >= 25
    assert all(
        f"| rank {culprit} {name} | {transport} |" in page for transport, name, culprit in CASES
    )
