"""`Replica`: a parameter of which every data-parallel rank has a replica.

A rank may update only a shard of its replica, and then has the optimizer's state of the shard only
(ZeRO-1). For example, on 2 ranks and with a weight of shape (8, 6):

- In a forward or a backward pass, the module uses the whole replica (8, 6).
- At other times, the module holds a DTensor [Shard(0)] with a local tensor (4, 6). The local tensor
  is a view of this rank's 4 rows of the replica.
- A backward pass reduces the gradient to the layout of the shard.
- The next forward gathers the 4 rows that the other rank has updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shoal_dtensor import DTensor, Replicate, Spec
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import (
    ShardsInFlight,
    accumulation_hooks,
    grad_hooked,
    gradient_hooks,
    is_compiling,
    leaf_route,
    local_of,
)

from .._torch import run_when_ready
from ..parameters.data_axes import DataAxes
from ..parameters.leaf_checks import check_steps_in_backward
from ..parameters.sharded_parameters import (
    ShardedParameter,
    install_switch,
    start_to_gather,
    with_methods_of_dtensors,
)


def weak_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does not keep the object of a method alive.

    The object refers to nodes of leaves, and the nodes refer to the leaves and their hooks.
    Python's garbage collector does not see these references, so it would never free such a cycle.
    """
    reference = WeakMethod(method)

    def call(*args: Any) -> Any:
        if (bound := reference()) is None:
            raise StyleError(
                "replicate: the module of a parameter in this pass is gone; keep what replicate() "
                "returned"
            )
        return bound(*args)

    return call


@dataclass(slots=True, eq=False, weakref_slot=True)
class Replica:
    """A parameter of which every data-parallel rank has a replica.

    If optimizers update a shard of the replica, the parameter is several tensors:

    | name                  | tensor                                          | used by           |
    | --------------------- | ----------------------------------------------- | ----------------- |
    | `leaf`                | the whole replica on this rank                  | autograd: `.grad` |
    | `recorded_view`       | the differentiable result of `ReplicaView`      | `module_tensor`   |
    | `module_tensor`       | `recorded_view`; `leaf` if the leaf is frozen   | modules in a pass |
    | `optimizer_parameter` | this rank's shard of the replica                | optimizers        |

    Otherwise `leaf`, `module_tensor` and `optimizer_parameter` are the same object, and
    `recorded_view` is None.
    """

    leaf: nn.Parameter
    # the target of reduced gradients: the parameter itself, or a shard that optimizers update
    target: ShardedParameter
    # the version of the shard when the replica was gathered; None if it has to be gathered
    version: tuple[object, ...] | None = None
    recorded_view: Tensor | None = None
    # The next three fields are None if optimizers update a shard.
    # The function that gets the gradient of the leaf in a pass of `torch.autograd.grad`.
    interceptor: Callable[[Tensor], Tensor | None] | None = None
    # the autograd node that accumulates the gradient of the leaf
    node: Any = None
    # the handle of the hook of the leaf that calls `interceptor`
    hook_handle: Any = None

    @property
    def module_tensor(self) -> Tensor:
        """The tensor that modules use in forwards and backwards."""
        if self.recorded_view is not None and self.leaf.requires_grad:
            return self.recorded_view
        return self.leaf

    @property
    def optimizer_parameter(self) -> nn.Parameter:
        """The parameter that optimizers update, and that a backward pass may be requested for."""
        return self.target.leaf

    def mean_shard_bytes(self) -> int:
        """Return the bytes of a shard of the gradient, which the ranks of a style may make uneven.

        The mean is the same on all of these ranks.
        """
        leaf = self.leaf
        shards = 1
        if isinstance(leaf, DTensor):
            for placement, ranks in zip(leaf.placements, leaf.device_mesh.shape, strict=True):
                if placement.is_shard():
                    shards *= ranks
        return leaf.numel() * self.target.reduced.dtype.itemsize // shards

    def intercept_gradient(self, interceptor: Callable[[Tensor], Tensor | None]) -> list[Any]:
        """Have a function called in passes that do not accumulate in the leaf.

        Args:
            interceptor: gets the gradient of this rank's rows, and returns the gradient of
                `optimizer_parameter`.

        Returns:
            The handles of the hooks that were registered.
        """
        leaf: Any = self.leaf
        shard = self.optimizer_parameter
        if shard is not self.leaf:
            apply: Any = ReplicaView.apply
            view = apply(self, interceptor, leaf, shard)
            self.recorded_view = view
            install_switch(view, self.target)
            # Autograd runs nodes that are ready in the reverse order of their creation. The view's
            # node is created before all forwards, so without this call it would run last, and no
            # bucket would be complete before the end of the pass.
            run_when_ready(view.grad_fn)
            return []
        self.interceptor = interceptor
        self.node = torch.autograd.graph.get_gradient_edge(leaf).node
        self.hook_handle = leaf.register_hook(weak_hook(self._hook))
        return [self.hook_handle]

    def _hook(self, grad: Tensor | None) -> Any:
        """Intercept a gradient that `torch.autograd.grad` returns; a hook of the leaf."""
        # For a gradient that autograd accumulates, `GradientBuckets` has a post-accumulate hook.
        is_returned = leaf_route(self.node) == "return"
        if grad is None or not is_returned:
            return None
        # autograd calls hooks in the order of their registration
        hook_ids = list(gradient_hooks(self.leaf))
        is_called_last = hook_ids[-1] == self.hook_handle.id
        if not is_called_last:
            raise StyleError(
                "replicate: a parameter has a gradient hook that was registered after "
                "replicate(...), so it would change the gradient of this rank's rows before "
                "torch.autograd.grad averages it over ranks; register the hook before replicate, "
                "or call backward()"
            )
        assert self.interceptor is not None, "the hook was registered with it"
        return self.interceptor(grad)

    def check_hooks(self) -> None:
        """Raise StyleError if users' hooks would not see the reduced gradient."""
        check_steps_in_backward("replicate", self.optimizer_parameter)
        has_shard = self.optimizer_parameter is not self.leaf
        if has_shard and grad_hooked(self.optimizer_parameter):
            raise StyleError(
                "replicate: a parameter has a gradient hook, which autograd would not call for "
                "the shards that the optimizer updates; move the hook's work after backward(), "
                "when gradients are reduced"
            )
        # one of the hooks belongs to the buckets
        if not has_shard and len(accumulation_hooks(self.leaf) or ()) > 1:
            raise StyleError(
                "replicate: a parameter has a post-accumulate-grad hook, which would get the "
                "gradient of this rank's rows only; move the hook's work after backward(), when "
                "gradients are reduced"
            )

    def adopt(self) -> bool:
        """Adopt the shard that the module holds now; return whether it requires gradients."""
        self.target.adopt()
        required = self.optimizer_parameter.requires_grad
        if self.leaf.requires_grad is not required:
            self.leaf.requires_grad_(required)
        return required

    def fill(self, gathered: Tensor) -> None:
        leaf: Any = self.leaf
        local = local_of(leaf).detach()
        if local.device == gathered.device:
            local.copy_(gathered)
        else:  # made on the meta device
            value = DTensor(gathered, leaf.spec) if isinstance(leaf, DTensor) else gathered.clone()
            self.leaf = nn.Parameter(value, requires_grad=leaf.requires_grad)
        self.version = self.target.version()


def replica_of(leaf: nn.Parameter, axes: DataAxes, dtype: torch.dtype | None) -> Replica:
    """Return the replica of a parameter that optimizers update as a whole.

    Modules, optimizers and autograd use the same object: `leaf`.

    Args:
        leaf: a plain parameter, or a DTensor on the axes of a style.
        axes: the data axes.
        dtype: the dtype of the reduction; by default the dtype of the gradient.
    """
    shape = leaf.spec.local_shape if isinstance(leaf, DTensor) else leaf.shape
    spec = Spec(
        axes.mesh,
        axes.placements(Replicate()),
        shape,
        None,
        dtype=dtype or leaf.grad_dtype or leaf.dtype,
    )
    # All layouts are equal, because the parameter is neither sharded nor gathered. Nothing replaces
    # the parameter in its modules, so `sites` is empty.
    target = ShardedParameter(
        sites=(), leaf=leaf, resting=spec, gathered=spec, inner=None, reduced=spec
    )
    return Replica(leaf, target)


class OwnerOfReplicas(Protocol):
    """The reducer of a replicated module."""

    awaits_backward: bool
    replicas: list[Replica]


def value_outside(owner: OwnerOfReplicas, shard: Any) -> Any:
    """Return what code outside of a forward gets for a parameter that a module holds.

    Between a forward and its backward it is the replica of a shard that the optimizer updates. Code
    under `no_grad` gets the shard, so that it can write to it.
    """
    if is_compiling() or not owner.awaits_backward or not torch.is_grad_enabled():
        return shard
    for replica in owner.replicas:
        if replica.optimizer_parameter is shard and replica.version == replica.target.version():
            return with_methods_of_dtensors(replica.module_tensor, shard)
    return shard


def gathered_in_turns(
    groups: Iterable[Sequence[Replica]],
) -> Iterator[tuple[Sequence[Replica], list[Tensor]]]:
    """Yield each group with its gathered tensors, while the next group is in flight."""
    started: list[tuple[Sequence[Replica], ShardsInFlight]] = []
    for group in groups:
        targets = [replica.target for replica in group]
        in_flight = start_to_gather(targets, "replicate gathers updated parameters")
        started.append((group, in_flight))
        if len(started) == 2:
            first, in_flight = started.pop(0)
            yield first, in_flight.wait()
    for last, in_flight in started:
        yield last, in_flight.wait()


class ReplicaView(Function):
    """A map from a leaf and its shard to the `recorded_view` that modules use.

    The view may be used in any number of forwards and passes. The backward returns the gradient for
    the leaf if the pass accumulates in the leaf. Any other pass was requested for the shard, which
    was passed to `torch.autograd.grad` or `backward(inputs=...)`: the backward calls `interceptor`
    with the gradient, and returns the result for the shard.
    """

    @staticmethod
    def forward(
        ctx: Any,
        replica: Replica,
        interceptor: Callable[[Tensor], Tensor | None],
        leaf: Tensor,
        shard: Tensor,
    ) -> Tensor:
        ctx.interceptor = interceptor
        ctx.set_materialize_grads(False)
        return replica.target.view(local_of(leaf))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, Tensor | None, Tensor | None]:
        # One (node, index of the input) for each of `leaf` and `shard`, in this order.
        leaf_edge = ctx.next_functions[-2]
        leaf_node = leaf_edge[0]
        if grad is None or leaf_route(leaf_node) == "accumulate":
            return None, None, grad, None
        return None, None, None, ctx.interceptor(grad)
