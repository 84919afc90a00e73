"""The rest of a state after the loss of ranks, in the layout of another mesh.

Covers: held_state.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from shoal_dtensor.checkpoint import HeldState
from shoal_dtensor.errors import ArgumentTypeError, CheckpointError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

GLOBAL = {
    "rows": torch.arange(35.0).view(7, 5),
    "few": torch.arange(3.0),
    "grid": torch.arange(64).view(8, 8),
}
# replicas along the first axis, but for the grid
LAYOUTS: dict[str, list[Any]] = {
    "rows": [Replicate(), Shard(0)],
    "few": [Replicate(), Shard(0)],
    "grid": [Replicate(), Shard(1)],
}


def _state(shape: tuple[int, ...], layouts: dict[str, list[Any]], scale: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape)
    tensors = {
        name: distribute_tensor(GLOBAL[name] * int(scale), mesh, layouts[name]) for name in GLOBAL
    }
    return {
        "model": tensors,
        "plain": torch.tensor(scale),
        "groups": [{"lr": scale, "params": ["a", "b"]}],
    }


def _new_state() -> dict[str, Any]:
    return _state((4,), {"rows": [Shard(1)], "few": [Shard(0)], "grid": [Shard(0)]}, 0)


def _require(state: dict[str, Any], scale: int) -> None:
    for name, whole in GLOBAL.items():
        assert torch.equal(state["model"][name].full_tensor(), whole * scale), name
    assert state["plain"] == scale and state["groups"] == [{"lr": scale, "params": ["a", "b"]}]


@on_ranks(4)
def test_replicas_bring_what_the_lost_ranks_had() -> None:
    held = HeldState()
    if dist.get_rank() not in (0, 3):  # of each shard one holder is left
        held.keep(7, _state((2, 2), LAYOUTS, 3))
    else:
        _state((2, 2), LAYOUTS, 3)
    state = _new_state()
    assert held.recover(state) == 7
    _require(state, 3)


@on_ranks(4)
def test_shards_of_shards_move_too() -> None:
    held, layouts = HeldState(), {name: [Shard(0), Shard(0)] for name in GLOBAL}
    held.keep(1, _state((2, 2), layouts, 2))
    state = _new_state()
    assert held.recover(state) == 1
    _require(state, 2)


@on_ranks(4)
def test_a_lost_shard_leaves_the_state_as_it_is() -> None:
    held = HeldState()
    # the second half of every tensor is gone
    if dist.get_rank() in (0, 2):
        held.keep(7, _state((2, 2), LAYOUTS, 3))
    else:
        _state((2, 2), LAYOUTS, 3)
    state = _new_state()
    assert held.recover(state) is None
    _require(state, 0)


@on_ranks(4)
@pytest.mark.parametrize("forgetful", [None, 0])
def test_the_newest_step_that_is_whole_is_taken(forgetful: int | None) -> None:
    held, rank = HeldState(), dist.get_rank()
    newer, older = _state((2, 2), LAYOUTS, 5), _state((2, 2), LAYOUTS, 4)
    held.keep(5, newer) if rank < 2 else held.keep(4, older)
    if rank == forgetful:
        held.forget()  # in the middle of the update
    state = _new_state()
    expected = 5 if forgetful is None else 4
    assert held.recover(state) == expected
    _require(state, expected)


@on_ranks(4)
def test_equal_steps_of_different_pasts_are_not_mixed() -> None:
    held, state = HeldState(), _state((4,), {name: [Shard(0)] for name in GLOBAL}, 2)
    held.keep(3, state)
    assert held.recover(_new_state()) == 3
    if dist.get_rank() == 0:
        # of a process that was left behind, and kept the same step
        held = HeldState()
    held.keep(3, state)
    assert held.recover(_new_state()) is None


@on_ranks(4)
def test_errors() -> None:
    held, mesh = HeldState(), init_device_mesh("cpu", (4,))
    held.keep(0, {"x": torch.ones(2), "group": {"y": torch.ones(3)}})
    with pytest.raises(CheckpointError, match=r"group.y is held as \(3,\) of torch.float32 on cpu"):
        held.recover({"x": torch.ones(2), "group": {"y": torch.ones(4 if dist.get_rank() else 3)}})
    with pytest.raises(CheckpointError, match="x is partial"):
        held.keep(0, {"x": DTensor.from_local(torch.ones(2), mesh, [Partial()])})
    with pytest.raises(ArgumentTypeError, match="step is an int"):
        held.keep("0", {})  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ArgumentTypeError, match="state_dict is a dict"):
        held.recover([])  # type: ignore[arg-type]  # the mistake
