"""Parameters of which every data-parallel rank has a replica; it may update a shard only, and have its state (ZeRO-1).

With data axes of 2 ranks, a Linear's weight of shape (8, 6), of which ranks update shards:

    what its forward sees  (8, 6) on every rank, for good; autograd accumulates its gradient
    what the module holds  a DTensor [Shard(0)], local (4, 6): a view of these rows, for optimizers and checkpoints

Gradients are reduced to the second layout.  A step of the optimizer writes to the rows of this rank; the next forward
gathers the rows of the others, in one collective for each group of parameters.

May import: _torch, policies, sharded_parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shoal_dtensor import DTensor
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import grad_hooked, leaf_route, local_of

from ._torch import run_when_ready
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .sharded_parameters import DataAxes, ShardedParameter, Site, shard_parameter


@dataclass(slots=True, eq=False)
class Replica:
    """A parameter that every data-parallel rank has a replica of."""

    leaf: nn.Parameter  # where autograd accumulates
    target: ShardedParameter  # to what gradients are reduced: the parameter itself, or a shard that optimizers update
    version: tuple[object, ...] | None = None  # of the shard when the replica was gathered; None if it has to be
    seen: Tensor | None = None  # what modules see of a leaf that is trained and whose shard they hold

    @classmethod
    def with_shard(
        cls, param: nn.Parameter, sites: Sequence[Site], axes: DataAxes, dtype: torch.dtype | None
    ) -> Replica:
        """A parameter, which modules go on to see, and its shard, which takes its place in them."""
        policies = MixedPrecisionPolicy(reduce_dtype=dtype), OffloadPolicy()
        sharded = shard_parameter(param, sites, axes, None, policies, view=True)
        sharded.put(sharded.leaf)
        return cls(param, sharded, sharded.version())

    @property
    def held(self) -> nn.Parameter:
        """What optimizers see, and what a backward pass may be asked for."""
        return self.target.leaf

    def ask(self, take: Callable[[Tensor], Tensor | None]) -> list[Any]:
        """Have the gradient of a pass that does not accumulate in the leaf taken; handles that undo it.

        `take` gets the gradient of this rank's rows, and returns what is to be that of `held`.
        """
        leaf: Any = self.leaf
        if self.held is not self.leaf:
            self.seen = seen = _Seen.apply(self, take, leaf, self.held)  # type: ignore[no-untyped-call]  # torch
            run_when_ready(seen.grad_fn)  # it is older than all forwards: its gradient would wait for the pass's end
            return []
        node = torch.autograd.graph.get_gradient_edge(leaf).node

        def hook(grad: Tensor | None) -> Tensor | None:
            if grad is None or leaf_route(node) != "return":
                return None
            if [*leaf._backward_hooks][-1] != handle.id:
                raise StyleError(
                    "replicate: a parameter has a gradient hook that was registered after replicate(...), so it would "
                    "change the gradient of this rank's rows that torch.autograd.grad is to return the mean of; "
                    "register it before, or call backward()"
                )
            return take(grad)

        handle = leaf.register_hook(hook)
        return [handle]

    def check_hooks(self) -> None:
        """Raise StyleError if users' hooks would not see the reduced gradient."""
        if self.held is not self.leaf and grad_hooked(self.held):
            raise StyleError(
                "replicate: a parameter has a gradient hook, and autograd does not know the shards that the optimizer "
                "updates; call what it does after backward(), when gradients are reduced"
            )
        if self.held is self.leaf and len(self.leaf._post_accumulate_grad_hooks or ()) > 1:  # one is of the buckets
            raise StyleError(
                "replicate: a parameter has a post-accumulate-grad hook, which would see the gradient of this rank's "
                "rows; call what it does after backward(), when gradients are reduced"
            )

    def adopt(self) -> bool:
        """Take the shard that the module holds now; whether it requires gradients."""
        self.target.adopt()
        required = self.held.requires_grad
        if self.leaf.requires_grad is not required:
            self.leaf.requires_grad_(required)
        return required

    def fill(self, gathered: Tensor) -> None:
        """Take the values of all ranks."""
        leaf: Any = self.leaf
        local = local_of(leaf).detach()
        if local.device == gathered.device:
            local.copy_(gathered)
        else:  # made on the meta device
            value = DTensor(gathered, leaf.spec) if isinstance(leaf, DTensor) else gathered.clone()
            self.leaf = nn.Parameter(value, requires_grad=leaf.requires_grad)
        self.version = self.target.version()


class _Seen(Function):
    """A leaf and its shard -> what modules see, in any number of forwards and passes.

    Backward: the gradient goes to the leaf, or is taken for the shard where a pass is asked for that by name.
    """

    @staticmethod
    def forward(
        ctx: Any, replica: Replica, take: Callable[[Tensor], Tensor | None], leaf: Tensor, shard: Tensor
    ) -> Tensor:
        ctx.take = take
        ctx.set_materialize_grads(False)
        return replica.target.view(local_of(leaf))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, Tensor | None, Tensor | None]:
        (leaf, _), _ = ctx.next_functions[-2:]
        if grad is None or leaf_route(leaf) == "accumulate":
            return None, None, grad, None
        return None, None, None, ctx.take(grad)
