"""A Megatron-style script with groups in module globals, unchanged.

Covers: script_arguments.py, certify.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal_lab import certify
from shoal_lab.__main__ import main
from shoal_mesh.testing import lab

SCRIPT = str(Path(__file__).parent / "support" / "megatron_script.py")
# One device is without tensor-parallel ranks: the size follows the mesh.
TENSOR_SIZE = ("--tensor-model-parallel-size", "{tp}")


def test_tensor_sequence_vocabulary_and_data_parallelism_equal_one_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["certify", SCRIPT, "--mesh", "dp=2,tp=2", "--", *TENSOR_SIZE, "--num-layers", "2"]
    assert main(command) == 0
    # 27 parameters: before two steps, their gradients, three states of AdamW, and at the end
    assert "mesh dp=2, tp=2: 297 values compared within 1e-09: equal" in capsys.readouterr().out


def test_norm_gradients_that_are_not_reduced_are_named_with_the_axis() -> None:
    arguments = [*TENSOR_SIZE, "--forgets", "norm", "--clip-grad", "inf"]
    report = certify(SCRIPT, meshes=[{"dp": 2, "tp": 2}], arguments=arguments, shrink=False)
    found = {finding.name: (finding.axes, finding.sentence()) for finding in report.findings}
    missing = (("tp",), "missing all-reduce over tp: it is right after a sum over tp")
    norms = ("blocks.0.input_norm", "blocks.0.mlp_norm", "final_norm")
    assert found == {f"{norm}.{leaf}": missing for norm in norms for leaf in ("weight", "bias")}


def test_eight_ranks_have_the_losses_of_one(tmp_path: Path) -> None:
    losses = []
    for ranks, tensor_size in ((1, 1), (8, 4)):
        output = tmp_path / str(ranks)
        arguments = ["--tensor-model-parallel-size", str(tensor_size), "--output", str(output)]
        lab(ranks).run_script(SCRIPT, arguments)
        losses.append([float(word) for word in output.read_text().split()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
