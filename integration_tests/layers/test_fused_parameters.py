"""Fused parameters in checkpoints, over data axes and read from files.

Covers: shoal_tp_styles/apply/fused_parameters.py, shoal_models/weights/loading.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as api

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import full_tensor, get_model_state_dict, get_optimizer_state_dict
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_models import load_sharded
from shoal_tp_styles import (
    HeadParallel,
    PackedColwiseParallel,
    ParallelStyle,
    parallelize_module,
)


class Columns(nn.Module):
    """A Linear whose weight has shape (in, out), as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 18)), nn.Parameter(torch.randn(18))
        self.nf, self.nx = 18, 8

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight + self.bias


CASES: dict[str, tuple[Callable[[], nn.Module], ParallelStyle]] = {
    "heads": (lambda: nn.MultiheadAttention(8, 4, batch_first=True), HeadParallel()),
    "gate": (lambda: nn.Linear(8, 22), PackedColwiseParallel(blocks={"gate": 11, "up": 11})),
    "columns": (Columns, PackedColwiseParallel(blocks=3)),
}


def loss_of(module: Any, x: Tensor) -> Any:
    out = module(x, x, x)[0] if isinstance(module, nn.MultiheadAttention) else module(x)
    return out.square().sum()


def same(state: Any, expected: Any, path: str = "") -> None:
    """Nested dicts of the same names and (full) values."""
    if isinstance(expected, dict):
        assert state.keys() == expected.keys(), path
        for key in expected:
            same(state[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(full_tensor(state), expected, msg=path)
    else:
        assert state == expected, path


@on_ranks(4)
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_checkpoints_have_the_names_and_values_of_one_device(kind: str, tmp_path: Path) -> None:
    make, style = CASES[kind]
    paths = [str(tmp_path)]
    dist.broadcast_object_list(paths)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def model_of(over: str) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = make().double()
        if over == "ranks":
            parallelize_module(model, all_ranks(), style)
        elif over != "one device":
            parallelize_module(model, grid["tensor"], style)
            fully_shard(model, grid["data"]) if over == "shards" else replicate(
                model, grid["data"], shard_optimizer=over == "optimizer shards"
            )
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    torch.manual_seed(0)
    single, single_optimizer = model_of("one device")
    x = torch.randn(3, 5, 8, dtype=torch.double)
    module = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for model, steps in ((single, single_optimizer), (module, optimizer)):
        for _ in range(2):
            loss_of(model, x).backward()
            steps.step()
            steps.zero_grad()
    expected: Any = api.get_state_dict(single, single_optimizer)
    saved: Any = api.get_state_dict(module, optimizer)
    for got, wanted in zip(saved, expected, strict=True):
        same(got, wanted)
    full = api.StateDictOptions(full_state_dict=True)
    same(get_model_state_dict(module, options=full), expected[0])
    same(get_optimizer_state_dict(module, optimizer, options=full), expected[1])
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=paths[0])
    for over in ("ranks", "shards", "replicas", "optimizer shards", "one device"):
        target, other = model_of(over)
        state: Any = dict(
            zip(("model", "optimizer"), api.get_state_dict(target, other), strict=True)
        )
        dcp.load(state, checkpoint_id=paths[0], no_dist=over == "one device")
        api.set_state_dict(
            target, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        for got, wanted in zip(api.get_state_dict(target, other), expected, strict=True):
            same(got, wanted, over)
        rows = (
            x
            if over in ("one device", "ranks")
            else x.repeat(2, 1, 1).chunk(2)[grid.get_local_rank("data")]
        )
        loss_of(target, rows).backward()  # the mean over equal rows
        other.step()
        resumed: Any = api.get_state_dict(target, other)[0]
        if over == "ranks":
            first = {name: value.full_tensor() for name, value in resumed.items()}
        same(resumed, first, over)


@on_ranks(4)
@pytest.mark.parametrize("kind", CASES)
def test_fused_parameters_are_read_by_their_runs(kind: str) -> None:
    make, style = CASES[kind]
    single = make()
    with torch.device("meta"):
        empty = make()
    parallel = parallelize_module(empty, all_ranks(), style)
    state = single.state_dict()
    assert not load_sharded(parallel, state).missing
    same(dict(parallel.state_dict()), dict(state))
    assert load_sharded(
        parallel, {name: value + 1 for name, value in state.items()}
    ).bytes_read < 2 * sum(value.nbytes for value in state.values())
    same(dict(parallel.state_dict()), {name: value + 1 for name, value in state.items()})
