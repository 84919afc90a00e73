"""ShardedTensorBase: size, spec and local shards of a sharded tensor; nothing here talks to another rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist

from ._torch import make_wrapper
from .assemble import empty_parts, known_size
from .enumerable_spec import _infer_sharding_spec_from_shards_metadata
from .errors import LocalShardError, UnsupportedOpError
from .groups import _get_current_process_group, resolve
from .metadata import Layout, ShardedTensorMetadata, TensorProperties
from .shard import Shard
from .spec import ShardingSpec


class ShardedTensorBase(torch.Tensor):
    """Size, spec and local shards, without a process group: nothing here talks to another rank.

    Args:
        sharding_spec: How the tensor is cut and who holds what.
        size: Global size, as numbers or one sequence.
        dtype: Defaults to the default dtype.
        layout: torch.strided.
        requires_grad: Whether the shards require gradients.
        pin_memory: Whether the shards lie in pinned memory.
        memory_format: torch.contiguous_format.
    """

    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _local_shards: list[Shard]
    _anchor: torch.Tensor | None
    _process_group: dist.ProcessGroup | None
    _layout: Layout

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Self:
        """An object with metadata and no shards yet."""
        properties = TensorProperties(
            dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory
        )
        return cls._wrap(sharding_spec, sharding_spec.build_metadata(known_size(size), properties), [])

    @classmethod
    def _wrap(
        cls,
        spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        parts: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        stride: Sequence[int] | None = None,
    ) -> Self:
        """The object around local data that are known to fit; no checks, no communication.

        ``parts`` are this rank's shards in the order of the metadata, or one empty tensor where it has none: that one
        keeps the rank's place in the autograd graph.
        """
        rank = dist.get_rank() if group is not None else None
        own = [shard for shard in metadata.shards_metadata if rank is not None and shard.rank == rank]
        device = parts[0].device if parts else torch.device("cpu")
        props = metadata.tensor_properties
        self: Self = make_wrapper(
            cls, metadata.size, stride, props.dtype, device=device, layout=props.layout, pin_memory=props.pin_memory
        )
        self._sharding_spec, self._metadata, self._process_group = spec, metadata, group
        self._layout = metadata.layout if group is not None else ()
        self._local_shards = [Shard(part, each) for part, each in zip(parts, own, strict=False)]
        self._anchor = None if own or not parts else _anchor(parts[0])
        return self

    def metadata(self) -> ShardedTensorMetadata:
        """All shards, the size and the properties of the tensor."""
        properties = self._metadata.tensor_properties
        if properties.requires_grad == self.requires_grad:
            return self._metadata
        return replace(self._metadata, tensor_properties=replace(properties, requires_grad=self.requires_grad))

    def local_shards(self) -> list[Shard]:
        """This rank's shards, in the order of the metadata; an empty list where it has none."""
        return self._local_shards

    def sharding_spec(self) -> ShardingSpec:
        """How the tensor is cut and who holds what."""
        return self._sharding_spec

    @property
    def _parts(self) -> list[torch.Tensor]:
        """Data of the local shards, or the one empty tensor that stands for them."""
        return [shard.tensor for shard in self._local_shards] or ([] if self._anchor is None else [self._anchor])

    def _replace_parts(self, parts: Sequence[torch.Tensor]) -> None:
        """Give the local shards other data (of the same shape): after an in-place op, those with its history."""
        if self._local_shards:
            self._local_shards = [Shard(part, s.metadata) for part, s in zip(parts, self._local_shards, strict=True)]
        else:
            self._anchor = _anchor(parts[0])

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> Self:
        """The tensor of these shards; the metadata are trusted to be the same on every rank, the shards are checked."""
        shards = sharded_tensor_metadata.shards_metadata
        spec = sharding_spec or _infer_sharding_spec_from_shards_metadata(shards)
        self = cls._wrap(spec, sharded_tensor_metadata, [shard.tensor for shard in local_shards])
        for shard in local_shards:
            if shard.metadata not in shards:
                raise LocalShardError(f"the shard {shard.metadata} is not in the metadata {shards}")
        self._local_shards = list(local_shards)
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether the local shards require gradients."""
        parts = self._parts
        return any(part.requires_grad for part in parts) if parts else self._metadata.tensor_properties.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        for part in self._parts:
            part.requires_grad_(value)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]  # as requires_grad
        """Whether the local shards are leaves of the autograd graph."""
        return all(part.is_leaf for part in self._parts)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]  # as requires_grad
        """What made the first local shard, None for a leaf."""
        return self._parts[0].grad_fn if self._parts else None

    def is_pinned(self, device: Any = None) -> bool:
        """Whether the shards lie in pinned memory."""
        return self._metadata.tensor_properties.pin_memory

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the disabled one of its C type
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedOpError(
            f"{func} reached a ShardedTensor below __torch_function__, where its shards cannot be seen; "
            "call it without DisableTorchFunction, or on local_tensor()"
        )

    __hash__ = torch.Tensor.__hash__


def _anchor(part: torch.Tensor) -> torch.Tensor:
    """The empty tensor, of one dim, that keeps the place in autograd of a rank without shards."""
    return part if part.dim() == 1 else part.reshape(0)


def load_pickled(cls: type[ShardedTensorBase], state: dict[str, Any]) -> Any:
    """The pickled ShardedTensor, on the group of ``load_with_process_group`` or the default one.

    Raises:
        ProcessGroupError: This rank has another place in the group or the world than the one that saved it.
    """
    group = resolve(_get_current_process_group())
    state["group"].check(group)
    parts = [shard.tensor for shard in state["shards"]] or empty_parts(state["metadata"])
    made = cls._wrap(state["spec"], state["metadata"], parts, group)
    made.requires_grad = state["metadata"].tensor_properties.requires_grad
    made.__dict__.update(state["marks"])
    return made
