"""ShardedTensor: one tensor of which every rank of a process group holds the shards that its spec gives it.

The shards carry the autograd history and the gradients; the object around them has the global size and no storage.
What an operation does is in ops.py; how data move is in reshard.py; how shards become a tensor is in assemble.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shoal_mesh import Comm

from . import bridge, checkpointable, ops
from .assemble import (
    check_layout,
    check_ranks,
    describe,
    described_by,
    empty_parts,
    flatten_size,
    known_size,
    placed,
    refuse_rrefs,
)
from .base import ShardedTensorBase, load_pickled
from .enumerable_spec import _infer_sharding_spec_from_shards_metadata
from .errors import LocalShardError, UnsupportedOpError
from .groups import ProcessGroupState, agree, comm_of, devices_of_all, gather_error, resolve
from .handlers import laid_out_as
from .metadata import ShardedTensorMetadata, TensorProperties, moved_to
from .reshard import collect, deliver, gather, move
from .shard import Shard, ordered_for
from .spec import ShardingSpec


class ShardedTensor(ShardedTensorBase):
    """A tensor whose shards lie on the ranks of a process group.

    The constructor, called by all ranks of the group, allocates shards and leaves them unset, as ``torch.empty`` does.
    Operations work as on a plain tensor; plain tensors among their arguments count as equal on all ranks.

    Args:
        sharding_spec: How the tensor is cut and who holds what.
        size: Global size, as numbers or one sequence.
        process_group: The ranks that hold it; None is the default group.
        init_rrefs: Must be False: remote references over RPC are left out.
        properties: dtype, layout, requires_grad, pin_memory, memory_format.

    Raises:
        ShardingSpecError: The spec does not fit the size, or places shards on ranks outside the group.
    """

    ProcessGroupState = ProcessGroupState
    _process_group: dist.ProcessGroup

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
        **properties: Any,
    ) -> ShardedTensor:
        """See the class."""
        refuse_rrefs(init_rrefs)
        group = resolve(process_group)
        metadata = described_by(ShardedTensorBase(sharding_spec, *size, **properties)._metadata, group)
        check_layout(metadata.tensor_properties)
        return cls._wrap(sharding_spec, metadata, empty_parts(metadata), group)

    # --- construction from what the ranks have ------------------------------------------------------------------

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: Sequence[Shard],
        *global_size: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """The tensor of the shards that the ranks have; all ranks call it, each with its own shards, or none.

        Args:
            local_shards: This rank's shards, placed on this rank.
            global_size: Size of the whole; one dim may be None where every rank has one shard: they then lie one behind
                another along it, in the order of the ranks.
            process_group: The ranks that hold the tensor; None is the default group.
            init_rrefs: Must be False.

        Raises:
            LocalShardError, RankMismatchError, ShardingSpecError: On every rank, see ``assemble.describe``.
        """
        refuse_rrefs(init_rrefs)
        group = resolve(process_group)
        metadata, shards = describe(local_shards, flatten_size(global_size), group)
        check_ranks(metadata, group)
        parts = [shard.tensor for shard in shards] or empty_parts(metadata)
        spec = _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        return cls._wrap(spec, metadata, parts, group)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """The tensor of which every rank has its one shard, without communication and without a copy.

        Raises:
            LocalShardError: The local tensor has another size than the spec gives this rank, or is not contiguous.
        """
        refuse_rrefs(init_rrefs)
        group = resolve(process_group)
        properties = TensorProperties.create_from_tensor(local_tensor)
        metadata = described_by(sharding_spec.build_metadata(known_size(global_size), properties), group)
        own = [each for each in metadata.shards_metadata if each.rank == dist.get_rank()]
        if len(own) > 1:
            raise LocalShardError(
                f"the spec gives rank {dist.get_rank()} {len(own)} shards, one local tensor was given"
            )
        parts = [shard.tensor for shard in ordered_for([Shard(local_tensor, each) for each in own], metadata)]
        return cls._wrap(sharding_spec, metadata, parts or empty_parts(metadata), group)

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override]  # torch's order of arguments
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """The tensor of these shards and metadata, which are trusted to be the same on every rank; no communication.

        Raises:
            LocalShardError: The local shards are not those that the metadata give this rank.
            ShardingSpecError: The metadata overlap, leave a gap, or place shards outside the group.
        """
        refuse_rrefs(init_rrefs)
        group = resolve(process_group)
        metadata = described_by(sharded_tensor_metadata, group)
        check_layout(metadata.tensor_properties)
        shards = ordered_for(local_shards, metadata)
        spec = sharding_spec or _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        return cls._wrap(spec, metadata, [s.tensor for s in shards] or empty_parts(metadata), group)

    @classmethod
    def _scatter(
        cls, spec: ShardingSpec, tensor: torch.Tensor, src_rank: int, process_group: dist.ProcessGroup | None
    ) -> ShardedTensor:
        """Behind ``ShardingSpec.shard``: one collective brings every shard of ``src_rank``'s data to its holder."""
        group = resolve(process_group)
        properties = TensorProperties.create_from_tensor(tensor)
        metadata = described_by(spec.build_metadata(tensor.size(), properties), group)
        parts = deliver(tensor.detach(), metadata.layout, src_rank, comm_of(group, tensor.device.type))
        made = cls._wrap(spec, metadata, placed(parts, metadata), group)
        made.requires_grad = tensor.requires_grad
        return made

    def _with(self, parts: Sequence[torch.Tensor], *, stride: Sequence[int] | None = None) -> ShardedTensor:
        """The same layout around other local data, which may have another dtype or device."""
        metadata = self._metadata
        like = parts[0]
        properties = replace(metadata.tensor_properties, dtype=like.dtype, requires_grad=like.requires_grad)
        if properties != metadata.tensor_properties:
            metadata = replace(metadata, tensor_properties=properties)
        return self._wrap(self._sharding_spec, metadata, parts, self._process_group, stride=stride or self.stride())

    # --- access ---------------------------------------------------------------------------------------------------

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that hold the tensor."""
        return self._process_group

    @property
    def _comm(self) -> Comm:
        return comm_of(self._process_group, self._parts[0].device.type)

    def local_tensor(self) -> torch.Tensor:
        """The data of this rank's one shard.

        Raises:
            UnsupportedOpError: It has several, or none.
        """
        if len(self._local_shards) != 1:
            raise UnsupportedOpError(
                f"local_tensor() needs exactly one local shard, rank {dist.get_rank()} has {len(self._local_shards)}; "
                "use local_shards()"
            )
        return self._local_shards[0].tensor

    @property  # type: ignore[override]  # an attribute of torch.Tensor; the shards have it
    def grad(self) -> ShardedTensor | None:
        """The gradients of the shards, laid out alike; None where there is none yet."""
        grads = [part.grad for part in self._parts if part.is_leaf]
        found = [each for each in grads if each is not None]
        return self._with(found) if found and len(found) == len(self._parts) else None

    @grad.setter
    def grad(self, value: ShardedTensor | None) -> None:
        new: list[Any] = [None] * len(self._parts)
        if value is not None:
            new = laid_out_as(self, value)
        for part, each in zip(self._parts, new, strict=True):
            part.grad = each

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _get_preferred_device(self) -> torch.device:
        """Where this rank's shards lie, and so where collectives on them run."""
        return self._parts[0].device

    def remote_shards(self) -> dict[int, Any]:
        """Not here: raises UnsupportedOpError (docs/shard_api_parity.md says why)."""
        raise UnsupportedOpError("remote references over RPC are left out; use gather, full_tensor or reshard")

    # --- moving data ----------------------------------------------------------------------------------------------

    def resharded(self, spec: ShardingSpec) -> ShardedTensor:
        """A tensor of the same values laid out by ``spec``; differentiable, all ranks call it, this one stays as it is.

        Every element moves once, straight to its new holder, in one all-to-all; none at all if the layouts are equal
        (the shards are then shared).
        """
        metadata = described_by(
            spec.build_metadata(self.size(), self.metadata().tensor_properties), self._process_group
        )
        parts = move(self._parts, self._layout, metadata.layout, self._comm)
        return self._wrap(spec, metadata, placed(parts, metadata), self._process_group)

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Lay this very tensor out by another spec, whatever both specs are, and return it; all ranks call it.

        A leaf (a parameter) stays a leaf: its data and gradient move without a trace in the autograd graph.  Anything
        else keeps its history.  ``resharded`` returns a new tensor instead.
        """
        leaf, wanted = self.is_leaf, self.requires_grad
        gradient = self.grad
        with torch.set_grad_enabled(torch.is_grad_enabled() and not leaf):
            moved = self.resharded(resharding_spec)
        self._adopt(moved)
        if leaf and wanted:
            self._replace_parts([part.detach().requires_grad_() for part in self._parts])
        if gradient is not None:
            self.grad = gradient.resharded(resharding_spec)
        return self

    def _adopt(self, other: ShardedTensor) -> None:
        """Become what ``other`` is, in place."""
        self._sharding_spec, self._metadata, self._layout = other._sharding_spec, other._metadata, other._layout
        self._local_shards, self._anchor = list(other._local_shards), other._anchor

    def gather(  # type: ignore[override]  # torch's ShardedTensor takes Tensor.gather's name for this
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the full tensor into ``out`` on one rank; all ranks call it.

        Args:
            dst: Rank in the process group that gets the data.
            out: Where to, of the global size, on ``dst``; None on the other ranks.
            enforce_dtype: As ``dtype=out.dtype`` (deprecated).
            dtype: Type in which the data travel; ``out`` keeps its own.

        Raises:
            LocalShardError: ``out`` is missing on ``dst``, given elsewhere, or of another size: on every rank.
        """
        if enforce_dtype:
            warnings.warn("enforce_dtype is deprecated: pass dtype", FutureWarning, stacklevel=2)
        agree(
            self._process_group, {"dst": dst, "dtype": dtype}, gather_error(self._process_group, self.size(), dst, out)
        )
        with torch.no_grad():
            parts = [part if dtype is None else part.to(dtype) for part in self._parts]
            gather(parts, self._layout, dst, self._comm, out)

    def full_tensor(self) -> torch.Tensor:
        """The full tensor as a plain one, on every rank; differentiable, all ranks call it."""
        return collect(self._parts, self._layout, self.size(), self._comm)

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """As ``Tensor.to`` on every shard; all ranks call it with alike arguments.

        Returns this very tensor where nothing changes.  ``process_group`` names the group of the result.
        """
        group = kwargs.pop("process_group", None)
        args = tuple(arg._parts[0] if isinstance(arg, ShardedTensor) else arg for arg in args)
        parts = [part.to(*args, **kwargs) for part in self._parts]
        if group is None and all(new is old for new, old in zip(parts, self._parts, strict=True)):
            return self
        spec, metadata = self._sharding_spec, self._metadata
        if parts[0].device != self._parts[0].device:
            metadata = moved_to(metadata, devices_of_all(self._process_group, parts[0].device))
            spec = _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        properties = replace(metadata.tensor_properties, dtype=parts[0].dtype)
        return self._wrap(
            spec,
            replace(metadata, tensor_properties=properties),
            parts,
            resolve(group) if group else self._process_group,
        )

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: Any = None
    ) -> ShardedTensor:
        """The shards in CPU memory, on ``process_group`` (which must reach the same ranks) if one is given."""
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> ShardedTensor:
        """The shards on this rank's CUDA device, the current one if none is given."""
        target = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        return self.to(target, non_blocking=non_blocking, memory_format=memory_format, process_group=process_group)

    # --- conversion -----------------------------------------------------------------------------------------------

    def to_dtensor(self) -> Any:
        """The DTensor of the same shards, sharing them; differentiable, no communication.

        Raises:
            NotExpressibleError: The layout has no placements: several shards on a rank, or no grid.
        """
        return bridge.to_dtensor(self)

    @classmethod
    def from_dtensor(cls, dtensor: Any) -> ShardedTensor:
        """The ShardedTensor of a DTensor's shards, sharing them; differentiable, no communication.

        Raises:
            NotExpressibleError: The DTensor is replicated or partial along some mesh axis.
        """
        made: ShardedTensor = bridge.from_dtensor(cls, dtensor)
        return made

    # --- torch's protocols ----------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return ops.run(ShardedTensor, func, tuple(types), tuple(args), kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]  # the memo of copy.deepcopy holds anything
        copied = self._with([part.detach().clone().requires_grad_(part.requires_grad) for part in self._parts])
        memo[id(self)] = copied
        if self.grad is not None:
            gradient = self.grad
            copied.grad = gradient._with([part.clone() for part in gradient._parts])
        if getattr(self, "_is_param", False):
            copied.__dict__["_is_param"] = True  # what torch.nn.Parameter sets on a tensor of another class
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {
            "shards": [Shard(shard.tensor.detach(), shard.metadata) for shard in self._local_shards],
            "metadata": self.metadata(),
            "spec": self._sharding_spec,
            "group": ProcessGroupState.of(self._process_group),
            "marks": {"_is_param": True} if getattr(self, "_is_param", False) else {},  # as torch.nn.Parameter sets it
        }
        return load_pickled, (type(self), state)

    __create_write_items__ = checkpointable.create_write_items
    __create_chunk_list__ = checkpointable.create_chunk_list
    __get_tensor_shard__ = checkpointable.get_tensor_shard

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # noqa: ARG002, RUF100  # torch's
        kind = "Parameter containing ShardedTensor" if getattr(self, "_is_param", False) else "ShardedTensor"
        return (
            f"{kind}(size={tuple(self.size())}, dtype={self.dtype}, requires_grad={self.requires_grad}, "
            f"spec={self._sharding_spec}, local={[(s.metadata.shard_offsets, s.tensor) for s in self._local_shards]})"
        )


ShardingSpec.bind(ShardedTensor._scatter)
