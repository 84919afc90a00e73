"""Functions that are computed without DTensors.  Covers: ops/dispatch.py."""

from __future__ import annotations

import pytest
import torch

from sharding_cases import FULL, bricks, chunk, sharded
from shoal_mesh.testing import on_ranks
from shoal_shard_api import zeros
from shoal_shard_api.errors import LocalShardError

BRICKS = bricks(6, 5)


@on_ranks(4)
def test_copy_from_any_layout_and_from_a_plain_tensor() -> None:
    target = zeros(BRICKS, 6, 5)
    assert target.copy_(sharded(chunk(1))) is target
    assert torch.equal(target, FULL)
    target.copy_(FULL[0])
    assert torch.equal(target, FULL[0].expand(6, 5))
    plain = torch.empty(6, 5)
    assert torch.equal(plain.copy_(sharded(BRICKS)), FULL)
    with pytest.raises(LocalShardError, match=r"\(5,\) does not fit \(6, 5\)"):
        target.copy_(zeros(chunk(0), 5))
    with pytest.raises(LocalShardError, match="does not broadcast"):
        target.copy_(torch.zeros(3, 5))


@on_ranks(4)
def test_equal_and_allclose_compare_any_layouts_alike_on_every_rank() -> None:
    a, b = sharded(chunk(0)), sharded(BRICKS)
    changed = FULL.clone()
    changed[5, 4] += 1e-7
    assert torch.equal(a, b)
    assert a.equal(FULL)
    assert torch.equal(FULL, b)
    assert not torch.equal(a, FULL + 1)
    assert not torch.equal(a, zeros(chunk(0), 5, 6))
    assert torch.allclose(a, changed)
    assert torch.allclose(changed, b)
    assert not torch.allclose(a, FULL + 1)
    assert torch.allclose(a, FULL + 1, atol=2.0)
    with pytest.raises(LocalShardError, match="sizes differ"):
        torch.allclose(a, zeros(chunk(0), 5, 6))
