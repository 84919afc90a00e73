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


def enter_with_buffers(mesh: Any, buffers: Any) -> None:
    enter(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0, 0]))


def enter_with_dims(mesh: Any, dims: Any) -> None:
    enter(context_parallel(mesh, buffers=[torch.ones(4)], buffer_seq_dims=dims))


def enter_with_layout(mesh: Any, layout: Any) -> None:
    buffers = [torch.ones(4)]
    enter(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0], layout=layout))


CALLS: Mapping[str, Callable[[Any, Any], object]] = {
    "context_parallel, buffers": enter_with_buffers,
    "context_parallel, dims": enter_with_dims,
    "context_parallel, layout": enter_with_layout,
    "context_parallel_unshard": lambda mesh, x: context_parallel_unshard(mesh, x, [0]),
    "set_rotate_method": lambda mesh, x: set_rotate_method(x),
}


def enter(block: AbstractContextManager[object]) -> None:
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
