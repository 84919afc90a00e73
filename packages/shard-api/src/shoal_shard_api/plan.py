"""Sharding plans as data: which parameter is cut how, which module is replaced by whom, what becomes of outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from .spec import ShardingSpec


class Sharder(ABC):
    """A way of sharding a whole sub-module that no spec per parameter can say."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The sharded module that takes the place of ``module``; all ranks call it."""


@dataclass(frozen=True)
class ShardingPlan:
    """How to shard a module.

    Args:
        plan: Path of a parameter -> its spec, or path of a sub-module -> the Sharder that replaces it.
        output_plan: Path of a module ("" is the root) -> spec to which its ShardedTensor output is resharded.
        return_local_tensor: Paths of modules whose ShardedTensor output is returned as this rank's local tensor.

    Example:
        >>> from shoal_shard_api import ChunkShardingSpec
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
    """Something that makes a plan for a module."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The plan by which ``module`` is to be sharded; the same on every rank."""
