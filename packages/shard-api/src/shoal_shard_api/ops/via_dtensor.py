"""A function of ShardedTensors by way of DTensors: convert the arguments, run it, convert its results.

All arguments are converted to one mesh: that of the first tensor whose layout has placements.  Pointwise functions,
detected by a run on meta tensors, need no placements: they are computed on each shard alone, in any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from shoal_dtensor import DTensor, Replicate, Shard, implicit_replication
from shoal_dtensor.internal import Box, ScopedValue, TorchDispatchMode, pytree
from shoal_mesh import DeviceMesh

from ..arguments import expect
from ..errors import NotExpressibleError, UnsupportedOpError
from ..ranks.process_groups import one_dim_mesh
from . import dtensor_conversion

_MAY_RESHARD = ScopedValue("shoal_implicit_reshard", False)
_ALSO_POINTWISE = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten._to_copy.default}


@contextmanager
def implicit_reshard(allow: bool = True) -> Iterator[None]:
    """Inside the ``with``, a tensor whose layout has no placements is moved to Shard(0) for an op that needs them.

    Args:
        allow: False refuses such ops again, which is the default outside.

    Example:
        >>> both_on_one = EnumerableShardingSpec(
        ...     [ShardMetadata([0], [2], "rank:0/cpu"), ShardMetadata([2], [2], "rank:0/cpu")])
        >>> with implicit_reshard():
        ...     ones(both_on_one, 4).cumsum(0).full_tensor()
        tensor([1., 2., 3., 4.])
    """
    expect("implicit_reshard", "allow", allow, bool)
    with _MAY_RESHARD.entered(allow):
        yield


class DTensorCall:
    """One function call by way of DTensors: the grids of its tensors, and which of them it writes to."""

    def __init__(self, cls: Any, func: Callable[..., Any], tensors: Sequence[Any]) -> None:
        self.cls, self.func, self.tensors = cls, func, tensors
        self.name: str = str(getattr(func, "__name__", func))
        self.initializer: bool = getattr(func, "__module__", "") == "torch.nn.init"
        self.in_place: bool = self.name == "__setitem__" or (self.name.endswith("_") and not self.name.endswith("__"))
        self.specs: dict[int, Any] = dict.fromkeys(map(id, tensors))  # by id; None where a layout has no placements
        self.problem = ""  # why one of them has none
        for each in tensors:
            try:
                self.specs[id(each)] = dtensor_conversion.spec_for(each)
            except NotExpressibleError as error:
                self.problem = self.problem or str(error)

    @cached_property
    def home(self) -> DeviceMesh:
        """The mesh of the first tensor that has placements, else the 1-D mesh of all ranks."""
        first = self.tensors[0]
        meshes = (spec.mesh for spec in self.specs.values() if spec is not None)
        return next(meshes, None) or one_dim_mesh(first.process_group, first._local_tensors[0].device.type)

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, plain: Callable[[DTensor], Any] | None = None
    ) -> Any:
        """The result: refused, computed shard by shard, or by way of DTensors; ``plain`` makes one with dims plain."""
        self._refuse_leaf(args, kwargs)
        if self.problem:
            if is_pointwise(self.func, args, kwargs, self.tensors):
                return run_shardwise(self.func, args, kwargs, self.tensors)
            self.check_layouts()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.initializer):
            return self._run_at_home(args, kwargs, plain)

    def _run_at_home(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[[DTensor], Any] | None
    ) -> Any:
        dtensors = {id(each): self._on_mesh(each) for each in self.tensors}
        before = {key: dtensor.grad_fn for key, dtensor in dtensors.items()}
        originals = {id(dtensors[id(each)]): each for each in self.tensors}

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, self.cls):
                return dtensors[id(leaf)]
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.dim() > 0:
                return DTensor.from_local(leaf, self.home, [Replicate()] * self.home.ndim, run_check=False)
            return leaf

        def back(leaf: Any) -> Any:
            """A result as the caller gets it: plain or a ShardedTensor."""
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) in originals:
                return originals[id(leaf)]
            if leaf.dim() == 0:
                return leaf.full_tensor()
            if plain is not None:
                return plain(leaf)
            if not all(placement.is_shard() for placement in leaf.placements):
                leaf = leaf.redistribute(placements=self._placements_at_home(leaf.shape) or _shard_further(leaf))
            return dtensor_conversion.from_dtensor(self.cls, leaf, like=self.tensors[0])

        with implicit_replication():  # plain tensors that the function creates
            result = self.func(*pytree.tree_map(convert, args), **pytree.tree_map(convert, kwargs))
        for each in self.tensors:
            self._write_back(each, dtensors[id(each)], before[id(each)])
        return pytree.tree_map(back, result)

    def _refuse_leaf(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a write to a leaf that requires grad.  The op writes to a view of the shard, which torch allows."""
        if self.initializer or not torch.is_grad_enabled():
            return
        written = [args[0]] if self.in_place and args else []
        written += pytree.tree_leaves(kwargs.get("out"))
        if any(isinstance(each, self.cls) and each.requires_grad and each.is_leaf for each in written):
            raise UnsupportedOpError(
                f"{self.name}: a leaf ShardedTensor that requires grad cannot be written in place; use torch.no_grad()"
            )

    def check_layouts(self) -> None:
        """Raise NotExpressibleError for a layout without placements, unless it may be moved."""
        if self.problem and not _MAY_RESHARD.own():
            raise NotExpressibleError(
                f"{self.name}: {self.problem}. reshard() to a ChunkShardingSpec first, or use implicit_reshard()"
            )

    def _at_home(self, tensor: Any) -> bool:
        spec = self.specs[id(tensor)]
        return spec is not None and spec.mesh == self.home

    def _on_mesh(self, tensor: Any) -> DTensor:
        """The DTensor on the home mesh; a tensor of another layout takes the placements of one of its shape there."""
        if self._at_home(tensor):
            return dtensor_conversion.to_dtensor(tensor)
        spec = self.specs[id(tensor)]
        along = (Shard(0 if spec is None else spec.placements[0].dim),) * self.home.ndim
        return dtensor_conversion.to_dtensor_on(tensor, self.home, self._placements_at_home(tensor.shape) or along)

    def _placements_at_home(self, shape: torch.Size) -> tuple[Shard, ...] | None:
        """The placements of an argument of this shape on the home mesh, None if there is none."""
        fits = (each for each in self.tensors if each.shape == shape and self._at_home(each))
        return next((self.specs[id(each)].placements for each in fits), None)

    def _write_back(self, tensor: Any, dtensor: DTensor, before: Any) -> None:
        """Give the tensor what the op wrote to its DTensor: the values if it was moved, else the autograd history."""
        if self._at_home(tensor):
            if dtensor.grad_fn is not before:
                tensor._set_local_tensors([dtensor.to_local()])
        elif self.in_place and tensor is self.tensors[0]:
            moved = dtensor_conversion.from_dtensor(self.cls, dtensor, like=tensor).resharded(tensor.sharding_spec())
            for local, new in zip(tensor._local_tensors, moved._local_tensors, strict=True):
                local.copy_(new)


def _shard_further(dtensor: DTensor) -> tuple[Any, ...]:
    """Placements with Shard(0) on every axis that shards no dim; on all axes if one of them shards dim 0 already."""
    again = any(placement.is_shard(0) for placement in dtensor.placements)
    return tuple(Shard(0) if again or not placement.is_shard() else placement for placement in dtensor.placements)


# --- pointwise functions, shard by shard ------------------------------------------------------------------------------


class _NotPointwise(Exception):  # noqa: N818, RUF100  # control flow; no user sees it
    """The function has an operator that is not elementwise."""


class _OnlyPointwise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class is untyped
    """Raises at the first operator that is not elementwise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        if not is_pointwise and func not in _ALSO_POINTWISE:
            raise _NotPointwise
        return func(*args, **(kwargs or {}))


def is_pointwise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> bool:
    """Whether the call can be computed shard by shard; from sizes, dtypes and layouts, so all ranks decide the same."""
    first = tensors[0]
    if any(each._layout != first._layout for each in tensors):
        return False

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
        return leaf

    meta_args, meta_kwargs = pytree.tree_map(to_meta, args), pytree.tree_map(to_meta, kwargs)
    try:
        with torch.no_grad(), _OnlyPointwise():  # type: ignore[no-untyped-call]  # as above
            result = func(*meta_args, **meta_kwargs)
    except _NotPointwise:
        return False
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return bool(outputs) and all(each.shape == first.shape for each in outputs)


def run_shardwise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> Any:
    """Result of a pointwise call, computed on each local shard; no communication."""
    first = tensors[0]
    boxes: list[Box | None] = [shard.metadata.box for shard in first.local_shards()] or [None]
    results, sharded = [], {id(each) for each in tensors}
    for index, box in enumerate(boxes):

        def local(leaf: Any, index: int = index, box: Box | None = box) -> Any:
            if id(leaf) in sharded:
                return leaf._local_tensors[index]
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                return leaf.new_empty(0) if box is None else block_for(leaf, box, tuple(first.shape))
            return leaf

        results.append(func(*pytree.tree_map(local, args), **pytree.tree_map(local, kwargs)))

    def joined(*local_tensors: Any) -> Any:
        """The ShardedTensor of the results of all shards; an argument itself if its local tensors are the results."""
        if not isinstance(local_tensors[0], torch.Tensor):
            return local_tensors[0]
        for tensor in tensors:
            if all(new is old for new, old in zip(local_tensors, tensor._local_tensors, strict=True)):
                return tensor
        return first._with(local_tensors)

    return pytree.tree_map(joined, *results)


def block_for(plain: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """The slice of a plain tensor that broadcasts against the shard with this box; dims of size 1 are not sliced."""
    own = box[len(shape) - plain.dim() :]
    return plain[tuple(slice(None) if n == 1 else slice(*span) for n, span in zip(plain.shape, own, strict=True))]
