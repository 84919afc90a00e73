"""`deferred_gradients()`: gradients accumulated over several backward passes and reduced once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..tensor.dtensor import DTensor
from ..tensor.parameter_gradients import gradients_deferred


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
    with gradients_deferred(DTensor):
        yield
