"""Covers: rules/language/local_ops.py: an index out of range raises on every rank, whatever shard it has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal_dtensor import Replicate, Shard, distribute_tensor
from shoal_dtensor.testing import on_threads, thread_meshes

LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i.unsqueeze(1)),
    "take": lambda x, i: x.take(i),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding_bag": lambda x, i: F.embedding_bag(i.unsqueeze(0), x, mode="sum"),
    "nll_loss": lambda x, i: F.nll_loss(x.t(), i),
    "nll_loss, each": lambda x, i: F.nll_loss(x.t(), i, reduction="none"),
}


@pytest.mark.parametrize("sharding", [Shard(0), Shard(0, sizes=(3, 0, 2))], ids=str)
@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_out_of_range_raises_on_every_rank(name: str, sharding: Shard) -> None:
    look_up = LOOKUPS[name]
    x, index = torch.ones(5, 2), torch.tensor([1, 10 if name == "take" else 5])
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|out of bounds|valid range"):
        look_up(x, index)

    def check(mesh: Any) -> str:
        spread, fixed = (
            distribute_tensor(x, mesh, [sharding]),
            distribute_tensor(index, mesh, [Replicate()]),
        )
        with pytest.raises(IndexError, match="out of bounds for a dim of") as caught:
            look_up(spread, fixed)
        return str(caught.value)

    meshes = thread_meshes((3,))
    messages = on_threads([partial(check, mesh) for mesh in meshes], meshes)
    assert len({*messages}) == 1
    assert f"index {int(index[1])} is out of bounds" in messages[0]
