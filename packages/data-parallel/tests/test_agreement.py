"""Checks before the first collective.

Parameters differ between ranks, or are on the meta device.

Covers: agreement.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from data_parallel_model import mesh_of
from shoal_data_parallel import FSDPModule, ReplicateModule, StyleError, fully_shard, replicate
from shoal_dtensor import Shard
from shoal_mesh import CommDebugMode, LockstepError
from shoal_mesh.testing import on_ranks

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "replicate": replicate,
    "optimizer": partial(replicate, shard_optimizer=True),
    "fully_shard": fully_shard,
}


def two_layers(width: int = 4) -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width))


@pytest.mark.parametrize("how", FUNCTIONS)
@on_ranks(3)
def test_ranks_with_different_parameters_name_the_first(how: str) -> None:
    """The error was that of the first collective, or a hang."""
    data = mesh_of(3, 1)["data"]
    is_last = data.get_local_rank() == 2
    frozen, wide, short = two_layers(), two_layers(5 if is_last else 4), two_layers()
    if is_last:
        frozen[0].weight.requires_grad_(False)
        del short[1]
    cases = [
        (frozen, r"0\.weight: \(4, 4\) torch.float32, frozen on ranks \[2\]"),
        (
            wide,
            r"1\.weight: \(4, 4\) torch.float32, trained on ranks \[0, 1\]; 1\.weight: \(5, 4\)",
        ),
        (short, r"1\.weight.*no parameter on ranks \[2\]"),
    ]
    for model, message in cases:
        with pytest.raises(LockstepError, match=message):
            FUNCTIONS[how](model, data)
        # nothing has changed, and the group works
        assert not isinstance(model, FSDPModule | ReplicateModule)
    FUNCTIONS[how](two_layers(), data)(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_ranks_that_choose_different_placements_are_named() -> None:
    """Each rank took the shards of the others for rows, or for columns, without a word."""
    data = mesh_of(2, 1)["data"]
    chosen = Shard(data.get_local_rank())
    model = nn.Linear(4, 4, bias=False)
    message = r"weight with Shard\(dim=0\): .* ranks \[0\]; weight with Shard\(dim=1\): .* \[1\]"
    with pytest.raises(LockstepError, match=message):
        fully_shard(model, data, shard_placement_fn=lambda _: chosen)
    assert not isinstance(model, FSDPModule)
    fully_shard(model, data)(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_the_comparison_is_one_small_message() -> None:
    with CommDebugMode() as counted:
        fully_shard(two_layers(), mesh_of(2, 1)["data"])
    assert sum(counted.get_comm_counts().values()) == 1


@pytest.mark.parametrize("how", FUNCTIONS)
@on_ranks(2)
def test_fake_parameters_are_not_compared(how: str) -> None:
    """The comparison read numbers of fake tensors, which do not have values."""
    data = mesh_of(2, 1)["data"]
    with FakeTensorMode():
        model = FUNCTIONS[how](two_layers(), data)
        assert model(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("how", FUNCTIONS)
@on_ranks(2)
def test_a_forward_on_fake_tensors_does_not_read_real_parameters(how: str) -> None:
    """The digest of a real parameter is fake inside of the mode, and was compared."""
    model = FUNCTIONS[how](two_layers(), mesh_of(2, 1)["data"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.empty(2, 4)).shape == (2, 4)
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("how", FUNCTIONS)
@on_ranks(2)
def test_parameters_without_values_are_named(how: str) -> None:
    """A forward on the meta device ended in errors of torch's operators."""
    data = mesh_of(2, 1)["data"]
    with torch.device("meta"):
        model = two_layers()
    FUNCTIONS[how](model, data)
    for _ in range(2):
        with pytest.raises(
            StyleError, match=r"\['0.weight', '0.bias', '1.weight', '1.bias'\] are on"
        ):
            model(torch.ones(2, 4))
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_memory_that_nobody_initialized_is_named() -> None:
    """A forward computed with the numbers that happened to be in the memory."""
    with torch.device("meta"):
        model = two_layers()
    fully_shard(model, mesh_of(2, 1)["data"])
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    for _ in range(2):
        with pytest.raises(StyleError, match=r"\['1.weight', '1.bias'\] have memory but no values"):
            model(torch.ones(2, 4))
    model[1].reset_parameters()
    model(torch.ones(2, 4)).sum().backward()
