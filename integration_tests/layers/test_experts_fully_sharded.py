"""Data axes beside those of experts, one step.  Covers: expert_forward.py, expert_forward.py, fully_shard.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from moe_checks import run
from moe_models import WIDTH, mixture
from shoal_data_parallel import fully_shard
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
