"""Covers: plan/propose.py."""

from __future__ import annotations

import pytest
import torch

from shoal_mesh import abstract_mesh
from shoal_tp_styles import LayoutError, RowwiseParallel, preview, propose
from shoal_tp_styles.testing import ModelArgs, Transformer

MODEL = Transformer(ModelArgs(n_layers=1, weight_tying=False))
TOKENS = torch.zeros(8, 6, dtype=torch.long)
WHOLE = sum(param.numel() * 4 for param in MODEL.parameters())


def test_the_fastest_within_the_bound_comes_first() -> None:
    found = propose(MODEL, 4, 4 * WHOLE, TOKENS)
    assert found.best is not None and found.best.shape[0] * found.best.shape[1] == 4
    assert found.best.seconds == min(each.seconds for each in found.candidates)
    assert {each.shape for each in found.candidates} == {(4, 1), (2, 2), (1, 4)}
    shared = {each.data: each.nbytes for each in found.candidates if each.shape == (4, 1)}
    assert shared == {
        "replicate": 4 * WHOLE,
        "replicate(shard_optimizer=True)": round(2.5 * WHOLE),
        "fully_shard": WHOLE,
    }
    (tensor,) = (each for each in found.candidates if each.shape == (1, 4))
    cost = preview(MODEL, found.plan, abstract_mesh((4,)), TOKENS)
    assert (tensor.nbytes, tensor.seconds) == (4 * cost.parameter_bytes, cost.seconds)


def test_a_bound_leaves_what_fits() -> None:
    found = propose(MODEL, 4, int(1.1 * WHOLE), TOKENS)
    assert found.best is not None and found.best.data == "fully_shard"
    assert "too much" in repr(found).splitlines()[-1] and "too much" not in repr(found).splitlines()[1]
    assert propose(MODEL, 4, 1000, TOKENS).best is None
    own = propose(MODEL, 2, WHOLE, TOKENS, plan={"output": RowwiseParallel()}, state=0.0)
    assert own.plan == {"output": RowwiseParallel()}
    assert max(each.nbytes for each in own.candidates) == 2 * WHOLE
    with pytest.raises(LayoutError, match="got 0 ranks"):
        propose(MODEL, 0, 10)
