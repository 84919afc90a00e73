"""Replaced methods and hooks of parameters, for the time of a forward or a backward.

In a forward or a backward, modules hold tensors that are computed from the parameters: the gathered
tensors of a unit, or the views of replicas. These tensors are not leaves of autograd. Users' code
may call `requires_grad_` on them, and may have registered hooks on the leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.internal import accumulation_hooks

from .sharded_parameters import ShardedParameter


class GradientSwitch:
    """A replacement of `requires_grad_` for the tensor that modules use of a trained parameter.

    The tensor is computed from the parameter's leaf, and torch allows `requires_grad_(False)` only
    on leaves. A call of the switch changes two things:

    | call                    | the modules get                     | the leaf, for later forwards |
    | ----------------------- | ----------------------------------- | ---------------------------- |
    | `requires_grad_(False)` | `recorded.detach()`                 | is frozen                    |
    | `requires_grad_(True)`  | `recorded`, which autograd recorded | is trained                   |

    Args:
        parameter: the parameter.
        recorded: the tensor that autograd has recorded.
    """

    __slots__ = ("_recorded", "parameter")

    def __init__(self, parameter: ShardedParameter, recorded: Tensor) -> None:
        self.parameter = parameter
        # A weak reference, because the switch is an attribute of the tensor. The caller (a unit's
        # views, or a replica) keeps the tensor alive as long as modules may use it.
        self._recorded = ref(recorded)

    def __call__(self, requires_grad: bool = True) -> Tensor | None:
        """Give the modules the recorded tensor, or a detached one; return the tensor.

        Returns None if the recorded tensor is freed: then only the leaf is changed.
        """
        self.parameter.leaf.requires_grad_(requires_grad)
        recorded = self._recorded()
        if recorded is None:
            return None
        shown = recorded
        if not requires_grad:
            shown = recorded.detach()
            install_switch(shown, self)
        self.parameter.put(shown)
        return shown


def install_switch(tensor: Any, switch: GradientSwitch) -> None:
    """Replace `tensor.requires_grad_` by a switch.

    Torch refuses such calls for tensors that are not leaves.
    """
    tensor.requires_grad_ = switch


# what code that knows the parameter as a DTensor may ask it for
_OF_DTENSORS = ("full_tensor", "to_local", "redistribute", "placements", "device_mesh")


def with_methods_of_dtensors(values: Any, leaf: Any) -> Any:
    """Return a plain tensor with a parameter's values, which answers as the parameter does.

    `model.logit_scale.full_tensor()` then works at all times, also while the module shows values.
    """
    if not isinstance(values, DTensor):
        for name in _OF_DTENSORS:
            setattr(values, name, getattr(leaf, name))
    return values


class SilentHooks:
    """Post-accumulate hooks of leaves without a gradient, removed until the end of a pass.

    The backward of a unit is one autograd function with an edge to each leaf of the unit. Autograd
    then runs the node of each leaf. The node calls the leaf's post-accumulate hooks, even if the
    function has returned None for the leaf.
    """

    def __init__(self) -> None:
        # by `id` of the leaf: the leaf, and the hooks that were removed from it
        self._removed: dict[int, tuple[nn.Parameter, dict[int, Callable[..., Any]]]] = {}
        # `id` of the leaves that have got a gradient in the pass
        self._with_gradient: set[int] = set()

    def silence(self, leaf: nn.Parameter) -> None:
        """Remove the hooks of a leaf until the pass is over, unless it has got a gradient."""
        hooks = accumulation_hooks(leaf) or {}
        if hooks and id(leaf) not in self._with_gradient:
            self._removed[id(leaf)] = leaf, dict(hooks)
            # autograd holds this very dict
            hooks.clear()

    def enable(self, leaf: nn.Parameter) -> None:
        """Give a leaf its hooks back, because it gets a gradient: autograd is to call them."""
        self._with_gradient.add(id(leaf))
        _, hooks = self._removed.pop(id(leaf), (leaf, {}))
        if hooks:
            accumulation_hooks(leaf).update(hooks)

    def restore(self) -> None:
        """Give all leaves their hooks back."""
        for leaf, _ in list(self._removed.values()):
            self.enable(leaf)
