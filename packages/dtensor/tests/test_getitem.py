"""Indices against torch's assignments; index lists without numbers.

Covers: tensor/spec_arguments.py.
"""

# mypy: allow-untyped-calls
# Torch gives `backward` and some of its functions no types.

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from shoal_dtensor import Partial, Placement, Replicate, Shard, distribute_tensor
from shoal_dtensor.tensor.spec_arguments import with_a_dim
from shoal_dtensor.testing import on_threads, thread_meshes
from shoal_mesh import DeviceMesh

PARTS = st.one_of(
    st.integers(-2, 1),
    st.sampled_from([slice(None), slice(1, None), slice(0, 2, 2), None]),
    st.just(Ellipsis),
)
LAYOUTS: list[tuple[Placement, Placement]] = [
    (Replicate(), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(2), Shard(2)),
    (Shard(1), Partial()),
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(PARTS, max_size=5),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.booleans(),
)
def test_the_same_assignment(
    parts: list[Any], ndim: int, row: bool, layout: tuple[Placement, Placement], sharded: bool
) -> None:
    x = torch.arange(12.0).view(2, 3, 2)
    if (
        sum(part is not None and part is not Ellipsis for part in parts) > 3
        or parts.count(Ellipsis) > 1
    ):
        return
    index = tuple(parts)
    target = x[index]
    shape = [
        1 if row and i == 0 else n for i, n in enumerate(target.shape[max(0, target.ndim - ndim) :])
    ]
    value = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    expected = x.clone()
    expected[index] = value

    def check(mesh: Any) -> None:
        spread = distribute_tensor(x, mesh, layout)
        part: Placement = Shard(0) if sharded and shape else Replicate()
        spread[index] = distribute_tensor(value, mesh, [part, Replicate()])
        assert torch.equal(spread.full_tensor(), expected)

    meshes = thread_meshes((2, 2))
    on_threads([partial(check, mesh) for mesh in meshes], meshes)


@pytest.mark.parametrize(
    "index", [slice(2), (slice(1), None), torch.tensor([1]), (0, torch.tensor([1])), True, [0]]
)
def test_other_indices_stay(index: Any) -> None:
    x = torch.ones(4, 4)
    assert with_a_dim(x, index, 3) == (x, index, 3)


def test_a_number_out_of_range_is_refused(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 1 with size 4"):
        x[:, 4] = 3
    with pytest.raises(IndexError, match="too many indices"):
        x[0, 0, 0] = 3


@pytest.mark.parametrize("index", [[], (slice(None), []), ([], [])], ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_lists_without_numbers(placement: Placement, index: Any) -> None:
    x = torch.arange(15.0).view(5, 3)

    def check(mesh: Any) -> None:
        spread: Any = distribute_tensor(x, mesh, [placement])
        with torch.enable_grad():
            got: Any = spread.requires_grad_()[index]
            got.sum().backward()
        assert got.full_tensor().shape == x[index].shape
        assert spread.grad is not None and not spread.grad.full_tensor().any()
        written = distribute_tensor(x, mesh, [placement])
        written[index] = 7.0
        assert torch.equal(written.full_tensor(), x)

    meshes = thread_meshes((4,))
    on_threads([partial(check, mesh) for mesh in meshes], meshes)
