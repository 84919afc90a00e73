"""Parameters converted between forwards, and optimizers that step in the backward.

Both run on real ranks.

Covers: gradients/gradient_buckets.py (lacks_nodes), replicate.py, parameters/leaf_checks.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor.errors import StyleError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "to a dtype and back": lambda module: module.double().float(),
    "to the same dtype": lambda module: module.float(),
    "to empty": lambda module: module.to_empty(device="cpu"),
}
WRAPPERS: dict[str, Callable[[nn.Module, Any], object]] = {
    "replicate": replicate,
    "replicate, sharded optimizer": partial(replicate, shard_optimizer=True),
    "fully_shard": fully_shard,
}


def gradients_of(module: nn.Module, rows: Tensor) -> list[Tensor]:
    module(rows).square().mean().backward()
    gradients = []
    for parameter in module.parameters():
        gradient: Any = parameter.grad
        full = getattr(gradient, "full_tensor", gradient.clone)
        gradients.append(full())
        parameter.grad = None
    return gradients


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_gradients_are_averaged_after_a_conversion_of_the_module(change: str, wrapper: str) -> None:
    """Autograd's nodes were other ones, and the backward ended in an AssertionError."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    values = copy.deepcopy(plain.state_dict())
    outer = nn.Sequential(copy.deepcopy(plain))
    module: Any = outer[0]
    WRAPPERS[wrapper](module, mesh)
    rows = torch.arange(16.0).reshape(4, 4) / 16
    own_rows = rows[2 * mesh.get_rank() :][:2]
    expected = gradients_of(plain, rows)
    torch.testing.assert_close(gradients_of(module, own_rows), expected)
    state = copy.deepcopy(module.state_dict())
    CHANGES[change](outer)
    module.load_state_dict(state if wrapper != "replicate" else values)
    torch.testing.assert_close(gradients_of(module, own_rows), expected)


@pytest.mark.parametrize("wrapper", ["replicate", "fully_shard"])
@on_ranks(2)
def test_optimizers_in_the_backward_are_refused(wrapper: str) -> None:
    """They stepped with the gradient of one rank's rows, or of the step before."""
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(4, 3)
    WRAPPERS[wrapper](module, mesh)
    # Its import uses torch.jit, which is deprecated.
    with warnings.catch_warnings(action="ignore"):
        from torch.distributed.optim.apply_optimizer_in_backward import (
            _apply_optimizer_in_backward,
        )
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with pytest.raises(StyleError, match="would step before gradients are reduced"):
        module(torch.ones(2, 4)).sum().backward()
