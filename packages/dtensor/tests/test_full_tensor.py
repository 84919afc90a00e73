"""Covers: api/full_tensor.py: DTensors become whole, other values stay the same objects."""

from __future__ import annotations

import torch

from shoal_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, full_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks


def test_values_that_are_no_dtensors_are_returned_themselves() -> None:
    plain = torch.ones(2)
    assert full_tensor(plain) is plain
    assert full_tensor(None) is None
    assert full_tensor("text") == "text"


@on_ranks(2)
def test_a_dtensor_becomes_whole_and_stays_differentiable() -> None:
    mesh = init_device_mesh("cpu", (2,))
    value = torch.arange(5.0)
    for placement in (Shard(0), Replicate()):
        tensor = distribute_tensor(value, mesh, [placement])
        assert torch.equal(full_tensor(tensor), value)
    partial = DTensor.from_local(value, mesh, [Partial()])
    assert torch.equal(full_tensor(partial), 2 * value)
    sharded = distribute_tensor(value, mesh, [Shard(0)]).requires_grad_()
    whole = full_tensor(sharded)
    assert type(whole) is torch.Tensor
    (whole * value).sum().backward()  # type: ignore[no-untyped-call]  # of torch
    assert sharded.grad is not None
    assert torch.equal(full_tensor(sharded.grad), value)
