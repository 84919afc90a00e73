"""Losses and exchanges of tokens in plain code pass the checker, or are refused.

Covers: declared_functions.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import I, R, ShardType as S, spmd
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import Vocab
from shoal_tp_styles.experts.token_route import ArrivedRows, StartedExchange
from shoal_tp_styles.losses import functional
from shoal_tp_styles.losses.linear_cross_entropy import linear_cross_entropy


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def typed(dp: Any, tp: Any, *shape: int) -> Tensor:
    tensor = torch.randn(shape, requires_grad=True)
    spmd.assert_tensor_type(tensor, {"dp": dp, "tp": tp})
    return tensor


def tokens(*shape: int) -> Tensor:
    target = torch.zeros(shape, dtype=torch.int64)
    spmd.assert_tensor_type(target, {"dp": S(0), "tp": I})
    return target


def kinds(tensor: Tensor) -> str:
    found = spmd.type_of(tensor)
    assert found is not None
    return ", ".join([f"{axis!r}: {kind!r}" for axis, kind in found.local.items()])


def test_losses_over_a_sharded_vocabulary_are_equal_on_its_ranks(mesh: DeviceMesh) -> None:
    vocab = Vocab(mesh.comm("tp"), (5, 5))
    with spmd.set_current_mesh(mesh), spmd.typecheck():
        logits = typed(S(0), S(1), 6, 5)
        assert kinds(functional.log_sum_exp(logits, vocab)) == "dp: V, tp: I"
        losses = functional.cross_entropy(logits, tokens(6), reduction="none", vocab=vocab)
        assert kinds(losses) == "dp: V, tp: I"
        shares = functional.log_softmax(logits, vocab=vocab)
        assert kinds(shares) == "dp: V, tp: V"
        with pytest.raises(SpmdTypeError, match=r"source type is S\(1\)"):
            functional.log_sum_exp(typed(S(0), I, 6, 5), vocab)


def test_a_loss_that_multiplies_by_the_sharded_weight(mesh: DeviceMesh) -> None:
    vocab = Vocab(mesh.comm("tp"), (5, 5))
    with spmd.set_current_mesh(mesh), spmd.typecheck():
        rows = typed(S(0), I, 6, 8)
        weight = typed(R, S(0), 5, 8)
        loss = linear_cross_entropy(rows, weight, tokens(6), reduction="none", vocab=vocab)
        assert kinds(loss) == "dp: V, tp: I"
        with pytest.raises(SpmdTypeError, match="linear_cross_entropy"):
            linear_cross_entropy(typed(S(0), R, 6, 8), weight, tokens(6), vocab=vocab)


class Exchange:
    """An exchange of rows, of which nothing is sent."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def start(self, rows: Tensor, *, back: bool) -> Any:
        class Arrived:
            def wait(self) -> Tensor:
                return rows.clone()

        return Arrived()


def test_rows_of_experts_vary(mesh: DeviceMesh) -> None:
    exchange = Exchange(mesh.comm("tp"))
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        in_flight: list[Any] = []
        start: Any = StartedExchange.apply
        token = start(typed(I, S(0), 6, 8), exchange, in_flight)
        arrive: Any = ArrivedRows.apply
        arrived = arrive(token, exchange, in_flight)
        assert (kinds(token), kinds(arrived)) == ("dp: I, tp: V", "dp: I, tp: V")
        with pytest.raises(SpmdTypeError, match="each rank's own rows"):
            start(typed(I, I, 6, 8), exchange, in_flight)
