"""Deep copies and pickles of DTensors: the local part, the spec, and what users have set on the tensor.

The DTensor class is an argument here: this module lies below it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .spec import Spec

__all__ = ["deep_copy", "rebuild", "reduce"]

# What a partial norm was when it was last asked for, and what a copied view follows: not the copy's business.
_OWN = frozenset({"_reduced", "_source"})


def deep_copy(cls: Any, tensor: Any, memo: dict[int, Any]) -> Any:
    """A copy of a leaf with its gradient and attributes; the one in `memo` where it was copied before.

    Raises:
        RuntimeError: the tensor has a history.
    """
    if not tensor.is_leaf:
        raise RuntimeError("only leaf tensors can be deep-copied; detach first")
    found = memo.get(id(tensor))
    if found is not None:
        return found
    local = copy.deepcopy(tensor._local_tensor, memo)
    result = memo[id(tensor)] = cls(local, tensor._spec, requires_grad=tensor.requires_grad)
    result.__dict__.update(copy.deepcopy(_attributes(tensor), memo))
    if tensor.grad is not None:
        result.grad = copy.deepcopy(tensor.grad, memo)
    return result


def reduce(cls: Any, tensor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `__reduce_ex__` gives: `rebuild` and its arguments."""
    return rebuild, (cls, tensor._local_tensor, tensor._spec, tensor.requires_grad, _attributes(tensor))


def rebuild(cls: Any, local: torch.Tensor, spec: Spec, requires_grad: bool, attributes: Mapping[str, Any]) -> Any:
    """A DTensor of class `cls` with attributes; `_is_param` among them makes it an `nn.Parameter`."""
    result = cls(local, spec, requires_grad=requires_grad)
    result.__dict__.update(attributes)
    return result


def _attributes(tensor: Any) -> dict[str, Any]:
    return {name: value for name, value in tensor.__dict__.items() if name not in _OWN}
