"""A tensor that is sharded without communication, for worlds that exchange nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal_dtensor import Shard, distribute_tensor
from shoal_mesh import DeviceMesh

__all__ = ["sharded"]


def sharded(mesh: DeviceMesh, value: Tensor, dim: int = 0) -> Any:
    """Every rank's own shard of a tensor that all have."""
    return distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)
