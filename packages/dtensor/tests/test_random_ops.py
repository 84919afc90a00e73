"""Covers: rules/math/creation.py: every random operator against the same one on the plain tensor.

On four ranks, on one rank (with nccl where there is a GPU), and for simulated coordinates of meshes
up to 8 x 8 without any process group. The same functions run on CPU and, under the `gpu` marker, on
an accelerator, which all ranks share if there are fewer than four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_dtensor import DTensor, Replicate, Shard, Spec
from shoal_dtensor.rng.state import generator_of
from shoal_mesh import DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.internal import accelerator
from shoal_mesh.testing import on_ranks

ACCELERATOR = accelerator()
DEVICES = [
    "cpu",
    pytest.param(
        ACCELERATOR or "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(ACCELERATOR is None, reason="needs an accelerator"),
        ],
    ),
]
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


def multinomial_with_replacement(x: Any, g: Any) -> Any:
    return torch.multinomial(x.abs(), 9, replacement=True, generator=g)


MATRIX_OPS: dict[str, Op] = {
    "multinomial": lambda x, g: torch.multinomial(x.abs(), 2, generator=g),
    "multinomial with replacement": multinomial_with_replacement,
    "multinomial of one": lambda x, g: torch.multinomial(x.abs(), 1, generator=g),
    "feature_dropout": lambda x, g: F.feature_alpha_dropout(x, 0.4, training=True),
}


# These use up the generator as their values say, or look at all rows: they gather, which needs
# process groups.
GATHERING = {"rrelu", "poisson"}


def placements_of(ndim: int, mesh_ndim: int) -> list[list[Any]]:
    single: list[Any] = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    if mesh_ndim == 1:
        return [[placement] for placement in single]
    return [[a, b] for a in single for b in single]


def uneven(shape: tuple[int, ...], ways: int = 4) -> list[Any]:
    """A ragged sharding of dim 0 with empty shards."""
    n = shape[0]
    return [
        Shard(
            0,
            sizes=(0, n - n // 2, n // 2, *[0] * (ways - 3))
            if ways > 2
            else (n,) + (0,) * (ways - 1),
        )
    ]


def own(value: DTensor, expected: Tensor) -> Tensor:
    """This rank's box of a plain tensor."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    box = value._spec.box(coordinate)
    return expected[tuple(slice(start, stop) for start, stop in box)]


def cut(x: Tensor, mesh: DeviceMesh, placements: list[Any], order: Any = None) -> DTensor:
    """`x` distributed without communication."""
    spec = Spec(mesh, placements, x.shape, x.stride(), x.dtype, order)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    box = spec.box(coordinate)
    return DTensor(
        x[tuple(slice(start, stop) for start, stop in box)].clone(), spec, requires_grad=False
    )


def seeded(passed: bool, device: torch.device) -> tuple[torch.Generator, torch.Generator]:
    """The generator that operators use, and the device's default one.

    On CPU both hold a spare normal value.
    """
    default = generator_of(device)
    generator = torch.Generator(device)
    for each in (generator, default):
        each.manual_seed(11)
        torch.empty(1, dtype=torch.float64, device=device).normal_(generator=each)
    return generator if passed else default, default


def check(
    op: Op,
    x: Tensor,
    mesh: DeviceMesh,
    placements: list[Any],
    passed: bool,
    name: str,
    order: Any = None,
) -> None:
    used, default = seeded(passed, x.device)
    expected = op(x.clone(), used if passed else None)
    states = used.get_state(), default.get_state()
    sharded = cut(x, mesh, placements, order)
    used, default = seeded(passed, x.device)
    got = op(sharded, used if passed else None)
    case = f"{name} of {tuple(x.shape)} as {placements} on rank {mesh.get_rank()} of {mesh}"
    assert torch.equal(used.get_state(), states[0]), f"{case}: generator"
    assert torch.equal(default.get_state(), states[1]), f"{case}: default generator"
    assert got.dtype == expected.dtype, case
    assert got.shape == expected.shape, case
    assert torch.equal(got._local_tensor, own(got, expected)), f"{case}:\n{got}\n{expected}"


def values(shape: tuple[int, ...], device: str) -> Tensor:
    """The same values on every device, in (-1, 1)."""
    return (
        torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).sin().to(device)
    )


def sweep(name: str, device: str, meshes: list[tuple[int, ...]]) -> int:
    """An operator of all shapes and placements on meshes of the process's ranks.

    Return the number of cases.
    """
    cases = 0
    for number, mesh_shape in enumerate(meshes):
        mesh = init_device_mesh(device, mesh_shape)
        for shape in SHAPES if number == 0 else ON_A_SQUARE:
            x = values(shape, device)
            for placements in placements_of(len(shape), len(mesh_shape)):
                check(OPS[name], x, mesh, placements, passed=cases % 2 == 0, name=name)
                cases += 1
            if len(mesh_shape) == 1:
                check(OPS[name], x, mesh, uneven(shape, mesh_shape[0]), passed=True, name=name)
    return cases


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
@on_ranks(4)
def test_random_operators_equal_one_device(name: str, device: str) -> None:
    cases = sweep(name, device, [(4,), (2, 2)])
    assert cases == 41, cases


@pytest.mark.parametrize("device", DEVICES)
@on_ranks(1)
def test_random_operators_on_one_rank_equal_the_plain_ones(device: str) -> None:
    """With a GPU, its rank has nccl for CUDA tensors."""
    for name in OPS:
        sweep(name, device, [(1,), (1, 1)])


def matrices(name: str, device: str, meshes: list[tuple[int, ...]]) -> None:
    for mesh_shape in meshes:
        mesh = init_device_mesh(device, mesh_shape)
        for shape in ((8, 6), (5, 7), (2, 40)):
            x = values(shape, device)
            for placements in placements_of(2, len(mesh_shape)):
                check(
                    MATRIX_OPS[name],
                    x,
                    mesh,
                    placements,
                    passed=name.startswith("multi"),
                    name=name,
                )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MATRIX_OPS)
@on_ranks(4)
def test_random_operators_on_matrices_equal_one_device(name: str, device: str) -> None:
    matrices(name, device, [(4,), (2, 2)])


@pytest.mark.parametrize("device", DEVICES)
@on_ranks(1)
def test_random_operators_on_matrices_of_one_rank_equal_the_plain_ones(device: str) -> None:
    for name in MATRIX_OPS:
        matrices(name, device, [(1,), (1, 1)])


RAGGED: list[Any] = [Shard(0, sizes=(0, 9, 1, 0, 20, 3, 0, 0)), Shard(1)]
LAYOUTS: list[tuple[tuple[int, ...], list[Any], Any]] = [
    ((8, 8), [Shard(0), Shard(1)], None),
    ((8, 8), [Shard(0), Shard(0)], ((0, (1, 0)),)),
    ((8, 8), [Shard(1), Replicate()], None),
    ((8, 8), RAGGED, None),
    ((2, 3), [Shard(1), Shard(0, multiple_of=4)], None),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in OPS if name not in GATHERING])
def test_simulated_coordinates_equal_one_device(name: str, device: str) -> None:
    """Even and uneven shardings.

    On a device the tensors are of one round of its generator and of several.
    """
    where = torch.device(device) if device == "cpu" else torch.device(device, 0)
    for number, (mesh_shape, placements, order) in enumerate(LAYOUTS):
        for shape in [(33, 33), (33, 20)] + ([(33, 40_000)] if device == "cuda" else []):
            x = values(shape, str(where))
            for rank in (0, 3, 5, 17, 36, 63):
                if rank < torch.Size(mesh_shape).numel():
                    mesh = abstract_mesh(mesh_shape, rank=rank, device_type=device)
                    check(OPS[name], x, mesh, placements, number % 2 == 0, name, order)
