"""What users attach to parameters, attributes and hooks, goes along to the parameters that replace them.

A hook that the user removes by its handle is removed there too: what is registered looks it up where the handle points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal_dtensor import DTensor

__all__ = ["carry_over", "has_hooks"]

_STATE = "_shoal_state"
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


def carry_over(old: Any, new: Any) -> None:
    """Give a parameter the attributes and the gradient hooks of the one that it replaces.

    Args:
        old: plain, or a DTensor parameter that replaced a plain one.
        new: the other way round.
    """
    state: _State | None = getattr(old, _STATE, None)
    if state is None and isinstance(old, DTensor):
        return  # it replaced a parameter that had nothing attached
    internal = state.attributes if state is not None else frozenset()
    attributes = {name: value for name, value in vars(old).items() if name not in internal and name != _STATE}
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
