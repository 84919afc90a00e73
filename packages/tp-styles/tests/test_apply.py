"""Covers: apply/apply.py, lowering/lowered.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from shoal_mesh import CommDebugMode, DeviceMesh, abstract_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    StyleError,
    UnsupportedModuleError,
    parallelize_module,
    unparallelize_module,
)
from tp_checks import assert_same_gradients


@on_ranks(4)
def test_uneven_features_and_unparallelize() -> None:
    single: Any = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 5)).double()
    module: Any = copy.deepcopy(single)
    axis = all_ranks()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module, axis, plan)
    x = torch.randn(3, 7, dtype=torch.double)
    torch.testing.assert_close(module(x), single(x))
    single(x).square().sum().backward()
    module(x).square().sum().backward()
    assert_same_gradients(module, single)
    copied = copy.deepcopy(module)
    torch.testing.assert_close(copied(x), single(x))
    assert copied[0].weight is not module[0].weight
    unparallelize_module(module)
    assert type(module[0].weight) is nn.Parameter
    for mine, theirs in zip(module.parameters(), single.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(module(x), single(x), rtol=0, atol=0)
    parallelize_module(module, axis, plan)
    torch.testing.assert_close(module(x), single(x))


@on_ranks(2)
def test_assigned_tensors_are_laid_out_as_the_parameters_they_replace() -> None:
    # 'Parameter' object has no attribute 'spec', in the next forward
    single: Any = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    other: Any = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module: Any = parallelize_module(copy.deepcopy(other), all_ranks(), plan)
    specs = [parameter.spec for parameter in module.parameters()]
    module.load_state_dict(single.state_dict(), assign=True)
    assert [parameter.spec for parameter in module.parameters()] == specs
    x = torch.randn(3, 7, dtype=torch.double)
    torch.testing.assert_close(module(x), single(x))
    single(x).square().sum().backward()
    module(x).square().sum().backward()
    assert_same_gradients(module, single)
    swapped = parallelize_module(copy.deepcopy(other), all_ranks(), {"0": RowwiseParallel()})
    # DTensors of another layout
    module.load_state_dict({**module.state_dict(), **swapped[:1].state_dict()}, assign=True)
    assert [parameter.spec for parameter in module.parameters()] == specs
    single[0].load_state_dict(other[0].state_dict())
    torch.testing.assert_close(module(x), single(x))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        module.load_state_dict({"0.weight": torch.ones(2, 2)}, strict=False, assign=True)


class Scaled(ColwiseParallel):
    """A style that reads a parameter once it is sharded."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parallel = super()._apply(module, device_mesh)
        weight: Any = parallel.weight
        weight.data.to_local().mul_(2)
        return parallel


@on_ranks(2)
def test_the_parameters_of_a_plan_travel_together() -> None:
    torch.manual_seed(dist.get_rank())  # the values of rank 0 count
    module: Any = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    first: Any = copy.deepcopy(module)
    for param in first.parameters():
        dist.broadcast(param.detach(), 0)
    first[2].weight.data.mul_(2)
    plan: dict[str, ParallelStyle] = {
        str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(6)
    }
    with CommDebugMode() as mode:
        parallelize_module(module, all_ranks(), {**plan, "2": Scaled()})
    # The ranks compare their modules. Before the style that acts by itself, its own, and after it:
    # shards by one all-to-all, biases by one broadcast.
    assert mode.get_total_counts() == 1 + 2 + 1 + 2
    for name, param in first.named_parameters():
        assert torch.equal(module.get_parameter(name).full_tensor(), param), name


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel()])
def test_weights_that_consist_of_several_tensors_are_refused(
    style: ColwiseParallel | RowwiseParallel,
) -> None:
    linear = nn.Linear(4, 8)
    weight = linear.weight.detach()
    pair: Any = TwoTensor(weight, weight.clone())  # type: ignore[no-untyped-call]  # torch
    linear.weight = nn.Parameter(pair, requires_grad=False)
    with pytest.raises(
        UnsupportedModuleError,
        match=r"weight of Linear is a TwoTensor, .* To shard quantized weights",
    ):
        parallelize_module(linear, abstract_mesh((2,)), style)
    assert isinstance(linear.weight, TwoTensor)


@pytest.mark.parametrize("module", [nn.LSTMCell(4, 8), nn.CosineSimilarity(1)])
def test_modules_without_a_sharding_say_what_to_do(module: nn.Module) -> None:
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(StyleError, match="Write a style"):
            parallelize_module(module, abstract_mesh((2,)), style)
        assert all(type(param) is nn.Parameter for param in module.parameters())
