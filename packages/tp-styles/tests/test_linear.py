"""Covers: styles/linear.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import Replicate
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import (
    ColwiseParallel,
    HeadParallel,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)
from shoal_tp_styles.internal import resolve


@fake_world(2)
def test_unsupported_modules_are_refused_by_name() -> None:
    axis = init_device_mesh("cpu", (2,))
    with pytest.raises(UnsupportedModuleError, match="max_norm"):
        parallelize_module(
            nn.Embedding(4, 4, max_norm=1.0), axis, RowwiseParallel(input_layouts=Replicate())
        )
    with pytest.raises(UnsupportedModuleError, match="sparse gradients"):
        parallelize_module(nn.Embedding(4, 4, sparse=True), axis, ColwiseParallel())
    with pytest.raises(UnsupportedModuleError, match="HeadParallel does not support Linear"):
        parallelize_module(nn.Linear(4, 4), axis, HeadParallel())
    attention: Any = parallelize_module(nn.MultiheadAttention(8, 2), axis, HeadParallel())
    x = torch.randn(3, 2, 8)
    with pytest.raises(UnsupportedModuleError, match="average_attn_weights"):
        attention(x, x, x, average_attn_weights=False)
    with pytest.raises(UnsupportedModuleError, match="mask per head"):
        attention(x, x, x, attn_mask=torch.zeros(4, 3, 3))


def test_every_style_is_refused_where_it_makes_no_sense() -> None:
    with pytest.raises(
        UnsupportedModuleError,
        match=r"ColwiseParallel does not support LayerNorm, only Linear",
    ):
        ColwiseParallel().sharding(nn.LayerNorm(4))
    with pytest.raises(UnsupportedModuleError, match=r"RowwiseParallel"):
        resolve(nn.Sequential(nn.ReLU()), {"0": RowwiseParallel()})
