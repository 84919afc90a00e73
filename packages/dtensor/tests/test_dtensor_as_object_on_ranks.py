"""Covers: tensor/dtensor.py, tensor/serialization.py, tensor/gradients.py: an object, on ranks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, safe_globals, zeros
from shoal_dtensor.errors import PlacementError
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def sample(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spread(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> Any:
    return distribute_tensor(tensor, mesh, list(placements))


def by_attribute(x: Any) -> Any:
    x.requires_grad = True
    return x


def by_turns(x: Any) -> Any:
    for on in (True, False, True, False):
        x.requires_grad_(on)
    x.requires_grad = True
    assert len(x._backward_hooks) == 1  # not one more each time
    return x


def by_data(x: Any) -> Any:
    leaf = nn.Parameter(spread(sample(5, 4), x.device_mesh, S1))
    leaf.data = x
    return leaf


def turned(x: Any) -> Any:
    leaf = nn.Parameter(x.t().contiguous())
    with torch.no_grad():
        leaf.t_()
    return leaf


def swapped(x: Any) -> Any:
    leaf, other = nn.Parameter(spread(sample(5, 4), x.device_mesh, S1)), nn.Parameter(x)
    torch.utils.swap_tensors(leaf, other)  # type: ignore[no-untyped-call]  # torch
    return leaf


WAYS: dict[str, Callable[[Any], Any]] = {
    "method": lambda x: x.requires_grad_(),
    "attribute": by_attribute,
    "by turns": by_turns,
    "parameter": nn.Parameter,
    "frozen parameter, attribute": lambda x: by_attribute(nn.Parameter(x, requires_grad=False)),
    "data": by_data,
    "t_": turned,
    "swap_tensors": swapped,
    "pickle": lambda x: pickle.loads(pickle.dumps(x.requires_grad_())),
    "copy": lambda x: copy.copy(x.requires_grad_()),
    "deepcopy": lambda x: copy.deepcopy(x.requires_grad_()),
}


@pytest.mark.parametrize("name", WAYS)
@on_ranks(4)
def test_a_leafs_gradient_has_the_layout_of_the_leaf_however_it_became_one(name: str) -> None:
    mesh = mesh_1d()
    leaf = WAYS[name](spread(sample(5, 4), mesh, R))
    (leaf * spread(sample(5, 4, seed=2), mesh, S0)).sum().backward()
    assert leaf.grad.placements == leaf.placements
    assert torch.equal(leaf.grad.full_tensor(), sample(5, 4, seed=2))


@on_ranks(4)
def test_data_takes_shape_and_dtype_of_what_it_is_set_to() -> None:
    mesh = mesh_1d()
    x: Any = nn.Parameter(spread(sample(5, 4), mesh, S0))
    for value in (sample(5, 4).float(), sample(7, 2), sample(3)):
        x.data = spread(value, mesh, S0)
        assert (x.shape, x.dtype, x.stride()) == (value.shape, value.dtype, value.stride())
        x.grad = None
        (x * x).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * value)
    assert isinstance(x, nn.Parameter)
    with pytest.raises(PlacementError, match="expected a DTensor"):
        x.data = sample(3)


@on_ranks(4)
def test_attributes_survive_copies_and_pickles() -> None:
    x: Any = nn.Parameter(spread(sample(5, 4), mesh_1d(), S0))
    x.note = {"tied to": "lm_head"}
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    with torch.serialization.safe_globals(safe_globals()):
        loaded = torch.load(file, weights_only=True)
    made: Any
    for made in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), loaded):
        assert (type(made), made.note, isinstance(made, nn.Parameter)) == (DTensor, x.note, True)
    assert copy.copy(x)._local_tensor is x._local_tensor
    norm = torch.linalg.vector_norm(x.detach())
    # is remembered until it is written to, which is nobody else's business
    assert norm.item() > 0
    assert "_reduced" not in pickle.loads(pickle.dumps(norm)).__dict__
    # could not stay a view of five rows on four ranks: it follows its base
    view = x.detach().view(2, 10)
    for made in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert not made.__dict__
        assert torch.equal(made.full_tensor(), sample(5, 4).view(2, 10))


@on_ranks(4)
def test_numbers_are_formatted_and_not_iterated_over() -> None:
    mesh = mesh_1d()
    partial: Any = DTensor.from_local(torch.tensor(1.0), mesh, [Partial()])
    assert f"{partial:.2f} {zeros(device_mesh=mesh):>4}" == "4.00  0.0"
    assert f"{zeros(device_mesh=mesh)}" == "0.0"
    # what is printed without a format asks no other rank, and says that it shows the local part
    assert f"{partial}" == repr(partial)
    text = "DTensor(shape=(), dtype=torch.float32, placements=(Partial(sum),), device_mesh="
    assert repr(partial).startswith(text) and "local_tensor=tensor(1.)" in repr(partial)
    with pytest.raises(TypeError, match="0-d"):
        iter(partial)


@on_ranks(4)
def test_many_gradients_at_once() -> None:
    mesh = mesh_1d()
    eye = torch.eye(5, dtype=torch.float64)

    def rows(x: Any, seeds: Any) -> Any:
        return torch.autograd.grad((x**3).sum(1), x, seeds, is_grads_batched=True)[0]

    def cubes(x: Any) -> Any:
        return (x**3).sum()

    want = rows(sample(5, 4).requires_grad_(), eye), torch.func.hessian(cubes)(sample(5, 4))
    for placement in (R, S0, S1):
        x = spread(sample(5, 4), mesh, placement)
        found = rows(x.clone().requires_grad_(), spread(eye, mesh, R)), torch.func.hessian(cubes)(x)
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got.full_tensor(), expected)
