"""Covers: case_runner.py: the outcome of a case is named, and the cases after it still run."""

from __future__ import annotations

import os
import time

import torch
from integration_tests.case_runner import kind, run_cases, signature

from shoal_mesh import all_reduce, init_device_mesh
from shoal_mesh.errors import PeerError


def verdict(case: str) -> str:
    """One rank's part of a made-up case."""
    rank = torch.distributed.get_rank()
    if case == "rank 2 dies" and rank == 2:
        os._exit(3)
    if case == "all hang" or (case == "rank 1 hangs" and rank == 1):
        time.sleep(60)
    if case == "one raises":
        return "error: RuntimeError: here" if rank == 3 else ""
    if case == "two kinds":
        return "refused: PlanError: a" if rank else "refused: LayoutError: b"
    # as a program in which ranks differ; a right one after it would meet what is left of it
    if case == "torn":
        try:
            all_reduce(torch.ones(2 + rank), init_device_mesh("cpu", (4,)).comm((0,)))
        except PeerError as error:
            return f"error: {type(error).__name__}: {error}"
    if case == "meets":
        return (
            ""
            if all_reduce(torch.ones(2), init_device_mesh("cpu", (4,)).comm((0,)))[0] == 4
            else "wrong: y"
        )
    return "" if case == "right" else "wrong: y" if rank == 1 else ""


def test_each_kind_of_failure_has_its_name_and_costs_no_other_case() -> None:
    cases = [
        "right",
        "one raises",
        "two kinds",
        "wrong",
        "rank 2 dies",
        "right",
        "rank 1 hangs",
        "all hang",
        "right",
    ]
    cases += ["torn", "meets", "right"]
    found = run_cases(verdict, cases, patience=3.0)
    assert [*map(kind, found)] == [
        "",
        "disagreement",
        "disagreement",
        "wrong",
        "disagreement",
        "",
        "disagreement",
        "hang",
        "",
        "error",
        "",
        "",
    ]
    assert "rank 3: error: RuntimeError: here" in found[1]
    assert "others were still at work" in found[6]


def test_a_signature_leaves_out_what_differs_between_cases_of_one_cause() -> None:
    unequal = "Tensor-likes are not close! Mismatched elements:"
    one = f"wrong: gradient of blocks.0.up.weight 0: {unequal} 4 / 12"
    other = f"wrong: gradient of blocks.2.up.weight 0: {unequal} 3 / 9"
    assert signature(one) == signature(other) != signature("refused: PlanError: placing")
