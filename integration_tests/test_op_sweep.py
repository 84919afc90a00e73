"""A fair sample of `op_sweep.py`: every operator of the families that models are made of, right in every case."""

from __future__ import annotations

import pytest

pytest.importorskip("expecttest", reason="torch's operator database needs it")

from integration_tests.op_sweep import Result, sweep_one

from shoal_mesh.testing import rank_pool

SAMPLE = (
    "add sub mul div neg exp tanh sigmoid where clamp maximum sum mean var std amax prod all softmax log_softmax "
    "logsumexp linalg.vector_norm mm bmm addmm baddbmm matmul nn.functional.linear nn.functional.layer_norm "
    "nn.functional.rms_norm nn.functional.group_norm nn.functional.embedding nn.functional.cross_entropy "
    "nn.functional.nll_loss nn.functional.mse_loss nn.functional.gelu nn.functional.silu nn.functional.conv2d "
    "nn.functional.max_pool2d nn.functional.interpolate fft.fft linalg.solve cdist"
)
VARIANTS = {"softmax": "", "log_softmax": "", "nn.functional.interpolate": "bilinear", "div": "no_rounding_mode"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE.split())
def test_sample_is_right(name: str) -> None:
    answers = rank_pool(4).run(sweep_one, name, VARIANTS.get(name, ""), False, 2, 5, False, timeout=180)
    for answer in answers:
        result = Result(**answer)
        assert result.right, "no case ran"
        assert result.good, "\n".join(result.notes)
