"""The constructors of ShardedTensor: allocated, from local shards or local tensors, and scattered from one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from ..arguments import expect, expect_all, expect_plain
from ..errors import LocalShardError
from ..ranks.process_groups import check_rank, comm_of, resolve
from ..ranks.reshard import scatter
from ..spec.enumerable_spec import _infer_sharding_spec_from_shards_metadata
from ..spec.metadata import ShardedTensorMetadata, TensorProperties
from ..spec.sharding_spec import ShardingSpec
from .assemble import (
    check_layout,
    check_ranks,
    checked_metadata,
    describe,
    known_size,
    on_placements,
    refuse_rrefs,
)
from .shard import Shard, ordered_for
from .sharded_tensor_base import ShardedTensorBase


class ShardedTensorConstructors(ShardedTensorBase):
    """ShardedTensorBase with a process group, and the constructors that ShardedTensor has."""

    _process_group: dist.ProcessGroup

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
        **properties: Any,
    ) -> Self:
        """See ShardedTensor."""
        refuse_rrefs(init_rrefs)
        group = resolve(process_group)
        metadata = checked_metadata(ShardedTensorBase(sharding_spec, *size, **properties)._metadata, group)
        check_layout(metadata.tensor_properties)
        return cls._wrap(sharding_spec, metadata, [], group)

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: Sequence[Shard],
        *global_size: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> Self:
        """Local shards -> sharded: as ``init_from_local_shards``, which describes the arguments and errors."""
        refuse_rrefs(init_rrefs)
        group = resolve(process_group)
        metadata, shards = describe(local_shards, global_size, group)
        check_ranks(metadata, group)
        spec = _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        return cls._wrap(spec, metadata, [shard.tensor for shard in shards], group)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> Self:
        """Local tensor -> sharded: the tensor whose shard on this rank is ``local_tensor``; no communication, no copy.

        Args:
            local_tensor: This rank's shard, contiguous; ignored on a rank without a shard.
            sharding_spec: The spec of the tensor, with at most one shard per rank.
            global_size: Global size, as integers or one sequence.
            process_group: The ranks that hold the tensor; None is the default group.
            init_rrefs: Must be False.

        Raises:
            ArgumentTypeError: An argument has a wrong type.
            LocalShardError: The local tensor has another size than the spec gives this rank's shard, or is not
                contiguous; or this rank has several shards.
            ShardingSpecError: The spec does not fit the size or the group.
        """
        refuse_rrefs(init_rrefs)
        expect_plain("_init_from_local_tensor", "local_tensor", local_tensor)
        expect("_init_from_local_tensor", "sharding_spec", sharding_spec, ShardingSpec)
        group = resolve(process_group)
        properties = TensorProperties.create_from_tensor(local_tensor)
        metadata = checked_metadata(sharding_spec.build_metadata(known_size(global_size), properties), group)
        own = [each for each in metadata.shards_metadata if each.rank == dist.get_rank()]
        if len(own) > 1:
            raise LocalShardError(
                f"the spec places {len(own)} shards on rank {dist.get_rank()}, one local tensor was given"
            )
        shards = ordered_for([Shard(local_tensor, each) for each in own], metadata)
        return cls._wrap(sharding_spec, metadata, [shard.tensor for shard in shards], group)

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override]  # torch's order of arguments
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> Self:
        """Local shards -> sharded: the tensor of these shards and metadata; no communication, no copy.

        Args:
            local_shards: This rank's shards.
            sharded_tensor_metadata: Metadata of all shards, the same on every rank (this is not checked).
            process_group: The ranks that hold the tensor; None is the default group.
            init_rrefs: Must be False.
            sharding_spec: The spec of the result; None infers it from the metadata.

        Raises:
            ArgumentTypeError: An argument has a wrong type.
            LocalShardError: The local shards are not those that the metadata place on this rank.
            ShardingSpecError: The metadata overlap, leave a gap, or place shards outside the group.
        """
        refuse_rrefs(init_rrefs)
        call = "_init_from_local_shards_and_global_metadata"
        expect_all(call, "local_shards", local_shards, Shard)
        expect(call, "sharding_spec", sharding_spec, ShardingSpec, optional=True)
        group = resolve(process_group)
        metadata = checked_metadata(sharded_tensor_metadata, group)
        check_layout(metadata.tensor_properties)
        shards = ordered_for(local_shards, metadata)
        spec = sharding_spec or _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        return cls._wrap(spec, metadata, [shard.tensor for shard in shards], group)

    @classmethod
    def _scatter(
        cls, spec: ShardingSpec, tensor: torch.Tensor, src_rank: int, process_group: dist.ProcessGroup | None
    ) -> Self:
        """Plain on ``src_rank`` -> sharded: see ``ShardingSpec.shard``."""
        group = resolve(process_group)
        expect_plain("ShardingSpec.shard", "tensor", tensor)
        check_rank("ShardingSpec.shard", "src_rank", src_rank, group)
        properties = TensorProperties.create_from_tensor(tensor)
        metadata = checked_metadata(spec.build_metadata(tensor.size(), properties), group)
        local_tensors = scatter(tensor.detach(), metadata.layout, src_rank, comm_of(group, tensor.device.type))
        result = cls._wrap(spec, metadata, on_placements(local_tensors, metadata), group)
        result.requires_grad = tensor.requires_grad
        return result
