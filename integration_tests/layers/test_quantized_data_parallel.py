"""Data parallelism refuses weights that are tensors of tensors, or ignores and keeps them whole.

Covers: shoal_data_parallel/parameters/sharded_parameters.py.
"""

from __future__ import annotations

import copy

import pytest
import torch

from quantized_models import X, model, quantized, ways
from shoal_data_parallel import UnsupportedModuleError, fully_shard, replicate
from shoal_dtensor.internal import check_plain_tensors
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks


@ways
@on_ranks(2)
def test_quantized_weights_are_refused_with_the_way_out(how: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for wrap in (fully_shard, replicate):
        single = quantized(how)
        with pytest.raises(
            UnsupportedModuleError, match=r"shape \(126, 64\) .* ignored_params: it stays whole"
        ):
            wrap(single, mesh)
        whole = {param for param in single.parameters() if param.ndim == 2}
        expected = copy.deepcopy(single)(X)
        torch.testing.assert_close(wrap(single, mesh, ignored_params=whole)(X), expected)


def test_parameters_of_plain_tensors_pass() -> None:
    check_plain_tensors("replicate", model().parameters())
