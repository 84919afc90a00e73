"""shard_parameter and _shard_tensor, and their errors on all ranks.

Covers: module/shard_module.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sharded_modules import snapshot
from sharding_cases import chunk, enumerable, on_rank
from shoal_mesh.testing import on_ranks
from shoal_shard_api import ShardedTensor, _shard_tensor, shard_parameter
from shoal_shard_api.errors import (
    MissingParameterError,
    ParameterError,
    ProcessGroupError,
    RankMismatchError,
)

GRID = enumerable(
    ([0, 0], [4, 8], 0), ([4, 0], [4, 8], 1), ([0, 8], [4, 8], 2), ([4, 8], [4, 8], 3)
)


@on_ranks(4)
@pytest.mark.parametrize(
    "spec", [chunk(0), chunk(1, (3, 1, 0, 2)), GRID, enumerable(([0, 0], [8, 16], 2))], ids=str
)
def test_shard_parameter_takes_the_data_of_the_source(spec: Any) -> None:
    torch.manual_seed(dist.get_rank())
    linear = nn.Linear(16, 8)
    expected = [torch.empty_like(linear.weight) for _ in range(4)]
    dist.all_gather(expected, linear.weight.detach())
    shard_parameter(linear, "weight", spec, src_rank=2)
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, ShardedTensor)
    assert weight.sharding_spec() == spec
    assert weight.requires_grad
    assert weight.is_leaf
    assert torch.equal(weight.detach(), expected[2])
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]


@on_ranks(4)
def test_what_is_no_parameter_stays_what_it_is() -> None:
    module = nn.BatchNorm1d(8)
    module.register_buffer("table", torch.arange(8.0))
    module.plain = torch.arange(4.0)
    shard_parameter(module, "table", chunk(0))
    shard_parameter(module, "plain", chunk(0))
    assert isinstance(module.get_buffer("table"), ShardedTensor)
    assert isinstance(module.__dict__["plain"], ShardedTensor)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    shard_parameter(frozen, "weight", chunk(0))
    assert not frozen.weight.requires_grad


class OnRank(NamedTuple):
    """An argument that is another one on one rank."""

    rank: int
    there: Any
    elsewhere: Any


def of_this_rank(argument: Any) -> Any:
    return on_rank(*argument) if isinstance(argument, OnRank) else argument


# arguments of `shard_parameter` behind the module, the error and its text
PARAMETER_FAILURES: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "no attribute": (
        ("absent", chunk(0)),
        AttributeError,
        "Linear has no attribute 'absent'",
    ),
    "no attribute on one rank": (
        (OnRank(2, "absent", "weight"), chunk(0)),
        AttributeError,
        r"^rank 2: .*'absent'",
    ),
    "no tensor": (
        ("in_features", chunk(0)),
        ValueError,
        "in_features must be a Tensor, got int",
    ),
    "not contiguous": (
        ("turned", chunk(0)),
        ValueError,
        r"turned is not contiguous: size \(8, 16\)",
    ),
    "not contiguous on one rank": (
        (OnRank(3, "turned", "weight"), chunk(0)),
        ValueError,
        r"^rank 3: .*not contiguous",
    ),
    "no spec": (
        ("weight", "rows"),
        TypeError,
        "Linear.weight: the spec is a ShardingSpec, got str",
    ),
    "dim out of range": (
        ("weight", chunk(2)),
        ValueError,
        r"Linear.weight: dim 2 .*\(8, 16\)",
    ),
    "rank outside": (
        ("weight", chunk(0, (0, 4))),
        ValueError,
        "global rank 4 is not among",
    ),
    "spec with a gap": (
        ("weight", enumerable(([0, 0], [8, 8], 0))),
        ValueError,
        r"no shard holds .*\[0:8, 8:16\]",
    ),
    "different specs": (
        ("weight", OnRank(1, chunk(1), chunk(0))),
        ValueError,
        r"sharding_spec must be equal on all ranks: .*dim=0.* on rank 0, .*dim=1.* on rank "
        r"1",
    ),
    "different sources": (
        ("weight", chunk(0), OnRank(2, 1, 0)),
        ValueError,
        "src_rank must be equal on all ranks: 0 on rank 0, 1 on rank 2",
    ),
    "no such source": (
        ("weight", chunk(0), 4),
        RuntimeError,
        "src_rank=4 is not a rank .* of 4",
    ),
    "different sizes": (
        (OnRank(1, "bias", "weight"), chunk(0)),
        ValueError,
        r"size must be equal on all ranks: \(8, 16\) .*\(8,\)",
    ),
}


@on_ranks(4)
@pytest.mark.parametrize("case", PARAMETER_FAILURES)
def test_shard_parameter_refuses_on_all_ranks_and_changes_nothing(case: str) -> None:
    arguments, kind, text = PARAMETER_FAILURES[case]
    module = nn.Linear(16, 8)
    module.turned = module.weight.detach().t().contiguous().t()
    before = snapshot(module)
    with pytest.raises(kind, match=f"(?s){text}") as raised:
        shard_parameter(module, *map(of_this_rank, arguments))
    assert snapshot(module) == before
    messages: list[Any] = [None] * 4
    dist.all_gather_object(messages, (type(raised.value).__name__, str(raised.value)))
    assert len(set(messages)) == 1
    shard_parameter(module, "weight", chunk(0))  # nobody is left in a collective
    assert torch.equal(module.weight, module.weight)


@on_ranks(4)
def test_the_errors_have_their_own_types() -> None:
    linear = nn.Linear(4, 4)
    with pytest.raises(MissingParameterError, match="no attribute 'absent'"):
        shard_parameter(linear, "absent", chunk(0))
    shard_parameter(linear, "weight", chunk(0))
    with pytest.raises(ParameterError, match="already"):
        shard_parameter(linear, "weight", chunk(1))
    with pytest.raises(ProcessGroupError, match="src_rank=-1 is not a rank"):
        shard_parameter(linear, "bias", chunk(0), src_rank=-1)


@on_ranks(4)
def test_shard_tensor_refuses_on_all_ranks() -> None:
    rank = dist.get_rank()
    full = torch.arange(12.0).view(3, 4)
    with pytest.raises(ValueError, match=r"^rank 1: tensor is not contiguous"):
        _shard_tensor(full.t() if rank == 1 else full.t().contiguous(), chunk(0))
    with pytest.raises(
        RankMismatchError,
        match=r"dtype must be equal on all ranks: torch.float32 on rank 0, torch.float64 on rank 3",
    ):
        _shard_tensor(full.double() if rank == 3 else full, chunk(0))
    with pytest.raises(
        RankMismatchError, match=r"src_rank must be equal on all ranks: 0 on rank 0, 1 on rank 1"
    ):
        _shard_tensor(full, chunk(0), src_rank=rank)
    with pytest.raises(
        RankMismatchError, match=r"sharding_spec must be equal .*rank:3/cpu, rank:2.* on rank 2"
    ):
        _shard_tensor(full, chunk(0, (3, 2, 1, 0)) if rank == 2 else chunk(0))
    assert torch.equal(_shard_tensor(full, chunk(0)), full)
