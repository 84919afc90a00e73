"""Process groups of a Megatron-style program, in globals of this module.

Such programs keep them so.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_tensor_group: Any = None
_data_group: Any = None


def initialize_model_parallel(tensor_size: int) -> None:
    """Make groups of consecutive tensor-parallel ranks, and data-parallel groups across them."""
    # The state per rank in a module is what is tested.
    global _tensor_group, _data_group  # noqa: PLW0603  # see above
    world = dist.get_world_size()
    if world % tensor_size:
        raise RuntimeError(f"{world} ranks cannot be divided into groups of {tensor_size}")
    if _tensor_group is not None:
        raise RuntimeError("the groups are initialized already")
    for first in range(0, world, tensor_size):
        ranks = list(range(first, first + tensor_size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            _tensor_group = group
    for column in range(tensor_size):
        ranks = list(range(column, world, tensor_size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            _data_group = group


def tensor_group() -> Any:
    """Return the tensor-parallel group of this rank."""
    return _tensor_group


def tensor_size() -> int:
    """Return the number of tensor-parallel ranks."""
    return dist.get_world_size(_tensor_group)


def tensor_rank() -> int:
    """Return the position of this rank among its tensor-parallel ranks."""
    return dist.get_rank(_tensor_group)


def data_group() -> Any:
    """Return the data-parallel group of this rank."""
    return _data_group


def data_size() -> int:
    """Return the number of data-parallel ranks."""
    return dist.get_world_size(_data_group)


def data_rank() -> int:
    """Return the position of this rank among its data-parallel ranks."""
    return dist.get_rank(_data_group)
