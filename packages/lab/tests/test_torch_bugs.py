"""Programs of torch's DDP, FSDP2 and DTensor, and bugs in them.

Covers: observe/local_values.py, certify.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal_lab import certify

SCRIPT = str(Path(__file__).parent / "support" / "torch_2d_script.py")

# The table imports torch's DTensor, which the fast suite must not.
NAMES = (
    "ddp_loss_divided",
    "ddp_last_microbatch_not_synchronized",
    "fsdp_loss_not_scaled_up",
    "fsdp_clip_by_local_norm",
    "fsdp_ignored_parameter_not_reduced",
    "fsdp_divide_factor",
    "fsdp_mean_of_uneven_tokens",
    "gathered_without_reduction",
    "rowwise_output_left_partial",
    "norm_replica_not_reduced",
    "replicated_sum_taken_as_replica",
)


@pytest.mark.parity
@pytest.mark.parametrize("name", NAMES)
def test_a_bug_is_named_with_its_parameter_and_axes(name: str) -> None:
    from bug_table import names_bug
    from torch_bug_table import TORCH

    (bug,) = (bug for bug in TORCH if bug.program.__name__ == name)
    report = certify(bug.program, meshes=[bug.mesh])
    assert names_bug(report, bug), str(report)


@pytest.mark.parity
def test_a_script_in_the_form_of_the_tutorial_is_certified() -> None:
    meshes = [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 4}]
    report = certify(SCRIPT, meshes=meshes, arguments=["--tp", "{tp}"])
    assert report.passed, str(report)
    # 21 parameters: before two steps, their gradients, three states of AdamW, and at the end
    assert [result.compared for result in report.results] == [231, 231]


@pytest.mark.parity
def test_a_mistake_in_the_script_is_named() -> None:
    arguments = ["--tp", "{tp}", "--wrong"]
    report = certify(SCRIPT, meshes=[{"dp": 2, "tp": 1}], arguments=arguments, shrink=False)
    assert len(report.findings) == 21
    assert {finding.axes for finding in report.findings} == {("dp",)}
    assert "2 times too small: sum taken as mean over dp" in str(report)
