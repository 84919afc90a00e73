"""What users attach to parameters, attributes and hooks, goes along to the parameters that replace them.

A hook that the user removes by its handle is removed there too: what is registered looks it up where the handle points.
An optimizer that still holds a parameter that was replaced would update nothing: its step raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal_mesh.internal import dataclass

from ..errors import StyleError
from ..tensor.dtensor import DTensor

_STATE = "_shoal_state"
_REPLACED = "_shoal_replaced"
_Hooks = Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class _State:
    """Of a parameter that replaced another: its attributes before, and the hooks of the first.  Pickles as nothing."""

    attributes: frozenset[str]
    hooks: _Hooks
    post_hooks: _Hooks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Carried:
    """A hook of another parameter, as long as its handle has not removed it."""

    hooks: _Hooks
    key: int

    def __call__(self, tensor: Any) -> Any:
        hook = self.hooks.get(self.key)
        return None if hook is None else hook(tensor)


def _hooks(param: Any) -> tuple[_Hooks, _Hooks]:
    state: _State | None = getattr(param, _STATE, None)
    if state is not None:
        return state.hooks, state.post_hooks
    return param._backward_hooks or {}, param._post_accumulate_grad_hooks or {}


def has_hooks(param: Tensor) -> bool:
    """Whether a plain parameter has gradient hooks of its user."""
    return any(_hooks(param))


def has_own_hooks(param: Any) -> bool:
    """Whether a DTensor parameter has gradient hooks of its user beside those that were carried over to it."""
    if not isinstance(param, DTensor):
        return False
    tensor_hooks, post_hooks = param._backward_hooks or {}, param._post_accumulate_grad_hooks or {}
    own = [hook for hook in tensor_hooks.values() if not isinstance(getattr(hook, "hook", hook), _Carried)]
    return len(own) > 1 or not all(isinstance(hook, _Carried) for hook in post_hooks.values())  # one is the DTensor's


def note_replaced(param: Tensor) -> None:
    """Have the steps of optimizers that hold a parameter raise: another is in its place."""
    setattr(param, _REPLACED, True)
    _check_optimizers()


@cache
def _check_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if hasattr(param, _REPLACED):  # which a compiled step is guarded on
                raise StyleError(
                    f"{type(optimizer).__name__}.step: it holds a parameter of shape {tuple(param.shape)} that a style "
                    "or data parallelism has replaced since, so no module would see the update. Make the optimizer "
                    "after parallelize_module, fully_shard and replicate(shard_optimizer=True)"
                )


def carry_gradient(old: Any, new: Any, grad: Tensor | None) -> None:
    """Give a parameter the dtype that is chosen for gradients of the one that it replaces, and its gradient.

    Args:
        old: the parameter that is replaced.
        new: the one in its place.
        grad: the gradient of `old`, placed as `new` is; None: it has none.
    """
    if old.grad_dtype is not old.dtype:
        new.grad_dtype = old.grad_dtype
    if grad is not None:
        new.grad = grad


def carry_over(old: Any, new: Any) -> None:
    """Give a parameter the attributes and the gradient hooks of the one that it replaces.

    Args:
        old: plain, or a DTensor parameter that replaced a plain one.
        new: the other way round.
    """
    note_replaced(old)
    state: _State | None = getattr(old, _STATE, None)
    if state is None and isinstance(old, DTensor):
        return  # it replaced a parameter that had nothing attached
    internal = {*(state.attributes if state is not None else ()), _STATE, _REPLACED}
    attributes = {name: value for name, value in vars(old).items() if name not in internal}
    hooks, post_hooks = _hooks(old)
    if not attributes and not hooks and not post_hooks:
        return
    setattr(new, _STATE, _State(frozenset(vars(new)), hooks, post_hooks))
    for name, value in attributes.items():
        setattr(new, name, value)
    trained = new.requires_grad
    new.requires_grad_(True)  # hooks are registered on tensors that get gradients
    for key in hooks:
        new.register_hook(_Carried(hooks, key))
    for key in post_hooks:
        new.register_post_accumulate_grad_hook(_Carried(post_hooks, key))
    new.requires_grad_(trained)


def holds_tensors(param: Tensor | None) -> bool:
    """Whether a parameter is made of tensors, as quantized weights are, and is not a DTensor.

    Example:
        >>> holds_tensors(torch.nn.Linear(2, 2).weight)
        False
    """
    return hasattr(param, "__tensor_flatten__") and not hasattr(param, "device_mesh")
