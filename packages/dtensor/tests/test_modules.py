"""What packages above build on: forwards that stand in, checks of arguments, modes of arithmetic, modes of operators.

Covers: modules/{forwards,checked_arguments}.py, arithmetic.py, _torch/operator_modes.py.
"""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal_dtensor._torch.operator_modes import ReplacedAttention, dispatch_modes, selectively_checkpointed, unwatched
from shoal_dtensor.arithmetic import arithmetic, complete_forms, current_arithmetic
from shoal_dtensor.errors import LayoutError, StyleTypeError
from shoal_dtensor.modules.checked_arguments import check_device_mesh, submodule_of
from shoal_dtensor.modules.forwards import ModuleForward, forward_of, set_forward
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


class Doubled(ModuleForward):
    """Twice what the module's class computes."""

    title = "Doubled"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * type(self.module).forward(self.module, *args, **kwargs)


def doubled() -> nn.Linear:
    module = nn.Linear(3, 2)
    set_forward(module, Doubled(module, Mock()))
    return module


def test_a_forward_stands_in_and_goes() -> None:
    module, x = doubled(), torch.ones(1, 3)
    expected = functional.linear(x, module.weight, module.bias)
    assert isinstance(forward_of(module), Doubled)
    assert inspect.signature(module.forward) == inspect.signature(nn.Linear(3, 2).forward)
    torch.testing.assert_close(module(x), 2 * expected)
    set_forward(module, None)
    assert forward_of(module) is None
    torch.testing.assert_close(module(x), expected)


def test_a_copy_has_its_own_forward_and_a_dropped_module_is_freed() -> None:
    module, x = doubled(), torch.ones(1, 3)
    copied = copy.deepcopy(module)
    forward = forward_of(copied)
    assert forward is not None and forward.module is copied
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.fill_(1)
    assert torch.equal(copied(x), torch.full((1, 2), 2.0))
    assert not torch.equal(module(x), copied(x))
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


def test_what_is_no_mesh_and_no_stage_is_refused() -> None:
    with fake_world(2):
        check_device_mesh("here", init_device_mesh("cpu", (2,)))
    with pytest.raises(LayoutError, match=r"here: device_mesh is builtins\.str; make one with shoal_mesh"):
        check_device_mesh("here", "data")
    module = nn.Linear(2, 2)
    assert submodule_of("here", SimpleNamespace(submod=module)) is module
    with pytest.raises(StyleTypeError, match=r"here: expected the submod of stage to be an nn\.Module, got NoneType"):
        submodule_of("here", module)


def test_a_mode_of_arithmetic_completes_modules_until_it_is_left() -> None:
    mode, mesh, module = Mock(), Mock(), nn.Linear(2, 2)
    complete_forms(mesh, module)
    with pytest.raises(ZeroDivisionError), arithmetic(mode):
        assert current_arithmetic() is mode
        complete_forms(mesh, module, over_data=(None, torch.float32))
        raise ZeroDivisionError
    assert current_arithmetic() is None
    mode.complete.assert_called_once_with(mesh, module, (None, torch.float32))


def test_selective_checkpointing_is_seen_and_left_out() -> None:
    seen: list[tuple[bool, int]] = []

    def block(x: Tensor) -> Tensor:
        seen.append((selectively_checkpointed(), dispatch_modes()))
        with unwatched():
            seen.append((selectively_checkpointed(), dispatch_modes()))
        return x.sin()

    def context() -> Any:
        policy = CheckpointPolicy.PREFER_RECOMPUTE
        return create_selective_checkpoint_contexts(lambda *_, **__: policy)  # type: ignore[no-untyped-call]  # torch

    x = torch.ones(2, requires_grad=True)
    checkpoint(block, x, use_reentrant=False, context_fn=context).sum().backward()
    assert seen == [(True, 1), (False, 0)] * 2
    assert not selectively_checkpointed()


def test_attention_is_another_function_inside_of_a_mode() -> None:
    q = torch.ones(1, 1, 2, 4)
    attend = Mock(return_value=q)
    with ReplacedAttention(attend):
        assert functional.scaled_dot_product_attention(q, q, q, is_causal=True) is q
        assert torch.equal(functional.relu(q), q)
    attend.assert_called_once_with(q, q, q, is_causal=True)
