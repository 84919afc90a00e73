"""Transforms of torch.func and forward-mode AD at the crossings of plain tensors and DTensors.

Covers: _torch/tensors.py (apply), tensor/{dtensor,autograd}.py, api/constructors.py.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor, local_map
from shoal_dtensor.errors import NoRuleError, TransformError
from shoal_dtensor.internal import apply
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world

X = torch.linspace(-1, 1, 12).reshape(4, 3)
# of torch.jit, which forward-mode AD imports
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),
]
REFUSED = pytest.raises(TransformError, match=r"no rule for transforms of torch\.func")


def doubled(local: Tensor) -> Tensor:
    return local * 2


OF_DTENSORS: dict[str, Callable[[Any, DeviceMesh], object]] = {
    "redistribute": lambda x, mesh: x.redistribute(placements=[Replicate()]),
    "to_local": lambda x, mesh: x.to_local(),
    "full_tensor": lambda x, mesh: x.full_tensor(),
    "local_map": lambda x, mesh: local_map(doubled, [Shard(0)], ([Shard(0)],), device_mesh=mesh)(x),
}
OF_PLAIN: dict[str, Callable[[Any, DeviceMesh], object]] = {
    "from_local": lambda x, mesh: DTensor.from_local(x, mesh, [Shard(0)]),
    "distribute_tensor": lambda x, mesh: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None),
}
TRANSFORMS: dict[str, Callable[[Callable[[Any], Any]], object]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum().to_local())(X),
    "vjp": lambda f: torch.func.vjp(f, X),
    "vmap": lambda f: torch.func.vmap(f)(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
}


@pytest.mark.parametrize("name", OF_DTENSORS)
def test_a_crossing_does_not_drop_the_tangent_of_a_dtensor(name: str) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(X, mesh, [Shard(0)])
        with forward_ad.dual_level():
            # without a tangent, the level changes nothing
            OF_DTENSORS[name](x, mesh)
            dual: Any = forward_ad.make_dual(x, x)
            with REFUSED:
                OF_DTENSORS[name](dual, mesh)
            with REFUSED, torch.no_grad():
                OF_DTENSORS[name](dual, mesh)
            assert forward_ad.unpack_dual(dual * 2).tangent is not None


@pytest.mark.parametrize("name", OF_PLAIN)
def test_a_dtensor_is_not_made_of_a_tensor_with_a_tangent(name: str) -> None:
    with fake_world(2), forward_ad.dual_level():
        mesh = init_device_mesh("cpu", (2,))
        OF_PLAIN[name](X, mesh)
        with REFUSED:
            OF_PLAIN[name](forward_ad.make_dual(X, X), mesh)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OF_PLAIN)
def test_a_dtensor_is_not_made_in_a_transform(name: str, transform: str) -> None:
    with fake_world(2), REFUSED:
        mesh = init_device_mesh("cpu", (2,))
        TRANSFORMS[transform](lambda x: OF_PLAIN[name](x, mesh))


def test_batches_of_gradients_do_not_enter_dtensors() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(X, mesh, [Shard(0)]).requires_grad_()
        y: Any = x * x
        y = y.full_tensor()
        with REFUSED:
            torch.autograd.grad(y, x, torch.ones(5, 8, 3), is_grads_batched=True)


class Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        raise NoRuleError("of the function")


def test_other_errors_of_a_function_stay_themselves() -> None:
    with forward_ad.dual_level(), pytest.raises(NoRuleError, match="of the function"):
        apply(Refusal, forward_ad.make_dual(X, X))
