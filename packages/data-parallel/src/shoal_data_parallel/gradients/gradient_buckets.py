"""Gradients of replicated parameters, reduced in buckets and delivered at the end of a pass.

Autograd accumulates the gradient of this rank's rows in `.grad`. A pass first sets aside the
gradients in `.grad`, removes each bucket's gradients when the last of them has arrived, and puts
the means in their place when it is over. `torch.autograd.grad` does not accumulate: it returns a
tensor that gets the mean when the pass is over.

A rank may update only a shard of its replica, with the optimizer's state of the shard (ZeRO-1). On
2 ranks the forward sees a weight (8, 6), and the module holds a DTensor [Shard(0)], local (4, 6), a
view of its rows of the weight. Gradients are reduced to that layout; the next forward gathers the
rows that other ranks have updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shoal_dtensor import DTensor, Replicate, Spec
from shoal_dtensor.errors import LayoutError, StyleError
from shoal_dtensor.internal import (
    backward_number,
    first_order_only,
    grad_hooked,
    leaf_route,
    local_of,
    running_pass,
)
from shoal_mesh import all_gather

from .._torch import run_when_ready
from ..parameters.leaf_hooks import GradientSwitch, install_switch
from ..parameters.sharded_parameters import DataAxes, ShardedParameter
from .forward_writes import COLUMNS, ForwardWrites
from .gradient_group import Group
from .reducer import Reducer
from .reduction import GroupReduction, deliver


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does not keep the object of a method alive.

    The object holds nodes of leaves, and the nodes hold the leaves, which Python's garbage
    collector does not see.
    """
    found = WeakMethod(method)

    def call(*args: Any) -> Any:
        if (bound := found()) is None:
            raise StyleError(
                "replicate: the module of a parameter in this pass is gone; keep what replicate() "
                "returned"
            )
        return bound(*args)

    return call


@dataclass(slots=True, eq=False, weakref_slot=True)
class Replica:
    """A parameter of which every data-parallel rank has a replica."""

    leaf: nn.Parameter  # where autograd accumulates
    # the target of reduced gradients: the parameter itself, or a shard that optimizers update
    target: ShardedParameter
    # the version of the shard when the replica was gathered; None if it has to be gathered
    version: tuple[object, ...] | None = None
    # the tensor that modules see of a trained leaf whose shard they hold
    seen: Tensor | None = None
    # of a leaf that modules hold: the function that gets its gradient, its node, and the hook
    interceptor: Callable[[Tensor], Tensor | None] | None = None
    node: Any = None
    hook_handle: Any = None

    @property
    def shown(self) -> Tensor:
        """The tensor that modules see in forwards and backwards."""
        is_recorded = self.leaf.requires_grad and self.seen is not None
        return cast(Tensor, self.seen) if is_recorded else self.leaf

    @property
    def held(self) -> nn.Parameter:
        """The tensor that optimizers see, and that a backward pass may be requested for."""
        return self.target.leaf

    def intercept_gradient(self, take: Callable[[Tensor], Tensor | None]) -> list[Any]:
        """Have `take` called in a pass that does not accumulate in the leaf; return hook handles.

        `take` gets the gradient of this rank's rows, and returns the gradient of `held`.
        """
        leaf: Any = self.leaf
        if self.held is not self.leaf:
            seen = _Seen.apply(self, take, leaf, self.held)  # type: ignore[no-untyped-call]  # torch
            self.seen = seen
            install_switch(seen, GradientSwitch(self.target, seen))
            # the original is older than all forwards, so its gradient would wait for the end of the
            # pass
            run_when_ready(seen.grad_fn)
            return []
        self.interceptor = take
        self.node = torch.autograd.graph.get_gradient_edge(leaf).node
        self.hook_handle = leaf.register_hook(_weak(self._hook))
        return [self.hook_handle]

    def _hook(self, grad: Tensor | None) -> Any:
        leaf = cast(Any, self.leaf)
        if grad is None or leaf_route(self.node) != "return":
            return None
        if [*leaf._backward_hooks][-1] != self.hook_handle.id:
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
        if self.held is not self.leaf and grad_hooked(self.held):
            raise StyleError(
                "replicate: a parameter has a gradient hook, which autograd would not call for "
                "the shards that the optimizer updates; move the hook's work after backward(), "
                "when gradients are reduced"
            )
        # one of the hooks belongs to the buckets
        if self.held is self.leaf and len(self.leaf._post_accumulate_grad_hooks or ()) > 1:
            raise StyleError(
                "replicate: a parameter has a post-accumulate-grad hook, which would get the "
                "gradient of this rank's rows only; move the hook's work after backward(), when "
                "gradients are reduced"
            )

    def adopt(self) -> bool:
        """Adopt the shard that the module holds now; return whether it requires gradients."""
        self.target.adopt()
        required = self.held.requires_grad
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
    """Return the replica of a parameter that stays the same object.

    The parameter is plain, or on the axes of a style. `dtype` is the dtype of the reduction.
    """
    shape = leaf.spec.local_shape if isinstance(leaf, DTensor) else leaf.shape
    spec = Spec(
        axes.mesh,
        axes.placements(Replicate()),
        shape,
        None,
        dtype=dtype or leaf.grad_dtype or leaf.dtype,
    )
    return Replica(leaf, ShardedParameter((), leaf, spec, spec, inner=None, reduced=spec))


class _Seen(Function):
    """A map from a leaf and its shard to the tensor that modules see.

    It may be used in any number of forwards and passes. In backward, the gradient goes to the leaf,
    or to `take` if a pass was requested for the shard by name.
    """

    @staticmethod
    def forward(
        ctx: Any,
        replica: Replica,
        take: Callable[[Tensor], Tensor | None],
        leaf: Tensor,
        shard: Tensor,
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


class Bucket(Group):
    """Replicas whose gradients are reduced together; all of them are `trained`."""

    owner = "replicate"

    def __init__(self, name: str, replicas: Sequence[Replica], axes: DataAxes) -> None:
        super().__init__(name, axes)
        # the writes of forwards, for the bucket whose flags show them
        self.writes: ForwardWrites | None = None
        self.replicas = replicas
        self.parameters = [replica.target for replica in replicas]
        self.trained = list(range(len(replicas)))

    def watch_writes(self, writes: ForwardWrites) -> None:
        """Send the writes of forwards with this bucket's gradients."""
        self.writes = writes
        self.extra_flags = COLUMNS

    def extra_columns(self) -> Tensor | None:
        return None if self.writes is None else self.writes.columns()

    def take(self, i: int) -> Tensor | None:
        """Remove the gradient that autograd has accumulated from a parameter, and return it."""
        leaf = self.replicas[i].leaf
        grad = leaf.grad
        leaf.grad = None
        return grad

    def keep(self, i: int) -> None:
        """Keep the gradient that autograd has accumulated, added to the one kept before."""
        grad = self.take(i)
        if grad is not None:
            self.add_to_kept(i, grad, copy=False)


@dataclass(slots=True, eq=False)
class _Pass:
    """A backward pass that fills buckets, from its first gradient to its end.

    Attributes:
        number: the number of the pass; passes may run inside of others.
        grads_before: `.grad` of each parameter before the pass.
        missing: for each bucket how many of its gradients have not arrived.
        earlier: the buckets of other modules that the same pass has reached before.
        requested: for parameters of torch.autograd.grad, the gradient of this rank's rows, and the
            tensor that gets the mean.
        late: the buckets that got another gradient after their reduction had started.
        reductions: the reductions of the first buckets, in order.
    """

    number: int
    grads_before: list[Tensor | None]
    missing: list[int]
    earlier: list[GradientBuckets] = field(default_factory=list)
    requested: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    reductions: list[GroupReduction] = field(default_factory=list)


class GradientBuckets:
    """The buckets of a module's trained parameters.

    They are the part of each backward pass that fills them.
    """

    def __init__(self, buckets: Sequence[Bucket], owner: Reducer) -> None:
        self.buckets = buckets  # in the order in which they are reduced
        # its flag decides whether passes reduce gradients
        self.owner = owner
        self.parameters: list[Replica] = [
            replica for bucket in buckets for replica in bucket.replicas
        ]
        self._place = {
            id(p.leaf): (at, i)
            for at, bucket in enumerate(buckets)
            for i, p in enumerate(bucket.replicas)
        }
        self._pass: _Pass | None = None
        # a leaf's node lives only as long as it is referenced
        with torch.inference_mode(False), torch.enable_grad():
            self._nodes: list[Any] = [
                torch.autograd.graph.get_gradient_edge(p.leaf).node for p in self.parameters
            ]
            # The gradients of the parameters that optimizers see.
            self.held: list[Any] = [
                torch.autograd.graph.get_gradient_edge(p.held).node for p in self.parameters
            ]
            self._handles = [
                handle
                for at, p in enumerate(self.parameters)
                for handle in p.intercept_gradient(partial(self._take, at))
            ]
        self._handles += [node.register_prehook(_weak(self.begin)) for node in self._nodes]
        # This hook also has lowered modules leave the accumulation to autograd, so `begin` comes
        # before it.
        for parameter in self.parameters:
            self._handles.append(
                parameter.leaf.register_post_accumulate_grad_hook(_weak(self._arrived))  # type: ignore[no-untyped-call]  # torch
            )

    @property
    def running(self) -> bool:
        """True from the first gradient of a pass to the end of the pass."""
        return self._pass is not None

    @property
    def _current(self) -> _Pass:
        assert self._pass is not None, "hooks of a pass begin it"
        return self._pass

    @property
    def has_started_all(self) -> bool:
        """True if the reductions of all buckets have started."""
        started = 0 if self._pass is None else len(self._pass.reductions)
        return started == len(self.buckets)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_if_needed(self, grads: Any) -> None:
        """Begin a pass through a module's output, even if it reaches none of the parameters.

        This is a hook of the output.
        """
        if not self.running and any(leaf_route(node) != "unused" for node in self.held):
            self.begin(grads)

    def begin(self, _: Any = None) -> None:
        """Begin a pass, unless one is running: set aside the gradients in `.grad`."""
        if self.running:
            return
        for parameter in self.parameters:
            parameter.check_hooks()
        for bucket in self.buckets:
            bucket.check_kept()
            bucket.divisor = self.owner.divisor
        started = _Pass(
            backward_number(),
            grads_before=[parameter.leaf.grad for parameter in self.parameters],
            missing=[len(bucket.replicas) for bucket in self.buckets],
        )
        for parameter in self.parameters:
            parameter.leaf.grad = None
        self._pass = started
        self.owner.begin_pass()
        running = running_pass()
        started.earlier = [part for part in running.parts if isinstance(part, GradientBuckets)]
        running.join(self)

    def _arrived(self, leaf: Tensor) -> None:
        """Reduce buckets in order as soon as they are complete; a hook on accumulated gradients."""
        current = self._current
        at, i = self._place[id(leaf)]
        # otherwise both were held until the pass is over
        if i in self.buckets[at].kept:
            self.buckets[at].keep(i)
        current.missing[at] -= 1
        # Reentrant checkpointing runs passes inside of this one, and each may bring a
        # parameter's gradient.
        if at < len(current.reductions):
            current.late.add(at)
        # Which parameters a pass uses may differ between ranks; the order of reductions must not.
        in_turn = all(part.has_started_all for part in current.earlier)
        if not in_turn or not self.owner.syncs or backward_number() != current.number:
            return
        for following in range(len(current.reductions), len(self.buckets)):
            if current.missing[following] > 0:
                return
            self._reduce(following)

    def _take(self, at: int, grad: Tensor) -> Tensor | None:
        """Keep a gradient that autograd does not accumulate; return its replacement."""
        self.begin()
        current = self._current
        parameter = self.parameters[at]
        if leaf_route(self.held[at]) != "return":
            parameter.leaf.grad = (
                grad if parameter.leaf.grad is None else parameter.leaf.grad + grad
            )
            return None
        if backward_number() != current.number:
            # the pass around this one reduces the gradients of its result
            return None
        if not self.owner.syncs and self.owner.returns_zero_gradients:
            bucket, i = self._place[id(parameter.leaf)]
            self.buckets[bucket].add_to_kept(i, grad)
            return torch.zeros_like(parameter.held.detach())
        first_order_only(
            "replicate: torch.autograd.grad(..., create_graph=True) of a replicated parameter: "
            "the mean over ranks cannot be differentiated. Compute gradients of inputs instead, "
            "or differentiate the module before it is replicated"
        )
        mean = torch.empty_like(parameter.held.detach())
        current.requested[at] = (grad, mean)
        return mean

    def _fill_requested(self) -> None:
        """Reduce the gradients of `torch.autograd.grad`, and fill the tensors that it returns."""
        axes = self.buckets[0].axes
        requested = self._current.requested
        indices = sorted(requested)
        comm = axes.comm
        is_requested = [at in requested for at in range(len(self.parameters))]
        own_requests = torch.tensor([is_requested], device=axes.mesh.device_type)
        ranks = all_gather(own_requests, comm).sum(0).tolist()
        for parameter, count in zip(self.parameters, ranks, strict=True):
            if 0 < count < comm.size:
                raise LayoutError(
                    "replicate: torch.autograd.grad of a parameter of shape "
                    f"{tuple(parameter.leaf.shape)} was used by only {count} of {comm.size} "
                    "data-parallel ranks, so the other ranks would get None. Use backward(), "
                    "which gives all ranks the mean with zeros"
                )
        replicas = [self.parameters[at] for at in indices]
        bucket = Bucket("gradients that were asked for", replicas, axes)
        bucket.divisor = self.owner.divisor
        grads: dict[int, Tensor | None] = {}
        for i, at in enumerate(indices):
            grads[i] = requested[at][0]
        means = GroupReduction.start(bucket, grads).gradients()
        for at, mean in zip(indices, means, strict=True):
            local_of(requested[at][1]).copy_(mean)

    def reduce_kept(self) -> None:
        """Reduce the gradients that passes have kept, and deliver them; all ranks call it."""
        for bucket in self.buckets:
            bucket.check_kept()
            bucket.divisor = self.owner.divisor
        # also buckets without kept gradients on this rank
        reductions = [GroupReduction.start(bucket, {}) for bucket in self.buckets]
        for reduction in reductions:
            reduction.wait()
            self._check_writes(reduction)
        deliver(reductions)

    def _reduce(self, at: int) -> None:
        bucket = self.buckets[at]
        gradients = {i: bucket.take(i) for i in bucket.trained}
        self._current.reductions.append(GroupReduction.start(bucket, gradients))

    def finish(self) -> None:
        """Reduce the remaining gradients at the end of the pass, and deliver all.

        This includes parameters that this rank has not used.
        """
        reductions: list[GroupReduction] = []
        current = self._current
        if current.requested:
            self._fill_requested()
        elif self.owner.syncs:
            remaining = range(len(current.reductions), len(self.buckets))
            for at in (*remaining, *sorted(current.late)):
                self._reduce(at)
            for reduction in current.reductions:
                reduction.wait()
                self._check_writes(reduction)
            reductions = current.reductions
            current.reductions = []
        else:
            for bucket in self.buckets:
                bucket.spoiled = True  # until all are kept
            for bucket in self.buckets:
                for i in bucket.trained:
                    bucket.keep(i)
        self._restore(current)
        deliver(reductions)
        for bucket in self.buckets:
            bucket.spoiled = False

    def _check_writes(self, reduction: GroupReduction) -> None:
        """Raise StyleError if ranks have written different values.

        A rank without writes does not read the flags from an accelerator, which would make it wait.
        """
        bucket = reduction.group
        assert isinstance(bucket, Bucket), "buckets were made here"
        writes = bucket.writes
        sums = reduction.extra
        if writes is None or sums is None:
            return
        if writes.has_written:
            counts = sums.tolist()
        elif sums.is_cpu:
            counts = _read_from_host_memory(sums)
        else:
            return
        writes.check(counts, bucket.axes.comm.size, self.owner.module)

    def fail(self) -> None:
        """End a pass that has raised.

        No `.grad` has changed, unless the pass was already delivering.
        """
        if self._pass is not None:
            self._restore(self._pass)

    def _restore(self, ended: _Pass) -> None:
        """End the pass, and restore the gradients from before it."""
        self._pass = None
        self.owner.end_pass()
        for parameter, grad in zip(self.parameters, ended.grads_before, strict=True):
            parameter.leaf.grad = grad
        while ended.reductions:
            ended.reductions.pop().give_back()


def _read_from_host_memory(sums: Tensor) -> list[float]:
    """Return the numbers of a tensor on the CPU, where the host waits for no device."""
    numbers: list[float] = sums.tolist()
    return numbers
