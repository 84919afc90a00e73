"""Covers: styles/prepare.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import Replicate, Shard, distribute_tensor
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    LayoutError,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    parallelize_module,
)
from small_models import own_shard
from tp_checks import counts


def test_layouts_of_different_lengths_are_refused_at_construction() -> None:
    with pytest.raises(LayoutError, match=r"same length, got 1 .* and 2"):
        PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Shard(0), Replicate()))
    with pytest.raises(LayoutError, match=r"same length"):
        PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=(Replicate(),))
    with pytest.raises(LayoutError, match=r"without desired"):
        PrepareModuleInput(input_layouts=Shard(0))
    with pytest.raises(LayoutError, match=r"input_kwarg_layouts"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={})
    with pytest.raises(LayoutError, match=r"same length"):
        PrepareModuleInputOutput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Replicate(),),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(0),
        )


@on_ranks(4)
def test_prepare_module_input() -> None:
    axis = all_ranks()
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    module: Any = parallelize_module(nn.Identity(), axis, style)
    full = torch.randn(8, 3)
    with CommDebugMode() as mode:
        out = module(own_shard(full, 0))
    assert counts(mode) == {"all_gather": 1}
    torch.testing.assert_close(out.full_tensor(), full)


class GivesBackInputs(nn.Module):
    """Takes whatever it is given and gives it back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inputs."""
        return (*args, *kwargs.values())


@on_ranks(4)
def test_prepare_several_inputs() -> None:
    axis, full = all_ranks(), torch.randn(8, 3)
    style = PrepareModuleInput(
        input_layouts=(Shard(0), None, Shard(0)),
        desired_input_layouts=(Replicate(), None, Replicate()),
        input_kwarg_layouts={"mask": Shard(0)},
        desired_input_kwarg_layouts={"mask": Replicate()},
        use_local_output=True,
    )
    module: Any = parallelize_module(GivesBackInputs(), axis, style)
    arrived = distribute_tensor(full, axis, (Shard(0),))
    a, b, c, d = module(own_shard(full, 0), "as it is", arrived, mask=own_shard(full, 0))
    assert b == "as it is"
    for value in (a, c, d):
        torch.testing.assert_close(value, full)
    with pytest.raises(LayoutError, match="the module has 1 inputs, but layouts for 3"):
        module(full)


@on_ranks(4)
def test_prepare_output_and_both() -> None:
    axis, full = all_ranks(), torch.randn(8, 3)
    out = parallelize_module(
        nn.Identity(),
        axis,
        PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
    )
    torch.testing.assert_close(out(full), own_shard(full, 0))
    both = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(0),
    )
    module: Any = parallelize_module(nn.Identity(), axis, both)
    x = own_shard(full, 0).requires_grad_()
    with CommDebugMode() as mode:
        torch.testing.assert_close(module(x), own_shard(full, 0))
    assert counts(mode) == {"all_gather": 1}
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))
