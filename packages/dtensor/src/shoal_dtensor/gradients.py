"""Gradients of leaves: laid as the leaf lies, many in one collective, at once or at the end of a scope.

A leaf's hook gives its gradient out while the reduction is still to be done: the tensor knows where it will lie, and
its first use runs all reductions that have been asked for.  What autograd itself does with it (take it, or add it to
the gradient that is there) waits with it, so usually nothing is used before the end of the backward pass.
The DTensor class is an argument here: this module lies below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor

from ._torch import (
    accumulating_leaf,
    apply,
    at_end_of_backward,
    backward_number,
    is_transformed,
    set_thread_object,
    thread_object,
)
from .autograd import Redistribute, gradient_spec, pending, redistributed
from .placements import Replicate
from .redistribute import Batch, Plan, Queued, plan, run, run_all
from .spec import Spec
from .wrapping import wrap

__all__ = ["gradients_deferred", "later", "lay_gradient"]

_DETACH, _ADD_ = torch.ops.aten.detach.default, torch.ops.aten.add_.Tensor

# Bytes that one collective for several gradients takes: enough to hide its latency, little to pack and to hold.
BUCKET = 2**22


class LikeLeaf:
    """A gradient hook: lay the gradient as the leaf lies, reducing what is partial."""

    __slots__ = ("cls", "spec")

    def __init__(self, cls: Any, spec: Spec) -> None:
        self.cls, self.spec = cls, spec

    def __call__(self, grad: Any) -> Any:
        if grad is None:  # an autograd function had none to give, or has added it to `.grad` itself
            return None
        made = grad
        if not isinstance(grad, self.cls):  # zeros that a formula made: the same on every rank
            if is_transformed(grad):  # several gradients at once: nothing is accumulated
                return None
            mesh = self.spec.mesh
            made = wrap(self.cls, grad, Spec(mesh, (Replicate(),) * mesh.ndim, grad.shape, grad.stride(), grad.dtype))
        found = made._spec
        target = _target(self.spec, found)
        if target is None:
            return None if made is grad else made
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return apply(Redistribute, made, self.cls, target, (None, None), False)
        scope: Deferral | None = thread_object(_SCOPE)
        if scope is not None and scope.takes(made):
            return made
        way = plan(found, target)
        if not way.collectives or way.bytes_sent > BUCKET:
            return redistributed(self.cls, made, target)
        return _pass_of(self.cls).gradient(way, made)


@lru_cache(maxsize=4096)
def _target(leaf: Spec, grad: Spec) -> Spec | None:
    """How a leaf's gradient has to lie; None if it lies so, and says so: `multiple_of` may cut as a plain `Shard`."""
    if grad.mesh is leaf.mesh and grad.placements == leaf.placements and grad.same_layout(leaf):
        return None
    return gradient_spec(_lying_as(leaf, grad))


def lay_gradient(cls: Any, leaf: Any) -> None:
    """Have the gradient of a leaf lie as the leaf does now: one hook, however often this is called."""
    hooks = leaf._backward_hooks or {}
    for name, hook in hooks.items():
        if type(hook) is LikeLeaf:
            hooks[name] = LikeLeaf(cls, leaf._spec)
            return
    leaf.register_hook(LikeLeaf(cls, leaf._spec))


def _lying_as(leaf: Spec, grad: Spec) -> Spec:
    """The spec of a leaf's gradient: the leaf's layout, its own stride and dtype."""
    return Spec(leaf.mesh, leaf.placements, grad.shape, grad.stride, grad.dtype, leaf.shard_order)


# --- one backward pass ------------------------------------------------------------------------------------------------


class Pass(Batch):
    """The reductions of one backward pass.

    Attributes:
        cls: the DTensor class.
        made: the gradients that wait for them.
        bytes: what has been asked for since the last flush.
    """

    __slots__ = ("__weakref__", "bytes", "cls", "made")

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls, self.bytes = cls, 0
        self.made: list[ReferenceType[Any]] = []

    def gradient(self, way: Plan, grad: Any) -> Any:
        """The gradient, still to be moved as `way` says."""
        queued = self.add(way, grad._local_tensor, grad)
        made = self.follow(pending(self.cls, queued, way.dst, grad.device))
        self.bytes += way.bytes_sent
        if self.bytes >= BUCKET:  # counted on the busiest rank, so all ranks agree
            self.flush()
            self.bytes = 0
        return made

    def follow(self, tensor: Any) -> Any:
        """Have a tensor finished when the pass ends, should it still be there."""
        self.made.append(ref(tensor))
        return tensor

    def finish(self) -> None:
        """Run what is left: every gradient is what it says from here on."""
        self.flush()
        for made in self.made:
            tensor = made()
            if tensor is not None:
                _ = tensor._local_tensor
        self.made.clear()


_PASSES: WeakValueDictionary[int, Pass] = WeakValueDictionary()


def _pass_of(cls: Any) -> Pass:
    """That of the backward pass that is running."""
    number = backward_number()
    found = _PASSES.get(number)
    if found is None:
        found = _PASSES[number] = Pass(cls)
        at_end_of_backward(found.finish)
    return found


class Sum:
    """A gradient and what is to be added to it in place, which is under way."""

    __slots__ = ("coming", "present")

    def __init__(self, present: Any, coming: Queued) -> None:
        self.present, self.coming = present, coming

    def wait(self) -> Tensor:
        """The sum, where the gradient was."""
        present: Tensor = self.present if isinstance(self.present, Tensor) else self.present.wait()
        return present.add_(self.coming.wait())


def later(cls: Any, op: Any, args: Sequence[Any]) -> Any:
    """What autograd does with a gradient that is under way, put off until it arrives; None for anything else."""
    raw = cls.local_slot.__get__
    if op is _DETACH:
        (tensor,) = args
        held = raw(tensor)
        if isinstance(held, Queued) and isinstance(held.batch, Pass):
            return held.batch.follow(pending(cls, held, tensor._spec, tensor.device))
    if op is _ADD_ and len(args) == 2 and type(args[1]) is cls.pending:
        target, coming = args[0], raw(args[1])
        if (
            isinstance(coming, Queued)
            and isinstance(coming.batch, Pass)
            and type(target) in (cls, cls.pending)
            and target is not args[1]
            and target.dtype == args[1].dtype
            and target._spec.same_layout(args[1]._spec)
        ):
            cls.local_slot.__set__(target, Sum(raw(target), coming))
            target.__class__ = cls.pending
            return coming.batch.follow(target)
    return None


# --- several backward passes ------------------------------------------------------------------------------------------

_SCOPE = "shoal_dtensor.deferred_gradients"  # torch hands such objects on to the threads of its backward passes


class Deferral:
    """The leaves whose gradients wait for the end of a scope."""

    __slots__ = ("_leaves",)

    def __init__(self) -> None:
        self._leaves: dict[int, Any] = {}

    def takes(self, grad: Any) -> bool:
        """Whether the gradient that a hook sees can stay as it lies: it is about to be accumulated, unseen by users."""
        leaf = accumulating_leaf()
        if leaf is None or leaf._post_accumulate_grad_hooks:
            return False
        if any(type(hook) is not LikeLeaf for hook in leaf._backward_hooks.values()):
            return False
        present = leaf.grad
        if present is not None and not present._spec.same_layout(grad._spec):
            target = _lying_as(grad._spec, present._spec)
            way = plan(present._spec, target)
            if way.collectives:
                return False
            leaf.grad = wrap(type(grad), run(way, present._local_tensor), target)
        self._leaves[id(leaf)] = leaf
        return True

    def finish(self, cls: Any) -> None:
        """Lay every gradient as its leaf lies, many in one collective."""
        bucket: list[tuple[Any, Plan]] = []
        size = 0
        for leaf in self._leaves.values():
            if leaf.grad is None:
                continue
            found = leaf.grad._spec
            way = plan(found, gradient_spec(_lying_as(leaf._spec, found)))
            if way.bytes_sent > BUCKET:
                leaf.grad = wrap(cls, run(way, leaf.grad._local_tensor), way.dst)
                continue
            bucket.append((leaf, way))
            size += way.bytes_sent
            if size >= BUCKET:
                _settle(cls, bucket)
                size = 0
        _settle(cls, bucket)
        self._leaves.clear()


def _settle(cls: Any, bucket: list[tuple[Any, Plan]]) -> None:
    """Redistribute the gradients of some leaves together, and forget the list."""
    results = run_all([way for _, way in bucket], [leaf.grad._local_tensor for leaf, _ in bucket])
    for (leaf, way), local in zip(bucket, results, strict=True):
        leaf.grad = wrap(cls, local, way.dst)
    bucket.clear()


@contextmanager
def gradients_deferred(cls: Any) -> Iterator[None]:
    """The scope of `deferred_gradients`, for a DTensor class."""
    if thread_object(_SCOPE) is not None:  # the outermost scope counts
        yield
        return
    scope = Deferral()
    set_thread_object(_SCOPE, scope)
    try:
        yield
    finally:
        set_thread_object(_SCOPE, None)
    scope.finish(cls)
