"""Parameters whose tensor class decides what is gathered, such as float8, int8 and NF4.

Such a class has two methods, with the signatures of torch's `fully_shard`:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors, metadata)
        what is sent in place of this shard; `(mesh)` alone is an older form
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (tensor, inner tensors)
        the parameter that modules see, of the gathered outputs; None if `out` is to be filled

The outputs keep their memory while the unit is gathered. When the unit is gathered again, they have
other values, and `out` is the parameter that modules saw before.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Placement, Replicate, Shard, Spec
from shoal_dtensor.errors import LayoutError, StyleError
from shoal_mesh import DeviceMesh, LockstepError
from shoal_mesh.internal import all_gather_objects

from .layout_move import LayoutMove
from .policies import MixedPrecisionPolicy

_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def has_extension(tensor: Tensor) -> bool:
    """Return whether the class of a tensor decides what is gathered; a DTensor's class does not.

    Raises:
        StyleError: if it has only one of the two methods.
    """
    # DTensor has one of the methods, only to raise an error when torch's `fully_shard` calls it
    if isinstance(tensor, DTensor):
        return False
    present = [name for name in _METHODS if hasattr(tensor, name)]
    if len(present) == 1:
        raise StyleError(
            f"fully_shard: {type(tensor).__name__} has {present[0]}, but not both of "
            f"{' and '.join(_METHODS)}"
        )
    return bool(present)


@dataclass(slots=True, eq=False)
class GatherExtension:
    """Tensors that are sent in place of the shards of one parameter.

    Attributes:
        resting: the layout of the shards, over the data axes.
        axis: the data axis that shards.
        stride: the stride of the whole parameter.
        module: the module that holds the parameter.
        precision: the dtypes of the parameter's unit.
        lengths: the lengths along the first dim on all ranks, for each tensor that is sent. They
            are known after the first gather.
        metadata: what `fsdp_pre_all_gather` returned for `fsdp_post_all_gather` at the last gather.
    """

    resting: Spec
    axis: int
    stride: tuple[int, ...]
    module: nn.Module
    precision: MixedPrecisionPolicy
    lengths: list[list[int]] | None = None
    metadata: Any = None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the axis that shards."""
        mesh = self.resting.mesh
        return mesh if mesh.ndim == 1 else mesh[mesh.axis_names[self.axis]]

    def send(self, shard: Tensor) -> tuple[list[Tensor], list[LayoutMove]]:
        """Return the tensors that are sent in place of a shard, and their moves."""
        method: Any = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]  # of the class
        arguments = (
            self.mesh,
            self.resting.shape,
            self.stride,
            self.module,
            self.precision,
        )
        is_older_form = len(inspect.signature(method).parameters) == 1
        tensors, self.metadata = method(*(arguments[:1] if is_older_form else arguments))
        parts = [tensor.contiguous() for tensor in tensors]
        if self.lengths is None:
            self.lengths = self._agreed_lengths(parts)
        pairs = zip(parts, self.lengths, strict=True)
        return parts, [self._move(part, lengths) for part, lengths in pairs]

    def receive(self, shard: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the parameter that modules see, made from the gathered outputs.

        Returns also the inner tensors, which own its memory.
        """
        method: Any = shard.fsdp_post_all_gather  # type: ignore[attr-defined]  # of the class
        result: tuple[Tensor, Sequence[Tensor]] = method(
            tuple(outputs), self.metadata, self._dtype_of(shard)
        )
        tensor, _ = result
        if tensor.shape != self.resting.shape:
            raise StyleError(
                f"fully_shard: fsdp_post_all_gather of {type(shard).__name__} returned a tensor of "
                f"shape {tuple(tensor.shape)} for a parameter of {tuple(self.resting.shape)}"
            )
        return result

    def refill(self, shard: Tensor, outputs: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out`, the parameter that modules saw before, from the gathered outputs."""
        method: Any = shard.fsdp_post_all_gather  # type: ignore[attr-defined]  # of the class
        method(tuple(outputs), self.metadata, self._dtype_of(shard), out=out)

    def _dtype_of(self, shard: Tensor) -> torch.dtype:
        return self.precision.param_dtype or shard.dtype

    def _move(self, part: Tensor, lengths: Sequence[int]) -> LayoutMove:
        """Return the gather of a tensor that is sharded by its first dim."""
        mesh = self.resting.mesh
        whole: list[Placement] = [Replicate()] * mesh.ndim
        sharded: list[Placement] = [*whole]
        sharded[self.axis] = Shard(0, sizes=tuple(lengths))
        shape = (sum(lengths), *part.shape[1:])
        source = Spec(mesh, sharded, shape, None, dtype=part.dtype)
        target = Spec(mesh, whole, shape, None, dtype=part.dtype)
        return LayoutMove(source, target)

    def _agreed_lengths(self, parts: Sequence[Tensor]) -> list[list[int]]:
        """Return the lengths of the tensors of all ranks.

        Raises:
            LockstepError: on all ranks, if tensors of ranks differ in more than the first dim.
        """
        comm = self.resting.mesh.comm((self.axis,))
        own_parts = [(tuple(part.shape), part.dtype) for part in parts]
        gathered = all_gather_objects(comm.group, own_parts)
        # for each coordinate on the axis the rank in the group
        order = range(comm.size) if comm.order is None else comm.order
        of_ranks = [gathered[rank] for rank in order]
        kinds = set()
        for parts_of_rank in of_ranks:
            kinds_of_rank = [(shape[1:], dtype) for shape, dtype in parts_of_rank]
            kinds.add(tuple(kinds_of_rank))
        has_numbers = any(not shape for parts in of_ranks for shape, _ in parts)
        if len(kinds) != 1 or has_numbers:
            raise LockstepError(
                "fully_shard: fsdp_pre_all_gather returns as many tensors on all ranks, of the "
                f"same dtypes and of shapes that differ in the first dim only; got {of_ranks}"
            )
        lengths = []
        for i in range(len(own_parts)):
            lengths_of_ranks = [parts[i][0][0] for parts in of_ranks]
            lengths.append(lengths_of_ranks)
        return lengths

    def refuse(self, limit: str) -> LayoutError:
        """Return the error for a use of the parameter that its class does not support."""
        return LayoutError(
            f"fully_shard: a parameter whose class decides what is gathered {limit}; pass it in "
            "ignored_params, or change it back to a plain tensor first"
        )


def extension_of(
    param: nn.Parameter, resting: Spec, module: nn.Module, precision: MixedPrecisionPolicy
) -> GatherExtension | None:
    """Return the extension of a parameter on data axes alone; None if its class has none.

    Raises:
        LayoutError: if the parameter is not sharded along its first dim by one axis.
    """
    if not has_extension(param):
        return None
    sharding = [(axis, p) for axis, p in enumerate(resting.placements) if isinstance(p, Shard)]
    if [shard.dim for _, shard in sharding] != [0]:
        raise LayoutError(
            f"fully_shard: {type(param).__name__} decides what is gathered, which takes shards of "
            f"the first dim over one axis, got {resting.placements}"
        )
    stride = torch.empty(resting.shape, device="meta").stride()
    axis = sharding[0][0]
    return GatherExtension(resting, axis, stride, module, precision=precision)
