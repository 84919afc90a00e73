"""Covers: modules/recurrent.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import DTensor
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import LayoutError, SequenceParallel, parallelize_module
from small_models import assert_same_parameters, own_shard


@on_ranks(4)
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_recurrent_modules_on_shards_of_the_batch(
    kind: str, batch_first: bool, local: bool
) -> None:
    make = getattr(nn, kind)
    single: Any = make(3, 5, num_layers=2, bidirectional=True, batch_first=batch_first).double()
    batch = 0 if batch_first else 1
    style = SequenceParallel(sequence_dim=batch, use_local_output=local)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    full = torch.randn((8, 4, 3) if batch_first else (4, 8, 3), dtype=torch.double)
    start = torch.randn(4, 8, 5, dtype=torch.double)
    x, y = full.clone().requires_grad_(), own_shard(full, batch).requires_grad_()
    hx, own = (start, start) if kind == "LSTM" else start, own_shard(start, 1)
    expected, states = single(x, hx)
    got, ours = module(y, (own, own) if kind == "LSTM" else own)
    assert isinstance(got, DTensor) is not local
    got_local = got if local else got.to_local()
    torch.testing.assert_close(got_local, own_shard(expected, batch))
    for theirs, mine in zip(states, ours, strict=True) if kind == "LSTM" else [(states, ours)]:
        torch.testing.assert_close(mine if local else mine.to_local(), own_shard(theirs, 1))
    seed = torch.randn_like(expected)
    expected.backward(seed)
    with CommDebugMode() as mode:
        got_local.backward(own_shard(seed, batch))
    assert mode.get_total_counts() == 1  # all parameters together
    assert x.grad is not None
    torch.testing.assert_close(y.grad, own_shard(x.grad, batch))
    assert_same_parameters(module, single)
    # plain again, with its own weights
    torch.testing.assert_close(module(full)[0], single(full)[0])


@on_ranks(4)
def test_one_sequence_without_a_batch_dim_is_refused_on_all_ranks() -> None:
    module = parallelize_module(
        nn.RNN(2, 2, batch_first=True), all_ranks(), SequenceParallel(sequence_dim=0)
    )
    with pytest.raises(LayoutError, match=r"without the batch dim.* x\.unsqueeze\(0\)"):
        module(torch.randn(0 if all_ranks().get_local_rank() == 3 else 1, 2))
