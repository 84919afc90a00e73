"""Replicated parameters of which every data-parallel rank updates a shard: the optimizer's state is sharded (ZeRO-1).

With data axes of 2 ranks, a Linear's weight of shape (8, 6):

    what its forward sees  (8, 6) on every rank, for good; autograd accumulates its gradient
    what the module holds  a DTensor [Shard(0)], local (4, 6): a view of these rows, for optimizers and checkpoints

Gradients are reduced to the second layout.  A step of the optimizer writes to the rows of this rank; the next forward
gathers the rows of the others, in one collective for each group of parameters.

May import: policies, reduction, sharded_parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Spec
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import local_shard, redistribute_shards
from shoal_mesh import purpose
from shoal_mesh.internal import dataclass

from .policies import MixedPrecisionPolicy, OffloadPolicy
from .reduction import in_groups
from .sharded_parameters import DataAxes, ShardedParameter, Site, shard_parameter


@dataclass(slots=True, eq=False)
class ShardedReplica:
    """A parameter that every data-parallel rank has a replica of, and updates a shard of.

    Attributes:
        leaf: what modules see.
        sharded: what optimizers see.
        version: of the shard when the replica was gathered; None if it has to be.
    """

    leaf: nn.Parameter
    sharded: ShardedParameter
    version: tuple[object, ...] | None

    @classmethod
    def of(
        cls, param: nn.Parameter, sites: Sequence[Site], axes: DataAxes, dtype: torch.dtype | None
    ) -> ShardedReplica:
        """A parameter, which modules go on to see, and its shard, which takes its place in them."""
        policies = MixedPrecisionPolicy(reduce_dtype=dtype), OffloadPolicy()
        sharded = shard_parameter(param, sites, axes, None, policies, view=True)
        sharded.put(sharded.leaf)
        return cls(param, sharded, sharded.version())

    @property
    def reduced(self) -> Spec:
        """The layout in which gradients arrive."""
        return self.sharded.reduced

    def gradient(self, grad: Tensor | None) -> tuple[Tensor, Spec]:
        """The local gradient and its layout before the reduction; None counts as zeros."""
        return self.sharded.gradient(grad)

    def accumulate(self, reduced: Tensor) -> None:
        """Add a reduced local gradient to the shard's."""
        self.sharded.accumulate(reduced)

    def gathered_bytes(self) -> int:
        """What this rank receives when it is filled."""
        gathered = self.sharded.gathered
        return gathered.dtype.itemsize * gathered.local_shape.numel()

    def check_hooks(self) -> None:
        """Raise StyleError if users' hooks would not see the reduced gradient."""
        shard: Any = self.sharded.leaf
        if len(shard._backward_hooks or ()) > 1 or shard._post_accumulate_grad_hooks:  # one hook is the DTensor's own
            raise StyleError(
                "replicate: a parameter has a gradient hook, and autograd does not know the shards that the optimizer "
                "updates; call what it does after backward(), when gradients are reduced"
            )

    def adopt(self) -> bool:
        """Take the shard that the module holds now; whether it requires gradients."""
        self.sharded.adopt()
        required = self.sharded.leaf.requires_grad
        if self.leaf.requires_grad is not required:
            self.leaf.requires_grad_(required)
        return required

    def fill(self, gathered: Tensor) -> None:
        """Take the values of all ranks."""
        held: Any = self.leaf
        local = local_shard(held) if isinstance(held, DTensor) else held.detach()
        if local.device == gathered.device:
            local.copy_(gathered)
        else:  # made on the meta device
            value = DTensor(gathered, held.spec) if isinstance(held, DTensor) else gathered.clone()
            self.leaf = nn.Parameter(value, requires_grad=held.requires_grad)
        self.version = self.sharded.version()

    def copied(self, memo: dict[int, Any]) -> ShardedReplica:
        """That of a copy of the module."""
        sites = tuple((copy.deepcopy(module, memo), name) for module, name in self.sharded.sites)
        one, leaf = self.sharded, copy.deepcopy(self.sharded.leaf, memo)
        sharded = ShardedParameter(sites, leaf, one.resting, one.gathered, one.inner, one.reduced)
        return ShardedReplica(copy.deepcopy(self.leaf, memo), sharded, None)


class OptimizerShards:
    """The parameters of a module, which shows shards to optimizers and replicas to its forward.

    Attributes:
        replicas: the parameters.
    """

    def __init__(self, replicas: Sequence[ShardedReplica], bucket_bytes: int) -> None:
        self.replicas = replicas
        self._bucket_bytes = bucket_bytes
        self._shown = False

    def trained(self, held: Iterable[Tensor]) -> list[ShardedReplica]:
        """The parameters that require gradients now.

        Args:
            held: the parameters that the module holds.

        Raises:
            StyleError: if the module has a parameter that has no shard.
        """
        trained = [replica for replica in self.replicas if replica.adopt()]
        known = {id(replica.sharded.leaf) for replica in self.replicas}
        if any(id(param) not in known for param in held):
            raise StyleError(
                "replicate: the module has got another parameter since replicate(..., shard_optimizer=True), of which "
                "the optimizer's state cannot be sharded; add parameters before"
            )
        return trained

    def show(self, replicas: bool) -> None:
        """Have the modules hold the replicas, or the shards."""
        if self._shown is not replicas:
            self._shown = replicas
            for replica in self.replicas:
                replica.sharded.put(replica.leaf if replicas else replica.sharded.leaf)

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the replicas of shards that were written to; one group is on its way while another is copied."""
        groups = self._stale()
        in_flight = [self._start(group) for group in groups[:1]]
        for at, group in enumerate(groups):
            in_flight += [self._start(following) for following in groups[at + 1 : at + 2]]
            for replica, gathered in zip(group, in_flight.pop(0).wait(), strict=True):
                replica.fill(gathered)

    def _stale(self) -> list[list[ShardedReplica]]:
        for replica in self.replicas:
            replica.adopt()
        stale = (replica for replica in self.replicas if replica.version != replica.sharded.version())
        return in_groups(stale, ShardedReplica.gathered_bytes, self._bucket_bytes)

    def _start(self, group: Sequence[ShardedReplica]) -> Any:
        with purpose("replicate gathers updated parameters"):
            moves = [(replica.sharded.resting, replica.sharded.gathered) for replica in group]
            return redistribute_shards([replica.sharded.shard() for replica in group], moves)

    def copied(self, memo: dict[int, Any]) -> OptimizerShards:
        """Those of a copy of the module."""
        return OptimizerShards([replica.copied(memo) for replica in self.replicas], self._bucket_bytes)
