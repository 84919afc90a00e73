"""One step with data axes and axes of experts.

Covers: expert_forward.py, expert_forward.py, fully_shard.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from moe_checks import run
from moe_models import WIDTH, mixture
from shoal_data_parallel import FSDPMeshInfo, ShardPlacementResult, fully_shard
from shoal_dtensor import DTensor, Replicate
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import ExpertParallel, ExpertTensorParallel, parallelize_module
from tp_checks import naming


@on_ranks(4)
@pytest.mark.parametrize(
    "style", [ExpertParallel(input_layouts=Replicate()), ExpertTensorParallel()], ids=["ep", "etp"]
)
@pytest.mark.parametrize("kind", ["packed", "transposed", "listed"])
def test_experts_are_sharded_over_data_axes_too(kind: str, style: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    single: Any = mixture(kind, 5)
    module: Any = copy.deepcopy(single)
    parallelize_module(module, mesh["expert"], {"experts": style})
    fully_shard(module.experts, mesh["data"])
    fully_shard(module, mesh["data"])
    for unit in (module, module.experts):
        unit.set_gradient_divide_factor(1)  # the loss is a sum over all tokens
    x = torch.randn(6, WIDTH, dtype=torch.double)
    rows = slice(0, 4) if mesh.get_local_rank("data") == 0 else slice(4, 6)
    expected = run(single, x)
    got = module(x[rows])
    torch.testing.assert_close(got, expected[rows])
    got.square().sum().backward()
    plain = dict(single.named_parameters())
    for name, param in module.named_parameters():
        assert isinstance(param, DTensor) and isinstance(param.grad, DTensor), name
        torch.testing.assert_close(param.full_tensor(), plain[name], msg=naming(name))
        torch.testing.assert_close(param.grad.full_tensor(), plain[name].grad, msg=naming(name))


@on_ranks(4, timeout=120)
@pytest.mark.parametrize("after", [False, True], ids=["styles first", "styles last"])
def test_one_call_shards_dense_parameters_and_experts_over_two_meshes(after: bool) -> None:
    """Each rank has its own tokens: dense parameters are sharded over 4 ranks, experts over 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "expert"))
    data = mesh["shards", "expert"].flatten("data")
    single: Any = mixture("packed", 5)
    module: Any = copy.deepcopy(single)
    experts = {*module.experts.parameters()}
    style = {"experts": ExpertParallel()}
    info = FSDPMeshInfo(mesh["shards"], shard_mesh_dim=0)

    def choose(param: Any) -> Any:
        return ShardPlacementResult(None, info) if param in experts else None

    if not after:
        parallelize_module(module, mesh["expert"], style)
        experts = {*module.experts.parameters()}
    fully_shard(module, data, shard_placement_fn=choose)
    if after:
        parallelize_module(module, mesh["expert"], style)
    module.set_gradient_divide_factor(1)  # the loss is a sum over all tokens
    x = torch.randn(7, WIDTH, dtype=torch.double)
    expected = run(single, x)
    rows = x.tensor_split(4)[torch.distributed.get_rank()]
    got = module(rows)
    torch.testing.assert_close(got, expected.tensor_split(4)[torch.distributed.get_rank()])
    got.square().sum().backward()
    plain = dict(single.named_parameters())
    for name, param in module.named_parameters():
        of_expert = name.startswith("experts")
        axes = ("shards", "expert") if of_expert else ("data",)
        assert isinstance(param, DTensor) and param.device_mesh.axis_names == axes, name
        assert isinstance(param.grad, DTensor), name
        torch.testing.assert_close(param.grad.full_tensor(), plain[name].grad, msg=naming(name))


class WithDropout(nn.Module):
    """Experts between two dropouts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dropout(self.inner(self.dropout(x)))
        return found


@on_ranks(4, timeout=120)
@pytest.mark.parametrize("experts_on", [("expert",), ("shards", "expert")], ids=["2", "4"])
def test_dropouts_around_experts_are_those_of_one_process(experts_on: tuple[str, ...]) -> None:
    """The axis of the experts is a part of the axis of the batch, or the whole of it."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "expert"))
    data = mesh["shards", "expert"].flatten("data")
    single: Any = WithDropout(mixture("packed", 6)).train()
    module: Any = copy.deepcopy(single)
    of_experts = mesh["expert"] if experts_on == ("expert",) else data
    parallelize_module(module, of_experts, {"inner.experts": ExpertParallel()})
    if experts_on == ("expert",):
        fully_shard(module.inner.experts, mesh["shards"])
    fully_shard(module, data, ignored_params={*module.inner.experts.parameters()})
    x = torch.randn(8, WIDTH, dtype=torch.double)
    rows = x.tensor_split(4)[torch.distributed.get_rank()]
    torch.manual_seed(5)
    expected = single(x)
    torch.manual_seed(5)
    got = module(rows)
    torch.testing.assert_close(got, expected.tensor_split(4)[torch.distributed.get_rank()])
