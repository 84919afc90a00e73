"""Covers: modules/recurrent.py: recurrent modules whose hidden units are sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from one_device import as_one_device
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
    unparallelize_module,
)
from small_models import assert_same_parameters, own_shard

GATHERED = ColwiseParallel(output_layouts=Replicate())


def states_of(kind: str, single: Any, batch: int) -> Any:
    """An initial state that gets gradients."""
    rows = single.num_layers * (1 + single.bidirectional)
    each = [torch.randn(rows, batch, single.hidden_size, dtype=torch.double) for _ in range(2)]
    return tuple(each) if kind == "LSTM" else each[0]


def leaves(state: Any) -> Any:
    return tuple(map(leaves, state)) if isinstance(state, tuple) else state.clone().requires_grad_()


def flat(state: Any) -> list[torch.Tensor]:
    return list(state) if isinstance(state, tuple) else [state]


@on_ranks(4)
@pytest.mark.parametrize("hidden", [8, 6, 2])  # even, uneven, and empty shards
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize(
    ("layers", "both", "first"),
    [(1, False, False), (3, False, True), (2, True, False), (1, True, True)],
)
def test_values_states_and_gradients(
    kind: str, hidden: int, layers: int, both: bool, first: bool
) -> None:
    options: dict[str, Any] = {
        "num_layers": layers,
        "bidirectional": both,
        "batch_first": first,
        "bias": layers != 3,
    }
    single: Any = getattr(nn, kind)(3, hidden, **options).double()
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), GATHERED)
    full, state = (
        torch.randn(5, 4, 3, dtype=torch.double),
        states_of(kind, single, 5 if first else 4),
    )
    for hx in (None, state):
        x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
        theirs, ours = (None if hx is None else leaves(hx) for _ in range(2))
        (expected, last), (got, mine) = single(x, theirs), module(y, ours)
        torch.testing.assert_close(got, expected)
        for a, b in zip(flat(mine), flat(last), strict=True):
            torch.testing.assert_close(a, b)
        loss, other = (
            out.square().sum() + sum(s.square().sum() for s in flat(end))
            for out, end in ((got, mine), (expected, last))
        )
        loss.backward()
        other.backward()
        torch.testing.assert_close(y.grad, x.grad)
        for a, b in zip(flat(ours), flat(theirs), strict=True) if hx is not None else ():
            torch.testing.assert_close(a.grad, b.grad)
    assert_same_parameters(module, single)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("local", [True, False])
def test_units_stay_sharded_for_a_row_wise_layer(kind: str, local: bool) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn: Any = getattr(nn, kind)(3, 6, num_layers=2)
            self.out = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden, state = self.rnn(x[:2])
            hidden, _ = self.rnn(x[2:], state)  # states go in as they came out
            return self.out(hidden)  # type: ignore[no-any-return]  # a module's call has no type

    single = Tagger().double()
    plan = {"rnn": ColwiseParallel(use_local_output=local), "out": RowwiseParallel()}
    x = torch.randn(5, 3, dtype=torch.double)  # without a batch
    as_one_device(single, plan, all_ranks(), [x])
    module = parallelize_module(copy.deepcopy(single), all_ranks(), plan)
    hidden = module.rnn(x)[0]
    assert isinstance(hidden, DTensor) is not local
    assert (hidden if local else hidden.to_local()).shape == (5, 3)
    torch.testing.assert_close(unparallelize_module(module)(x), single(x))


@on_ranks(2)
def test_inputs_sharded_along_the_sequence_are_gathered() -> None:
    single = nn.GRU(3, 4).double()
    style = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    module = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    full = torch.randn(6, 2, 3, dtype=torch.double)
    x, y = full.clone().requires_grad_(), own_shard(full, 0).requires_grad_()
    expected, got = single(x)[0], module(y)[0]
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(y.grad, own_shard(x.grad, 0))


@on_ranks(2)
@pytest.mark.parametrize("both", [True, False])
def test_dropout_between_layers_draws_what_one_device_draws(both: bool) -> None:
    single = nn.GRU(3, 4, num_layers=3, dropout=0.5, bidirectional=both).double()
    module = parallelize_module(copy.deepcopy(single), all_ranks(), GATHERED)
    x = torch.randn(5, 2, 3, dtype=torch.double)
    torch.manual_seed(7)
    expected = single(x)[0]
    after = torch.rand(3)
    torch.manual_seed(7)
    got = module(x)[0]
    torch.testing.assert_close(got, expected)
    assert torch.equal(torch.rand(3), after)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert_same_parameters(module, single)
    torch.testing.assert_close(module.eval()(x), single.eval()(x))


class Doubled(nn.GRU):
    """A GRU with a forward of its own."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        return super().forward(2 * input, hx)


@fake_world(2)
def test_refused_forms() -> None:
    axis = init_device_mesh("cpu", (2,))
    with pytest.raises(
        UnsupportedModuleError, match=r"proj_size=2.* SequenceParallel\(sequence_dim=1\)"
    ):
        parallelize_module(nn.LSTM(3, 4, proj_size=2), axis, GATHERED)
    with pytest.raises(UnsupportedModuleError, match="its own forward"):
        parallelize_module(Doubled(3, 4), axis, GATHERED)
    with pytest.raises(LayoutError, match=r"pass output_layouts=Replicate\(\)"):
        parallelize_module(nn.RNN(3, 4, bidirectional=True), axis, ColwiseParallel())
    with pytest.raises(LayoutError, match="Shard"):
        parallelize_module(nn.RNN(3, 4), axis, ColwiseParallel(output_layouts=Shard(0)))
    with pytest.raises(LayoutError, match="aligned"):
        parallelize_module(nn.RNN(3, 4), axis, ColwiseParallel().aligned(2))
    with pytest.raises(UnsupportedModuleError, match=r"or its hidden units with ColwiseParallel"):
        parallelize_module(nn.RNN(3, 4), axis, RowwiseParallel())
    module = parallelize_module(nn.RNN(3, 4), axis, GATHERED)
    with pytest.raises(UnsupportedModuleError, match="PackedSequence"):
        module(pack_sequence([torch.randn(4, 3), torch.randn(2, 3)]))
