"""Gradients that cross between DTensors and plain tensors.

A DTensor has one gradient, which is sharded over the ranks. A plain tensor has a gradient on each
rank, and data parallelism sums these over its ranks. Only the layer of data parallelism knows
whether the ranks have one loss together or a loss each. Therefore it installs a `Crossings` object,
which is called where a gradient crosses.

May import: layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .layout.spec import Spec


class Crossings(Protocol):
    """Handler of gradients that cross, for data parallelism.

    `node` is the autograd node at which a gradient crosses.
    """

    def enter(self, node: Any, grad: Tensor, spec: Spec) -> tuple[Tensor, Spec]:
        """Return the gradient of a `to_local()` result, and its layout as a DTensor's gradient."""

    def leave(self, node: Any, grad: Tensor, spec: Spec) -> Tensor:
        """Return the gradient of a plain tensor that counts as a DTensor of this layout."""

    def check_factor(self, node: Any, number: Tensor) -> None:
        """Check a plain number, on which the gradient that `node` gives to a DTensor depends."""


_installed: list[Crossings] = []


def install_crossings(crossings: Crossings) -> None:
    """Call `crossings` from now on; installing the same object again changes nothing."""
    if crossings not in _installed:
        _installed.append(crossings)


def enter(node: Any, grad: Tensor, spec: Spec) -> tuple[Tensor, Spec]:
    """Return a local gradient that enters DTensors, and its layout, after data parallelism."""
    for crossings in _installed:
        grad, spec = crossings.enter(node, grad, spec)
    return grad, spec


def leave(node: Any, grad: Tensor, spec: Spec) -> Tensor:
    """Return a local gradient that leaves DTensors, after data parallelism."""
    for crossings in _installed:
        grad = crossings.leave(node, grad, spec)
    return grad


def check_factor(node: Any, number: Tensor) -> None:
    """Have data parallelism check a plain number, on which the gradient of a DTensor depends."""
    for crossings in _installed:
        crossings.check_factor(node, number)


def nodes_below(node: Any, ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield a node of autograd's graph and all nodes below it, each once.

    The search goes no further at nodes for which `ends` is true.
    """
    waiting = [node]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not ends(node):
            waiting += [below for below, _ in node.next_functions]
