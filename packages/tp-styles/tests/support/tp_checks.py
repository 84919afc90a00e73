"""Checks for several test files: gradients of parallel modules, sharded logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Shard, distribute_tensor, full_tensor
from shoal_mesh.testing import all_ranks, counts as counts
from shoal_tp_styles import Vocab

ALL_REDUCE = torch.ops._c10d_functional.all_reduce


def naming(name: str) -> Callable[[str], str]:
    """A `msg` of `torch.testing.assert_close` that names the tensor that differs."""
    return lambda message: f"{name}: {message}"


def global_value(tensor: Tensor | None) -> Tensor:
    """The global value of a parameter's gradient."""
    assert tensor is not None, "there is a gradient"
    return full_tensor(tensor)


def assert_same_gradients(parallel: nn.Module, single: nn.Module) -> None:
    """Every parameter has the single module's gradient, with the parameter's placements."""
    expected = dict(single.named_parameters())
    for name, param in parallel.named_parameters():
        if isinstance(param, DTensor):
            assert isinstance(param.grad, DTensor), f"{name}: the gradient is a DTensor"
            assert param.grad.placements == param.placements, name
        torch.testing.assert_close(global_value(param.grad), expected[name].grad, msg=naming(name))


def sharded(logits: Tensor, dim: int, plain: bool = False) -> tuple[Tensor, Any]:
    """Logits sharded along `dim`, as DTensor or as plain local shard with its Vocab."""
    mesh = all_ranks()
    spread = distribute_tensor(logits.detach(), mesh, (Shard(dim),), src_data_rank=None)
    if not plain:
        return spread.requires_grad_(), None
    return spread.to_local().clone().requires_grad_(), Vocab.even(mesh, logits.shape[dim])


def assert_same_gradient(x: Tensor, dim: int, logits: Tensor) -> None:
    """`x`, from `sharded`, has its shard of the gradient of the full logits."""
    assert x.grad is not None and logits.grad is not None, "both have gradients"
    if isinstance(x, DTensor):
        assert isinstance(x.grad, DTensor), "like its leaf"
        torch.testing.assert_close(x.grad.full_tensor(), logits.grad)
    else:
        torch.testing.assert_close(x.grad, sharded(logits.grad, dim, plain=True)[0].detach())
