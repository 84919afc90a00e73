"""Exchanges of the contents of two tensors: `Module.to` and `load_state_dict` on parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def keep_hooks_in_exchanges(
    cls: type[torch.Tensor], update: Callable[[torch.Tensor], object]
) -> None:
    """Have torch's exchange of two tensors keep the hooks that each object shows.

    The hooks that an object shows are an attribute of it. Autograd has a reference to them at the
    contents, which go to the other object. So after `model.to(dtype)` a parameter shows its hooks,
    but they are never called.

    Args:
        cls: the class of the tensors.
        update: called with each tensor before autograd gets the hooks of the tensor.
    """
    exchange: Callable[[Any, Any], None] = torch.utils.swap_tensors

    @wraps(exchange)
    def swap_tensors(t1: Any, t2: Any) -> None:
        exchange(t1, t2)
        for tensor in (t1, t2):
            if isinstance(tensor, cls) and tensor.is_leaf:
                update(tensor)
                _give_hooks_to_autograd(tensor)

    torch.utils.swap_tensors = swap_tensors


def _give_hooks_to_autograd(tensor: Any) -> None:
    """Have autograd call the hooks that a leaf shows, and no others."""
    # The assignment of the same object is not idle: it replaces autograd's reference.
    tensor._backward_hooks = tensor._backward_hooks
    # None would leave the hooks of the other object
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks or OrderedDict()
