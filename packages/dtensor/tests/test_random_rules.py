"""Covers: rules/random.py, on four gloo ranks: every random operator against the same one on the plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_dtensor import DTensor, Replicate, Shard, Spec
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

SHAPES = [(8, 6), (5, 7), (3, 2, 9), (0, 4), (33, 33)]
ON_A_SQUARE = [(5, 7), (3, 2, 9)]
aten = torch.ops.aten

Op = Callable[..., Any]
OPS: dict[str, Op] = {
    "normal_": lambda x, g: x.normal_(1.0, 2.0, generator=g),
    "uniform_": lambda x, g: x.uniform_(-1.0, 2.0, generator=g),
    "bernoulli_": lambda x, g: x.bernoulli_(0.3, generator=g),
    "exponential_": lambda x, g: x.exponential_(1.5, generator=g),
    "cauchy_": lambda x, g: x.cauchy_(generator=g),
    "geometric_": lambda x, g: x.geometric_(0.3, generator=g),
    "log_normal_": lambda x, g: x.log_normal_(generator=g),
    "random_": lambda x, g: x.random_(generator=g),
    "random_to": lambda x, g: x.random_(10, generator=g),
    "random_from": lambda x, g: x.random_(-5, 10, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x.clamp(0, 1), generator=g),
    "bernoulli.p": lambda x, g: torch.bernoulli(x, 0.4, generator=g),
    "bernoulli_.Tensor": lambda x, g: x.clone().bernoulli_(x.clamp(0, 1), generator=g),
    "rand_like": lambda x, g: torch.rand_like(x),
    "randn_like": lambda x, g: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x, g: torch.randint_like(x, 9),
    "randint_like.low": lambda x, g: torch.randint_like(x, -3, 9),
    "uniform.functional": lambda x, g: aten.uniform(x, 0.0, 2.0, generator=g),
    "normal_functional": lambda x, g: aten.normal_functional(x, 0.0, 2.0, generator=g),
    "normal.Tensor_float": lambda x, g: torch.normal(x, 2.0, generator=g),
    "normal.float_Tensor": lambda x, g: torch.normal(1.0, x.abs(), generator=g),
    "normal.Tensor_Tensor": lambda x, g: torch.normal(x, x.abs(), generator=g),
    "native_dropout": lambda x, g: torch.native_dropout(x, 0.3, True)[0],
    # Of no elements, torch returns a float mask on CPU and a boolean one elsewhere.
    "native_dropout.mask": lambda x, g: torch.native_dropout(x, 0.3, True)[1].bool(),
    "native_dropout.eval": lambda x, g: torch.native_dropout(x, 0.3, False)[0],
    "dropout": lambda x, g: F.dropout(x, 0.25),
    "dropout in place": lambda x, g: F.dropout(x.clone(), 0.25, inplace=True),
    "dropout all": lambda x, g: F.dropout(x, 1.0),
    "alpha_dropout": lambda x, g: F.alpha_dropout(x, 0.25, training=True),
    "rrelu": lambda x, g: F.rrelu(x, training=True),
    "poisson": lambda x, g: torch.poisson(x.abs(), generator=g),
    "transposed normal_": lambda x, g: x.transpose(0, -1).normal_(generator=g),
    "transposed rand_like": lambda x, g: torch.rand_like(x.transpose(0, -1)),
    "out=": lambda x, g: aten.normal.out(x, 0.0, 1.0, generator=g, out=torch.empty_like(x)),
}
MATRIX_OPS: dict[str, Op] = {
    "multinomial": lambda x, g: torch.multinomial(x.abs(), 2, generator=g),
    "multinomial with replacement": lambda x, g: torch.multinomial(x.abs(), 9, replacement=True, generator=g),
    "multinomial of one": lambda x, g: torch.multinomial(x.abs(), 1, generator=g),
    "feature_dropout": lambda x, g: F.feature_alpha_dropout(x, 0.4, training=True),
}


def placements_of(ndim: int, mesh_ndim: int) -> list[list[Any]]:
    single: list[Any] = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    if mesh_ndim == 1:
        return [[placement] for placement in single]
    return [[a, b] for a in single for b in single]


def uneven(shape: tuple[int, ...]) -> list[Any]:
    """A ragged cut of dim 0 over four ranks, with an empty piece."""
    n = shape[0]
    return [Shard(0, sizes=(0, n - n // 2, n // 2, 0))]


def own(value: DTensor, expected: Tensor) -> Tensor:
    """This rank's box of a plain tensor."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    box = value._spec.box(coordinate)
    return expected[tuple(slice(start, stop) for start, stop in box)]


def cut(x: Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    """`x` distributed without communication."""
    spec = Spec(mesh, placements, x.shape, x.stride(), x.dtype)
    box = spec.box(mesh.get_coordinate())
    return DTensor(x[tuple(slice(start, stop) for start, stop in box)].clone(), spec, requires_grad=False)


def seeded(passed: bool) -> torch.Generator:
    generator = torch.Generator()
    for each in (generator, torch.default_generator):
        each.manual_seed(11)
        torch.empty(1, dtype=torch.float64).normal_(generator=each)
    return generator if passed else torch.default_generator


def check(op: Op, x: Tensor, mesh: Any, placements: list[Any], passed: bool, name: str) -> None:
    generator = seeded(passed)
    expected = op(x.clone(), generator if passed else None)
    states = generator.get_state(), torch.get_rng_state()
    sharded = cut(x, mesh, placements)
    generator = seeded(passed)
    got = op(sharded, generator if passed else None)
    case = f"{name} of {tuple(x.shape)} as {placements}"
    assert torch.equal(generator.get_state(), states[0]), f"{case}: generator"
    assert torch.equal(torch.get_rng_state(), states[1]), f"{case}: default generator"
    assert got.dtype == expected.dtype, case
    assert got.shape == expected.shape, case
    assert torch.equal(got._local_tensor, own(got, expected)), f"{case}:\n{got}\n{expected}"


@pytest.mark.parametrize("name", OPS)
@on_ranks(4)
def test_random_operators_equal_one_device(name: str) -> None:
    cases = 0
    for mesh_shape in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", mesh_shape)
        for shape in SHAPES if len(mesh_shape) == 1 else ON_A_SQUARE:
            x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).sin()
            for placements in placements_of(len(shape), len(mesh_shape)):
                check(OPS[name], x, mesh, placements, passed=cases % 2 == 0, name=name)
                cases += 1
            if len(mesh_shape) == 1:
                check(OPS[name], x, mesh, uneven(shape), passed=True, name=name)
    assert cases == 41, cases


@pytest.mark.parametrize("name", MATRIX_OPS)
@on_ranks(4)
def test_random_operators_on_matrices_equal_one_device(name: str) -> None:
    for mesh_shape in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", mesh_shape)
        for shape in ((8, 6), (5, 7), (2, 40)):
            x = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape).sin()
            for placements in placements_of(2, len(mesh_shape)):
                check(MATRIX_OPS[name], x, mesh, placements, passed=name.startswith("multi"), name=name)
