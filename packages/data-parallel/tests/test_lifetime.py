"""Tensors without users are freed, tensors of a graph are not.

Covers: unit_passes.py, gradient_buckets.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor.errors import StyleError
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world

Wrap = Callable[[Any, DeviceMesh], Any]


def shard_and_keep_gathered(model: Any, mesh: DeviceMesh) -> Any:
    return fully_shard(model, mesh=mesh["data"], reshard_after_forward=False)


def shard_in_units(model: Any, mesh: DeviceMesh) -> Any:
    fully_shard(model[0], mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def replicate_with_optimizer_shards(model: Any, mesh: DeviceMesh) -> Any:
    return replicate(model, mesh["data"], shard_optimizer=True)


WRAPS: dict[str, Wrap] = {
    "fully_shard": lambda model, mesh: fully_shard(model, mesh=mesh["data"]),
    "fully_shard, kept gathered": shard_and_keep_gathered,
    "units": shard_in_units,
    "hybrid": lambda model, mesh: fully_shard(model, mesh=mesh),
    "replicate": lambda model, mesh: replicate(model, mesh["data"]),
    "optimizer shards": replicate_with_optimizer_shards,
}


def wrapped(how: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
    return WRAPS[how](nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), mesh)


def trained(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def recorded(model: nn.Module) -> None:
    model(torch.ones(2, 4))


def evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4))


def differentiated_twice(model: nn.Module) -> None:
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def raised(model: Any) -> None:
    handle = model[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4))
    handle.remove()


def references(how: str, use: Callable[[nn.Module], None]) -> list[ref[Any]]:
    """To a model that nobody has any more, and its parameters."""
    model = wrapped(how)
    seen = [ref(model), *map(ref, model.parameters())]
    use(model)
    return [*seen, *map(ref, model.parameters())]


@pytest.fixture(autouse=True, scope="module")
def older_objects() -> Iterator[None]:
    """Half a million objects of before the tests, which this file's 70 collections do not visit."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("how", WRAPS)
@pytest.mark.parametrize("use", [trained, recorded, evaluated, differentiated_twice, raised])
def test_a_model_is_freed(how: str, use: Callable[[nn.Module], None]) -> None:
    with fake_world(4):
        seen = references(how, use)
        gc.collect()
        # leaves, when the nodes are gone that refer to them unseen
        gc.collect()
        assert [each() for each in seen] == [None] * len(seen)


@pytest.mark.parametrize("how", WRAPS)
def test_a_graph_keeps_what_its_backward_needs(how: str) -> None:
    with fake_world(4):
        model = wrapped(how)
        parameters: list[Tensor] = [*model.parameters()]
        loss = model(torch.ones(2, 4)).sum()
        del model
        gc.collect()
        loss.backward()
        assert all(parameter.grad is not None for parameter in parameters)


def test_a_gradient_that_nobody_averages_is_an_error() -> None:
    with fake_world(4):
        model = wrapped("replicate")
        part = model[0]
        del model
        gc.collect()
        with pytest.raises(
            StyleError, match=r"the module of a parameter in this pass is gone; keep what replicate"
        ):
            part(torch.ones(2, 4)).sum().backward()
