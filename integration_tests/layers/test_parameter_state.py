"""Attributes and hooks that a user put on parameters before a plan is applied.

Covers: modules/owners.py, optim/local_step.py.
"""

# mypy: disable-error-code="attr-defined, union-attr"
# Gradients are DTensors here, and parameters have attributes of users.

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import DTensor
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    PackedColwiseParallel,
    StyleError,
    parallelize_module,
    unparallelize_module,
)


def linear(style: Any = None) -> tuple[Any, list[str], list[Any]]:
    """A Linear with attributes and hooks, made parallel; what the hooks saw; their handles."""
    module: Any = nn.Linear(4, 8).double()
    seen: list[str] = []
    module.weight.lr_scale = 0.5

    def double(grad: Any) -> Any:
        seen.append(f"grad {type(grad).__name__}")
        return grad * 2

    handles = [
        module.weight.register_hook(double),
        module.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(f"after {tuple(p.grad.shape)}")
        ),
    ]
    if style is not None:
        parallelize_module(module, all_ranks(), style)
    return module, seen, handles


@on_ranks(4)
def test_hooks_and_attributes_survive() -> None:
    torch.manual_seed(0)
    single, _, _ = linear()
    torch.manual_seed(0)
    module, seen, handles = linear(ColwiseParallel())
    x = torch.ones(3, 4, dtype=torch.double)
    single(x).sum().backward()
    module(x).sum().backward()
    assert isinstance(module.weight, DTensor) and module.weight.lr_scale == 0.5
    assert seen == ["grad DTensor", "after (8, 4)"]
    torch.testing.assert_close(module.weight.grad.full_tensor(), single.weight.grad)
    for handle in handles:
        handle.remove()
    module.zero_grad()
    module(x).sum().backward()
    assert len(seen) == 2, "removed by the user's handles"
    torch.testing.assert_close(2 * module.weight.grad.full_tensor(), single.weight.grad)


@on_ranks(4)
def test_they_survive_the_way_back() -> None:
    module, seen, handles = linear(ColwiseParallel())
    module.weight.lr_scale = 0.25
    unparallelize_module(module)
    assert type(module.weight) is nn.Parameter and module.weight.lr_scale == 0.25
    handles[1].remove()
    module(torch.ones(3, 4, dtype=torch.double)).sum().backward()
    assert seen == ["grad Tensor"]
    parallelize_module(module, all_ranks(), ColwiseParallel())
    assert module.weight.lr_scale == 0.25


@on_ranks(4)
def test_a_model_with_hooks_is_copied_and_saved() -> None:
    module, _, _ = linear(ColwiseParallel())
    assert copy.deepcopy(module)(torch.ones(3, 4, dtype=torch.double)).shape == (3, 2)
    torch.save(module.state_dict(), io.BytesIO())


@on_ranks(4)
def test_frozen_parameters_stay_frozen() -> None:
    module, _, _ = linear()
    module.weight.requires_grad_(False)
    parallelize_module(module, all_ranks(), ColwiseParallel())
    assert not module.weight.requires_grad and module.weight.lr_scale == 0.5


@on_ranks(4)
def test_hooks_of_a_fused_parameter_that_is_split_are_refused_before_anything_changes() -> None:
    module, _, handles = linear()
    weight, features = module.weight, module.weight.shape[0]
    style = PackedColwiseParallel(blocks={"q": features - 1, "k": 1})
    with pytest.raises(LayoutError, match="'weight' has gradient hooks"):
        parallelize_module(module, all_ranks(), style)
    assert module.weight is weight
    for handle in handles:
        handle.remove()
    parallelize_module(module, all_ranks(), style)
    assert module.weight_q.lr_scale == module.weight_k.lr_scale == 0.5
    assert unparallelize_module(module).weight.lr_scale == 0.5


# The warning is torch's: it traces through any cached function.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:.*record_function")
@on_ranks(2, timeout=100)
def test_a_compiled_step_looks_for_replaced_parameters() -> None:
    def trained(compiles: bool) -> Any:
        torch.manual_seed(0)
        module = parallelize_module(nn.Linear(4, 8).double(), all_ranks(), ColwiseParallel())
        adam = torch.optim.AdamW(module.parameters(), foreach=True)
        step = torch.compile(lambda: adam.step(), backend="eager") if compiles else adam.step
        for _ in range(2):
            module(torch.ones(3, 4, dtype=torch.double)).sum().backward()
            step()
        return module.weight.full_tensor()

    torch.testing.assert_close(trained(compiles=True), trained(compiles=False))
    module = nn.Linear(4, 8)
    adam = torch.optim.AdamW(module.parameters(), foreach=True)
    parallelize_module(module, all_ranks(), ColwiseParallel())
    with pytest.raises(
        StyleError, match="distribute_module has replaced, so the update would not reach"
    ):
        torch.compile(lambda: adam.step(), backend="eager")()
