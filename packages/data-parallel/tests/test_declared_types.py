"""Types of the parameters that modules see.

Covers: declared_types.py, parameters/gathered_types.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import DTensor
from shoal_dtensor.internal import I, V, spmd
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


class KeepsTypesOfParameters(nn.Module):
    """A Linear with a frozen bias, which keeps the weight that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.bias.requires_grad_(False)
        self.types: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.types = [spmd.type_of(self.linear.weight), spmd.type_of(self.linear.bias)]
        out: Tensor = self.linear(x)
        return out


def sharded(model: nn.Module, data: DeviceMesh) -> Any:
    return fully_shard(model, mesh=data)


def with_optimizer_shards(model: nn.Module, data: DeviceMesh) -> Any:
    return replicate(model, data, shard_optimizer=True)


@pytest.mark.parametrize("wrap", [sharded, with_optimizer_shards])
@pytest.mark.parametrize("grad", [True, False])
def test_modules_see_replicated_parameters(
    wrap: Callable[[nn.Module, DeviceMesh], Any], grad: bool, mesh: DeviceMesh
) -> None:
    model = wrap(KeepsTypesOfParameters(), mesh["data"])
    with spmd.set_current_mesh(mesh, local_axes=["data"]), spmd.typecheck(local=False):
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            spmd.assert_tensor_type(parameter, {"tensor": I})
        x = torch.randn(2, 4)
        spmd.assert_tensor_type(x, {"data": V, "tensor": I})
        with torch.set_grad_enabled(grad):
            out = model(x)
        assert [repr(found) for found in model.types] == ["{tensor: I, data: R}"] * 2
        found = spmd.type_of(out)
        assert found is not None
        assert found.by_axis == {
            spmd.normalize_axis("data"): V,
            spmd.normalize_axis("tensor"): I,
        }


def test_without_a_checker_parameters_have_no_type(mesh: DeviceMesh) -> None:
    model = sharded(KeepsTypesOfParameters(), mesh["data"])
    model(torch.randn(2, 4))
    assert model.types == [None, None]
