"""How a unit computes and where its shards are kept, as data: the policies of `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal_dtensor.errors import LayoutError


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit; the shards themselves, which the optimizer sees, keep theirs.

    Attributes:
        param_dtype: of the gathered parameters, so of the computation; that of the shards when
            None.
        reduce_dtype: in which gradients are reduced; that of the computation when None.
        output_dtype: to which floating outputs of the unit's forward are cast; None leaves them.
        cast_forward_inputs: whether floating inputs of the unit's forward are cast to
            `param_dtype`.
        param_dtype_override_fn: given a parameter, the dtype in which it is gathered, or None for
            `param_dtype`. It says the same on all ranks. Called when the unit is made.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None

    def for_parameter(self, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        """Return the policy of one parameter, in whose dtype it is gathered."""
        if self.param_dtype_override_fn is None:
            return self
        dtype = self.param_dtype_override_fn(parameter)
        return replace(self, param_dtype=dtype or self.param_dtype, param_dtype_override_fn=None)


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Shards stay on the device of the mesh."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer's state are kept in the memory of the host.

    Attributes:
        pin_memory: whether that memory is pinned, where the mesh is of an accelerator's devices;
            what of a unit is on its way to or from the device is anyway.
    """

    pin_memory: bool = True


@dataclass(frozen=True, slots=True)
class DataParallelMeshDims:
    """The axes of data parallelism in a mesh on which parameters are DTensors.

    Several axes act as one.

    Attributes:
        shard: the names of those over which parameters are sharded.
        replicate: the names of those over which parameters are replicated.

    Raises:
        LayoutError: if there are none. (A ValueError too.)

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
                "DataParallelMeshDims: name an axis to shard over, or to replicate over"
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
