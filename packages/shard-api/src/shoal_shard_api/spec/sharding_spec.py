"""The abstract specs, the checks of lists of shards, and operators overridden for a class of specs.

A spec maps a global size to shards; it holds no data.  ``ShardingSpec.shard`` needs the class ShardedTensor, which is
defined above: tensor/sharded_tensor.py hands its constructor down once, through ``ShardingSpec.bind``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from shoal_dtensor.internal import format_box, gap, overlap
from shoal_mesh.internal import dataclass

from .._torch import RemoteDevice
from ..arguments import expect, expect_all
from ..errors import ShardingSpecError, UnsupportedOpError
from .metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, parse_placement

CustomOp = Callable[[tuple[type, ...], tuple[Any, ...], "dict[str, Any]", ProcessGroup], Any]
"""An override: (types, args, kwargs, process_group) -> result; the first three as in ``__torch_function__``."""

_OVERRIDES: dict[tuple[type | None, Callable[..., Any]], CustomOp] = {}  # declared mutable state
"""By class of spec, or None for any, and function."""


class PlacementSpec(ABC):  # noqa: B024  # a marker to derive from, as in torch's API; it has no abstract method
    """Base class of the placements of an entity.

    Example:
        >>> isinstance(DevicePlacementSpec("rank:0/cpu"), PlacementSpec)
        True
    """


@dataclass(frozen=True)
class DevicePlacementSpec(PlacementSpec):
    """The placement of an entity on one device of one rank.

    Args:
        device: "rank:1/cuda:1", or a parsed placement.

    Raises:
        ShardingSpecError: The device cannot be parsed.

    Example:
        >>> DevicePlacementSpec("rank:1/cpu").device.rank()
        1
    """

    device: RemoteDevice

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", parse_placement(self.device))


class ShardingSpec(ABC):
    """Which shards a tensor of a given size has, and which rank holds each.  A subclass defines ``build_metadata``.

    Example:
        >>> class OnRankZero(ShardingSpec):
        ...     def build_metadata(self, tensor_sizes, tensor_properties):
        ...         shard = ShardMetadata([0] * len(tensor_sizes), tensor_sizes, "rank:0/cpu")
        ...         return ShardedTensorMetadata([shard], tensor_sizes, tensor_properties)
        >>> OnRankZero().shard(torch.arange(3)).full_tensor()
        tensor([0, 1, 2])
    """

    _scatter: ClassVar[Callable[..., Any] | None] = None

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """All shards of a tensor of this size; the same on every rank.

        Args:
            tensor_sizes: Global size.
            tensor_properties: Properties of the shards.

        Raises:
            ShardingSpecError: The spec does not fit a tensor of this size.
        """

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: ProcessGroup | None = None) -> Any:
        """Plain on ``src_rank`` -> sharded by this spec; all ranks of the group call it.

        Args:
            tensor: Global tensor, of the same size and dtype on every rank; the data of ``src_rank`` are used.
            src_rank: Rank in ``process_group`` (a global rank if no group is given).
            process_group: Group of the ranks named in the spec; None is the default group.

        Raises:
            ShardingSpecError: The spec does not fit the tensor or the group.
            ProcessGroupError: ``src_rank`` is not a rank of the group, or this rank is not in it.
        """
        assert ShardingSpec._scatter is not None, "sharded_tensor.py binds the constructor when it is imported"
        return ShardingSpec._scatter(self, tensor, src_rank, process_group)

    @classmethod
    def bind(cls, scatter: Callable[..., Any]) -> None:
        """Set the function behind ``shard``; called once, by the module that defines ShardedTensor."""
        ShardingSpec._scatter = scatter


def check_build_arguments(spec: ShardingSpec, tensor_sizes: Any, tensor_properties: Any) -> None:
    """Check the types of the arguments of ``build_metadata``.

    Raises:
        ArgumentTypeError: The size is no sequence of integers, or the properties are no TensorProperties.
    """
    call = f"{type(spec).__name__}.build_metadata"
    expect_all(call, "tensor_sizes", tensor_sizes, int)
    expect(call, "tensor_properties", tensor_properties, TensorProperties)


def validate_non_overlapping_shards_metadata(shards: Sequence[ShardMetadata]) -> None:
    """Check that no two shards share an element.

    Args:
        shards: Metadata of the shards.

    Raises:
        ArgumentTypeError: They are no sequence of ShardMetadata.
        ShardingSpecError: Two do, or two differ in the number of dims; names both.

    Example:
        >>> validate_non_overlapping_shards_metadata([ShardMetadata([0], [2]), ShardMetadata([2], [2])])
    """
    expect_all("validate_non_overlapping_shards_metadata", "shards", shards, ShardMetadata)
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
    """Check that the shards, which must not overlap, cover a tensor of this size exactly.

    Args:
        shards_metadata: Metadata of the shards.
        tensor_dims: Global size.

    Raises:
        ArgumentTypeError: The shards are no sequence of ShardMetadata, or the size no sequence of integers.
        ShardingSpecError: No shards, a wrong number of dims, a shard beyond the size, or elements in no shard.

    Example:
        >>> check_tensor([ShardMetadata([0], [2]), ShardMetadata([2], [2])], (4,))
    """
    expect_all("check_tensor", "shards_metadata", shards_metadata, ShardMetadata)
    expect_all("check_tensor", "tensor_dims", tensor_dims, int)
    size = tuple(tensor_dims)
    if not shards_metadata:
        raise ShardingSpecError(f"a tensor of size {size} needs at least one shard, got none")
    for i, shard in enumerate(shards_metadata):
        if len(shard.shard_sizes) != len(size):
            raise ShardingSpecError(
                f"shard {i} {_name(shard)} has {len(shard.shard_sizes)} dims, the tensor of size {size} has {len(size)}"
            )
        if any(stop > n for (_, stop), n in zip(shard.box, size, strict=True)):
            raise ShardingSpecError(f"shard {i} {_name(shard)} reaches beyond the tensor of size {size}")
    missing = gap([shard.box for shard in shards_metadata], size)
    if missing is not None:
        raise ShardingSpecError(f"no shard holds the elements {format_box(missing)} of the tensor of size {size}")


def _name(shard: ShardMetadata) -> str:
    return f"{format_box(shard.box)} on {shard.placement}"


def custom_sharding_spec_op(sharding_spec_class: type, func: Callable[..., Any]) -> Callable[[CustomOp], CustomOp]:
    """A decorator that registers a function in place of ``func`` for ShardedTensors whose spec is of this class.

    Args:
        sharding_spec_class: The class itself; subclasses have overrides of their own.
        func: A function of torch, or a method of torch.Tensor.

    Raises:
        ArgumentTypeError: The class is no class, or ``func`` is not callable.

    Example:
        >>> @custom_sharding_spec_op(ChunkShardingSpec, torch.digamma)
        ... def digamma(types, args, kwargs, process_group): ...
    """
    expect("custom_sharding_spec_op", "sharding_spec_class", sharding_spec_class, type)
    return overriding("custom_sharding_spec_op", sharding_spec_class, func)


def overriding(call: str, sharding_spec_class: type | None, func: Callable[..., Any]) -> Callable[[CustomOp], CustomOp]:
    """A decorator that registers a function in place of ``func``; for ShardedTensors of any spec if there is no class.

    Raises:
        ArgumentTypeError: ``func``, or the decorated function, is not callable.
    """
    expect(call, "func", func, Callable)

    def register(implementation: CustomOp) -> CustomOp:
        expect(call, "the decorated function", implementation, Callable)
        _OVERRIDES[sharding_spec_class, func] = implementation
        return implementation

    return register


def override_of(sharding_spec: ShardingSpec, op: Callable[..., Any]) -> CustomOp | None:
    """The user's function in place of ``op``: for any spec, else for the class of this one; None if there is none."""
    return _OVERRIDES.get((None, op)) or _OVERRIDES.get((type(sharding_spec), op))


def _has_custom_op(sharding_spec: ShardingSpec, op: Callable[..., Any]) -> bool:
    """Whether an override of ``op`` is registered for the class of this spec."""
    return (type(sharding_spec), op) in _OVERRIDES


def _dispatch_custom_op(
    sharding_spec: ShardingSpec,
    op: Callable[..., Any],
    types: tuple[type, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    process_group: ProcessGroup,
) -> Any:
    """Result of the override of ``op`` for the class of this spec.

    Raises:
        UnsupportedOpError: None is registered.
    """
    if not _has_custom_op(sharding_spec, op):
        raise UnsupportedOpError(f"{op} is not overridden for {type(sharding_spec).__name__}")
    return _OVERRIDES[type(sharding_spec), op](types, args, kwargs, process_group)
