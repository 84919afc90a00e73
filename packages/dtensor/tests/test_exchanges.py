"""Hooks on parameters whose contents torch exchanged, in `Module.to` and `load_state_dict`.

Covers: _torch/exchanges.py, tensor/gradients.py (update_hooks).
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import DTensor, Shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world

CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "to a dtype": lambda module: module.double(),
    "to the dtype that it has": lambda module: module.float(),
    "to a device": lambda module: module.to("cpu"),
    "twice": lambda module: module.double().float(),
}


def parameter_of(sizes: tuple[int, ...] = (4, 3)) -> Any:
    """A parameter that is sharded over two ranks, of which this process plays one."""
    mesh = init_device_mesh("cpu", (2,))
    return nn.Parameter(DTensor.from_local(torch.ones(sizes), mesh, [Shard(0)]))


@pytest.mark.parametrize("name", CHANGES)
def test_hooks_are_called_once_after_a_change_of_the_module(name: str) -> None:
    with fake_world(2):
        module: Any = nn.Module()
        module.weight = parameter_of()
        calls = []

        def double(gradient: Any) -> Any:
            calls.append("gradient")
            return gradient * 2

        module.weight.register_hook(double)
        module.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
        CHANGES[name](module)
        module.weight.sum().backward()
        assert calls == ["gradient", "accumulated"]
        gradient: Any = module.weight.grad
        assert (gradient.dtype, gradient.placements) == (module.weight.dtype, (Shard(0),))
        assert gradient.to_local().tolist() == [[2.0] * 3] * 4


def test_each_object_keeps_its_own_hooks() -> None:
    with fake_world(2):
        one, other = parameter_of(), parameter_of((2, 3))
        calls: list[str] = []
        one.register_hook(lambda _: calls.append("one"))
        other.register_post_accumulate_grad_hook(lambda _: calls.append("other"))
        torch.utils.swap_tensors(one, other)
        one.sum().backward()
        assert (tuple(one.shape), calls) == ((4, 3), ["one"])
        other.sum().backward()
        assert (tuple(other.shape), calls) == ((8, 3), ["one", "other"])


def test_plain_tensors_are_exchanged_as_by_torch() -> None:
    one, other = torch.ones(2), torch.zeros(3)
    torch.utils.swap_tensors(one, other)
    assert (one.tolist(), other.tolist()) == ([0, 0, 0], [1, 1])
