"""The two base classes of ShardedTensor.

`ShardedTensorBase` has the size, the spec and the local shards. `ShardedTensorConstructors` derives
from it, and adds the constructors on a process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Self

import torch
import torch.distributed as dist

from shoal_dtensor.internal import make_wrapper
from shoal_mesh.internal import require, require_each

from ..arguments import require_plain
from ..errors import ArgumentTypeError, LocalShardError, ShardingSpecError, UnsupportedOpError
from ..ranks.process_groups import _get_current_process_group, check_rank, comm_of, resolve
from ..ranks.reshard import scatter
from ..spec.metadata import Layout, ShardedTensorMetadata, TensorProperties
from ..spec.specs import ShardingSpec, _infer_sharding_spec_from_shards_metadata
from .shard import (
    Shard,
    checked_metadata,
    describe,
    empty_local_tensors,
    flatten_size,
    group_of,
    move_to_placements,
    own_shards,
    sort_local_tensors,
)


class ShardedTensorBase(torch.Tensor):
    """A sharded tensor without a process group: size, spec and local shards.

    The constructor returns a tensor without local shards.

    Args:
        sharding_spec: The shards of the tensor.
        size: Global size, as integers or one sequence.
        dtype: Element type; None is the default dtype.
        layout: torch.strided.
        requires_grad: True if the shards require gradients.
        pin_memory: True if the shards are in pinned host memory.
        memory_format: torch.contiguous_format.
        strides: Strides that the tensor reports, one per dim; None for those of a contiguous
            tensor. They do not describe memory: each shard is contiguous.

    Raises:
        ArgumentTypeError: The spec is not a ShardingSpec, the size not a sequence of integers, or a
            property has a wrong type.
        ShardingSpecError: The spec does not fit the size, or there is not one stride per dim.

    Example:
        >>> ShardedTensorBase(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 5, 2).size()
        torch.Size([5, 2])
    """

    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _local_shards: list[Shard]
    # An empty tensor on a rank of the process group that holds no shards; None on other ranks. The
    # forward's collectives take it as their input. They thus have a node in the autograd graph of
    # this rank too, and the node calls the collective of backward together with the other ranks.
    _anchor: torch.Tensor | None
    _process_group: dist.ProcessGroup | None
    # the rank of every shard, and its box: a (start, stop) along each dim; empty without a group
    _layout: Layout

    def __new__(  # noqa: PLR0913  # the arguments of torch
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        strides: Sequence[int] | None = None,
    ) -> Self:
        """Make a tensor without local shards; the docstring of the class lists the arguments."""
        require(
            sharding_spec,
            ShardingSpec,
            f"{cls.__name__}: sharding_spec is a ShardingSpec",
            ArgumentTypeError,
        )
        require(
            dtype,
            torch.dtype | None,
            f"{cls.__name__}: dtype is a torch.dtype or None",
            ArgumentTypeError,
        )
        require(
            layout, torch.layout, f"{cls.__name__}: layout is a torch.layout", ArgumentTypeError
        )
        require(requires_grad, bool, f"{cls.__name__}: requires_grad is a bool", ArgumentTypeError)
        require(pin_memory, bool, f"{cls.__name__}: pin_memory is a bool", ArgumentTypeError)
        require(
            memory_format,
            torch.memory_format,
            f"{cls.__name__}: memory_format is a torch.memory_format",
            ArgumentTypeError,
        )
        if strides is not None:
            require_each(
                strides,
                int,
                f"{cls.__name__}: strides is a sequence of ints",
                ArgumentTypeError,
                without=bool,
            )
        dtype = dtype or torch.get_default_dtype()
        properties = TensorProperties(
            dtype,
            layout,
            requires_grad,
            memory_format,
            pin_memory=pin_memory,
            strides=None if strides is None else tuple(strides),
        )
        metadata = sharding_spec.build_metadata(torch.Size(flatten_size(size)), properties)
        return cls._wrap(sharding_spec, metadata, [])

    @staticmethod
    def _install() -> None:
        """Extend torch for this class; runs once in a process, before the first tensor.

        ShardedTensor overrides it, so that torch's functions copy its shards.
        """

    @classmethod
    def _wrap(
        cls,
        spec: ShardingSpec | None,
        metadata: ShardedTensorMetadata,
        local_tensors: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        stride: Sequence[int] | None = None,
    ) -> Self:
        """Wrap local tensors that fit the metadata.

        Args:
            spec: The spec of the result; None infers it from the metadata.
            metadata: All shards, the global size and the properties.
            local_tensors: The tensors of this rank's shards, in the order in which the metadata
                lists these shards; with a group, an empty sequence allocates them.
            group: The ranks that hold the tensor; None for a tensor without a group.
            stride: The global stride; None is the stride of the metadata's properties.

        Raises:
            ShardingSpecError: The properties have strides for another number of dims.
        """
        _run_once(cls._install)
        # This allocates the rank's shards. For a rank without shards it returns one empty tensor,
        # which becomes the anchor below.
        if group is not None and not local_tensors:
            local_tensors = empty_local_tensors(metadata)
        shards = own_shards(metadata) if group is not None else []
        device = local_tensors[0].device if local_tensors else torch.device("cpu")
        metadata = _with_strides(metadata, stride)
        properties = metadata.tensor_properties
        # `_with_strides` has checked the strides. Properties without strides do not get `stride`.
        stride = properties.strides if stride is None else stride
        self: Self = make_wrapper(
            cls,
            metadata.size,
            stride,
            dtype=properties.dtype,
            layout=properties.layout,
            device=device,
            pin_memory=properties.pin_memory,
        )
        if spec is None:
            spec = _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        self._sharding_spec = spec
        self._metadata = metadata
        self._process_group = group
        self._layout = metadata.layout if group is not None else ()
        # `shards` may be empty although there are local tensors: on a rank whose only local tensor
        # is the anchor, and without a group. There are no pairs then.
        pairs = zip(local_tensors, shards, strict=False)
        self._local_shards = [Shard(local, shard) for local, shard in pairs]
        self._anchor = None
        if group is not None and local_tensors and not shards:
            self._anchor = _flatten_anchor(local_tensors[0])
        return self

    def metadata(self) -> ShardedTensorMetadata:
        """Return all shards, the global size and the properties of the tensor."""
        properties = self._metadata.tensor_properties
        if properties.requires_grad == self.requires_grad:
            return self._metadata
        current = replace(properties, requires_grad=self.requires_grad)
        return replace(self._metadata, tensor_properties=current)

    def local_shards(self) -> list[Shard]:
        """Return this rank's shards in the order of the metadata; a rank may have none."""
        return self._local_shards

    def sharding_spec(self) -> ShardingSpec:
        """Return the spec by which the tensor is sharded."""
        return self._sharding_spec

    @property
    def _local_tensors(self) -> list[torch.Tensor]:
        """Tensors of the local shards; the empty anchor on a rank without shards."""
        if self._local_shards:
            return [shard.tensor for shard in self._local_shards]
        return [] if self._anchor is None else [self._anchor]

    def _set_local_tensors(self, local_tensors: Sequence[torch.Tensor]) -> None:
        """Replace the local tensors by others of the same sizes, such as ones with a grad_fn."""
        if not self._local_shards:
            self._anchor = _flatten_anchor(local_tensors[0])
            return
        pairs = zip(local_tensors, self._local_shards, strict=True)
        self._local_shards = [Shard(local, shard.metadata) for local, shard in pairs]

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> Self:
        """Wrap shards and metadata without comparing them between ranks; no communication."""
        require(
            sharded_tensor_metadata,
            ShardedTensorMetadata,
            f"{cls.__name__}: sharded_tensor_metadata is a ShardedTensorMetadata",
            ArgumentTypeError,
        )
        require_each(
            local_shards,
            Shard,
            f"{cls.__name__}: local_shards is a sequence of Shard",
            ArgumentTypeError,
        )
        require(
            sharding_spec,
            ShardingSpec | None,
            f"{cls.__name__}: sharding_spec is a ShardingSpec or None",
            ArgumentTypeError,
        )
        shards = sharded_tensor_metadata.shards_metadata
        for shard in local_shards:
            if shard.metadata not in shards:
                raise LocalShardError(f"the shard {shard.metadata} is not in the metadata {shards}")
        local_tensors = [shard.tensor for shard in local_shards]
        self = cls._wrap(sharding_spec, sharded_tensor_metadata, local_tensors)
        self._local_shards = list(local_shards)
        return self

    @property
    def requires_grad(self) -> bool:
        """True if a local shard requires gradients."""
        tensors = self._local_tensors
        if not tensors:
            return self._metadata.tensor_properties.requires_grad
        return any(local.requires_grad for local in tensors)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        for local in self._local_tensors:
            local.requires_grad_(value)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]  # torch.Tensor declares an attribute
        """True if the local shards are leaves of the autograd graph."""
        return all(local.is_leaf for local in self._local_tensors)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]  # torch.Tensor declares an attribute
        """The autograd node of the first local shard, None for a leaf."""
        return self._local_tensors[0].grad_fn if self._local_tensors else None

    def is_pinned(self, device: Any = None) -> bool:
        """Tell whether the shards are in pinned host memory.

        ``device`` is accepted as in ``Tensor.is_pinned``, and ignored.
        """
        return self.metadata().tensor_properties.pin_memory

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares that of its C type
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Operations run in ``__torch_function__``. Operators only get here if it is disabled, and
        # then get this wrapper, which does not have memory.
        raise UnsupportedOpError(
            f"{func} cannot access the shards of a ShardedTensor; leave __torch_function__ "
            "enabled, or use local_tensor()"
        )


class ShardedTensorConstructors(ShardedTensorBase):
    """A sharded tensor with a process group, and the constructors of ShardedTensor."""

    _process_group: dist.ProcessGroup

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
        **properties: Any,
    ) -> Self:
        """Allocate the shards; the docstring of ShardedTensor lists the arguments."""
        # `group_of` refuses init_rrefs=True.
        group = group_of(process_group, init_rrefs)
        # The base class checks the properties and builds the metadata from them.
        without_group = ShardedTensorBase(sharding_spec, *size, **properties)
        metadata = checked_metadata(without_group._metadata, group)
        return cls._wrap(sharding_spec, metadata, [], group)

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: Sequence[Shard],
        *global_size: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> Self:
        """Wrap local shards; see ``init_from_local_shards`` for arguments and errors."""
        group = group_of(process_group, init_rrefs)
        metadata = describe(local_shards, global_size, group)
        local_tensors = [shard.tensor for shard in local_shards]
        return cls._wrap(None, metadata, local_tensors, group)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> Self:
        """Wrap the tensor of this rank's only shard; no communication."""
        group = group_of(process_group, init_rrefs)
        require_plain(
            local_tensor, "_init_from_local_tensor: local_tensor is a plain strided tensor"
        )
        require(
            sharding_spec,
            ShardingSpec,
            "_init_from_local_tensor: sharding_spec is a ShardingSpec",
            ArgumentTypeError,
        )
        properties = TensorProperties.of_shards_like(local_tensor)
        size = torch.Size(flatten_size(global_size))
        metadata = checked_metadata(sharding_spec.build_metadata(size, properties), group)
        placed = own_shards(metadata)
        if len(placed) > 1:
            raise LocalShardError(
                f"rank {dist.get_rank()} has {len(placed)} shards, but one local tensor was given: "
                "use init_from_local_shards()"
            )
        shards = [Shard(local_tensor, shard) for shard in placed]
        local_tensors = sort_local_tensors(shards, metadata)
        return cls._wrap(sharding_spec, metadata, local_tensors, group)

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override]  # torch's order
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> Self:
        """Wrap local shards and metadata; no communication, no copy."""
        group = group_of(process_group, init_rrefs)
        call = "_init_from_local_shards_and_global_metadata"
        require_each(
            local_shards, Shard, f"{call}: local_shards is a sequence of Shard", ArgumentTypeError
        )
        require(
            sharding_spec,
            ShardingSpec | None,
            f"{call}: sharding_spec is a ShardingSpec or None",
            ArgumentTypeError,
        )
        metadata = checked_metadata(sharded_tensor_metadata, group)
        local_tensors = sort_local_tensors(local_shards, metadata)
        return cls._wrap(sharding_spec, metadata, local_tensors, group)

    @classmethod
    def _scatter(
        cls,
        spec: ShardingSpec,
        tensor: torch.Tensor,
        src_rank: int,
        process_group: dist.ProcessGroup | None,
    ) -> Self:
        """Shard a plain tensor of ``src_rank``; see ``ShardingSpec.shard``."""
        group = resolve(process_group)
        require_plain(tensor, "ShardingSpec.shard: tensor is a plain strided tensor")
        check_rank("ShardingSpec.shard", "src_rank", src_rank, group)
        properties = TensorProperties.of_shards_like(tensor)
        metadata = checked_metadata(spec.build_metadata(tensor.size(), properties), group)
        comm = comm_of(group, tensor.device.type)
        scattered = scatter(tensor.detach(), metadata.layout, src_rank, comm)
        local_tensors = move_to_placements(scattered, metadata)
        result = cls._wrap(spec, metadata, local_tensors, group)
        result.requires_grad = tensor.requires_grad
        return result


def _with_strides(
    metadata: ShardedTensorMetadata, stride: Sequence[int] | None
) -> ShardedTensorMetadata:
    """Return the metadata with the strides that a result has.

    Args:
        metadata: The metadata; its properties may have the strides of the tensor that an operation
            has read.
        stride: The strides of the result; None for the strides of the metadata.

    Raises:
        ShardingSpecError: The properties have strides for another number of dims.
    """
    properties = metadata.tensor_properties
    strides = properties.strides
    if strides is None:
        return metadata
    if stride is not None:
        properties = replace(properties, strides=tuple(stride))
        return replace(metadata, tensor_properties=properties)
    if len(strides) != len(metadata.size):
        raise ShardingSpecError(
            f"a tensor of size {tuple(metadata.size)} needs one stride per dim, got "
            f"TensorProperties(strides={strides})"
        )
    return metadata


@cache
def _run_once(function: Callable[[], None]) -> None:
    """Call a function, unless this process has called it before."""
    function()


def _flatten_anchor(local: torch.Tensor) -> torch.Tensor:
    """Return the anchor of a rank without shards: an empty local tensor, as a 1-D tensor.

    An operation may have changed the number of dims of the earlier anchor.
    """
    return local if local.dim() == 1 else local.reshape(0)


def load_pickled(cls: type[ShardedTensorBase], state: dict[str, Any]) -> Any:
    """Unpickle a ShardedTensor on the group of ``load_with_process_group`` or the default group."""
    group = resolve(_get_current_process_group())
    state["group"].check(group)
    metadata = state["metadata"]
    local_tensors = [shard.tensor for shard in state["shards"]]
    result = cls._wrap(state["spec"], metadata, local_tensors, group)
    result.requires_grad = metadata.tensor_properties.requires_grad
    result.__dict__.update(state["marks"])
    return result
