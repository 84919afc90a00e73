"""ShardedTensor: one global tensor whose shards are on the ranks of a process group, as its spec says.

The shards carry the autograd history and the gradients. The tensor around them has the global size
and no storage. Operations are in ops/, data movement in ranks/reshard.py, constructors in
sharded_tensor_base.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shoal_dtensor import DTensor
from shoal_dtensor.internal import chunks_of, write_items
from shoal_mesh import Comm
from shoal_mesh.internal import kind_of

from ..arguments import expect
from ..errors import CheckpointError, LocalShardError, SpecTypeError, UnsupportedOpError
from ..ops import dispatch, via_dtensor
from ..ranks.process_groups import (
    ProcessGroupState,
    agree_on,
    check_rank,
    comm_of,
    members,
    resolve,
)
from ..ranks.reshard import collect, gather, move
from ..spec.metadata import ShardMetadata
from ..spec.specs import ShardingSpec
from .shard import Shard, checked_metadata, on_placements
from .sharded_tensor_base import ShardedTensorConstructors, load_pickled


class ShardedTensor(ShardedTensorConstructors):
    """A global tensor whose shards are on the ranks of a process group.

    The constructor, called by all ranks of the group, allocates uninitialised shards, as
    ``torch.empty`` does; it does not communicate. Operations work as on a plain tensor; a plain
    tensor among their arguments is taken to be replicated: equal on all ranks, except for the
    indices of embedding and embedding_bag (``replicated_indices``).

    Args:
        sharding_spec: The shards of the tensor and their placements.
        size: Global size, as integers or one sequence.
        process_group: The ranks that hold the tensor; None is the default group.
        init_rrefs: Must be False: remote references over RPC are not supported.
        properties: dtype, layout, requires_grad, pin_memory, memory_format.

    Raises:
        ArgumentTypeError: The spec is no ShardingSpec, the size is no sequence of integers, the
            group no process group.
        ProcessGroupError: There is no default group, or this rank is not in the group.
        ShardingSpecError: The spec does not fit the size, or places shards on ranks outside the
            group.

    Example:
        >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> tensor = ShardedTensor(rows, 4, 3).fill_(2.0)
        >>> tensor.local_tensor().shape, (tensor + 1).sum()
        (torch.Size([2, 3]), tensor(36.))
    """

    ProcessGroupState = ProcessGroupState

    def _with(
        self, local_tensors: Sequence[torch.Tensor], *, stride: Sequence[int] | None = None
    ) -> ShardedTensor:
        """The tensor with this layout and other local tensors, which may have another dtype."""
        metadata = self._metadata
        like = local_tensors[0]
        properties = replace(
            metadata.tensor_properties, dtype=like.dtype, requires_grad=like.requires_grad
        )
        if properties != metadata.tensor_properties:
            metadata = replace(metadata, tensor_properties=properties)
        stride = stride or self.stride()
        return self._wrap(
            self._sharding_spec, metadata, local_tensors, self._process_group, stride=stride
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that hold the tensor."""
        return self._process_group

    @property
    def _comm(self) -> Comm:
        return comm_of(self._process_group, self._local_tensors[0].device.type)

    def local_tensor(self) -> torch.Tensor:
        """The tensor of this rank's only shard.

        Raises:
            UnsupportedOpError: This rank has several shards, or none.
        """
        if len(self._local_shards) != 1:
            raise UnsupportedOpError(
                f"local_tensor() needs exactly one local shard, rank {dist.get_rank()} has "
                f"{len(self._local_shards)}; "
                "use local_shards()"
            )
        return self._local_shards[0].tensor

    @property  # type: ignore[override]  # an attribute of torch.Tensor; the shards have it
    def grad(self) -> ShardedTensor | None:
        """The gradients of the shards, sharded by the same spec; None before the first backward."""
        grads = [local.grad for local in self._local_tensors if local.is_leaf]
        present = [each for each in grads if each is not None]
        return self._with(present) if present and len(present) == len(self._local_tensors) else None

    @grad.setter
    def grad(self, value: ShardedTensor | None) -> None:
        new: list[Any] = [None] * len(self._local_tensors)
        if value is not None:
            new = dispatch.with_layout_of(self, value)
        for local, each in zip(self._local_tensors, new, strict=True):
            local.grad = each

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _get_preferred_device(self) -> torch.device:
        """The device of this rank's shards, and of the collectives on them."""
        return self._local_tensors[0].device

    def remote_shards(self) -> dict[int, Any]:
        """Remote references are not supported (docs/shard_api_parity.md).

        Raises:
            UnsupportedOpError: Always.
        """
        raise UnsupportedOpError(
            "remote references over RPC are not supported; use gather, full_tensor or reshard"
        )

    def resharded(self, spec: ShardingSpec) -> ShardedTensor:
        """Sharded -> sharded by ``spec``: a new tensor of the same values; differentiable, all ranks call it.

        One all-to-all sends every element once, from its old to its new rank. Equal layouts do not
        communicate: the result then shares the shards.

        Raises:
            SpecTypeError: It is no ShardingSpec.
            ShardingSpecError: It does not fit the size or the group.
        """
        expect("ShardedTensor.resharded", "spec", spec, ShardingSpec, error=SpecTypeError)
        properties = self.metadata().tensor_properties
        metadata = checked_metadata(
            spec.build_metadata(self.size(), properties), self._process_group
        )
        local_tensors = move(self._local_tensors, self._layout, metadata.layout, self._comm)
        return self._wrap(
            spec, metadata, on_placements(local_tensors, metadata), self._process_group
        )

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Sharded -> sharded by another spec, in place; returns this tensor; all ranks call it.

        A leaf (a parameter) stays a leaf: its data and its gradient move outside the autograd
        graph. Any other tensor keeps its history. ``resharded`` returns a new tensor instead.

        Raises:
            ArgumentTypeError: It is no ShardingSpec.
            ShardingSpecError: It does not fit the size or the group; the tensor is unchanged.
        """
        leaf = self.is_leaf
        requires_grad = self.requires_grad
        gradient = self.grad
        with torch.set_grad_enabled(torch.is_grad_enabled() and not leaf):
            moved = self.resharded(resharding_spec)
        vars(self).update(vars(moved))
        if leaf and requires_grad:
            self._set_local_tensors(
                [local.detach().requires_grad_() for local in self._local_tensors]
            )
        if gradient is not None:
            self.grad = gradient.resharded(resharding_spec)
        return self

    def gather(  # type: ignore[override]  # torch's ShardedTensor takes Tensor.gather's name for this
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Sharded -> plain on ``dst``: the global tensor is written into ``out``; all ranks call it.

        Args:
            dst: Rank in the process group that receives the tensor.
            out: A plain tensor of the global size on ``dst``; None on the other ranks.
            enforce_dtype: As ``dtype=out.dtype`` (deprecated).
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

        def facts() -> dict[str, Any]:
            self._check_gather(dst, out, dtype, enforce_dtype)
            return {"dst": dst, "dtype": dtype}

        agree_on(self._process_group, facts)
        with torch.no_grad():
            local_tensors = [
                local if dtype is None else local.to(dtype) for local in self._local_tensors
            ]
            gather(local_tensors, self._layout, self.size(), dst, self._comm, out)

    def _check_gather(self, dst: Any, out: Any, dtype: Any, enforce_dtype: Any) -> None:
        check_rank("gather", "dst", dst, self._process_group)
        expect("gather", "out", out, torch.Tensor, optional=True)
        expect("gather", "enforce_dtype", enforce_dtype, bool)
        expect("gather", "dtype", dtype, torch.dtype, optional=True)
        if dist.get_rank(self._process_group) != dst:
            if out is not None:
                raise LocalShardError(f"gather: out must be None on every rank but dst={dst}")
            return
        plain = (
            type(out) in (torch.Tensor, torch.nn.Parameter)
            and out.size() == self.size()
            and not out.is_meta
        )
        if not plain or any(
            n > 1 and step == 0 for n, step in zip(out.size(), out.stride(), strict=True)
        ):
            kind = "None" if out is None else f"a {kind_of(out)} of size {tuple(out.size())}"
            raise LocalShardError(
                f"gather: out must be a plain tensor with memory of size {tuple(self.size())} on "
                f"dst={dst}, got {kind}"
            )

    def full_tensor(self) -> torch.Tensor:
        """Sharded -> replicated: the global tensor as a plain one on every rank; differentiable, all ranks call it.

        Every rank's gradient of the result is taken to be the same; each keeps that of its own
        shards.
        """
        return collect(self._local_tensors, self._layout, self.size(), self._comm)

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """The tensor with every shard converted by ``Tensor.to``; all ranks call it with the same arguments.

        Args:
            args: As for ``Tensor.to``; a ShardedTensor stands for its dtype and device.
            kwargs: As for ``Tensor.to``; ``process_group`` is the group of the result, with the
                same ranks.

        Returns:
            This tensor if nothing changes, else a new one; placements name each rank's own device.

        Raises:
            ArgumentTypeError: ``process_group`` is no process group.
            RankMismatchError: The ranks move to different types of devices.
        """
        group = kwargs.pop("process_group", None)
        args = tuple(
            arg._local_tensors[0] if isinstance(arg, ShardedTensor) else arg for arg in args
        )
        local_tensors = [local.to(*args, **kwargs) for local in self._local_tensors]
        if group is None and all(
            new is old for new, old in zip(local_tensors, self._local_tensors, strict=True)
        ):
            return self
        spec: ShardingSpec | None = self._sharding_spec
        metadata = self._metadata
        device = local_tensors[0].device
        if device != self._local_tensors[0].device:
            reports = agree_on(
                self._process_group, lambda: {"device type": device.type, "~device": device}
            )
            devices = dict(
                zip(
                    members(self._process_group),
                    (report["~device"] for report in reports),
                    strict=True,
                )
            )
            shards = [
                ShardMetadata(
                    each.shard_offsets, each.shard_sizes, f"rank:{each.rank}/{devices[each.rank]}"
                )
                for each in metadata.shards_metadata
            ]
            spec = None
            metadata = replace(metadata, shards_metadata=shards)
        properties = replace(metadata.tensor_properties, dtype=local_tensors[0].dtype)
        metadata = replace(metadata, tensor_properties=properties)
        return self._wrap(
            spec, metadata, local_tensors, resolve(group) if group else self._process_group
        )

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: Any = None
    ) -> ShardedTensor:
        """The tensor with its shards in CPU memory; see ``to``."""
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> ShardedTensor:
        """The tensor with its shards on this rank's CUDA device, by default the current one; see ``to``."""
        target = (
            torch.device("cuda", torch.cuda.current_device())
            if device is None
            else torch.device(device)
        )
        return self.to(
            target,
            non_blocking=non_blocking,
            memory_format=memory_format,
            process_group=process_group,
        )

    def to_dtensor(self) -> Any:
        """The DTensor of the same shards, which it shares; differentiable, no communication.

        Raises:
            NotExpressibleError: The layout has no placements: several shards on one rank, or no
                grid.

        Example:
            >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
            >>> ones(rows, 4, 3).to_dtensor().placements
            (Shard(dim=0),)
        """
        return via_dtensor.to_dtensor(self)

    @classmethod
    def from_dtensor(cls, dtensor: Any) -> ShardedTensor:
        """The ShardedTensor of the shards of a DTensor, which it shares; differentiable, no communication.

        Args:
            dtensor: A shoal_dtensor.DTensor, sharded along every mesh axis of more than one rank.

        Raises:
            ArgumentTypeError: It is no DTensor of shoal_dtensor.
            NotExpressibleError: It is replicated or partial along some mesh axis, or has no dims.

        Example:
            >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
            >>> ShardedTensor.from_dtensor(ones(rows, 4).to_dtensor() * 2).full_tensor()
            tensor([2., 2., 2., 2.])
        """
        expect("ShardedTensor.from_dtensor", "dtensor", dtensor, DTensor)
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
        return dispatch.run(ShardedTensor, func, tuple(types), tuple(args), kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]  # the memo of copy.deepcopy holds anything
        clones = [
            local.detach().clone().requires_grad_(local.requires_grad)
            for local in self._local_tensors
        ]
        copied = self._with(clones)
        gradient = self.grad
        memo[id(self)] = copied
        if gradient is not None:
            copied.grad = gradient._with([local.clone() for local in gradient._local_tensors])
        if getattr(self, "_is_param", False):
            # set by torch.nn.Parameter on tensors of other classes
            copied.__dict__["_is_param"] = True
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {
            "shards": [
                Shard(shard.tensor.detach(), shard.metadata) for shard in self._local_shards
            ],
            "metadata": self.metadata(),
            "spec": self._sharding_spec,
            "group": ProcessGroupState.of(self._process_group),
            # set by torch.nn.Parameter
            "marks": {"_is_param": True} if getattr(self, "_is_param", False) else {},
        }
        return load_pickled, (type(self), state)

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        return write_items(fqn, self.__create_chunk_list__(), self.size(), self._local_tensors[0])

    # Shards with elements alone: an empty one has the offsets of the next, which a checkpoint's
    # index has once.
    def __create_chunk_list__(self) -> list[Any]:
        return chunks_of(shard.metadata.box for shard in self._local_shards if shard.tensor.numel())

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        filled = (shard for shard in self._local_shards if shard.tensor.numel())
        local = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in filled}
        if index.offset is None or tuple(index.offset) not in local:
            raise CheckpointError(
                f"{index.fqn}: no local shard begins at {index.offset}; they begin at {[*local]}"
            )
        return local[tuple(index.offset)].detach()  # it is read, or written in place

    # torch's
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # noqa: ARG002, RUF100
        kind = (
            "Parameter containing ShardedTensor"
            if getattr(self, "_is_param", False)
            else "ShardedTensor"
        )
        return (
            f"{kind}(size={tuple(self.size())}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad}, "
            f"spec={self._sharding_spec}, "
            f"local={[(s.metadata.shard_offsets, s.tensor) for s in self._local_shards]})"
        )


ShardingSpec._scatter = ShardedTensor._scatter
