"""The backward pass that is running, what becomes of a leaf's gradient in it, and tensors in groups by their bytes.

An autograd function that has the gradient of a leaf asks `grad_route` what to do with it.  What cannot be done before
all gradients are computed is a part of the pass, made by the first that asks: `running_pass().part(Kind)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch

from .._torch import at_end_of_backward, backward_number, is_compiling, will_run
from ..errors import SecondOrderError

Item = TypeVar("Item")


# --- the pass that is running -----------------------------------------------------------------------------------------


class PassPart(Protocol):
    """What takes part in a backward pass."""

    def finish(self) -> None:
        """All gradients are computed; the pass raises what this raises."""

    def fail(self) -> None:
        """The pass has raised: in autograd, in a part before this one, or in this one's `finish`."""


Part = TypeVar("Part", bound=PassPart)


class BackwardPass:
    """A backward pass, and its parts, which finish in the order in which they joined.

    It lives as long as autograd's engine runs it, so parts must not refer to it.
    """

    def __init__(self) -> None:
        self._parts: list[PassPart] = []

    def join(self, part: Part) -> Part:
        """Take a part into the pass."""
        self._parts.append(part)
        return part

    def part(self, kind: type[Part]) -> Part:
        """The part of a class of which a pass has one, made when it is first asked for."""
        found = next((part for part in self._parts if isinstance(part, kind)), None)
        return self.join(kind()) if found is None else found

    def finish(self) -> None:
        """Finish all parts; those that have not finished when one raises fail."""
        try:
            while self._parts:
                self._parts[0].finish()
                del self._parts[0]
        finally:
            self._fail()

    def _fail(self) -> None:
        while self._parts:
            self._parts.pop().fail()

    __del__ = _fail  # of a pass that has raised, so that it was not finished


_RUNNING: WeakValueDictionary[int, BackwardPass] = WeakValueDictionary()


def running_pass() -> BackwardPass:
    """The backward pass that is running on this thread; inside of another one, the inner one."""
    number = backward_number()
    running = _RUNNING.get(number)
    if running is None:
        running = BackwardPass()
        at_end_of_backward(running.finish)
        _RUNNING[number] = running
    return running


# --- what becomes of a gradient ---------------------------------------------------------------------------------------

# What becomes of the gradient of a parameter: not computed, added to `.grad`, or returned to autograd.
GradRoute = Literal["unused", "accumulate", "return"]


def grad_route(node: Any, param: Any) -> GradRoute:
    """What a backward does with the gradient of a parameter: added to `.grad` only where nobody else would see it.

    Args:
        node: where the autograd function's edge of this parameter leads (`ctx.next_functions`); None: nowhere.
        param: the parameter that the function was called with.
    """
    route: GradRoute = "return" if node is not None and is_compiling() else leaf_route(node)
    return "return" if route == "accumulate" and (not param.is_leaf or grad_hooked(param)) else route


def leaf_route(node: Any) -> GradRoute:
    """What autograd does in this backward pass with the gradient of a leaf, whose node this is."""
    if node is None:
        return "unused"
    try:
        return "accumulate" if will_run(node) else "unused"
    except RuntimeError:  # autograd.grad of a leaf, or an engine that cannot answer
        return "return"


def grad_hooked(param: Any) -> bool:
    """Whether users' hooks see the gradient of a parameter."""
    # One hook is the DTensor's own; it changes nothing about a gradient with the leaf's spec.
    return len(param._backward_hooks or ()) > 1 or bool(param._post_accumulate_grad_hooks)


def first_order_only() -> None:
    """Refuse to run a backward that itself is recorded: its local shards would not carry gradients.

    Raises:
        SecondOrderError: under `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise SecondOrderError(
            "a lowered module's backward ran with create_graph=True; second derivatives need the module's "
            "DTensor path: parallelize_module(..., lower=False)"
        )


# --- groups that travel together --------------------------------------------------------------------------------------


def in_groups(items: Iterable[Item], size_of: Callable[[Item], int], limit: int) -> list[list[Item]]:
    """Items in order, in groups of at most `limit` bytes together, or one alone.

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
