"""Covers: rules/nn/norms.py, rules/math/{reduction,matmul,ordering}.py: small, refused dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

LAYOUTS: list[list[Placement]] = [
    [Shard(0)],
    [Shard(1)],
    [Shard(1, sizes=(1, 0, 4, 1))],
    [Shard(0), Shard(1)],
    [Shard(1), Replicate()],
]


def put(whole: Tensor, placements: Sequence[Placement]) -> DTensor:
    mesh = init_device_mesh("cpu", (4,) if len(placements) == 1 else (2, 2))
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def like(whole: Tensor, x: DTensor, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(whole, x.device_mesh, placements, src_data_rank=None)


def channels(placements: Sequence[Placement]) -> list[Placement]:
    """For a vector of channels, the sharding of dim 1."""
    return [p.on_dim(0) if isinstance(p, Shard) and p.dim == 1 else Replicate() for p in placements]


def normalize_by_given_statistics(x: Any, w: Any) -> Any:
    return torch.native_batch_norm(x, w, w, w.detach(), w.detach(), False, 0.1, 1e-5)


NORMS: dict[str, Callable[[Any, Any], Any]] = {
    "layer_norm": lambda x, w: F.layer_norm(x, (6,), w, w),
    "native_layer_norm": lambda x, w: torch.native_layer_norm(x, (6,), w, w, 1e-5),
    "group_norm": lambda x, w: F.group_norm(x, 3, w, w),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w, w, training=True),
    "native_batch_norm": lambda x, w: torch.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5),
    "given statistics": normalize_by_given_statistics,
}


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NORMS)
@on_ranks(4)
def test_norms_of_small_dtypes(name: str, weights: torch.dtype) -> None:
    whole = torch.randn(8, 6, dtype=torch.bfloat16)
    weight, seed = torch.rand(6, dtype=weights) + 0.5, torch.randn(8, 6)
    for placements in LAYOUTS:
        x = put(whole, placements).requires_grad_()
        results = []
        for one, w in (
            (x, like(weight, x, channels(placements))),
            (whole.clone().requires_grad_(), weight),
        ):
            made = NORMS[name](one, w)
            made = made if isinstance(made, tuple) else (made,)
            (
                made[0].float() * (seed if one is not x else like(seed, x, placements))
            ).sum().backward()
            results.append([*made, one.grad])
        for got, expected in zip(*results, strict=True):
            assert isinstance(got, DTensor)
            assert got.dtype == got.to_local().dtype == expected.dtype
            torch.testing.assert_close(got.full_tensor(), expected, rtol=0.05, atol=0.05)


@on_ranks(4)
def test_variances_of_complex_numbers() -> None:
    whole = torch.randn(8, 6, dtype=torch.complex128)
    for placements in LAYOUTS:
        x = put(whole, placements)
        for dims in (None, 0, 1):
            for function in (torch.var, torch.std):
                torch.testing.assert_close(
                    function(x, dim=dims).full_tensor(),  # type: ignore[attr-defined]  # a DTensor
                    function(whole, dim=dims),
                )


@on_ranks(4)
def test_kernels_that_conjugate_inside() -> None:
    whole = torch.randn(6, 3, 5, dtype=torch.complex128)
    for placements in ([Replicate()], [Shard(0)], [Shard(1)], [Shard(0), Shard(2)]):
        x = put(whole, placements)
        torch.testing.assert_close(torch.linalg.pinv(x).full_tensor(), torch.linalg.pinv(whole))


@on_ranks(4)
def test_random_numbers_in_a_partial_tensor() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for op in ("sum", "avg", "max", "min"):
        for placements in (
            [Partial(op), Replicate()],
            [Partial(op), Shard(0)],
            [Partial(op), Partial(op)],
        ):
            x = DTensor.from_local(torch.ones(4, 3), mesh, placements)
            torch.manual_seed(1)
            x.uniform_(1, 2)
            torch.manual_seed(1)
            assert torch.equal(x.full_tensor(), torch.empty(x.shape).uniform_(1, 2))


@on_ranks(4)
def test_products_of_complex_numbers() -> None:
    whole = torch.randn(8, 6, dtype=torch.complex128)
    for placements in LAYOUTS:
        results = []
        for x in (put(whole, placements).requires_grad_(), whole.clone().requires_grad_()):
            made: Any = [x.prod(0), x.prod(1), x.prod()]
            sum(one.abs().sum() for one in made).backward()
            results.append([*made, x.grad])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got.full_tensor(), expected)


@on_ranks(4)
def test_nothing_has_no_extremum() -> None:
    for placements in ([Replicate()], [Shard(0)], [Shard(1)]):
        x = put(torch.zeros(0, 6), placements)
        for function in (torch.max, torch.min, torch.amax, torch.argmin):
            with pytest.raises((RuntimeError, IndexError), match=r"numel|zero.size"):
                function(x)
        assert x.amax(1).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
@on_ranks(4)
def test_what_no_kernel_takes_is_refused_on_every_rank(dtype: torch.dtype) -> None:
    # the last rank has nothing of five rows: it must not fail alone
    for shape in ((8, 6), (5, 6)):
        for placements in LAYOUTS:
            with pytest.raises((RuntimeError, NotImplementedError), match="not implemented"):
                torch.softmax(put(torch.ones(shape, dtype=dtype), placements), 0)


INTEGERS, TRUTH, COMPLEX = (
    torch.tensor([[3, 1], [4, 1], [5, 9], [2, 6], [5, 3]]),
    torch.ones(5, 5, dtype=torch.bool),
    torch.ones(5, 5, dtype=torch.complex64),
)
# Calls that plain torch refuses for the dtype or the shape of the whole tensor.
REFUSED: dict[str, tuple[Tensor, Callable[[Any], Any]]] = {
    "std of integers": (INTEGERS, lambda x: x.std(0)),
    "var of integers": (INTEGERS, torch.var),
    "histc of integers": (INTEGERS, lambda x: torch.histc(x, 4)),
    "trace": (TRUTH, torch.trace),
    "mm": (TRUTH, lambda x: x.T @ x),
    "mv": (TRUTH, lambda x: x @ x[0]),
    "dot": (TRUTH, lambda x: x[0].dot(x[1])),
    "bmm": (TRUTH, lambda x: x[:, :, None] @ x[:, None]),
    "addmm": (TRUTH, lambda x: torch.addmm(x, x, x)),
    "max": (COMPLEX, lambda x: x.max(0)),
    "amin": (COMPLEX, lambda x: x.amin(0)),
    "argmax": (COMPLEX, lambda x: x.argmax(1)),
    "aminmax": (COMPLEX, lambda x: x.aminmax(dim=0)),
    "mode": (COMPLEX, lambda x: x.mode(0)),
    "cummax": (COMPLEX, lambda x: x.cummax(0)),
    "max of nothing": (torch.zeros(0, 3), lambda x: x.max(0)),
    "min of nothing": (torch.zeros(3, 0), lambda x: x.min(1)),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(4)
def test_what_torch_refuses_is_refused_on_ranks_without_elements_too(name: str) -> None:
    """The last of four ranks has no element of five, and the kernel of an empty shard accepts all.

    Then it would wait for the other ranks in the next collective.
    """
    whole, call = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError)):
        call(whole)
    for placements in (*LAYOUTS[:2], *LAYOUTS[3:]):
        with pytest.raises((RuntimeError, IndexError), match=r"support|not implemented|non-zero"):
            call(put(whole, placements))
        ones = put(torch.ones(5), [Shard(0)])
        assert ones.sum().item() == 5


JOINED: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: torch.cat([x, y, x]),
    lambda x, y: torch.stack([y, x]),
    lambda x, y: x * y,
    lambda x, y: x.sum() + y,
    lambda x, y: x.long() + y,
)


@on_ranks(4)
def test_pending_averages_are_not_joined_with_integers_or_truth_values() -> None:
    """On one of two ranks, these do not hold twice an element that only this one has.

    In int8 they do not hold 2 * 90.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    row, column = mesh.get_coordinate() or (0, 0)
    part = torch.tensor([90.0, 60, 30, 10, 80])[slice(3) if column == 0 else slice(3, 5)] + 2 * row
    average = DTensor.from_local(part, mesh, [Partial("avg"), Shard(0)], shape=(5,), stride=(1,))
    whole = average.full_tensor()
    conversions: tuple[Callable[[Any], Any], ...] = (lambda x: x < 70, lambda x: x.to(torch.int8))
    for convert in conversions:
        other, expected = convert(average), convert(whole)
        for program in JOINED[:2]:
            assert torch.equal(program(average, other).full_tensor(), program(whole, expected))


@on_ranks(2)
def test_pending_sums_that_wrap_are_not_widened() -> None:
    """In int8, 100 + 100 is -56; as float64 it is 200."""
    mesh = init_device_mesh("cpu", (2,))
    total = DTensor.from_local(torch.tensor([100, 1], dtype=torch.int8), mesh, [Partial()])
    whole = torch.tensor([-56, 2], dtype=torch.int8)
    ones = distribute_tensor(torch.ones(2, dtype=torch.float64), mesh, [Replicate()])
    for program in JOINED:
        assert torch.equal(program(total, ones).full_tensor(), program(whole, ones.to_local()))
