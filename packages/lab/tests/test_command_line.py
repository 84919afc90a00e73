"""Scripts run and are certified without a change.

Covers: __main__.py, observe/batches.py, ranks.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_lab import CertifyError, certify
from shoal_lab.__main__ import main

SCRIPT = str(Path(__file__).parent / "support" / "training_script.py")


def test_a_script_is_equal_to_itself_with_the_concatenated_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["certify", SCRIPT, "--ranks", "2"]) == 0
    assert (
        "mesh ranks=2: 20 values compared within 1e-09: equal to one device"
        in capsys.readouterr().out
    )


def test_arguments_reach_the_script_and_axes_have_the_names_of_the_user(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["certify", SCRIPT, "--mesh", "dp=2", "--", "--wrong"]) == 1
    printed = capsys.readouterr().out
    assert (
        "gradient of 0.weight, 0.bias, 2.weight, 2.bias: 2 times too large: "
        "mean taken as sum over dp" in printed
    )
    assert f"certify {SCRIPT} --mesh dp=2 -- --wrong\n" in printed


def test_options_set_the_tolerance_and_the_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["certify", SCRIPT, "--ranks", "2", "--dtype", "keep"]
    assert main(command) == 0
    assert "within 1e-04" in capsys.readouterr().out
    assert main([*command, "--tolerance", "10", "--wrong"]) == 0
    assert "within 1e+01" in capsys.readouterr().out


# The ranks write to the output of the process that starts them, not to pytest's.
WITH_AND_WITHOUT_RUN = """
import sys
from shoal_lab.__main__ import main
for named in ([], ["run"]):
    assert main([*named, sys.argv[1], "--ranks", "3"]) == 0
"""


def test_a_script_runs_on_ranks_without_observation() -> None:
    command = [sys.executable, "-c", WITH_AND_WITHOUT_RUN, SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    # Lines of ranks may run into each other.
    printed = sorted(re.findall(r"rank \d of \d is done", done.stdout))
    assert printed == sorted([f"rank {rank} of 3 is done" for rank in range(3)] * 2)


def test_a_module_runs_and_has_options_that_begin_like_the_ones_of_the_command(
    tmp_path: Path,
) -> None:
    (tmp_path / "main_of_test.py").write_text("import sys; print(*sys.argv[1:], 'end')")
    command = [sys.executable, "-m", "shoal_lab", "run", "-m", "main_of_test", "--ranks", "1"]
    done = subprocess.run(
        [*command, "--dev", "cuda", "--rank", "7"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.stdout == "--dev cuda --rank 7 end\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["certify", "missing.py", "--ranks", "2"], "the script missing.py does not exist"),
        (["missing.py", "--ranks", "2"], "the script missing.py does not exist"),
        (
            ["certify", SCRIPT, "--mesh", "dp"],
            "expected axes and sizes such as dp=2,tp=4, got 'dp'",
        ),
        (["certify", SCRIPT, "--mesh", "dp=0"], "the sizes must be positive"),
        (["certify", SCRIPT, "--ranks", "0"], "the sizes of a mesh must be positive"),
    ],
)
def test_wrong_arguments_exit_with_2(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_a_script_has_no_other_reference() -> None:
    with pytest.raises(CertifyError, match="a script is compared with itself"):
        certify(SCRIPT, lambda: None, meshes=[{"ranks": 2}])
