"""Gradients of half types near the ends of their range are averaged without leaving it.

Covers: reduction.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_data_parallel import MixedPrecisionPolicy, fully_shard, replicate
from shoal_dtensor import DTensor
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import on_ranks

WAYS = ["fully_shard", "replicate", "two axes", "mixed precision", "kept gradients"]


def _data_parallel(way: str, dtype: torch.dtype) -> Any:
    """A linear layer on 4 data-parallel ranks."""
    layer: Any = nn.Linear(4, 1, bias=False)
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    if way == "mixed precision":
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        return fully_shard(layer, mesh=line, mp_policy=policy)
    if way == "replicate":
        return replicate(layer.to(dtype), mesh=line)
    return fully_shard(layer.to(dtype), mesh=grid if way == "two axes" else line)


def _gradient(layer: Any) -> Tensor:
    (parameter,) = layer.parameters()
    grad: Tensor = parameter.grad
    if isinstance(grad, DTensor):
        grad = grad.full_tensor()
    return grad.double()


@on_ranks(4)
@pytest.mark.parametrize("value", [60_000.0, 20_000.0, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_near_the_ends_of_the_range(way: str, dtype: torch.dtype, value: float) -> None:
    # The sum of four gradients of 20,000 was infinite in float16 before it was divided.
    grad, collectives = _step(way, dtype, value)
    want = torch.full((1, 4), value, dtype=dtype).double()
    torch.testing.assert_close(grad, want, rtol=1e-3, atol=6e-8)
    _, collectives_of_float32 = _step(way, torch.float32, value)
    assert collectives == collectives_of_float32


def _step(way: str, dtype: torch.dtype, value: float) -> tuple[Tensor, int]:
    """The averaged gradient of one step, and how many collectives it took.

    All local gradients are `value`.
    """
    layer = _data_parallel(way, dtype)
    x = torch.full((1, 4), value, dtype=torch.float32 if way == "mixed precision" else dtype)
    if way == "kept gradients":
        with layer.no_sync():
            layer(x / 2).sum().backward()
        x = x / 2
    with CommDebugMode() as mode:
        layer(x).sum().backward()
    return _gradient(layer), mode.get_total_counts()


@on_ranks(4)
@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 4.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_other_divisors(dtype: torch.dtype, factor: float) -> None:
    for value in (10_000.0, 1e-6):
        layer = _data_parallel("fully_shard", dtype)
        layer.set_gradient_divide_factor(factor)
        layer(torch.full((1, 4), value, dtype=dtype)).sum().backward()
        want = torch.full((1, 4), value, dtype=dtype).double() * 4 / factor
        rtol = 1e-2 if dtype is torch.bfloat16 else 1e-3
        torch.testing.assert_close(_gradient(layer), want, rtol=rtol, atol=6e-8)


@on_ranks(4)
def test_a_parameter_that_one_rank_uses() -> None:
    mesh = init_device_mesh("cpu", (4,))
    layers = nn.ModuleList([nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)]).half()
    replicated: Any = replicate(layers, mesh=mesh)
    first, second = replicated
    x = torch.ones(1, 4, dtype=torch.float16)
    used = first(x).sum() + (second(x).sum() if mesh.get_rank() == 1 else 0)
    used.backward()
    assert torch.equal(first.weight.grad, torch.ones(1, 4).half())
    assert torch.equal(second.weight.grad, torch.full((1, 4), 0.25).half())
