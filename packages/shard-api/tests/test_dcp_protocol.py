"""ShardedTensors in torch.distributed.checkpoint.  Covers: tensor/dcp_protocol.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharded_modules import FULL, save_model
from sharding_cases import chunk
from shoal_mesh.testing import on_ranks, rank_pool
from shoal_shard_api import ShardedTensor, zeros
from shoal_shard_api.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's own, on saving


def load_with_torch(where: str) -> None:
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {"model": {"weight": zeros(chunk(1), 10, 6), "bias": torch.zeros(10)}, "step": 0}
    dcp.load(state, checkpoint_id=where)
    assert torch.equal(state["model"]["weight"], FULL)


def test_torchs_own_load_and_save_know_the_tensors(tmp_path: Path) -> None:
    rank_pool(4).run(save_model, str(tmp_path / "saved"), chunk(0, (2, 0)))
    rank_pool(4).run(load_with_torch, str(tmp_path / "saved"))


@on_ranks(4)
def test_a_shard_that_is_not_here() -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    tensor = zeros(chunk(0), 4, 2)
    index = MetadataIndex("w", torch.Size([dist.get_rank(), 0]))
    assert tensor.__get_tensor_shard__(index).data_ptr() == tensor.local_tensor().data_ptr()
    with pytest.raises(CheckpointError, match="w: no local shard begins at"):
        tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size([9, 0])))
    assert isinstance(tensor, ShardedTensor)
    assert len(ShardedTensor(chunk(0), 2, 2).__create_chunk_list__()) == (1 if dist.get_rank() < 2 else 0)
