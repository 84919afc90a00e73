"""ShardedTensor: a global tensor whose spec places its shards on the ranks of a process group.

The shards carry the autograd history and the gradients. The tensor around them has the global size
and no storage. Operations are in ops/, data movement is in ranks/reshard.py, and constructors are
in sharded_tensor_base.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shoal_dtensor import DTensor
from shoal_dtensor.internal import (
    ShardedKind,
    chunks_of,
    guard_memory_exports,
    install_state_dict_copies,
    write_items,
)
from shoal_mesh import Comm
from shoal_mesh.internal import html_table, kind_of, require

from ..errors import (
    ArgumentTypeError,
    CheckpointError,
    LocalShardError,
    SpecTypeError,
    UnsupportedOpError,
)
from ..ops import dispatch, via_dtensor
from ..ranks.process_groups import (
    Fact,
    ProcessGroupState,
    agree_on,
    check_rank,
    comm_of,
    members,
    resolve,
)
from ..ranks.reshard import collect, gather, move
from ..spec.metadata import ShardedTensorMetadata, ShardMetadata
from ..spec.specs import ShardingSpec
from .shard import Shard, checked_metadata, device_of, move_to_placements
from .sharded_tensor_base import ShardedTensorConstructors, load_pickled


class ShardedTensor(ShardedTensorConstructors):
    """A global tensor whose shards are on the ranks of a process group.

    All ranks of the group call the constructor. It allocates uninitialized shards, as
    ``torch.empty`` does, and does not communicate. Operations work as on a plain tensor. A plain
    tensor among their arguments must be equal on all ranks, except for the indices of embedding
    and embedding_bag (see ``replicated_indices``).

    Args:
        sharding_spec: The shards of the tensor and their placements.
        size: Global size, as integers or one sequence.
        process_group: The ranks that hold the tensor; None is the default group.
        init_rrefs: Must be False: remote references over RPC are not supported.
        properties: dtype, layout, requires_grad, pin_memory, memory_format.

    Raises:
        ArgumentTypeError: The spec is not a ShardingSpec, the size not a sequence of integers, or
            the group not a process group.
        ProcessGroupError: There is no default group, or this rank is not in the group.
        ShardingSpecError: The spec does not fit the size, or places shards on ranks outside the
            group.

    Example:
        >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> tensor = ShardedTensor(rows, 4, 3).fill_(2.0)
        >>> tensor.local_tensor().shape, (tensor + 1).sum()
        (torch.Size([2, 3]), tensor(36.))
    """

    # torch's ShardedTensor has this class as an attribute, under which programs find it. Pickled
    # tensors have an instance of it.
    ProcessGroupState = ProcessGroupState

    def _with_local_tensors(self, local_tensors: Sequence[torch.Tensor]) -> ShardedTensor:
        """Return a tensor of this layout with other local tensors, which may have another dtype.

        The result does not have memory of the global size. As its global stride it reports the
        stride of this tensor.
        """
        metadata = self._metadata
        first = local_tensors[0]
        properties = replace(
            metadata.tensor_properties, dtype=first.dtype, requires_grad=first.requires_grad
        )
        # Most operations keep the properties, and the result then shares the metadata.
        if properties != metadata.tensor_properties:
            metadata = replace(metadata, tensor_properties=properties)
        return self._wrap(
            self._sharding_spec,
            metadata,
            local_tensors,
            self._process_group,
            stride=self.stride(),
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that hold the tensor."""
        return self._process_group

    @property
    def _comm(self) -> Comm:
        # On a rank without shards, `_local_shards` is empty, but `_local_tensors` has the anchor.
        # So `_local_tensors[0]` exists on every rank of the group.
        return comm_of(self._process_group, self._local_tensors[0].device.type)

    def local_tensor(self) -> torch.Tensor:
        """Return the tensor of this rank's only shard.

        Raises:
            UnsupportedOpError: This rank has several shards, or none.
        """
        count = len(self._local_shards)
        if count != 1:
            raise UnsupportedOpError(
                f"local_tensor() needs exactly one local shard, but rank {dist.get_rank()} has "
                f"{count}; use local_shards()"
            )
        return self._local_shards[0].tensor

    @property  # type: ignore[override]  # torch.Tensor declares an attribute, not a property
    def grad(self) -> ShardedTensor | None:
        """The gradients of the shards, sharded by the same spec; None before the first backward."""
        grads = []
        for local in self._local_tensors:
            if not local.is_leaf or local.grad is None:
                return None
            grads.append(local.grad)
        # `grads` is empty for a tensor without a process group (`_wrap` with `group=None`), which
        # does not have local tensors.
        return self._with_local_tensors(grads) if grads else None

    @grad.setter
    def grad(self, value: ShardedTensor | None) -> None:
        local_grads: list[Any] = [None] * len(self._local_tensors)
        if value is not None:
            # A gradient of another layout is resharded.
            local_grads = dispatch.local_tensors_in_layout_of(self, value)
        for local, grad in zip(self._local_tensors, local_grads, strict=True):
            local.grad = grad

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _get_preferred_device(self) -> torch.device:
        """Return the device of this rank's shards, and of the collectives on them."""
        return self._local_tensors[0].device

    def remote_shards(self) -> dict[int, Any]:
        """Refuse remote references, which are not supported (docs/shard_api_parity.md).

        Raises:
            UnsupportedOpError: Always.
        """
        raise UnsupportedOpError(
            "remote references over RPC are not supported; use gather, full_tensor or reshard"
        )

    def resharded(self, spec: ShardingSpec) -> ShardedTensor:
        """Return the same values sharded by ``spec``; all ranks call it.

        One all-to-all sends every element once, from its old to its new rank; it is differentiable.
        If the layouts are equal, nothing is sent (``reshard.move``), and the result shares the
        shards.

        Raises:
            SpecTypeError: ``spec`` is not a ShardingSpec.
            ShardingSpecError: ``spec`` does not fit the size or the group.
            RankMismatchError: Ranks pass other specs; they are compared in the all-to-all.
        """
        return self._resharded(spec, "resharded")

    def _resharded(self, spec: ShardingSpec, facts: str) -> ShardedTensor:
        """Return the same values sharded by ``spec``; all ranks must state the same ``facts``."""
        require(
            spec, ShardingSpec, "ShardedTensor.resharded: spec is a ShardingSpec", SpecTypeError
        )
        properties = self.metadata().tensor_properties
        group = self._process_group
        metadata = checked_metadata(spec.build_metadata(self.size(), properties), group)
        moved = move(self._local_tensors, self._layout, metadata.layout, self._comm, facts=facts)
        # The placements of the new spec may name other devices.
        local_tensors = move_to_placements(moved, metadata)
        return self._wrap(spec, metadata, local_tensors, group)

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Shard this tensor by another spec, in place; all ranks call it.

        A leaf (a parameter) stays a leaf: its data and its gradient move outside the autograd
        graph. Any other tensor keeps its history. ``resharded`` returns a new tensor instead.

        Returns:
            This tensor.

        Raises:
            ArgumentTypeError: ``resharding_spec`` is not a ShardingSpec.
            ShardingSpecError: The spec does not fit the size or the group.
            RankMismatchError: Ranks pass other specs, or some have a gradient and others do not.

            The tensor is unchanged then.
        """
        is_leaf = self.is_leaf
        requires_grad = self.requires_grad
        gradient = self.grad
        records_move = torch.is_grad_enabled() and not is_leaf
        with torch.set_grad_enabled(records_move):
            facts = "without a gradient" if gradient is None else "with a gradient"
            moved = self._resharded(resharding_spec, facts)
        # This object becomes the result: its local tensors or anchor, its metadata and its spec are
        # in `vars`. Its size and dtype, which are not, are equal to those of the result.
        vars(self).update(vars(moved))
        if is_leaf and requires_grad:
            leaves = [local.detach().requires_grad_() for local in self._local_tensors]
            self._set_local_tensors(leaves)
        if gradient is not None:
            self.grad = gradient.resharded(resharding_spec)
        return self

    def gather(  # type: ignore[override]  # as in torch's ShardedTensor, not as Tensor.gather
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the global tensor into the plain tensor ``out`` on rank ``dst``; all ranks call it.

        Args:
            dst: The rank that receives the tensor, as a rank in the process group.
            out: A plain tensor of the global size on ``dst``; None on the other ranks.
            enforce_dtype: Deprecated and without effect: values are always converted to the dtype
                of ``out``. The warning refers to ``dtype``, as torch's warning does.
            dtype: Element type in which the shards are sent; ``out`` keeps its own.

        Raises:
            ArgumentTypeError: An argument has a wrong type.
            LocalShardError: ``out`` is missing on ``dst``, given on another rank, of another size,
                or not writable.
            ProcessGroupError: ``dst`` is not a rank of the group.
            RankMismatchError: ``dst`` or ``dtype`` differs between ranks.

            Each is raised on every rank.
        """
        if enforce_dtype:
            warnings.warn("enforce_dtype is deprecated: pass dtype", FutureWarning, stacklevel=2)

        # `agree_on` calls this function on every rank. If it raises on one rank, all ranks raise.
        def check_and_describe() -> dict[str, Any]:
            self._check_gather(dst, out, dtype, enforce_dtype)
            return {"dst": dst, "dtype": dtype}

        agree_on(self._process_group, check_and_describe)
        with torch.no_grad():
            local_tensors = self._local_tensors
            if dtype is not None:
                local_tensors = [local.to(dtype) for local in local_tensors]
            gather(local_tensors, self._layout, self.size(), dst, comm=self._comm, out=out)

    def _check_gather(self, dst: Any, out: Any, dtype: Any, enforce_dtype: Any) -> None:
        check_rank("gather", "dst", dst, self._process_group)
        require(out, torch.Tensor | None, "gather: out is a Tensor or None", ArgumentTypeError)
        require(enforce_dtype, bool, "gather: enforce_dtype is a bool", ArgumentTypeError)
        require(
            dtype, torch.dtype | None, "gather: dtype is a torch.dtype or None", ArgumentTypeError
        )
        if dist.get_rank(self._process_group) != dst:
            if out is not None:
                raise LocalShardError(f"gather: out must be None on every rank but dst={dst}")
            return
        if not self._can_hold(out):
            raise LocalShardError(
                f"gather: on dst={dst}, out must be a plain tensor of shape {tuple(self.size())} "
                "in which every element has its own memory (not meta, not expanded), got "
                f"{kind_of(out)}"
            )

    def _can_hold(self, out: Any) -> bool:
        """Tell whether ``out`` is a plain tensor of this size in which every element has memory."""
        if type(out) not in (torch.Tensor, torch.nn.Parameter):
            return False
        if out.is_meta or out.size() != self.size():
            return False
        # A dim of stride 0 is expanded: its elements share memory.
        dims = zip(out.size(), out.stride(), strict=True)
        return all(size <= 1 or stride != 0 for size, stride in dims)

    def full_tensor(self) -> torch.Tensor:
        """Return the plain global tensor on every rank; all ranks call it.

        It is differentiable. The gradient of the result must be equal on all ranks; each rank keeps
        the part of its own shards.
        """
        return collect(self._local_tensors, self._layout, self.size(), self._comm)

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """Convert every shard by ``Tensor.to``; all ranks call it with the same arguments.

        Args:
            args: See ``Tensor.to``; a ShardedTensor among them stands for its dtype and device.
            kwargs: See ``Tensor.to``; ``process_group`` is the group of the result, with the same
                ranks.

        Returns:
            This tensor if nothing changes, else a new tensor. If the device changes, the placements
            of the new tensor name the device to which each rank has moved its shards.

        Raises:
            ArgumentTypeError: ``process_group`` is not a process group.
            RankMismatchError: The ranks move to different types of devices.
        """
        group = kwargs.pop("process_group", None)
        local_args: list[Any] = []
        for argument in args:
            is_sharded = isinstance(argument, ShardedTensor)
            local_args.append(argument._local_tensors[0] if is_sharded else argument)
        old_tensors = self._local_tensors
        local_tensors = [local.to(*local_args, **kwargs) for local in old_tensors]
        first = local_tensors[0]
        target = local_args[0] if local_args else kwargs.get("device", kwargs.get("other"))
        metadata = self._metadata
        if self._may_move(target, first.device):
            metadata = self._metadata_on(first.device)
        has_moved = metadata is not self._metadata
        pairs = zip(local_tensors, old_tensors, strict=True)
        if group is None and not has_moved and all(new is old for new, old in pairs):
            return self
        # `_wrap` infers the spec of a tensor that has moved from its metadata.
        spec = None if has_moved else self._sharding_spec
        properties = replace(metadata.tensor_properties, dtype=first.dtype)
        metadata = replace(metadata, tensor_properties=properties)
        group = resolve(group) if group else self._process_group
        return self._wrap(spec, metadata, local_tensors, group)

    def _may_move(self, target: Any, device: torch.device) -> bool:
        """Tell whether ``to(target)`` may move a shard of any rank; the same on all ranks.

        Args:
            target: The first argument of ``to``: a device, a tensor, a dtype or None.
            device: The device of this rank's shards after ``to``.
        """
        if not isinstance(target, torch.device | str | int | torch.Tensor):
            return False
        # The own shards do not decide: cuda:0 is the device of rank 0, and a new one for rank 1.
        # Only on the CPU, which has one device, do the placements show that no rank moves.
        device_types = {device_of(shard).type for shard in self._metadata.shards_metadata}
        return {device.type, *device_types} != {"cpu"}

    def _metadata_on(self, device: torch.device) -> ShardedTensorMetadata:
        """Return the metadata after a move of this rank's shards to a device; all ranks call it.

        If no rank has moved, return the metadata of this tensor.
        """
        group = self._process_group
        # A rank may have shards on several devices, of which some move.
        is_moved = any(local.device != device for local in self._local_tensors)
        # All ranks must move to one type of device. The devices themselves may differ.
        facts = {
            "device type": device.type,
            "device": Fact(device, compare=False),
            "moved": Fact(is_moved, compare=False),
        }
        reports = agree_on(group, lambda: facts)
        if not any(report["moved"] for report in reports):
            return self._metadata
        devices = [report["device"] for report in reports]
        device_of_rank = dict(zip(members(group), devices, strict=True))
        shards = []
        for shard in self._metadata.shards_metadata:
            placement = f"rank:{shard.rank}/{device_of_rank[shard.rank]}"
            shards.append(ShardMetadata(shard.shard_offsets, shard.shard_sizes, placement))
        return replace(self._metadata, shards_metadata=shards)

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: Any = None
    ) -> ShardedTensor:
        """Move the shards to CPU memory; see ``to``."""
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> ShardedTensor:
        """Move the shards to a CUDA device of this rank, by default the current one; see ``to``."""
        if device is None:
            target = torch.device("cuda", torch.cuda.current_device())
        else:
            target = torch.device(device)
        return self.to(
            target,
            non_blocking=non_blocking,
            memory_format=memory_format,
            process_group=process_group,
        )

    def to_dtensor(self) -> Any:
        """Wrap the same shards in a DTensor; differentiable, no communication.

        Raises:
            NotExpressibleError: No placements of a DTensor describe the layout, because a rank has
                several shards, or because the shards are not the cells of a grid.

        Example:
            >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
            >>> ones(rows, 4, 3).to_dtensor().placements
            (Shard(dim=0),)
        """
        return via_dtensor.to_dtensor(self)

    @classmethod
    def from_dtensor(cls, dtensor: Any) -> ShardedTensor:
        """Wrap the shards of a DTensor in a ShardedTensor; differentiable, no communication.

        Args:
            dtensor: A shoal_dtensor.DTensor, sharded along every mesh axis of more than one rank.

        Raises:
            ArgumentTypeError: ``dtensor`` is not a DTensor of shoal_dtensor.
            NotExpressibleError: ``dtensor`` is replicated or partial along some mesh axis, or has
                no dims.

        Example:
            >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
            >>> ShardedTensor.from_dtensor(ones(rows, 4).to_dtensor() * 2).full_tensor()
            tensor([2., 2., 2., 2.])
        """
        require(
            dtensor, DTensor, "ShardedTensor.from_dtensor: dtensor is a DTensor", ArgumentTypeError
        )
        result: ShardedTensor = via_dtensor.from_dtensor(cls, dtensor)
        return result

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        return dispatch.run_function(
            ShardedTensor, func, tuple(types), tuple(args), kwargs=kwargs or {}
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        known: ShardedTensor | None = memo.get(id(self))
        if known is not None:
            return known
        clones = []
        for local in self._local_tensors:
            clone = local.detach().clone()
            clones.append(clone.requires_grad_(local.requires_grad))
        copied = self._with_local_tensors(clones)
        gradient = self.grad
        memo[id(self)] = copied
        if gradient is not None:
            gradients = [local.clone() for local in gradient._local_tensors]
            copied.grad = gradient._with_local_tensors(gradients)
        if getattr(self, "_is_param", False):
            # torch.nn.Parameter sets this attribute on tensors of other classes
            copied.__dict__["_is_param"] = True
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        shards = [Shard(shard.tensor.detach(), shard.metadata) for shard in self._local_shards]
        # torch.nn.Parameter sets this attribute on tensors of other classes
        is_parameter = getattr(self, "_is_param", False)
        state = {
            "shards": shards,
            "metadata": self.metadata(),
            "spec": self._sharding_spec,
            "group": ProcessGroupState.of(self._process_group),
            "marks": {"_is_param": True} if is_parameter else {},
        }
        return load_pickled, (type(self), state)

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        return write_items(fqn, self.__create_chunk_list__(), self.size(), self._local_tensors[0])

    def _filled_shards(self) -> list[Shard]:
        """Return the local shards with elements.

        Checkpoints leave out empty shards: they have the offsets of the next shard, and the index
        of a checkpoint has one entry for each offset.
        """
        return [shard for shard in self._local_shards if shard.tensor.numel()]

    def __create_chunk_list__(self) -> list[Any]:
        return chunks_of(shard.metadata.box for shard in self._filled_shards())

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        tensors = {}
        for shard in self._filled_shards():
            tensors[tuple(shard.metadata.shard_offsets)] = shard.tensor
        offset = None if index.offset is None else tuple(index.offset)
        if offset not in tensors:
            raise CheckpointError(
                f"{index.fqn}: no local shard begins at {index.offset}; local shards begin at "
                f"{[*tensors]}"
            )
        # The checkpoint reads this tensor, or writes it in place.
        return tensors[offset].detach()

    def __repr__(  # type: ignore[override]  # torch has no type for it
        self,
        *,
        tensor_contents: Any = None,  # noqa: ARG002, RUF100  # torch passes it
    ) -> str:
        is_parameter = getattr(self, "_is_param", False)
        class_name = "Parameter containing ShardedTensor" if is_parameter else "ShardedTensor"
        size = tuple(self.size())
        local = [(shard.metadata.shard_offsets, shard.tensor) for shard in self._local_shards]
        return (
            f"{class_name}(size={size}, dtype={self.dtype}, requires_grad={self.requires_grad}, "
            f"spec={self._sharding_spec}, local={local})"
        )

    def _repr_html_(self) -> str:
        """Return the shards of all ranks as a table for notebooks, without their values."""
        shards = self._metadata.shards_metadata
        rows = [(shard.placement, shard.shard_offsets, shard.shard_sizes) for shard in shards]
        caption = f"ShardedTensor(size={tuple(self.size())}, dtype={self.dtype})"
        return html_table(rows, header=("placement", "offsets", "sizes"), caption=caption)

    @staticmethod
    def _install() -> None:
        """Have torch's copies of state dicts copy the shards, and its exports refuse the tensor."""

        def rebuild(tensor: ShardedTensor, shards: list[torch.Tensor]) -> Any:
            # outside of the group there are no shards
            return tensor._with_local_tensors(shards) if shards else tensor.detach()

        def parts(tensor: ShardedTensor) -> list[torch.Tensor]:
            return [local.detach() for local in tensor._local_tensors]

        def whole(tensor: ShardedTensor) -> torch.Tensor:
            return tensor.full_tensor().detach()

        install_state_dict_copies(ShardedKind(ShardedTensor, parts, rebuild, whole))
        guard_memory_exports(ShardedTensor, ShardedTensor.data_ptr)


ShardingSpec._scatter = ShardedTensor._scatter
