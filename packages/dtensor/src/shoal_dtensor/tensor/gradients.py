"""Gradients of leaves: the running backward pass, routes of gradients, batched reductions.

An autograd function that has the gradient of a leaf calls `grad_route` to determine how to deliver
it. Work that must wait until all gradients are computed is a part of the pass, made at the first
request: `running_pass().part(Kind)`.

A leaf's hook returns the gradient while its reduction to the leaf's layout is pending: the tensor
has the spec that it will have, and its first use runs all pending reductions. Autograd's own
operation on the gradient (storing it, or adding it to an existing gradient) is postponed with it,
so usually no gradient is used before the end of the backward pass. The DTensor class is an argument
here, because this module is below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .._torch.compiling import is_compiling, is_tracing, whole_when_compiled
from .._torch.tensors import (
    accumulation_hooks,
    apply,
    at_end_of_backward,
    backward_number,
    gradient_hooks,
    is_transformed,
    will_run,
)
from ..errors import SecondOrderError
from ..layout.spec import Spec
from ..redistribute.plan import plan as find_plan
from ..redistribute.shards_in_flight import CoalescedBatch
from ..redistribute.steps import Plan
from ..scopes import obey
from .autograd import (
    Redistribute,
    as_gradient,
    deferred_result,
    gradient_spec,
    in_layout,
    move_to,
    queue_move,
)

Item = TypeVar("Item")


# --- the pass that is running ---------------------------------------------------------------------


class PassPart(Protocol):
    """Work that is done in a backward pass once all gradients exist."""

    def finish(self) -> None:
        """Finish the work after all gradients are computed; an exception fails the pass."""

    def fail(self) -> None:
        """Clean up after the pass raised: in autograd, in an earlier part, or in `finish`."""


Part = TypeVar("Part", bound=PassPart)


@dataclass(eq=False)
class BackwardPass:
    """A backward pass, and its `parts`, which finish in the order in which they joined.

    The object lives as long as autograd's engine runs the pass, so parts must not refer to it.
    """

    parts: list[PassPart] = field(default_factory=list)
    # values that live as long as the pass, by class
    notes: dict[type, Any] = field(default_factory=dict)

    def note(self, cls: type[Item]) -> Item:
        """Return the pass's only note of a class; make it at the first request."""
        found: Item | None = self.notes.get(cls)
        if found is None:
            found = cls()
            self.notes[cls] = found
        return found

    def join(self, part: Part) -> Part:
        """Add a part to the pass."""
        self.parts.append(part)
        return part

    def part(self, cls: type[Part]) -> Part:
        """Return the pass's only part of a class; make it at the first request."""
        part = next((part for part in self.parts if isinstance(part, cls)), None)
        return self.join(cls()) if part is None else part

    def finish(self) -> None:
        """Finish all parts; if one raises, the unfinished parts fail."""
        try:
            while self.parts:
                self.parts[0].finish()
                del self.parts[0]
        finally:
            self._fail()

    def _fail(self) -> None:
        while self.parts:
            self.parts.pop().fail()

    # If autograd raises, the pass is freed without `finish`.
    __del__ = _fail


_RUNNING: WeakValueDictionary[int, BackwardPass] = WeakValueDictionary()


def running_pass() -> BackwardPass:
    """Return the backward pass that is running on this thread; if nested, the innermost."""
    number = backward_number()
    running = _RUNNING.get(number)
    if running is None:
        running = BackwardPass()
        at_end_of_backward(running.finish)
        _RUNNING[number] = running
    return running


def running_notes(cls: type[Item]) -> list[Item]:
    """Return the notes of a class in all running passes; a nested pass has its own note."""
    return [running.notes[cls] for running in _RUNNING.values() if cls in running.notes]


# --- delivery of a gradient -----------------------------------------------------------------------

# How the gradient of a parameter is delivered: not computed, added to `.grad`, or returned to
# autograd.
GradRoute = Literal["unused", "accumulate", "return"]


def grad_route(node: Any, param: Any) -> GradRoute:
    """Return how a backward function must deliver the gradient of a parameter.

    It is added to `.grad` directly only if nothing else would observe it.

    `node` is the node at the autograd function's edge of this parameter (`ctx.next_functions`), or
    None without such an edge.
    """
    if node is not None and is_compiling():
        return "return"
    route = leaf_route(node)
    is_observed = not param.is_leaf or grad_hooked(param)
    return "return" if route == "accumulate" and is_observed else route


def leaf_route(node: Any) -> GradRoute:
    """Return how autograd, in this backward pass, uses the gradient of the leaf with this node."""
    if node is None:
        return "unused"
    try:
        return "accumulate" if will_run(node) else "unused"
    except RuntimeError:
        # autograd.grad of a leaf, or an engine that cannot answer
        return "return"


def grad_hooked(param: Any) -> bool:
    """Tell whether hooks of the user observe the gradient of a parameter."""
    # One hook is the DTensor's own; it changes nothing about a gradient with the leaf's spec.
    return len(gradient_hooks(param) or ()) > 1 or bool(accumulation_hooks(param))


_OF_LOWERED = (
    "a lowered module's backward ran with create_graph=True; second derivatives need the module's "
    "DTensor path: parallelize_module(..., lower=False)"
)


def first_order_only(why: str = _OF_LOWERED) -> None:
    """Refuse to run a backward that is itself recorded, because local shards carry no gradients.

    Raises:
        SecondOrderError: under `create_graph=True`; the error contains `why`.
    """
    if torch.is_grad_enabled():
        raise SecondOrderError(why)


# --- groups of items for one message --------------------------------------------------------------


def in_groups(
    items: Iterable[Item], size_of: Callable[[Item], int], limit: int
) -> list[list[Item]]:
    """Split items, in order, into groups of at most `limit` bytes; a larger item forms its own.

    Example:
        >>> in_groups([3, 4, 9, 1], int, 8)
        [[3, 4], [9], [1]]
    """
    groups: list[list[Item]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    return groups


# --- to the layout of the leaf --------------------------------------------------------------------

_DETACH = torch.ops.aten.detach.default
_ADD_ = torch.ops.aten.add_.Tensor
# the operators that autograd calls to keep a gradient, by torch's names
ACCUMULATION = ("aten::detach", "aten::add_.Tensor")

# Bytes of one collective for several gradients: enough to hide its latency, and few to pack and to
# hold in memory.
BUCKET = 2**22


@dataclass(slots=True, eq=False)
class ParameterGradientHook:
    """A gradient hook that redistributes the gradient to the leaf's layout and reduces partials."""

    cls: Any
    spec: Spec  # the spec of the leaf

    def __call__(self, grad: Any) -> Any:
        # An autograd function did not have a gradient, or has added it to `.grad` itself.
        if grad is None:
            return None
        gradient = grad
        if not isinstance(grad, self.cls):
            # A transform computes several gradients at once, so nothing is accumulated.
            if not is_tracing() and is_transformed(grad):
                return None
            gradient = as_gradient(self.cls, grad, self.spec)
        if is_tracing():  # by compiled autograd
            return _place_gradient(gradient, self.spec)
        spec = gradient._spec
        target = _target(self.spec, spec)
        if target is None:
            return None if gradient is grad else gradient
        plan = find_plan(spec, target)
        obey("the gradient of a leaf", self.spec, plan)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return apply(Redistribute, gradient, self.cls, target, (None, None), False)
        return running_pass().part(GradientBatch).move(self.cls, gradient, plan)


@dataclass(slots=True, eq=False)
class CheckedHook(ParameterGradientHook):
    """A user's gradient hook whose result is converted to a DTensor, for a leaf in its layout."""

    hook: Callable[[Any], Any]
    is_leaf: bool

    def __call__(self, grad: Any) -> Any:
        # An autograd function of several parameters does not have gradients for the parameters that
        # a pass did not use.
        result = None if grad is None else self.hook(grad)
        if result is None or (not is_tracing() and is_transformed(result)):
            return result
        result = as_gradient(self.cls, result, self.spec)
        placed = ParameterGradientHook.__call__(self, result) if self.is_leaf else None
        return result if placed is None else placed


@whole_when_compiled
def _place_gradient(gradient: Any, leaf: Spec) -> Any:
    """Return a gradient in a leaf's layout, as one node of a graph."""
    target = _target(leaf, gradient._spec)
    if target is None:
        return gradient
    return gradient.redistribute(placements=target.placements, shard_order=target.shard_order)


@lru_cache(maxsize=4096)
def _target(leaf: Spec, grad: Spec) -> Spec | None:
    """Return the spec that a leaf's gradient must get; None if the gradient already has it."""
    # Placements are compared too, because they may differ (in `multiple_of`) for equal shards.
    if grad.mesh is leaf.mesh and grad.placements == leaf.placements and grad.same_layout(leaf):
        return None
    return gradient_spec(in_layout(leaf, grad))


def install_gradient_hook(cls: Any, leaf: Any) -> None:
    """Give the gradients of a leaf its current layout: one hook, however often this is called."""
    hooks = gradient_hooks(leaf) or {}
    for name, hook in hooks.items():
        if type(hook) is ParameterGradientHook:
            hooks[name] = ParameterGradientHook(cls, leaf._spec)
            return
    hook = ParameterGradientHook(cls, leaf._spec)
    Tensor.register_hook(leaf, hook)  # type: ignore[no-untyped-call]  # no types


def update_hooks(leaf: Any) -> None:
    """Give the gradient hooks of a leaf its current layout, in which they return gradients."""
    hooks = leaf._backward_hooks or {}
    for name, hook in hooks.items():
        if isinstance(hook, ParameterGradientHook):
            hooks[name] = replace(hook, spec=leaf._spec)


class GradientBatch(CoalescedBatch):
    """A part of the backward pass that collects reductions of gradients, to send them together."""

    # bytes of the reductions requested since the last flush
    bytes: int = 0

    def move(self, cls: Any, grad: Any, plan: Plan) -> Any:
        """Return a gradient that moves by a plan, together with others if its message is small.

        It moves at its first use, when the batch is full, or at the end of the pass. A gradient
        that fills a message alone moves at once.
        """
        if not plan.collectives or plan.bytes_sent > BUCKET:
            return move_to(cls, grad, plan.dst)
        result = queue_move(cls, self, plan, grad._local_tensor, source=grad)
        self.bytes += plan.bytes_sent
        # A plan counts the bytes of its busiest rank, so all ranks flush at the same time.
        if self.bytes >= BUCKET:
            self.flush()
            self.bytes = 0
        return result

    def finish(self) -> None:
        """Run the remaining reductions, so that every gradient has the values of its layout."""
        self.flush()

    def fail(self) -> None:
        """Do nothing: each gradient still gets its values at its first use."""


def postpone_use(cls: Any, op: Any, args: Sequence[Any]) -> Any:
    """Postpone autograd's use of a gradient that is in flight; None for any other operator."""
    if (op is not _DETACH and op is not _ADD_) or type(args[-1]) is not cls.pending:
        return None
    target = args[0]
    coming = args[-1]
    batch = cls.local_slot.__get__(coming)
    at = batch.position_of(coming) if isinstance(batch, GradientBatch) else None
    if at is None:
        return None
    if op is _DETACH:
        result = deferred_result(cls, batch, coming._spec, coming.device)
        batch.wait_for(at, result)
        return result
    if (
        type(target) is cls
        and target.dtype == coming.dtype
        and target._spec.same_layout(coming._spec)
    ):
        batch.wait_for(at, target, target._local_tensor)
        cls.local_slot.__set__(target, batch)
        target.__class__ = cls.pending
        return target
    return None
