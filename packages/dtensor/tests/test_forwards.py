"""Covers: modules/forwards.py."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from typing import Any
from unittest.mock import Mock

import torch
from torch import nn
from torch.nn import functional

from shoal_dtensor.modules.forwards import ModuleForward, forward_of, set_forward


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
