"""Mixtures of experts on ranks, compared with one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_models import WIDTH, Mixture
from shoal_mesh import all_reduce
from tp_checks import assert_same_gradients


def run(single: Mixture, x: Tensor) -> Any:
    """The output of one device; gradients are those of the sum of its squares."""
    out: Any = single(x)
    out.square().sum().backward()
    return out


def assert_same_on_shards(
    module: Any, single: Mixture, sizes: tuple[int, ...], rank: int, comm: Any
) -> None:
    """A mixture whose ranks have tokens of their own gives the rows of one device.

    All gradients add up.
    """
    x: Any = torch.randn(sum(sizes), WIDTH, dtype=torch.double, requires_grad=True)
    out = run(single, x)
    mine = x.detach().split(sizes)[rank].clone().requires_grad_()
    got = module(mine)
    torch.testing.assert_close(got, out.split(sizes)[rank])
    got.square().sum().backward()
    torch.testing.assert_close(mine.grad, x.grad.split(sizes)[rank])
    for name, param in module.named_parameters():
        if "experts" not in name:  # as data parallelism does
            param.grad = all_reduce(
                param.grad if param.grad is not None else torch.zeros_like(param), comm
            )
    assert_same_gradients(module, single)


def assert_same_on_replicas(module: Any, single: Mixture) -> None:
    """A mixture whose ranks have all tokens gives what one device gives, with all gradients."""
    x = torch.randn(3, 4, WIDTH, dtype=torch.double, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out = run(single, x)
    got = module(y)
    torch.testing.assert_close(got, out)
    got.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_gradients(module, single)
