"""The abstract kinds of spec, the checks that every list of shards must pass, and ops overridden for a kind of spec.

A spec says how a tensor of any given size is cut and who holds the pieces; it holds no data.  ``shard`` needs the class
ShardedTensor, which lies above: sharded_tensor.py hands its constructor down once, through ``ShardingSpec.bind``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from ._torch import RemoteDevice
from .boxes import gap, overlap, show
from .errors import ShardingSpecError, UnsupportedOpError
from .metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, parse_placement

CustomOp = Callable[[tuple[type, ...], tuple[Any, ...], "dict[str, Any]", ProcessGroup], Any]
"""An override: (types, args, kwargs, process_group) -> result, as ``__torch_function__`` got them."""

_CUSTOM_SPEC_OPS: dict[type, dict[Callable[..., Any], CustomOp]] = {}


class PlacementSpec(ABC):  # noqa: B024  # a marker to derive from, as in torch's API; it asks for nothing
    """Base of values that say where an entity lives."""


@dataclass(frozen=True)
class DevicePlacementSpec(PlacementSpec):
    """An entity that lives on one device: ``DevicePlacementSpec("rank:1/cuda:1")``."""

    device: RemoteDevice

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", parse_placement(self.device))


class ShardingSpec(ABC):
    """How a tensor of any size is cut into shards and who holds them.  Derive and write ``build_metadata``."""

    _scatter: ClassVar[Callable[..., Any] | None] = None

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """All shards of a tensor of this size, the same on every rank.

        Raises:
            ShardingSpecError: The spec does not fit a tensor of this size.
        """

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: ProcessGroup | None = None) -> Any:
        """The ShardedTensor of the tensor that ``src_rank`` holds, cut by this spec; all ranks of the group call it.

        Args:
            tensor: Full tensor; its data count on ``src_rank`` only, its size and dtype on every rank.
            src_rank: Rank in ``process_group`` whose data are the truth (a global rank if no group is given).
            process_group: Group of the ranks named in the spec; None is the default group.
        """
        assert ShardingSpec._scatter is not None, "sharded_tensor.py binds the constructor when it is imported"
        return ShardingSpec._scatter(self, tensor, src_rank, process_group)

    @classmethod
    def bind(cls, scatter: Callable[..., Any]) -> None:
        """Take the function behind ``shard``; called once, by the module that defines ShardedTensor."""
        ShardingSpec._scatter = scatter


def validate_non_overlapping_shards_metadata(shards: Sequence[ShardMetadata]) -> None:
    """Check that no two shards share an element.

    Raises:
        ShardingSpecError: Two do, or shards differ in the number of dims; names both.
    """
    for i, shard in enumerate(shards):
        if len(shard.shard_sizes) != len(shards[0].shard_sizes):
            raise ShardingSpecError(
                f"all shards must have the same number of dims: shard 0 {_name(shards[0])} has "
                f"{len(shards[0].shard_sizes)}, shard {i} {_name(shard)} has {len(shard.shard_sizes)}"
            )
    pair = overlap([shard.box for shard in shards])
    if pair is not None:
        i, j = pair
        raise ShardingSpecError(f"shards {i} {_name(shards[i])} and {j} {_name(shards[j])} overlap")


def check_tensor(shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Check that the shards, which must not overlap, hold every element of a tensor of this size and none beyond.

    Raises:
        ShardingSpecError: Wrong number of dims, a shard that sticks out, or a part that no shard holds; names it.
    """
    size = tuple(tensor_dims)
    if not shards_metadata:
        raise ShardingSpecError(f"a tensor of size {size} needs at least one shard, got none")
    for i, shard in enumerate(shards_metadata):
        if len(shard.shard_sizes) != len(size):
            raise ShardingSpecError(
                f"shard {i} {_name(shard)} has {len(shard.shard_sizes)} dims, the tensor of size {size} has {len(size)}"
            )
        if any(stop > n for (_, stop), n in zip(shard.box, size, strict=True)):
            raise ShardingSpecError(f"shard {i} {_name(shard)} sticks out of the tensor of size {size}")
    missing = gap([shard.box for shard in shards_metadata], size)
    if missing is not None:
        raise ShardingSpecError(f"no shard holds the part {show(missing)} of the tensor of size {size}")


def _name(shard: ShardMetadata) -> str:
    return f"{show(shard.box)} on {shard.placement}"


def custom_sharding_spec_op(sharding_spec_class: type, func: Callable[..., Any]) -> Callable[[CustomOp], CustomOp]:
    """Decorator: run the decorated function for ``func`` on ShardedTensors whose spec is of this class.

    Example:
        >>> from shoal_shard_api import ChunkShardingSpec
        >>> @custom_sharding_spec_op(ChunkShardingSpec, torch.digamma)
        ... def digamma(types, args, kwargs, process_group): ...
    """

    def register(implementation: CustomOp) -> CustomOp:
        _CUSTOM_SPEC_OPS.setdefault(sharding_spec_class, {})[func] = implementation
        return implementation

    return register


def _has_custom_op(sharding_spec: ShardingSpec, op: Callable[..., Any]) -> bool:
    """Whether an override of ``op`` is registered for this very kind of spec."""
    return op in _CUSTOM_SPEC_OPS.get(type(sharding_spec), {})


def _dispatch_custom_op(
    sharding_spec: ShardingSpec,
    op: Callable[..., Any],
    types: tuple[type, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    process_group: ProcessGroup,
) -> Any:
    """Result of the override of ``op`` for this kind of spec.

    Raises:
        UnsupportedOpError: None is registered.
    """
    if not _has_custom_op(sharding_spec, op):
        raise UnsupportedOpError(f"{op} is not overridden for {type(sharding_spec).__name__}")
    return _CUSTOM_SPEC_OPS[type(sharding_spec)][op](types, args, kwargs, process_group)
