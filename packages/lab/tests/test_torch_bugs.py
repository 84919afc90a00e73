"""Bugs in programs of torch's DDP, FSDP2 and DTensor are named.  Covers: observe/local_values.py, certify.py."""

from __future__ import annotations

import pytest

from shoal_lab import certify

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
