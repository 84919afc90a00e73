"""Gradients of replicated parameters, reduced in buckets and delivered at the end of a pass.

A backward pass accumulates the gradient of this rank's rows in `.grad`, in four steps:

1. When the pass begins, the earlier gradients in `.grad` are set aside.
2. Autograd accumulates this pass's gradients in `.grad`.
3. When a bucket has all of its gradients, they are removed from `.grad`, and their reduction
   starts.
4. When the pass ends, `.grad` gets the earlier gradients back, and the means are added to them.

`torch.autograd.grad` does not accumulate. It returns an uninitialized tensor for each parameter,
and the end of the pass, which runs before `grad` returns, writes the mean into the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor.errors import LayoutError, StyleError
from shoal_dtensor.internal import (
    backward_number,
    first_order_only,
    leaf_route,
    local_of,
    running_pass,
)
from shoal_mesh import all_gather

from ..parameters.data_axes import DataAxes
from .forward_writes import COLUMNS, ForwardWrites
from .gradient_group import Group
from .placeholders import placeholder_for
from .reducer import Reducer
from .reduction import GroupReduction, deliver
from .replica import Replica, weak_hook


class Bucket(Group):
    """Replicas of trained parameters, whose gradients are reduced together."""

    # for messages and profiles
    made_by = "replicate"

    def __init__(self, name: str, replicas: Sequence[Replica], axes: DataAxes) -> None:
        super().__init__(name, axes)
        # The parameters that forwards have written to, such as normalized weights. All ranks must
        # have written the same values. One bucket of a module sends bits of their digest with its
        # gradients, as extra flags; None for the other buckets.
        self.forward_writes: ForwardWrites | None = None
        self.replicas = replicas
        self.parameters = [replica.target for replica in replicas]
        # A bucket has trained parameters only. (Other groups also have frozen ones.)
        self.trained = list(range(len(replicas)))

    def watch_writes(self, writes: ForwardWrites) -> None:
        """Send the writes of forwards with this bucket's gradients."""
        self.forward_writes = writes
        self.extra_flags = COLUMNS

    def extra_columns(self) -> Tensor | None:
        return None if self.forward_writes is None else self.forward_writes.columns()

    def take_gradient(self, i: int) -> Tensor | None:
        """Remove the gradient that autograd has accumulated from a parameter, and return it."""
        leaf = self.replicas[i].leaf
        grad = leaf.grad
        leaf.grad = None
        return grad

    def keep_gradient(self, i: int) -> None:
        """Move the gradient that autograd has accumulated to the kept gradients of the group.

        It is added to the gradient that an earlier pass kept. A later pass reduces the sum.
        """
        grad = self.take_gradient(i)
        if grad is not None:
            self.add_to_kept(i, grad, copy=False)


@dataclass(slots=True, eq=False)
class _Pass:
    """A backward pass that fills buckets, from its first gradient to its end.

    Attributes:
        number: the number of the pass; passes may run inside of others.
        grads_before: `.grad` of each parameter before the pass.
        missing: the number of gradients that have not arrived, for each bucket.
        earlier: the buckets of other modules that the same pass has reached before. Their
            reductions start before those of this module, so that all ranks have one order.
        requested: for each replica that torch.autograd.grad was called for, by its index: the
            gradient of this rank's rows, and the tensor that gets the mean.
        late: indices of the buckets that got another gradient after their reduction had started.
        reductions: the reductions that have started, in the order of the buckets. With 2 entries,
            the reductions of buckets 0 and 1 have started.
    """

    number: int
    grads_before: list[Tensor | None]
    missing: list[int]
    earlier: list[GradientBuckets] = field(default_factory=list)
    requested: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    reductions: list[GroupReduction] = field(default_factory=list)


class GradientBuckets:
    """The buckets of a module's trained parameters, and the backward pass that fills them.

    The object is a `PassPart` of shoal_dtensor: an object with the methods `finish` and `fail`. It
    joins a backward pass with the first gradient of a replica, or when the pass reaches an output
    of the module. The pass calls `finish` when all gradients are computed, and `fail` if an error
    ends the pass.

    Attributes:
        buckets: the buckets, in the order in which they are reduced.
        owner: the module's reducer; its `syncs` decides whether a pass reduces gradients.
        replicas: the replicas of all buckets, in order.
        optimizer_nodes: for each replica, the autograd node of its `optimizer_parameter`.
            `leaf_route` of a node tells what a pass does with the gradient: "accumulate" it in
            `.grad`, "return" it from torch.autograd.grad, or leave it "unused".
    """

    def __init__(self, buckets: Sequence[Bucket], owner: Reducer) -> None:
        self.buckets = buckets
        self.owner = owner
        self.replicas: list[Replica] = [
            replica for bucket in buckets for replica in bucket.replicas
        ]
        # by `id` of the leaf: the index of the bucket, and the index of the replica in the bucket
        self._place: dict[int, tuple[int, int]] = {}
        for bucket_index, bucket in enumerate(buckets):
            for i, replica in enumerate(bucket.replicas):
                self._place[id(replica.leaf)] = (bucket_index, i)
        self._pass: _Pass | None = None
        # Leaves do not hold their nodes, and a node that is freed loses its hooks. So the nodes are
        # stored here.
        self._leaf_nodes: list[Any] = []
        self.optimizer_nodes: list[Any] = []
        self._handles: list[Any] = []
        with torch.inference_mode(False), torch.enable_grad():
            for replica in self.replicas:
                self._leaf_nodes.append(_gradient_node(replica.leaf))
                self.optimizer_nodes.append(_gradient_node(replica.optimizer_parameter))
            for replica_index, replica in enumerate(self.replicas):
                interceptor = partial(self._intercept, replica_index)
                # This registers a hook on the leaf, or none if optimizers update a shard: the
                # gradient then passes a node of the replica.
                self._handles += replica.intercept_gradient(interceptor)
        self._handles += [node.register_prehook(weak_hook(self.begin)) for node in self._leaf_nodes]
        # A tensor-parallel style may replace a module's forward by one with a backward of its own.
        # This backward adds gradients to `.grad` itself, without autograd's node, and `begin`, a
        # hook of the node, would not be called. But it leaves the addition to autograd if the leaf
        # has a post-accumulate hook. This hook therefore makes autograd accumulate all gradients.
        for replica in self.replicas:
            leaf: Any = replica.leaf
            hook = weak_hook(self._on_accumulated)
            self._handles.append(leaf.register_post_accumulate_grad_hook(hook))

    @property
    def is_running(self) -> bool:
        """True from the first gradient of a pass to the end of the pass."""
        return self._pass is not None

    @property
    def _current(self) -> _Pass:
        if self._pass is None:
            raise StyleError(
                "replicate: a parameter got a gradient from a node of autograd that replicate does "
                "not know, because `param.data` of another dtype was assigned, or a submodule was "
                "converted, several times since the last forward: convert the module that was "
                "passed to replicate, for example by module.to(dtype)"
            )
        return self._pass

    def lacks_nodes(self) -> bool:
        """Tell whether a leaf has another autograd node than the one with the hooks of buckets.

        A conversion of the module gives leaves new nodes, also if dtypes are the same afterwards.
        """
        leaves = [replica.leaf for replica in self.replicas]
        leaves += [replica.optimizer_parameter for replica in self.replicas]
        nodes = [*self._leaf_nodes, *self.optimizer_nodes]
        return any(
            leaf.requires_grad and _gradient_node(leaf) is not node
            for leaf, node in zip(leaves, nodes, strict=True)
        )

    @property
    def has_started_all(self) -> bool:
        """True if the reductions of all buckets have started."""
        started = 0 if self._pass is None else len(self._pass.reductions)
        return started == len(self.buckets)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_if_needed(self, grads: Any) -> None:
        """Begin the pass that has reached an output of the module; a hook of the output's node.

        Modules need the replicas from here on, and not only from the first gradient of a parameter:
        before that gradient, an activation checkpoint runs the forward of the module again. A pass
        that does not use the gradient of any parameter does not begin.
        """
        if self.is_running:
            return
        is_needed = any(leaf_route(node) != "unused" for node in self.optimizer_nodes)
        if is_needed:
            self.begin(grads)

    def begin(self, _: Any = None) -> None:
        """Begin a pass, unless one is running: set aside the gradients in `.grad`."""
        # Autograd calls this for each parameter, so it does not ask `is_running`, a call in Python.
        if self._pass is not None:
            return
        for replica in self.replicas:
            replica.check_hooks()
        for bucket in self.buckets:
            # This raises if a pass failed while it added to the kept gradients.
            bucket.check_kept()
            bucket.divisor = self.owner.divisor
        started = _Pass(
            backward_number(),
            grads_before=[replica.leaf.grad for replica in self.replicas],
            missing=[len(bucket.replicas) for bucket in self.buckets],
        )
        for replica in self.replicas:
            replica.leaf.grad = None
        self._pass = started
        self.owner.begin_pass()
        running = running_pass()
        started.earlier = [part for part in running.parts if isinstance(part, GradientBuckets)]
        running.join(self)

    def _on_accumulated(self, leaf: Tensor) -> None:
        """Start the reductions of complete buckets, in order; a hook on accumulated gradients."""
        current = self._current
        bucket_index, i = self._place[id(leaf)]
        # A kept gradient of earlier passes and this gradient are added now, so that only one tensor
        # is in memory until the pass is over.
        bucket = self.buckets[bucket_index]
        if i in bucket.kept:
            bucket.keep_gradient(i)
        current.missing[bucket_index] -= 1
        # Reentrant checkpointing runs passes inside of this one, and each may bring a
        # parameter's gradient.
        has_started = bucket_index < len(current.reductions)
        if has_started:
            current.late.add(bucket_index)
        next_bucket = len(current.reductions)
        if next_bucket == len(self.buckets) or current.missing[next_bucket] > 0:
            return
        # Which parameters a pass uses may differ between ranks; the order of reductions must not.
        # So the buckets of modules that the pass has reached earlier come first. A reduction that
        # cannot start here is started by `finish`.
        in_turn = all(part.has_started_all for part in current.earlier)
        is_nested = backward_number() != current.number
        if not in_turn or not self.owner.syncs or is_nested:
            return
        for following in range(next_bucket, len(self.buckets)):
            if current.missing[following] > 0:
                return
            self._start_reduction(following)

    def _intercept(self, replica_index: int, grad: Tensor) -> Tensor | None:
        """Keep a gradient that autograd does not accumulate in the leaf.

        The pass was requested for the replica's `optimizer_parameter`, in one of these ways:

        | call                        | effect                                     | returns       |
        | --------------------------- | ------------------------------------------ | ------------- |
        | `backward(inputs=[shard])`  | the gradient is added to `leaf.grad`       | None          |
        | `torch.autograd.grad`       | the end of the pass writes the mean        | uninitialized |
        | the same, without reduction | the gradient is added to the kept gradient | zeros         |
        | the same, in an outer pass  | the outer pass reduces the gradient        | None          |

        The third row is for pipeline schedules: the owner does not reduce gradients in this pass
        (`syncs` is False), and returns zeros for them (`returns_zero_gradients`).

        Returns:
            The gradient of `optimizer_parameter`. If the leaf itself is this parameter, None leaves
            `grad` as it is. If the parameter is a shard, None means that the shard does not get a
            gradient.
        """
        self.begin()
        current = self._current
        replica = self.replicas[replica_index]
        is_returned = leaf_route(self.optimizer_nodes[replica_index]) == "return"
        if not is_returned:
            # `missing` stays: the bucket never becomes complete, and `finish` starts its reduction.
            earlier = replica.leaf.grad
            replica.leaf.grad = grad if earlier is None else earlier + grad
            return None
        is_nested = backward_number() != current.number
        if is_nested:
            # The outer pass `current` uses the gradient that this nested call returns, and reduces
            # it together with its other gradients.
            return None
        if not self.owner.syncs and self.owner.returns_zero_gradients:
            bucket_index, i = self._place[id(replica.leaf)]
            self.buckets[bucket_index].add_to_kept(i, grad)
            shard = replica.optimizer_parameter
            # A placeholder, zeros without memory, is recognized by a mark on the object. Autograd
            # passes the result of a hook of a leaf on as another object, without the mark.
            if shard is replica.leaf:
                return torch.zeros_like(shard.detach())
            return placeholder_for(shard)
        first_order_only(
            "replicate: torch.autograd.grad(..., create_graph=True) of a replicated parameter: "
            "the mean over ranks cannot be differentiated. Compute gradients of inputs instead, "
            "or differentiate the module before it is replicated"
        )
        mean = torch.empty_like(replica.optimizer_parameter.detach())
        current.requested[replica_index] = (grad, mean)
        return mean

    def _fill_requested(self) -> None:
        """Reduce the gradients of `torch.autograd.grad`, and fill the tensors that it returns."""
        axes = self.buckets[0].axes
        requested = self._current.requested
        indices = sorted(requested)
        comm = axes.comm
        is_requested = [index in requested for index in range(len(self.replicas))]
        # (1, replicas) on each rank, and (ranks, replicas) together
        own_requests = torch.tensor([is_requested], device=axes.mesh.device_type)
        requests = all_gather(own_requests, comm)
        # for each replica the number of ranks that requested its gradient
        counts = requests.sum(0).tolist()
        for replica, count in zip(self.replicas, counts, strict=True):
            if 0 < count < comm.size:
                raise LayoutError(
                    "replicate: torch.autograd.grad of a parameter of shape "
                    f"{tuple(replica.leaf.shape)} was used by only {count} of {comm.size} "
                    "data-parallel ranks, so the other ranks would get None. Use backward(), "
                    "which gives all ranks the mean with zeros"
                )
        replicas = [self.replicas[index] for index in indices]
        bucket = Bucket("gradients that were asked for", replicas, axes)
        bucket.divisor = self.owner.divisor
        grads: dict[int, Tensor | None] = {}
        for i, index in enumerate(indices):
            grads[i], _ = requested[index]
        means = GroupReduction.start(bucket, grads).gradients()
        for index, mean in zip(indices, means, strict=True):
            _, returned = requested[index]
            local_of(returned).copy_(mean)

    def reduce_kept(self) -> None:
        """Reduce the gradients that passes have kept, and deliver them; all ranks call it."""
        for bucket in self.buckets:
            bucket.check_kept()
            bucket.divisor = self.owner.divisor
        # `start` adds the kept gradients to the empty dict. A bucket without kept gradients on this
        # rank takes part, too, because other ranks may have kept some.
        reductions = [GroupReduction.start(bucket, {}) for bucket in self.buckets]
        for reduction in reductions:
            reduction.wait()
            self._check_writes(reduction)
        deliver(reductions)

    def _start_reduction(self, bucket_index: int) -> None:
        bucket = self.buckets[bucket_index]
        gradients = {i: bucket.take_gradient(i) for i in bucket.trained}
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
            for bucket_index in (*remaining, *sorted(current.late)):
                self._start_reduction(bucket_index)
            for reduction in current.reductions:
                reduction.wait()
                self._check_writes(reduction)
            reductions = current.reductions
            current.reductions = []
        else:
            # If an error ends the pass in the middle of the second loop, the marks stay, and
            # `check_kept` of the next pass raises. They are removed at the end of this method.
            for bucket in self.buckets:
                bucket.partially_accumulated = True
            for bucket in self.buckets:
                for i in bucket.trained:
                    bucket.keep_gradient(i)
        self._restore(current)
        deliver(reductions)
        for bucket in self.buckets:
            bucket.partially_accumulated = False

    def _check_writes(self, reduction: GroupReduction) -> None:
        """Raise StyleError if ranks have written different values.

        A rank reads the sums of the flags if it has written something, or if they are on the CPU.
        A rank that has written nothing does not read them from an accelerator, because the host
        would wait for the device; the ranks that have written raise.
        """
        bucket = reduction.group
        assert isinstance(bucket, Bucket), "buckets were made here"
        writes = bucket.forward_writes
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
        self.owner.awaits_backward = False
        self.owner.end_pass()
        for replica, grad in zip(self.replicas, ended.grads_before, strict=True):
            replica.leaf.grad = grad
        # After an error, the reductions that have started return the kept gradients to the buckets.
        # `finish` has emptied the list.
        while ended.reductions:
            ended.reductions.pop().return_kept()


def _gradient_node(leaf: Tensor) -> Any:
    """Return the autograd node that accumulates the gradient of a leaf."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def _read_from_host_memory(sums: Tensor) -> list[float]:
    """Return the numbers of a tensor on the CPU, where the host waits for no device.

    The test of reads from devices (integration_tests/layers/test_stalls.py) allows the reads of
    this function by its name.
    """
    numbers: list[float] = sums.tolist()
    return numbers
