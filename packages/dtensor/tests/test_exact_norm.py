"""Exact norms, and clip_grad_norm_ inside sums_in_tree, on gloo ranks.

Covers: optim/clip_grad.py.
"""

from __future__ import annotations

from fractions import Fraction
from math import isqrt, prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import Shard, clip_grad_norm_, distribute_tensor, full_tensor
from shoal_dtensor.errors import OperatorArgumentError
from shoal_dtensor.optim.clip_grad import norm_of_limbs, square_limbs
from shoal_mesh import init_device_mesh, sums_in_tree
from shoal_mesh.testing import on_ranks


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(prod(shape))
    return (
        torch.randn(shape, generator=draw) * 10.0 ** torch.randint(-12, 3, shape, generator=draw)
    ).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_against_fractions(dtype: torch.dtype) -> None:
    grads = [values(dtype, 100, 7), values(dtype, 33)]
    elements = sum(grad.numel() for grad in grads)
    exponent = torch.frexp(
        torch.stack([grad.abs().max().double() for grad in grads]).max()
    ).exponent
    got = norm_of_limbs(square_limbs(grads, exponent, elements).tolist(), int(exponent), elements)
    total = sum(Fraction(x) ** 2 for grad in grads for x in grad.double().flatten().tolist())
    want = isqrt(int(total * 2**400)) / 2**200
    assert abs(got - want) <= 1e-15 * want


def test_any_order_and_any_shards() -> None:
    grad = values(torch.float32, 4096)
    exponent = torch.frexp(grad.abs().max()).exponent
    whole = square_limbs([grad], exponent, 4096)
    turned = square_limbs(list(grad.flip(0).tensor_split([5, 17, 1000])), exponent, 4096)
    assert torch.equal(whole, turned)
    apart = sum(square_limbs([part], exponent, 4096) for part in grad.tensor_split(3))
    assert torch.equal(whole, torch.as_tensor(apart))


@on_ranks(4)
def test_clipping_is_the_same_on_any_mesh() -> None:
    grads = [values(torch.float32, 33, 8), values(torch.float32, 5), values(torch.float32, 8, 8)]
    norms, clipped = [], []
    for shape, shards in [((4,), [Shard(0)]), ((2, 2), [Shard(0), Shard(1)]), ((1,), [Shard(0)])]:
        mesh = init_device_mesh("cpu", shape)
        if mesh.get_coordinate() is None:
            continue
        params = [
            nn.Parameter(distribute_tensor(torch.zeros_like(g), mesh, shards[: g.ndim]))
            for g in grads[::2]
        ]
        for param, grad in zip(params, grads[::2], strict=True):
            param.grad = distribute_tensor(grad, mesh, shards)
        plain = nn.Parameter(torch.zeros(5))
        plain.grad = grads[1].clone()
        with sums_in_tree():
            norms.append(clip_grad_norm_([*params, plain], 0.5))
        clipped.append([_full(param.grad) for param in (*params, plain)])
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    assert all(torch.equal(a, b) for each in clipped for a, b in zip(each, clipped[0], strict=True))
    torch.testing.assert_close(norms[0], torch.cat([grad.flatten() for grad in grads]).norm())


def _full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return full_tensor(tensor)


@on_ranks(2)
def test_no_gradient_a_zero_and_infinity() -> None:
    param = nn.Parameter(
        distribute_tensor(torch.zeros(3), init_device_mesh("cpu", (2,)), [Shard(0)])
    )
    for value in (0.0, torch.inf, torch.nan):
        param.grad = distribute_tensor(
            torch.tensor([0.0, 0.0, value]),
            param.device_mesh,  # type: ignore[attr-defined]
            [Shard(0)],
        )
        with sums_in_tree():
            norm = clip_grad_norm_([param], 1.0)
        assert torch.equal(norm, torch.tensor(value)) or (norm.isnan() and value != value)


@on_ranks(2)
def test_torchs_own_is_refused() -> None:
    param = nn.Parameter(
        distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    )
    weight: Any = param
    param.grad = distribute_tensor(torch.ones(4), weight.device_mesh, [Shard(0)])
    assert nn.utils.clip_grad_norm_([param], 9.0) == 2
    with (
        sums_in_tree(),
        pytest.raises(OperatorArgumentError, match=r"shoal_dtensor\.clip_grad_norm_"),
    ):
        nn.utils.clip_grad_norm_([param], 1.0)
