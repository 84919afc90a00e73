"""Covers: rules/nn/attention.py."""

# mypy: allow-untyped-calls
# Torch gives `backward` no type.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shoal_dtensor import Shard, distribute_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_gradients_of_ranks_without_queries_can_be_viewed() -> None:
    # (batch, sequence, heads, size): attention reads it transposed, and its gradients have the
    # strides of that.
    full = torch.randn(1, 8, 6, 2, dtype=torch.double, requires_grad=True)
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(
        full.detach(), mesh, [Shard(1, sizes=(8, 0, 0, 0))], src_data_rank=None
    ).requires_grad_()
    for leaf in (full, x):
        q, kv = leaf.transpose(1, 2), leaf.reshape(8, 12).view(1, 8, 6, 2).transpose(1, 2)
        F.scaled_dot_product_attention(q, kv, kv).square().sum().backward()
    grad: Any = x.grad
    torch.testing.assert_close(grad.full_tensor(), full.grad)
