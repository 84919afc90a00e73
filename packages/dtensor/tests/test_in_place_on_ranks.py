"""Covers: propagate.py, dispatch.py, redistribute/once.py: writes in place that no row has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard, communication, distribute_tensor
from shoal_dtensor.autograd import redistributed
from shoal_dtensor.errors import CommunicationForbiddenError
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks

R, S0 = Replicate(), Shard(0)
OPS = ("sum", "avg", "max", "min", "product", "norm2")

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: x.relu_(),
    "add a number": lambda x: x.add_(1),
    "subtract": lambda x: x.sub_(2.5),
    "clamp": lambda x: x.clamp_(-0.5, 0.5),
    "square": lambda x: x.pow_(2),
    "times itself": lambda x: x.mul_(x.detach().clone()),
    "fill": lambda x: x.fill_(3),
    "fill where": lambda x: x.masked_fill_(x > 0, 2.0),
    "set a row": lambda x: x.__setitem__(0, 1.0),
    "set a column": lambda x: x.__setitem__((slice(None), 1), 3.0),
    "set where": lambda x: x.__setitem__(x > 0, 7.0),
    "a row": lambda x: x[1].relu_(),
    "transposed": lambda x: x.t().sigmoid_(),
    "a chunk": lambda x: x.chunk(2)[0].exp_(),
    "cumulated": lambda x: x.cumsum_(0),
    "lower triangle": lambda x: x.tril_(),
    "flipped": lambda x: x.copy_(x.flip(0)),
    "matrix product": lambda x: x.addmm_(x.detach().clone(), x.detach().clone()),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "out": lambda x: torch.exp(x.clone(), out=x),
    "draw": lambda x: x.uniform_(),
}


def laid(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Any:
    """A DTensor of some values, partial ones among the placements."""
    spread = distribute_tensor(whole, mesh, [R] * mesh.ndim)
    return redistributed(DTensor, spread, spread._spec.with_(placements=placements))


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(4)
def test_writes_to_partial_tensors(name: str) -> None:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts: list[tuple[DeviceMesh, list[Placement]]] = [(line, [Partial(op)]) for op in OPS]
    layouts += [(square, [Partial(), S0]), (square, [Shard(1), Partial("max")]), (square, [Partial(), Partial()])]
    layouts.append((line, [S0]))
    for mesh, placements in layouts:
        torch.manual_seed(1)
        one = torch.randn(5, 5, dtype=torch.float64)
        one = one.abs() if Partial("norm2") in placements else one
        many = laid(one, mesh, placements)
        before = many.full_tensor()
        torch.manual_seed(2)
        PROGRAMS[name](one)
        torch.manual_seed(2)
        PROGRAMS[name](many)
        assert many.placements == tuple(placements)
        torch.testing.assert_close(many.full_tensor(), one, msg=f"{placements} {before}: {many.full_tensor()}, {one}")


@on_ranks(4)
def test_such_a_write_communicates_once_and_obeys_the_policy() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = laid(torch.randn(5, 5), mesh, [Partial()])
    with CommDebugMode() as counted:
        x.relu_()
    assert counted.get_total_counts() == 1
    with pytest.raises(CommunicationForbiddenError), communication("forbid"):
        x.relu_()


@on_ranks(4)
def test_gradients_pass_such_a_write() -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one, many = whole.clone().requires_grad_(), distribute_tensor(whole, mesh, [S0]).requires_grad_()
    x: Any
    for x in (one, many):
        y = x.sum(0)
        y.relu_()
        (y * y).sum().backward()
    grad: Any = many.grad
    torch.testing.assert_close(grad.full_tensor(), one.grad)
