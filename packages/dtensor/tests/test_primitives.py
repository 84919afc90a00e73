"""Covers: _torch/primitives.py: operators of `prims`, on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._prims  # registers the operators
from torch import Tensor

from shoal_dtensor import Shard, distribute_tensor, unknown_ops
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

prims = torch.ops.prims
X = torch.linspace(0.1, 0.9, 30, dtype=torch.float64).reshape(6, 5)
Y = X.flip(0).contiguous()
N = torch.arange(-15, 15).reshape(6, 5)
ONE = (
    "abs bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 digamma erfcx exp2 frexp "
    "log2 ndtri reciprocal rsqrt sign signbit spherical_bessel_j0 trunc view_of sin"
)
TWO = "div fmax fmin hypot igamma igammac maximum minimum ne nextafter"
# the operator, its arguments, and those given by name
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    **{name: (name, (X,), {}) for name in ONE.split()},
    **{name: (name, (X, Y), {}) for name in TWO.split()},
    "conj_physical": ("conj_physical", (torch.complex(X, Y),), {}),
    "zeta": ("zeta", (X + 1, Y), {}),
    "bitwise_not": ("bitwise_not", (N,), {}),
    "gcd": ("gcd", (N, N.flip(0).contiguous()), {}),
    "div of integers": ("div", (N, torch.full((6, 5), 4)), {}),
    "convert_element_type": ("convert_element_type", (X, torch.float32), {}),
    "copy_to": ("copy_to", (X.clone(), Y), {}),
    "sum": ("sum", (X, [0]), {}),
    "sum of all": ("sum", (X, [0, 1]), {}),
    "amax": ("amax", (X, [0]), {}),
    "amin of all": ("amin", (X, [0, 1]), {}),
    "prod": ("prod", (X, [0, 1]), {}),
    "prod of integers": ("prod", (N.abs() % 3 + 1, [0]), {}),
    "var": ("var", (X, [0], 1.0), {}),
}


def spread(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    mesh = init_device_mesh("cpu", (4,))
    return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)


def whole(result: Any) -> list[Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [part.full_tensor() for part in results]


@pytest.mark.parametrize("name", CALLS)
@on_ranks(4)
def test_operators_of_prims_are_those_of_one_process(name: str) -> None:
    operator, args, kwargs = CALLS[name]
    op = getattr(prims, operator).default
    expected = op(*args, **kwargs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    expected = tuple(part.clone() for part in expected)
    with unknown_ops("error"):
        result = op(*map(spread, args), **kwargs)
    for part, other in zip(whole(result), expected, strict=True):
        torch.testing.assert_close(part, other)
        assert part.dtype == other.dtype
