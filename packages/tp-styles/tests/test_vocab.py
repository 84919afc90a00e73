"""Covers: losses/vocab.py."""

from __future__ import annotations

import pytest
import torch

from shoal_mesh.testing import on_ranks
from shoal_tp_styles import LayoutError, losses
from tp_checks import sharded


@on_ranks(2)
def test_logits_with_other_layouts_are_refused() -> None:
    with pytest.raises(LayoutError, match="vocab=Vocab"):
        losses.cross_entropy(torch.randn(2, 3), torch.zeros(2, dtype=torch.long))
    x, _ = sharded(torch.randn(4, 3), 0)
    with pytest.raises(LayoutError, match="must be sharded on exactly one mesh axis"):
        losses.cross_entropy(x, torch.zeros(4, dtype=torch.long))
