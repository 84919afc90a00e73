"""Sharding plans as data: specs of parameters and outputs, Sharders of sub-modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import nn

from shoal_mesh.internal import dataclass

from ..spec.sharding_spec import ShardingSpec


class Sharder(ABC):
    """Shards a sub-module by code, where one spec per parameter is not enough.

    Example:
        >>> class RowParallel(Sharder):
        ...     def shard(self, module):
        ...         shard_parameter(module, "weight", ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]))
        ...         return module
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The sharded module, which replaces ``module``; all ranks call it."""


@dataclass(frozen=True)
class ShardingPlan:
    """The specs and Sharders by which ``shard_module`` shards a module.

    Args:
        plan: Path of a parameter -> its spec, or path of a sub-module -> its Sharder.
        output_plan: Path of a module ("" is the root) -> spec to which its ShardedTensor output is resharded.
        return_local_tensor: Paths of modules whose ShardedTensor output is returned as this rank's local tensor.

    Example:
        >>> ranks = ["rank:0/cpu", "rank:1/cpu"]
        >>> plan = ShardingPlan(
        ...     plan={"up.weight": ChunkShardingSpec(0, ranks), "down.weight": ChunkShardingSpec(1, ranks)},
        ...     output_plan={"": ChunkShardingSpec(0, ranks)},
        ...     return_local_tensor=[""],
        ... )
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec] | None = None
    return_local_tensor: Sequence[str] | None = None


class ShardingPlanner(ABC):
    """Builds the sharding plan of a module.

    Example:
        >>> class ShardAllRows(ShardingPlanner):
        ...     def build_plan(self, module):
        ...         rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ...         return ShardingPlan({name: rows for name, _ in module.named_parameters()})
        >>> sorted(ShardAllRows().build_plan(torch.nn.Linear(4, 4)).plan)
        ['bias', 'weight']
    """

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The sharding plan of ``module``; the same on every rank."""
