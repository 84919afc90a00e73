"""Replaced methods of the tensors that modules hold in place of parameters in a forward.

In a forward or a backward, modules hold tensors that are computed from the parameters: the gathered
tensors of a unit, or the views of replicas. These tensors are not leaves of autograd, but users'
code may call `requires_grad_` on them.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from shoal_dtensor import DTensor

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
