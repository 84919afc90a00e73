"""Replicated parameters of which every data-parallel rank updates a shard: the optimizer's state is sharded (ZeRO-1).

With data axes of 2 ranks, a Linear's weight of shape (8, 6):

    what its forward sees  (8, 6) on every rank, for good; autograd accumulates its gradient
    what the module holds  a DTensor [Shard(0)], local (4, 6): a view of these rows, for optimizers and checkpoints

Gradients are reduced to the second layout.  A step of the optimizer writes to the rows of this rank; the next forward
gathers the rows of the others, in one collective for each group of parameters.

May import: _torch, policies, sharded_parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shoal_dtensor import DTensor
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import grad_hooked, in_groups, leaf_route, local_of, redistribute_shards
from shoal_mesh import purpose

from ._torch import run_when_ready
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .sharded_parameters import DataAxes, ShardedParameter, Site, shard_parameter, shards_of


@dataclass(slots=True, eq=False)
class ShardedReplica:
    """A parameter that every data-parallel rank has a replica of, and updates a shard of."""

    leaf: nn.Parameter  # where autograd accumulates; modules see it where it is frozen
    sharded: ShardedParameter  # what optimizers see
    version: tuple[object, ...] | None  # of the shard when the replica was gathered; None if it has to be
    seen: Tensor | None = None  # what modules see of a leaf that is trained

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
    def held(self) -> nn.Parameter:
        """What optimizers see."""
        return self.sharded.leaf

    def ask(self, take: Callable[[Tensor], Tensor | None]) -> list[Any]:
        """Have the gradient of a pass that does not accumulate in the leaf taken; no handles."""
        self.seen = seen = _Seen.apply(self, take, self.leaf, self.held)  # type: ignore[no-untyped-call]  # torch
        run_when_ready(seen.grad_fn)  # it is older than all forwards: its gradient would wait for the end of the pass
        return []

    def check_hooks(self) -> None:
        """Raise StyleError if users' hooks would not see the reduced gradient."""
        if grad_hooked(self.sharded.leaf):
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
        local = local_of(held).detach()
        if local.device == gathered.device:
            local.copy_(gathered)
        else:  # made on the meta device
            value = DTensor(gathered, held.spec) if isinstance(held, DTensor) else gathered.clone()
            self.leaf = nn.Parameter(value, requires_grad=held.requires_grad)
        self.version = self.sharded.version()


class _Seen(Function):
    """A leaf and its shard -> what modules see, in any number of forwards and passes.

    Backward: the gradient goes to the leaf, or is taken for the shard where a pass is asked for that by name.
    """

    @staticmethod
    def forward(
        ctx: Any, replica: ShardedReplica, take: Callable[[Tensor], Tensor | None], leaf: Tensor, shard: Tensor
    ) -> Tensor:
        ctx.take = take
        ctx.set_materialize_grads(False)
        return replica.sharded.view(local_of(leaf))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, Tensor | None, Tensor | None]:
        (leaf, _), _ = ctx.next_functions[-2:]
        if grad is None or leaf_route(leaf) == "accumulate":
            return None, None, grad, None
        return None, None, None, ctx.take(grad)


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
                seen = replica.seen if replica.leaf.requires_grad and replica.seen is not None else replica.leaf
                replica.sharded.put(seen if replicas else replica.held)

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
        return in_groups(stale, lambda replica: replica.sharded.gathered.local_bytes, self._bucket_bytes)

    def _start(self, group: Sequence[ShardedReplica]) -> Any:
        with purpose("replicate gathers updated parameters"):
            moves = [(replica.sharded.resting, replica.sharded.gathered) for replica in group]
            return redistribute_shards(shards_of([replica.sharded for replica in group]), moves)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy of the module, whose replicas are filled at its first forward."""
        replicas = [replace(replica, version=None, seen=None) for replica in self.replicas]
        return vars(OptimizerShards(replicas, self._bucket_bytes))
