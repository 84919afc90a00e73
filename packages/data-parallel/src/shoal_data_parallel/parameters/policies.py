"""The policies of `fully_shard`: how a unit computes and where its shards are kept, as data.

`MixedPrecisionPolicy` has the dtypes, `OffloadPolicy` and `CPUOffloadPolicy` choose the memory of
the shards, and `DataParallelMeshDims` names the data axes of a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal_dtensor.errors import LayoutError


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit; the shards, which the optimizer sees, keep their dtype.

    Attributes:
        param_dtype: the dtype of the gathered parameters and so of the computation; the dtype of
            the shards if None.
        reduce_dtype: the dtype in which gradients are reduced; the dtype of the computation if
            None.
        output_dtype: the dtype to which floating outputs of the unit's forward are cast; None
            leaves them.
        cast_forward_inputs: whether floating inputs of the unit's forward are cast to
            `param_dtype`.
        param_dtype_override_fn: given a parameter, returns the dtype in which it is gathered, or
            None for `param_dtype`. It returns the same on all ranks. It is called when the unit is
            made.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None

    def for_parameter(self, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        """Return the policy of one parameter; its `param_dtype` is the dtype of gathered values.

        The dtype that `param_dtype_override_fn` returns for the parameter takes the place of
        `param_dtype`.
        """
        if self.param_dtype_override_fn is None:
            return self
        dtype = self.param_dtype_override_fn(parameter)
        return replace(self, param_dtype=dtype or self.param_dtype, param_dtype_override_fn=None)


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """A policy that keeps shards on the device of the mesh."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """A policy that keeps shards, their gradients and the optimizer's state in host memory.

    Attributes:
        pin_memory: whether shards, gradients and state are in pinned memory. It has no effect on a
            mesh of CPUs. Buffers for data in flight between host and device are always pinned.
    """

    pin_memory: bool = True


@dataclass(frozen=True, slots=True)
class DataParallelMeshDims:
    """The axes of data parallelism in a mesh on which parameters are DTensors.

    Attributes:
        shard: the names of the axes over which parameters are sharded. Several axes are flattened
            to one axis, in the order of the names.
        replicate: the names of the axes over which parameters are replicated, flattened alike.

    Raises:
        LayoutError: if neither `shard` nor `replicate` names an axis. A LayoutError is also a
            ValueError.

    Example:
        >>> dims = DataParallelMeshDims(shard=("data", "context"), replicate="hosts")
        >>> dims.replicate_names, dims.shard_names
        (('hosts',), ('data', 'context'))
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise LayoutError(
                "DataParallelMeshDims: pass at least one axis name, to shard over or to "
                "replicate over"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)
