"""`deferred_gradients()`: gradients accumulated over several backward passes and reduced once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._torch import current_node, set_thread_object, thread_object
from ..redistribute.plan import plan as find_plan
from ..tensor.autograd import gradient_spec, redistributed
from ..tensor.backward import grad_hooked, leaf_route
from ..tensor.dtensor import DTensor
from ..tensor.parameter_gradients import SCOPE, GradientBatch, with_layout_of


class _Deferred:
    """The leaves whose gradients wait for the end of a scope."""

    __slots__ = ("_leaves",)

    def __init__(self) -> None:
        self._leaves: dict[int, Any] = {}

    def takes(self, grad: Any) -> bool:
        """Whether the gradient that a hook sees can keep its layout: it is about to be accumulated, unseen by users."""
        node = current_node()
        leaf = getattr(node, "variable", None)
        if leaf is None or leaf_route(node) != "accumulate" or grad_hooked(leaf):
            return False
        present = leaf.grad
        if present is not None and not present._spec.same_layout(grad._spec):
            target = with_layout_of(grad._spec, present._spec)
            if find_plan(present._spec, target).collectives:
                return False
            leaf.grad = redistributed(DTensor, present, target)
        self._leaves[id(leaf)] = leaf
        return True

    def finish(self) -> None:
        """Redistribute every gradient to its leaf's layout, many in one collective."""
        batch = GradientBatch()
        for leaf in self._leaves.values():
            if leaf.grad is not None:
                spec = leaf.grad._spec
                plan = find_plan(spec, gradient_spec(with_layout_of(leaf._spec, spec)))
                leaf.grad = batch.moved(DTensor, leaf.grad, plan)
        batch.finish()


@contextmanager
def deferred_gradients() -> Iterator[None]:
    """Accumulate gradients over the backward passes of a block, and reduce them once, together, at its end.

    Inside, the gradient of a leaf stays partial where it arrives so: it has its true value for whoever asks, but not
    yet the leaf's placements. Leaves with hooks of their own are reduced in every pass, for the hooks to see them.
    Nothing is reduced if the block raises.

    Example:
        >>> import torch
        >>> from shoal_dtensor import Replicate, Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     weight = distribute_tensor(torch.ones(3), mesh, [Replicate()]).requires_grad_()
        ...     with deferred_gradients():
        ...         for batch in (torch.ones(4, 3), torch.ones(6, 3)):
        ...             (distribute_tensor(batch, mesh, [Shard(0)]) * weight).sum().backward()
        ...         print(weight.grad.placements)
        ...     print(weight.grad.placements)
        (Partial(sum),)
        (Replicate(),)
    """
    if thread_object(SCOPE) is not None:  # the outermost scope counts
        yield
        return
    scope = _Deferred()
    set_thread_object(SCOPE, scope)
    try:
        yield
    finally:
        set_thread_object(SCOPE, None)
    scope.finish()
