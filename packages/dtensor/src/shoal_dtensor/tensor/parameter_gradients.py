"""Gradients of leaves, redistributed to the leaf's layout: many in one collective.

A leaf's hook returns the gradient while its reduction is still to be done: the tensor knows the layout that it will
have, and its first use runs all reductions that have been asked for.  What autograd itself does with it (take it, or
add it to the gradient that is there) waits with it, so usually nothing is used before the end of the backward pass.
The DTensor class is an argument here: this module is below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .._torch import apply, is_tracing, is_transformed, thread_object, whole_when_compiled
from ..dispatch.decision import obey
from ..layout.spec import Spec
from ..redistribute.plan import plan as find_plan
from ..redistribute.shards_in_flight import CoalescedBatch
from ..redistribute.steps import Plan
from .autograd import Redistribute, as_gradient, gradient_spec, pending, queued, redistributed
from .backward import running_pass

_DETACH, _ADD_ = torch.ops.aten.detach.default, torch.ops.aten.add_.Tensor
ACCUMULATION = ("aten::detach", "aten::add_.Tensor")  # what autograd calls to keep a gradient, as torch names them

# Bytes that one collective for several gradients takes: enough to hide its latency, little to pack and to hold.
BUCKET = 2**22

# Under this name a thread holds the scope that may leave gradients as they are until it ends, and is asked by `takes`.
# torch hands such objects on to the threads of its backward passes.
SCOPE = "shoal_dtensor.deferred_gradients"


class ParameterGradientHook:
    """A gradient hook: redistribute the gradient to the leaf's layout, reducing what is partial."""

    __slots__ = ("cls", "spec")

    def __init__(self, cls: Any, spec: Spec) -> None:
        self.cls: Any = cls
        self.spec: Spec = spec

    def __call__(self, grad: Any) -> Any:
        if grad is None:  # an autograd function had none to give, or has added it to `.grad` itself
            return None
        gradient = grad
        if not isinstance(grad, self.cls):
            if not is_tracing() and is_transformed(grad):  # several gradients at once: nothing is accumulated
                return None
            gradient = as_gradient(self.cls, grad, self.spec)
        if is_tracing():  # by compiled autograd
            return _placed(gradient, self.spec)
        spec = gradient._spec
        target = _target(self.spec, spec)
        if target is None:
            return None if gradient is grad else gradient
        scope = thread_object(SCOPE)
        recorded = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not recorded and scope is not None and scope.takes(gradient):
            return gradient
        plan = find_plan(spec, target)
        obey("the gradient of a leaf", self.spec, plan)
        if recorded:
            return apply(Redistribute, gradient, self.cls, target, (None, None), False)
        return running_pass().part(GradientBatch).moved(self.cls, gradient, plan)


class CheckedHook(ParameterGradientHook):
    """A user's gradient hook, whose result is a DTensor: for a leaf, one in the leaf's layout."""

    __slots__ = ("hook", "is_leaf")

    def __init__(self, cls: Any, hook: Callable[[Any], Any], spec: Spec, *, is_leaf: bool) -> None:
        super().__init__(cls, spec)
        self.hook: Callable[[Any], Any] = hook
        self.is_leaf: bool = is_leaf

    def __call__(self, grad: Any) -> Any:
        # An autograd function of several parameters has no gradient for those that a pass did not use.
        result = None if grad is None else self.hook(grad)
        if result is None or (not is_tracing() and is_transformed(result)):
            return result
        result = as_gradient(self.cls, result, self.spec)
        placed = super().__call__(result) if self.is_leaf else None
        return result if placed is None else placed


@whole_when_compiled
def _placed(gradient: Any, leaf: Spec) -> Any:
    """A gradient in a leaf's layout, as one node of a graph."""
    target = _target(leaf, gradient._spec)
    if target is None:
        return gradient
    return gradient.redistribute(placements=target.placements, shard_order=target.shard_order)


@lru_cache(maxsize=4096)
def _target(leaf: Spec, grad: Spec) -> Spec | None:
    """The spec that a leaf's gradient must get; None if it has it. `multiple_of` may shard as `Shard` does."""
    if grad.mesh is leaf.mesh and grad.placements == leaf.placements and grad.same_layout(leaf):
        return None
    return gradient_spec(with_layout_of(leaf, grad))


def install_gradient_hook(cls: Any, leaf: Any) -> None:
    """Give the gradients of a leaf its current layout: one hook, however often this is called."""
    hooks = leaf._backward_hooks or {}
    for name, hook in hooks.items():
        if type(hook) is ParameterGradientHook:
            hooks[name] = ParameterGradientHook(cls, leaf._spec)
            return
    Tensor.register_hook(leaf, ParameterGradientHook(cls, leaf._spec))  # type: ignore[no-untyped-call]  # no types


def with_layout_of(leaf: Spec, grad: Spec) -> Spec:
    """The spec of a leaf's gradient: the leaf's layout, its own stride and dtype."""
    return Spec(leaf.mesh, leaf.placements, grad.shape, grad.stride, grad.dtype, leaf.shard_order)


class GradientBatch(CoalescedBatch):
    """Reductions of gradients that travel together: the part of a backward pass that they are.

    Attributes:
        bytes: what has been asked for since the last flush.
    """

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        super().__init__()
        self.bytes: int = 0

    def moved(self, cls: Any, grad: Any, plan: Plan) -> Any:
        """A gradient, moved as `plan` says: with others, at its first use or at the end, unless it fills a message."""
        if not plan.collectives or plan.bytes_sent > BUCKET:
            return redistributed(cls, grad, plan.dst)
        result = queued(cls, self, plan, grad._local_tensor, grad)
        self.bytes += plan.bytes_sent
        if self.bytes >= BUCKET:  # counted on the busiest rank, so all ranks agree
            self.flush()
            self.bytes = 0
        return result

    def finish(self) -> None:
        """Run what is left: every gradient is what it says from here on."""
        self.flush()

    def fail(self) -> None:
        """Leave the gradients to whoever uses them: each has its true value then."""


def postponed(cls: Any, op: Any, args: Sequence[Any]) -> Any:
    """What autograd does with a gradient that is under way, put off until it arrives; None for anything else."""
    if (op is not _DETACH and op is not _ADD_) or type(args[-1]) is not cls.pending:
        return None
    target, coming = args[0], args[-1]
    batch = cls.local_slot.__get__(coming)
    at = batch.position_of(coming) if isinstance(batch, GradientBatch) else None
    if at is None:
        return None
    if op is _DETACH:
        result = pending(cls, batch, coming._spec, coming.device)
        batch.wait_for(at, result)
        return result
    if type(target) is cls and target.dtype == coming.dtype and target._spec.same_layout(coming._spec):
        batch.wait_for(at, target, target._local_tensor)
        cls.local_slot.__set__(target, batch)
        target.__class__ = cls.pending
        return target
    return None
