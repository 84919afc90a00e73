"""The shard of a DTensor for code that works on shards, and what a pickled DTensor is made of."""

from __future__ import annotations

from typing import Any

import torch

from shoal_mesh import safe_globals as mesh_globals

from ..argument_types import check_type
from ..layout.placements import PICKLED
from ..layout.spec import Spec
from .dtensor import DTensor
from .serialization import rebuild


def local_shard(tensor: DTensor) -> torch.Tensor:
    """`placements -> V`: this rank's shard itself, of the local shape, outside of autograd.

    For modules that compute on local tensors and deliver gradients themselves; everyone else calls `to_local()`, which
    is differentiable.

    Args:
        tensor: the DTensor; one whose collective is still in flight is waited for.
    """
    if type(tensor) is not DTensor:  # hot loops of lowered modules ask for every parameter
        check_type("local_shard", "tensor", tensor, DTensor, "a DTensor")
    return tensor._local_tensor


def safe_globals() -> list[Any]:
    """What a pickled DTensor is made of, for `torch.load(..., weights_only=True)`; importing shoal registers nothing.

    Example:
        >>> with torch.serialization.safe_globals(safe_globals()):
        ...     pass  # torch.load("model.pt"); add_safe_globals(safe_globals()) is for good
    """
    return [rebuild, DTensor, Spec, *PICKLED, *mesh_globals()]
