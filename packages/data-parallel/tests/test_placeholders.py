"""Zeros without memory, in place of gradients that are kept.

Covers: placeholders.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal_data_parallel.gradients.placeholders import drop_placeholders, placeholder_for
from shoal_dtensor import Shard, distribute_tensor
from shoal_dtensor.internal import local_of
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


@pytest.mark.parametrize("shards", [False, True])
def test_placeholders_hold_one_number_and_go_before_the_next(shards: bool) -> None:
    with fake_world(2):
        values = torch.ones(5, 3)
        if shards:
            values = distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)])
        param = nn.Parameter(values)
        other = nn.Parameter(torch.ones(2))
        other.grad = torch.ones(2)
        param.grad = placeholder_for(param)
        assert param.grad.shape == (5, 3)
        assert local_of(param.grad).untyped_storage().nbytes() == 4
        assert not local_of(param.grad).any()
        again = placeholder_for(param)
        found = [param.grad is None]
        param.grad = again
        drop_placeholders([param, other])
        found += [param.grad is None, other.grad is None]
        assert found == [True, True, False]
