"""Covers: metadata.py: operators that change a tensor's shape in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal_dtensor import Placement, Replicate, Shard, distribute_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

USES: dict[str, Callable[[Any], Any]] = {
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_ dim": lambda x: x.squeeze_(0),
    "unsqueeze_": lambda x: x.unsqueeze_(-1),
    "t_": lambda x: x[0].t_(),
    "transpose_": lambda x: x.transpose_(0, 2),
    "swapaxes_": lambda x: x.swapaxes_(1, 2),
    "vector times matrix": lambda x: torch.matmul(x[0, 0], x[0].t()),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
@on_ranks(4)
def test_views_in_place(placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for name, use in USES.items():
        values = torch.arange(30.0).view(1, 5, 6)
        x = distribute_tensor(values, mesh, [placement], src_data_rank=None)
        got, expected = use(x), use(values)
        assert got.shape == expected.shape, name
        assert got._spec.shape == expected.shape, name
        torch.testing.assert_close(got.full_tensor(), expected)
        torch.testing.assert_close((got + 1).full_tensor(), expected + 1)
