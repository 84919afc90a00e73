"""Factories: values, properties, and random numbers equal to those of one device.

Covers: tensor/create.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharding_cases import chunk, enumerable
from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    NotExpressibleError,
    ShardedTensor,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)

SPECS = {
    "rows": chunk(0),
    "columns, two ranks": chunk(1, (2, 1)),
    "grid": enumerable(
        ([0, 0], [3, 4], 1), ([0, 4], [3, 5], 0), ([3, 0], [5, 4], 2), ([3, 4], [5, 5], 3)
    ),
    "several": enumerable(([0, 0], [2, 9], 3), ([2, 0], [2, 9], 1), ([4, 0], [4, 9], 3)),
}


@on_ranks(4)
@pytest.mark.parametrize("spec", SPECS)
def test_constant_tensors(spec: str) -> None:
    for result, wanted in (
        (zeros(SPECS[spec], 8, 9), torch.zeros(8, 9)),
        (ones(SPECS[spec], [8, 9], dtype=torch.int32), torch.ones(8, 9, dtype=torch.int32)),
        (full(SPECS[spec], (8, 9), 2.5, requires_grad=True), torch.full((8, 9), 2.5)),
        (full(SPECS[spec], (8, 9), 7), torch.full((8, 9), 7.0)),
        (full(SPECS[spec], (8, 9), 7, dtype=torch.int64), torch.full((8, 9), 7)),
        (
            full(SPECS[spec], (8, 9), True, dtype=torch.float16),
            torch.ones(8, 9, dtype=torch.float16),
        ),
    ):
        assert isinstance(result, ShardedTensor)
        assert result.sharding_spec() == SPECS[spec]
        assert torch.equal(result.detach(), wanted)
        assert result.dtype == wanted.dtype
    assert full(SPECS[spec], (8, 9), 2.5, requires_grad=True).requires_grad
    assert empty(SPECS[spec], 8, 9).shape == (8, 9)


@on_ranks(4)
@pytest.mark.parametrize("spec", SPECS)
def test_random_tensors_are_those_of_one_device(spec: str) -> None:
    for sharded, plain in ((rand, torch.rand), (randn, torch.randn)):
        torch.manual_seed(11)
        wanted = [plain(8, 9), plain(8, 9, dtype=torch.float64)]
        after = torch.rand(1)
        torch.manual_seed(11)
        result = [
            sharded(SPECS[spec], 8, 9, requires_grad=True),
            sharded(SPECS[spec], 8, 9, dtype=torch.float64),
        ]
        # the generator stands where one device's would
        assert torch.equal(torch.rand(1), after)
        for a, b in zip(result, wanted, strict=True):
            assert torch.equal(a.detach(), b)
        assert result[0].requires_grad
        assert result[0].is_leaf


@on_ranks(4)
def test_factories_on_a_sub_group() -> None:
    groups: list[Any] = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = 0 if dist.get_rank() in (0, 3) else 1
    torch.manual_seed(mine)
    wanted = torch.randn(5, 2)
    torch.manual_seed(mine)
    result = randn(chunk(0, ((3, 0), (1, 2))[mine]), 5, 2, process_group=groups[mine])
    assert torch.equal(result, wanted)


@on_ranks(4)
def test_a_random_tensor_without_dims() -> None:
    with pytest.raises(NotExpressibleError, match="draw a plain tensor"):
        rand(enumerable(([], [], 0)), [])
    assert torch.equal(ones(enumerable(([], [], 2)), []), torch.ones(()))


def test_factories_list_the_properties_of_a_tensor() -> None:
    names = [*inspect.signature(full).parameters]
    assert names[:5] == ["sharding_spec", "size", "fill_value", "dtype", "layout"]
    assert {"requires_grad", "pin_memory", "memory_format", "process_group", "init_rrefs"} < {
        *names
    }
