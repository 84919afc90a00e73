"""The whole value of a tensor that may or may not be a DTensor."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from torch import Tensor

from ..tensor.dtensor import DTensor

Value = TypeVar("Value")


@overload
def full_tensor(value: DTensor) -> Tensor: ...


@overload
def full_tensor(value: Value) -> Value: ...


def full_tensor(value: Any) -> Any:
    """`placements -> R`: return the whole tensor of a DTensor, and any other value as it is.

    It is for code that gets both kinds of tensors. For example, a model may have sharded and plain
    parameters, and some may not have a gradient. All ranks of the DTensor's mesh call it.

    Args:
        value: a DTensor, a plain tensor of any shape, or another value, such as None.

    Returns:
        `value.full_tensor()` for a DTensor, a plain tensor of its global shape that is
        differentiable; else `value` itself.

    Example:
        >>> import torch
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     rows = distribute_tensor(torch.arange(3), init_device_mesh("cpu", (1,)), [Shard(0)])
        ...     full_tensor(rows), full_tensor(torch.ones(2)), full_tensor(None)
        (tensor([0, 1, 2]), tensor([1., 1.]), None)
    """
    return value.full_tensor() if isinstance(value, DTensor) else value
