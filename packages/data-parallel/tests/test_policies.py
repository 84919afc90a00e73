"""Covers: policies.py: each field of a policy changes the memory or the dtype that it is about.

Ignoring a field left every value right, so only bytes, devices and dtypes show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal_data_parallel import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    replicate,
)
from shoal_dtensor.internal import local_shard
from shoal_mesh import init_device_mesh
from shoal_mesh.internal import Event
from shoal_mesh.testing import fake_world, observed, on_ranks

PARALLEL: dict[str, Callable[..., Any]] = {"fully_shard": fully_shard, "replicate": replicate}


def dtypes_of_sums(events: list[Event]) -> set[torch.dtype]:
    """Return the dtypes of the tensors that collectives have summed."""
    return {tensor.dtype for event in events if event.reduce_op for tensor in event.tensors}


@pytest.mark.parametrize("function", PARALLEL)
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        (MixedPrecisionPolicy(torch.bfloat16), torch.bfloat16),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32), torch.float32),
        (MixedPrecisionPolicy(reduce_dtype=torch.float64), torch.float64),
    ],
    ids=["the computation's", "float32", "float64"],
)
@on_ranks(2)
def test_gradients_are_summed_in_the_dtype_of_the_policy(
    policy: MixedPrecisionPolicy, dtype: torch.dtype, function: str
) -> None:
    mesh = init_device_mesh("cpu", (2,))
    layer = PARALLEL[function](nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
    out = layer(torch.ones(2, 4))
    with observed() as events:
        out.sum().backward()
    assert dtypes_of_sums(events) == {dtype}


@pytest.mark.parametrize("casts", [True, False])
@on_ranks(2)
def test_inputs_are_cast_if_the_policy_wants_it(casts: bool) -> None:
    class Identity(nn.Module):
        """A module with a parameter that its forward does not use."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x

    policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=casts)
    module: Any = fully_shard(Identity(), init_device_mesh("cpu", (2,)), mp_policy=policy)
    assert module(torch.ones(2)).dtype == (torch.bfloat16 if casts else torch.float32)


def shard_on_fake_device(policy: OffloadPolicy, function: str) -> Tensor:
    """Return a parameter's shard; the mesh is of a device that is not the host, without data."""
    layer = nn.Linear(8, 8, bias=False, device="meta")
    with fake_world(4), FakeTensorMode():
        mesh = init_device_mesh("meta", (4,))
        layer.weight = nn.Parameter(torch.ones(8, 8, device="meta"))
        # a policy of dtypes has `replicate` make a unit, whatever the other policy is
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        PARALLEL[function](layer, mesh=mesh, mp_policy=precision, offload_policy=policy)
        weight: Any = layer.weight
        return local_shard(weight)


@pytest.mark.parametrize("function", PARALLEL)
def test_shards_are_in_the_memory_that_the_policy_names(function: str) -> None:
    offloaded = shard_on_fake_device(CPUOffloadPolicy(pin_memory=False), function)
    resident = shard_on_fake_device(OffloadPolicy(), function)
    assert (offloaded.device.type, resident.device.type) == ("cpu", "meta")


@pytest.mark.parametrize("function", PARALLEL)
@pytest.mark.parametrize("pins", [True, False])
def test_memory_is_pinned_if_the_policy_wants_it(
    pins: bool, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[Tensor] = []

    # Fake tensors cannot be pinned.
    def note(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", note)
    shard_on_fake_device(CPUOffloadPolicy(pin_memory=pins), function)
    assert len(pinned) == int(pins)


@on_ranks(2)
def test_offloaded_parameters_may_begin_without_values() -> None:
    """`to_empty` gives them values on the host, and gathers take them from there."""
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    model: Any = fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert layer.weight.is_meta
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            local_shard(parameter).fill_(1)
    assert model(torch.ones(1, 4)).tolist() == [[5.0] * 4]
