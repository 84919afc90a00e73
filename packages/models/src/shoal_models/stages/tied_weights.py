"""Weights that the first and the last stage share: embeddings that are also the head.

Both stages hold such a weight under the name of the plain model. At the end of each backward they
exchange their gradients of it, and both add the sum of the first and the last stage's gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor.internal import local_of, running_pass
from shoal_mesh import Comm, comm_over, permute

# The attribute of a weight that has its hook.
_HOOKED = "_shoal_tied_hook"


class TiedWeights:
    """The weights of this rank's stage that the stage at the other end holds too.

    Args:
        model: the model with the modules of the stage.
        comm: the communicator along the axis of the stages; this rank is the first or the last.
        names: the names of the weights.
    """

    def __init__(self, model: nn.Module, comm: Comm, names: Sequence[str]) -> None:
        self._model = weakref.ref(model)
        # the first and the last stage
        self._comm = comm_over((comm.line[0], comm.line[-1]), "tied weights")
        self._names = names
        # by name, the handle of the hook on the weight that has this name at present
        self._handles: dict[str, Any] = {}
        model.register_forward_pre_hook(self._add_hooks)

    def holds(self, parameter: Tensor) -> bool:
        """Tell whether a parameter is one of these weights."""
        return any(self._weight(name) is parameter for name in self._names)

    def _weight(self, name: str) -> Any:
        model = self._model()
        assert model is not None, "a hook of a model outlived the model"
        return model.get_parameter(name)

    def _add_hooks(self, model: nn.Module, args: Any) -> None:
        """Give each weight without a hook its hook; called before each forward of the model.

        Calls such as `model.to(dtype)` may put other parameters in the place of the weights.
        """
        for name in self._names:
            weight = self._weight(name)
            if not weight.requires_grad or hasattr(weight, _HOOKED):
                continue
            if name in self._handles:
                self._handles[name].remove()
            self._handles[name] = weight.register_hook(partial(self._keep_gradient, name))
            setattr(weight, _HOOKED, True)

    def _keep_gradient(self, name: str, gradient: Tensor) -> None:
        """Keep a gradient for the end of the backward; the hook of the weight.

        Autograd calls it before it adds the gradient to the weight's `grad`.
        """
        weight = self._weight(name)
        earlier = None if weight.grad is None else weight.grad.clone()
        tied_gradient = _TiedGradient(name, weight, gradient, earlier)
        running_pass().part(_TiedGradients).add(tied_gradient, self._comm)


@dataclass(frozen=True, slots=True)
class _TiedGradient:
    """The gradient of a tied weight in one backward.

    Attributes:
        name: the name of the weight.
        weight: the weight; autograd adds `gradient` to its `grad`.
        gradient: the gradient of this stage.
        earlier: a copy of the `grad` that earlier backwards have left.
    """

    name: str
    weight: Any
    gradient: Tensor
    earlier: Tensor | None

    def sum_over_stages(self, comm: Comm) -> None:
        """Set the weight's `grad` to the earlier gradient plus the gradients of both stages."""
        own = local_of(self.gradient).contiguous()
        # [1, 0]: the two ranks exchange their tensors.
        other = permute(own, comm, [1, 0])
        # Both stages add in one order, so that their sums have the same bits.
        first = own if comm.rank == 0 else other
        last = other if comm.rank == 0 else own
        total = first + last
        if self.earlier is not None:
            total = local_of(self.earlier) + total
        local_of(self.weight.grad).copy_(total)


class _TiedGradients:
    """The gradients of tied weights in one backward, which are exchanged at its end."""

    def __init__(self) -> None:
        self._kept: list[tuple[_TiedGradient, Comm]] = []

    def add(self, gradient: _TiedGradient, comm: Comm) -> None:
        """Keep a gradient, and the communicator of the two stages."""
        self._kept.append((gradient, comm))

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange the gradients, in the same order on both stages."""
        for gradient, comm in sorted(self._kept, key=lambda kept: kept[0].name):
            gradient.sum_over_stages(comm)
        self._kept = []

    def fail(self) -> None:
        """Drop the gradients of a backward that raised."""
        self._kept = []
