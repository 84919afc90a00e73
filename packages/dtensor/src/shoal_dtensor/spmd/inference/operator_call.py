"""Calls of operators on typed local tensors, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..._torch.operators import OpOverload
from ...layout.tensor_meta import TensorMeta
from ..types.axis_types import AnyAxisType, R
from ..types.mesh_axes import MeshAxis
from ..types.tensor_types import TensorType


class Operand(NamedTuple):
    """A tensor argument of a call.

    Attributes:
        meta: its local shape, stride and dtype.
        tensor_type: its type; None for a constant, which is equal on all ranks.
        takes_gradient: whether a gradient may flow to it.
    """

    meta: TensorMeta
    tensor_type: TensorType | None
    takes_gradient: bool

    def on(self, axis: MeshAxis) -> AnyAxisType:
        """Return its type on an axis; R for a constant."""
        return R if self.tensor_type is None else self.tensor_type.by_axis[axis]

    def is_expanded_along(self, dim: int) -> bool:
        """Tell whether one element is repeated along a dim, by a stride of 0."""
        if self.tensor_type is None or dim >= len(self.meta.shape):
            return False
        return self.meta.shape[dim] > 1 and self.meta.stride[dim] == 0

    def with_type_on(self, axis: MeshAxis, axis_type: AnyAxisType) -> Operand:
        """Return the operand with another type on an axis."""
        assert self.tensor_type is not None, "a constant has no type"
        return self._replace(tensor_type=self.tensor_type.with_axis(axis, axis_type))


class LocalOperatorCall(NamedTuple):
    """A call of an operator on local tensors.

    Attributes:
        op: the overload.
        args, kwargs: its arguments, with an `Operand` in place of each tensor.
        operands: the tensor arguments in order.
        outputs: shape, stride and dtype of the local outputs, flattened.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Operand, ...]
    outputs: tuple[TensorMeta, ...]


def local_meta(tensor: torch.Tensor) -> TensorMeta:
    """Return shape, stride and dtype of a local tensor."""
    return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
