"""Uses of the public names that type checkers must accept, as the documentation writes them.

Nothing here is run.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal_data_parallel import fully_shard, replicate
from shoal_mesh import DeviceMesh


class Model(nn.Module):
    """A module with a method of its own."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """A scalar."""
        return x.sum()


def sharded(mesh: DeviceMesh, x: torch.Tensor) -> nn.Module:
    """What `fully_shard` returns is the module and an `FSDPModule`."""
    model = fully_shard(Model(), mesh)
    with model.no_sync():
        model.loss(x).backward()
    model.set_requires_gradient_sync(False)
    both = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], mesh)
    both[0].unshard()
    result: nn.Module = model
    return result


def replicated(mesh: DeviceMesh, x: torch.Tensor) -> nn.Module:
    """What `replicate` returns is the module and a `ReplicateModule`."""
    model = replicate(Model(), mesh)
    with model.no_sync():
        model.loss(x).backward()
    result: nn.Module = model
    return result
