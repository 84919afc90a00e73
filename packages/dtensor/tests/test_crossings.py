"""Handlers see, and may change, gradients that cross to and from plain tensors.

Covers: crossings.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_dtensor import DTensor, Shard, Spec, crossings, zeros
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


class Scaling:
    """A handler that multiplies gradients and notes their layouts."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, Any]] = []

    def enter(self, node: Any, grad: Tensor, spec: Spec) -> tuple[Tensor, Spec]:
        self.notes.append(("enter", spec.placements))
        return grad * 3, spec

    def leave(self, node: Any, grad: Tensor, spec: Spec) -> Tensor:
        self.notes.append(("leave", spec.placements))
        return grad * 5

    def check_factor(self, node: Any, number: Tensor) -> None:
        self.notes.append(("factor", number.item()))


def test_a_handler_is_called_where_gradients_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossings, "_installed", [])
    handler = Scaling()
    crossings.install_crossings(handler)
    # The second call changes nothing.
    crossings.install_crossings(handler)
    plain = torch.ones(2, requires_grad=True)
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        total: Any = DTensor.from_local(plain, mesh, [Shard(0)]).to_local().sum()
        total.backward()
    # Backward enters DTensors at `to_local` and leaves them at `from_local`.
    assert handler.notes == [("enter", (Shard(0),)), ("leave", (Shard(0),))]
    assert plain.grad is not None
    assert plain.grad.tolist() == [15, 15]


def test_a_handler_gets_plain_numbers_on_which_gradients_of_dtensors_depend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product's gradient needs its factors, a sum's gradient does not need its terms."""
    monkeypatch.setattr(crossings, "_installed", [])
    handler = Scaling()
    crossings.install_crossings(handler)
    three, one = torch.tensor(3.0, requires_grad=True), torch.ones((), requires_grad=True)
    with fake_world(2):
        shards: Any = zeros(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        total = (shards.requires_grad_() * three + one).sum()
        assert not handler.notes
        total.backward()
    assert [note for note in handler.notes if note[0] == "factor"] == [("factor", 3.0)]
