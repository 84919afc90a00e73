"""`replicate` of modules with styles against one device, on real gloo ranks.

Covers: shoal_data_parallel/{replicate,gradient_buckets}.py, with
shoal_tp_styles/plan/parallelize.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from integration_tests.layers.styled_model import models, styled
from torch import nn

from data_parallel_checks import (
    OPTIMIZERS,
    replicas_are_asked_for_gradients,
    replicas_are_copied,
    replicas_are_filled,
    replicas_freeze,
    replicas_grow,
    replicas_keep_gradients,
    replicas_outlive_a_fault,
)
from data_parallel_model import (
    Model,
    backward_of_each,
    batch,
    loss_of,
    mesh_of,
    own,
    pickled,
    same_gradients,
    train_alike,
)
from shoal_data_parallel import replicate
from shoal_dtensor import DTensor
from shoal_mesh import DeviceMesh
from shoal_mesh.testing import on_ranks

# bytes: of the model's 17,000 in float64, about one weight each
SMALL = 1000


def single_and_replicated(
    mesh: DeviceMesh, make: Callable[[], nn.Module] = Model, **options: Any
) -> tuple[Any, Any]:
    plain, model = models(mesh, make)
    return plain, replicate(model, mesh["data"], **({"bucket_bytes": SMALL} | options))


SHARDED = pytest.mark.parametrize("shard_optimizer", [False, True])


@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 2**20])
@on_ranks(4)
def test_training_is_that_of_one_device(bucket_bytes: int) -> None:
    mesh = mesh_of(2, 2)
    plain, model = models(mesh)
    parameters = list(model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in (plain, model)]
    # after the optimizer was made: parameters stay
    replicate(model, mesh["data"], bucket_bytes=bucket_bytes)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    train_alike(plain, model, mesh, optimizers)


@SHARDED
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@on_ranks(4)
def test_checkpointed_blocks_and_shared_parameters(
    reentrant: bool, tied: bool, shard_optimizer: bool
) -> None:
    mesh = mesh_of(2, 2)
    plain, model = single_and_replicated(
        mesh, lambda: Model(recompute=reentrant, tied=tied), shard_optimizer=shard_optimizer
    )
    for _ in range(2):  # the second pass adds to what is there
        backward_of_each(plain, model, mesh)
        same_gradients(plain, model)


@SHARDED
@on_ranks(4)
def test_gradients_are_kept_until_a_pass_that_reduces_them(shard_optimizer: bool) -> None:
    mesh = mesh_of(2, 2)
    replicas_keep_gradients(
        *single_and_replicated(mesh, shard_optimizer=shard_optimizer), mesh, shard_optimizer
    )


@SHARDED
@on_ranks(4)
def test_frozen_parameters_now_and_later(shard_optimizer: bool) -> None:
    mesh = mesh_of(2, 2)
    plain, model = models(mesh)
    replicas_freeze(plain, model, mesh, shard_optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(4)
def test_sharded_state_trains_as_one_device(name: str) -> None:
    mesh = mesh_of(2, 2)
    plain, model = single_and_replicated(mesh, shard_optimizer=True)
    optimizers = [OPTIMIZERS[name](one) for one in (plain, model)]
    train_alike(plain, model, mesh, optimizers)
    torch.testing.assert_close(model(batch(3)[0]), plain(batch(3)[0]))


@on_ranks(4)
def test_a_model_made_without_memory_is_filled_later() -> None:
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        model = Model().double()
    replicas_are_filled(models(mesh)[0], styled(model, mesh), mesh)


@SHARDED
@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
@on_ranks(4)
def test_a_copy_is_replicated_too(
    shard_optimizer: bool, copied_by: Callable[[nn.Module], Any]
) -> None:
    mesh = mesh_of(2, 2)
    replicas_are_copied(
        *single_and_replicated(mesh, shard_optimizer=shard_optimizer), mesh, copied_by
    )


@on_ranks(4)
def test_parameters_that_are_replaced_or_added() -> None:
    mesh = mesh_of(2, 2)
    replicas_grow(*single_and_replicated(mesh), mesh)


@SHARDED
@pytest.mark.parametrize("kept", [False, True])
@on_ranks(4)
def test_a_backward_that_raises_leaves_gradients_as_they_were(
    kept: bool, shard_optimizer: bool
) -> None:
    mesh = mesh_of(2, 2)
    replicas_outlive_a_fault(
        *single_and_replicated(mesh, shard_optimizer=shard_optimizer), mesh, kept
    )


@on_ranks(4)
def test_a_dtensor_parameter_keeps_its_layout() -> None:
    mesh = mesh_of(2, 2)
    _, model = single_and_replicated(mesh)
    loss_of(model, *own(mesh, *batch(0))).backward()
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor)
    grad: Any = weight.grad
    assert weight.spec.mesh == grad.spec.mesh == mesh["tensor"]


TRACED = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
)


@SHARDED
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=TRACED)])
@on_ranks(4)
def test_gradients_asked_for_by_name(compiled: bool, shard_optimizer: bool) -> None:
    mesh = mesh_of(2, 2)
    replicas_are_asked_for_gradients(
        mesh, *single_and_replicated(mesh, shard_optimizer=shard_optimizer), compiled
    )
