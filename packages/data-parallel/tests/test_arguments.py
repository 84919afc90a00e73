"""Covers: wrong arguments of public functions are typed errors, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from shoal_data_parallel import (
    StyleError,
    fully_shard,
    prepare_pipeline,
    reduce_after_last_microbatch,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
)
from shoal_dtensor.errors import StyleTypeError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world

MODULE = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
WRONG = (None, 3, 1.5, "x", [1], {"a": 1}, torch.ones(2), nn.Linear, object())
CALLS: Mapping[str, Callable[[Any, Any], object]] = {
    "fully_shard, module": lambda mesh, x: fully_shard(x, mesh),
    "fully_shard, mesh": lambda mesh, x: fully_shard(MODULE, x),
    "fully_shard, mp_policy": lambda mesh, x: fully_shard(MODULE, mesh, mp_policy=x),
    "fully_shard, offload_policy": lambda mesh, x: fully_shard(MODULE, mesh, offload_policy=x),
    "replicate, module": lambda mesh, x: replicate(x, mesh),
    "replicate, mesh": lambda mesh, x: replicate(MODULE, x),
    "replicate, bucket_bytes": lambda mesh, x: replicate(MODULE, mesh, bucket_bytes=x),
    "replicate, shard_optimizer": lambda mesh, x: replicate(MODULE, mesh, shard_optimizer=x),
    "reduce_after_last_microbatch": lambda mesh, x: reduce_after_last_microbatch(x),
    "register_fsdp_forward_method": lambda mesh, x: register_fsdp_forward_method(MODULE, x),
    "prepare_pipeline": lambda mesh, x: prepare_pipeline(x),
    "share_comm_ctx": lambda mesh, x: share_comm_ctx(x),
}
ALLOWED = {
    # the mesh of all ranks
    "fully_shard, mesh": type(None),
    "replicate, mesh": type(None),
    "replicate, bucket_bytes": int,
    "register_fsdp_forward_method": str,
}


@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments(call: str) -> None:
    before = copy.deepcopy(MODULE.state_dict())
    for wrong in WRONG:
        if isinstance(wrong, ALLOWED.get(call, ())):
            continue
        with fake_world(2), pytest.raises(StyleError):
            CALLS[call](init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), wrong)
    assert all(torch.equal(value, before[name]) for name, value in MODULE.state_dict().items())
    assert type(MODULE) is nn.Sequential


def test_lists_of_modules_are_looked_into() -> None:
    modules: Any = [nn.Linear(2, 2), 1]
    with pytest.raises(StyleTypeError, match=r"fully_shard: module is an nn\.Module, got int 1"):
        fully_shard(modules)
