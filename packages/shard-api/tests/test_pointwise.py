"""Pointwise functions in layouts without placements.  Covers: ops/via_dtensor.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sharding_cases import BRICKS, backward, full_of
from shoal_mesh.testing import observed, on_ranks
from shoal_shard_api import _shard_tensor

FULL = torch.linspace(-2, 2, 48).reshape(8, 6)


OPS: dict[str, Callable[[Any], Any]] = {
    "add": lambda t: t + t,
    "scalar": lambda t: 3 - t * 2.5,
    "plain": lambda t: t * FULL + FULL[0],
    "unary": lambda t: torch.tanh(t).exp(),
    "gelu": F.gelu,
    "where": lambda t: torch.where(t > 0, t, t * 0.1),
    "clamp": lambda t: t.clamp(-1, 1),
    "to": lambda t: t.double(),
}


@on_ranks(4)
def test_pointwise_functions_work_on_any_layout_without_communication() -> None:
    tensor = _shard_tensor(FULL, BRICKS)
    with observed() as events:
        results = {
            name: OPS[name](tensor)
            for name in ("add", "scalar", "plain", "unary", "gelu", "clamp", "to", "where")
        }
    assert [event.op for event in events] == []
    for name, got in results.items():
        assert got._layout == tensor._layout
        torch.testing.assert_close(full_of(got), OPS[name](FULL))
    assert tensor.mul_(2) is tensor
    assert torch.equal(tensor, FULL * 2)


@on_ranks(4)
def test_gradients_of_pointwise_functions_on_any_layout() -> None:
    tensor = _shard_tensor(FULL.clone().requires_grad_(), BRICKS)
    result: Any = (tensor * FULL).tanh()
    result.full_tensor().sum().backward()
    plain = FULL.clone().requires_grad_()
    backward((plain * FULL).tanh().sum())
    torch.testing.assert_close(full_of(tensor.grad), plain.grad)
