"""Covers: losses/sampling.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import Vocab, choose, losses
from tp_checks import sharded


@on_ranks(4)
def test_choices_are_those_of_the_full_logits() -> None:
    full = torch.randn(7, 11, dtype=torch.double)
    # equal maxima on two ranks: the smaller index
    full[0, 2] = full[0, 9] = 50.0
    full[1] = 1.0
    x, _ = sharded(full, 1)
    assert choose.argmax(x).tolist() == full.argmax(1).tolist()
    mesh = all_ranks()
    drawn = {
        choose.sample(x, generator=torch.Generator().manual_seed(3)).tolist()[2] for _ in range(2)
    }
    assert len(drawn) == 1
    many = full[2].expand(4000, 11)
    tokens = choose.sample(sharded(many, 1)[0], generator=torch.Generator().manual_seed(0))
    share = torch.bincount(tokens, minlength=11) / 4000
    torch.testing.assert_close(share.double(), full[2].softmax(0), atol=0.03, rtol=0)
    point = torch.rand(7, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    ours = choose.sample(x, generator=torch.Generator().manual_seed(5))
    single: Any = torch.searchsorted(full.softmax(1).cumsum(1), point[:, None], right=True).squeeze(
        1
    )
    assert ours.tolist() == single.tolist()
    assert choose.sample(x, temperature=0).tolist() == full.argmax(1).tolist()
    padded = torch.cat([full, torch.full((7, 2), 99.0, dtype=torch.double)], 1)
    x, _ = sharded(padded, 1)
    eleven = Vocab.of(x, 1, real=11)
    assert choose.argmax(x, vocab=eleven).tolist() == full.argmax(1).tolist()
    target = torch.randint(11, (7,))
    loss: Any = losses.cross_entropy(x, target, vocab=eleven, label_smoothing=0.1)
    torch.testing.assert_close(loss, functional.cross_entropy(full, target, label_smoothing=0.1))
    assert mesh.ndim == 1


@on_ranks(4)
def test_logits_that_are_no_numbers() -> None:
    # A row with a NaN gave token 0, and its maximum an index behind the last one.
    full = torch.randn(3, 11)
    full[1, 4] = torch.nan
    x, _ = sharded(full, 1)
    assert choose.argmax(x).tolist() == full.argmax(1).tolist()
    full[1, 4] = torch.inf
    infinite, _ = sharded(full, 1)
    empty, _ = sharded(torch.full((3, 11), -torch.inf), 1)
    for logits in (x, infinite, empty):
        with pytest.raises(RuntimeError, match=r"contains NaN or \+inf, or is -inf everywhere"):
            choose.sample(logits)
