"""Old names of classes that others replaced.  Covers: errors.py, rules/__init__.py, op_call.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal_dtensor import TensorMeta, errors, local_step, rules


def test_old_names_catch_what_they_caught() -> None:
    with pytest.deprecated_call(match="errors.OptimizerError is now"):
        old_error = errors.OptimizerError
    with pytest.raises(old_error, match="LBFGS"):
        local_step(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
    for name in ("DuplicateRuleError", "NotationError", "RowError"):
        with pytest.deprecated_call(match=f"rules.{name} is now"):
            old_error = getattr(rules, name)
        with pytest.raises(old_error, match="one arrow"):
            rules.parse("i j")


def test_the_old_name_of_the_arguments_of_a_call() -> None:
    vector = TensorMeta((3,), (1,), torch.float32)
    call = rules.OpCall(torch.ops.aten.relu.default, (vector,), {}, (vector,), (vector,))
    with pytest.deprecated_call(match="OpCall.bound is now OpCall.arguments"):
        assert call.bound == call.arguments == {"self": vector}
