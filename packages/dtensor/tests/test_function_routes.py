"""Replacements of torch functions of DTensors by a package above.

Covers: tensor/function_routes.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import DTensor, Shard, distribute_tensor
from shoal_dtensor.tensor.function_routes import (
    replace_function,
    restore_function,
    run_function,
)
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


def test_a_replacement_gets_the_arguments_of_calls_with_dtensors_until_it_is_removed() -> None:
    received: list[Any] = []

    def negate_relu(*args: Any, **kwargs: Any) -> Any:
        received.append((args, kwargs))
        return -run_function(functional.relu, (DTensor,), args, kwargs)

    with fake_world(2):
        x = distribute_tensor(torch.arange(-2.0, 2.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        plain = torch.tensor([-1.0, 3.0])
        replace_function(functional.relu, negate_relu)
        try:
            replaced: Any = functional.relu(x, inplace=False)
            assert functional.relu(plain).tolist() == [0.0, 3.0]
            other: Tensor = torch.abs(x)
        finally:
            restore_function(functional.relu)
        unreplaced: Any = functional.relu(x)

    ((args, kwargs),) = received
    assert args[0] is x
    assert kwargs == {"inplace": False}
    assert isinstance(replaced, DTensor)
    assert replaced.to_local().tolist() == [0.0, 0.0]
    assert isinstance(other, DTensor)
    assert isinstance(unreplaced, DTensor)
    assert unreplaced.placements == (Shard(0),)
