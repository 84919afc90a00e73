"""Covers: wrong arguments of public functions are typed errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from shoal_context_parallel import (
    StyleError,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    set_rotate_method,
)
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world

WRONG = (None, 3, 1.5, "x", [1], {"a": 1}, torch.ones(2), nn.Linear, object())
CALLS: Mapping[str, Callable[[Any, Any], object]] = {
    "context_parallel, buffers": lambda mesh, x: entered(
        context_parallel(mesh, buffers=x, buffer_seq_dims=[0, 0])
    ),
    "context_parallel, dims": lambda mesh, x: entered(
        context_parallel(mesh, buffers=[torch.ones(4)], buffer_seq_dims=x)
    ),
    "context_parallel, layout": lambda mesh, x: entered(
        context_parallel(mesh, buffers=[torch.ones(4)], buffer_seq_dims=[0], layout=x)
    ),
    "context_parallel_unshard": lambda mesh, x: context_parallel_unshard(mesh, x, [0]),
    "set_rotate_method": lambda mesh, x: set_rotate_method(x),
}


def entered(block: AbstractContextManager[object]) -> None:
    with block:
        pass


@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments(call: str) -> None:
    for wrong in WRONG:
        with fake_world(2), pytest.raises(StyleError):
            CALLS[call](init_device_mesh("cpu", (2,)), wrong)


def test_a_load_balancer_is_a_layout() -> None:
    wrong_values: list[Any] = [wrong for wrong in WRONG if wrong is not None]
    for wrong in wrong_values:
        with fake_world(2):
            mesh = init_device_mesh("cpu", (2,))
            with pytest.raises(StyleError, match="load_balancer must be a SequenceLayout"):
                context_parallel_unshard(mesh, [torch.ones(2)], [0], wrong)
            with pytest.raises(StyleError, match="load_balancer must be a SequenceLayout"):
                context_parallel_shard(mesh, [torch.ones(2)], [0], wrong)
