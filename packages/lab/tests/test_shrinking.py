"""The smallest run of a script that still fails.

Covers: shrinking.py, trials.py, script_arguments.py.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from shoal_lab import certify

SUPPORT = Path(__file__).parent / "support"
MEGATRON = str(SUPPORT / "megatron_script.py")
DATA_PARALLEL = str(SUPPORT / "training_script.py")


def test_the_mesh_and_the_integers_of_a_script_are_shrunk() -> None:
    degree = ["--tensor-model-parallel-size", "{tp}"]
    wrong = ["--forgets", "final_norm.weight", "--clip-grad", "inf"]
    arguments = [*degree, "--hidden-size=8", *wrong]
    report = certify(MEGATRON, meshes=[{"dp": 2, "tp": 2}], arguments=arguments)
    command, *lines = report.smallest.splitlines()
    words = shlex.split(command)
    expected = [*degree, "--hidden-size=4", *wrong]
    assert words[4:] == [MEGATRON, "--mesh", "dp=1,tp=2", "--", *expected]
    assert "--hidden-size=2 (RuntimeError: shape" in lines[0]
    assert lines[-1] == "  # constants in the script are unchanged"
    # the program of the printed command fails in the same way
    repeated = certify(MEGATRON, meshes=[{"dp": 1, "tp": 2}], arguments=expected, shrink=False)
    (finding,) = repeated.findings
    assert "missing all-reduce over tp" in finding.sentence()


def test_a_script_without_sizes_of_axes_gets_fewer_ranks() -> None:
    report = certify(DATA_PARALLEL, meshes=[{"node": 2, "local": 2}], arguments=["--wrong"])
    command, *lines = report.smallest.splitlines()
    assert command.endswith(f"certify {DATA_PARALLEL} --ranks 2 -- --wrong")
    assert lines[0] == "  # no argument has {node} or {local}: only the number of ranks was reduced"
    assert "2 times too large: mean taken as sum over ranks" in lines[1]


def test_a_script_that_fails_on_more_ranks_only_keeps_them() -> None:
    report = certify(DATA_PARALLEL, meshes=[{"ranks": 8}], arguments=["--wrong-above", "3"])
    assert "--ranks 4 -- --wrong-above 1" in report.smallest
    assert "mesh ranks=2 (equal to one device)" in report.smallest
