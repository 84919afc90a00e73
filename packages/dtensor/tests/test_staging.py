"""Copies of state dicts that torch.distributed.checkpoint stages, offloads and gathers.

They are of every kind of DTensor.

Covers: the parts of _torch/interception.py and tensor/serialization.py about staging.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import _state_dict_utils as helpers
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor, full_tensor
from shoal_dtensor.errors import PlacementError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

State = dict[str, Any]


def values() -> State:
    """Even and uneven shards, none on a rank, replicas, views and parameters.

    They have attributes, are in flight, or are plain.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def put(tensor: torch.Tensor, placement: Any) -> Any:
        return distribute_tensor(tensor, mesh, [placement])

    square = torch.arange(16.0).view(4, 4)
    state: State = {
        "uneven": put(torch.arange(15.0).view(5, 3), Shard(0)),
        "few": put(torch.arange(1.0), Shard(0)),
        "integers": put(torch.arange(8), Shard(0)),
        "empty": put(torch.zeros(0, 3), Shard(0)),
        "replica": put(torch.arange(4.0), Replicate()),
        "scalar": put(torch.tensor(3.0), Replicate()),
        "parameter": nn.Parameter(put(square, Shard(1))),
        "transposed": put(square, Shard(0)).t(),
        "copied view": put(square, Shard(1)).view(16),
        "slice": put(square, Shard(0))[:, 1:3],
        "in flight": put(square, Shard(0)).redistribute(placements=[Replicate()], async_op=True),
        "with attributes": put(torch.arange(4.0), Shard(0)),
        "plain": torch.arange(3.0),
    }
    state["with attributes"].scale = torch.ones(2)
    return state


def whole(value: Any) -> torch.Tensor:
    full: torch.Tensor = full_tensor(value)
    return full.detach().clone()


@torch.no_grad()
def overwrite(state: State) -> None:
    for value in state.values():
        (value.to_local() if isinstance(value, DTensor) else value).fill_(7)


def require_copy(copied: State, wanted: State, state: State) -> None:
    for name, value in state.items():
        got = copied[name]
        assert whole(got).equal(wanted[name]), name
        if isinstance(value, DTensor):
            assert isinstance(got, DTensor), name
            assert got.placements == value.placements, name
            assert got.device_mesh == value.device_mesh, name
            assert got.device_mesh.get_group() is value.device_mesh.get_group(), name


def stager(**options: bool) -> DefaultStager:
    names = ("pinned_memory", "shared_memory", "async_staging", "non_blocking_copy")
    off = dict.fromkeys([f"use_{name}" for name in names], False)
    return DefaultStager(StagingOptions(**{**off, **options}))


def staged_twice(state: State) -> State:
    """The second copy goes into the memory of the first."""
    cached = stager()
    cached.stage(state)
    copied: Any = cached.stage(state)
    return dict(copied)


def staged_by_thread(state: State) -> State:
    future: Any = stager(use_async_staging=True).stage(state)
    return dict(future.result())


def copied_into(state: State, **options: bool) -> State:
    memory = helpers._create_cpu_state_dict(state, **options)
    copied = helpers._copy_state_dict(state, memory)
    assert all(copied[name] is memory[name] for name in state)
    return copied


STAGERS: dict[str, Callable[[State], Any]] = {
    "default": lambda state: stager().stage(state),
    "shared": lambda state: stager(use_shared_memory=True).stage(state),
    "by a thread": staged_by_thread,
    "twice": staged_twice,
    "blocking": lambda state: BlockingAsyncStager().stage(state),
    "blocking, checked": lambda state: BlockingAsyncStager(type_check=True).stage(state),
    "copied": copied_into,
    "copied, shared": lambda state: copied_into(state, share_memory=True),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", STAGERS)
def test_a_staged_copy_has_the_values_and_layouts_of_its_moment(kind: str) -> None:
    # "a DTensor has no memory of its own", and a number was a plain tensor of zero
    state = values()
    wanted = {name: whole(value) for name, value in values().items()}
    copied = STAGERS[kind](state)
    overwrite(state)
    require_copy(copied, wanted, state)


@on_ranks(2)
def test_attributes_are_staged() -> None:
    state = values()
    copied: Any = stager().stage(state)
    state["with attributes"].scale.fill_(7)
    assert copied["with attributes"].scale.equal(torch.ones(2))
    assert isinstance(copied["parameter"], nn.Parameter)


@on_ranks(2)
def test_helpers_gather_offload_and_compare() -> None:
    state = values()
    wanted = {name: whole(value) for name, value in values().items()}
    gathered = helpers._gather_state_dict(state)
    for name, value in gathered.items():
        # it was still sharded
        assert not isinstance(value, DTensor), name
        assert value.equal(wanted[name]), name
    on_first = helpers._gather_state_dict(state, cpu_offload=True, ranks_only=(0,))
    assert bool(on_first) == (dist.get_rank() == 0)
    require_copy(helpers._offload_state_dict_to_cpu(state), wanted, state)
    other = {**state, "uneven": state["uneven"].redistribute(placements=[Replicate()])}
    with pytest.raises(
        PlacementError, match="can only be copied into an object of the same layout"
    ):
        helpers._copy_state_dict(state, other)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["default", "blocking", "shared", "by a thread", "writer"])
def test_asynchronous_saves_of_torch(kind: str, tmp_path: Path) -> None:
    state = values()
    wanted = {name: whole(value) for name, value in values().items()}
    options_of: dict[str, dict[str, Any]] = {
        "default": {},
        "blocking": {"async_stager": BlockingAsyncStager()},
        "shared": {"async_stager": stager(use_shared_memory=True)},
        "by a thread": {"async_stager": stager(use_async_staging=True)},
        "writer": {"storage_writer": dcp.FileSystemWriter(tmp_path)},
    }
    response: Any = dcp.async_save(state, checkpoint_id=tmp_path, **options_of[kind])
    if kind == "by a thread":
        response.staging_completion.result()
    overwrite(state)
    getattr(response, "upload_completion", response).result()
    dcp.load(state, checkpoint_id=tmp_path)
    require_copy(state, wanted, values())
