"""Covers: shoal_tp_styles/modules/recurrent.py.

Data parallelism has given the modules a class of its own.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_data_parallel import fully_shard, replicate
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import SequenceParallel, parallelize_module


@on_ranks(4)
@pytest.mark.parametrize("data_parallel", [fully_shard, replicate])
def test_a_module_of_data_axes_keeps_its_kind(data_parallel: Any) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    single: Any = nn.LSTM(4, 4).double()
    module = parallelize_module(
        data_parallel(copy.deepcopy(single), grid["data"]), grid["tensor"], SequenceParallel()
    )
    x, rank = torch.randn(3, 4, 4, dtype=torch.double), grid.get_local_rank("tensor")
    torch.testing.assert_close(
        module(x.chunk(2, 1)[rank])[0].to_local(), single(x)[0].chunk(2, 1)[rank]
    )
