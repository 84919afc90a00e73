"""torch's own attention module on DTensors equals one device.

Some ranks have no shards.

Covers: rules/language/rule.py, layout/spec.py (`local_stride`), _torch/operators.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import Placement, Replicate, Shard, Spec, distribute_module, distribute_tensor
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import on_ranks

R, S0 = Replicate(), Shard(0)


def two_equal_modules() -> tuple[Any, Any]:
    """The same attention module twice, in float64."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(nn.MultiheadAttention(12, 6, batch_first=True).double())
    return modules[0], modules[1]


def draw(rows: int) -> Tensor:
    return torch.randn(rows, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def shard_in_proj_bias(name: str, module: nn.Module, mesh: Any) -> None:
    for key, param in list(module.named_parameters(recurse=False)):
        placement: Placement = S0 if key == "in_proj_bias" else R
        setattr(module, key, nn.Parameter(distribute_tensor(param.detach(), mesh, [placement])))


@on_ranks(4)
def test_a_sharded_projection_bias_trains() -> None:
    mesh = init_device_mesh("cpu", (4,))
    plain, module = two_equal_modules()
    distribute_module(module, mesh, shard_in_proj_bias)
    # q, k and v have 36 rows of the bias: the third of three shards of 12 crosses ranks, one rank
    # has none
    x = draw(1)
    spread = distribute_tensor(x, mesh, [R])
    out, _ = module(spread, spread, spread, need_weights=False)
    expected, _ = plain(x, x, x, need_weights=False)
    torch.testing.assert_close(out.full_tensor(), expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for param, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("need_weights", [False, True])
@on_ranks(4)
def test_the_fused_kernel_of_evaluation(need_weights: bool) -> None:
    mesh = init_device_mesh("cpu", (4,))
    plain, module = (each.eval() for each in two_equal_modules())
    distribute_module(module, mesh)
    x = draw(2)
    spread = distribute_tensor(x, mesh, [S0])
    with torch.no_grad():
        got = module(spread, spread, spread, need_weights=need_weights)
        expected = plain(x, x, x, need_weights=need_weights)
    for one, other in zip(got, expected, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one.full_tensor(), other)


def test_the_stride_of_a_shard_follows_the_memory_of_the_global_tensor() -> None:
    mesh = abstract_mesh((4,), rank=1)
    channels_last = Spec(mesh, [S0], (8, 3, 5, 5), (75, 1, 15, 3))
    assert channels_last.local_stride == (75, 1, 15, 3)
    assert Spec(mesh, [Shard(2)], (1, 6, 8, 2), (96, 2, 12, 1)).local_stride == (24, 2, 12, 1)
    assert Spec(mesh, [S0], (8, 3), (0, 1)).local_stride == (3, 1)  # expanded
