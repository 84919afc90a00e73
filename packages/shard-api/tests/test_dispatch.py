"""Overrides and refusals.  Covers: ops/dispatch.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import dlpack

from sharding_cases import BRICKS, chunk
from shoal_mesh.testing import fake_world, on_ranks
from shoal_shard_api import (
    ChunkShardingSpec,
    ShardedTensor,
    _shard_tensor,
    custom_sharded_op_impl,
    custom_sharding_spec_op,
    zeros,
)
from shoal_shard_api.errors import UnsupportedOpError

FULL = torch.linspace(-2, 2, 48).reshape(8, 6)


@on_ranks(4)
def test_what_means_nothing_on_a_sharded_tensor() -> None:
    tensor = _shard_tensor(FULL.clone().requires_grad_(), chunk(0))
    for call in (tensor.numpy, tensor.tolist, tensor.data_ptr, tensor.untyped_storage):
        with pytest.raises(UnsupportedOpError, match="use local_shards"):
            call()
    # the first read of what it exported ended the process
    with pytest.raises(UnsupportedOpError, match="use local_shards"):
        dlpack.to_dlpack(tensor)  # type: ignore[attr-defined]  # torch declares no __all__
    with pytest.raises(UnsupportedOpError, match=r"register the hook on shard\.tensor"):
        tensor.register_hook(print)  # type: ignore[no-untyped-call]  # torch's own is untyped
    group = dist.new_group([0, 1, 2, 3])
    with pytest.raises(UnsupportedOpError, match="different process groups"):
        tensor + _shard_tensor(FULL, chunk(0), process_group=group)


@on_ranks(4)
def test_a_users_override_comes_first() -> None:
    @custom_sharded_op_impl(torch.asinh)
    def asinh(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return "mine", types, args, kwargs, process_group

    tensor = _shard_tensor(FULL, chunk(0))
    assert torch.asinh(tensor) == ("mine", (ShardedTensor,), (tensor,), {}, tensor.process_group)

    @custom_sharding_spec_op(ChunkShardingSpec, torch.atanh)
    def atanh(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return "chunked"

    assert torch.atanh(tensor) == "chunked"
    assert torch.atanh(zeros(BRICKS, 8, 6)).shape == (8, 6)


class OwnSpec(ChunkShardingSpec):
    """A class of specs with overrides of its own."""


@fake_world(4)
def test_an_override_of_metadata_does_not_depend_on_other_overrides() -> None:
    custom_sharding_spec_op(OwnSpec, torch.Tensor.element_size)(
        lambda types, args, kwargs, group: -1
    )
    assert zeros(OwnSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 8).element_size() == -1
    assert zeros(chunk(0), 8).element_size() == 4
