"""What an operation on ShardedTensors does.

Looked up in this order: the user's override of the function; the user's override for the kind of spec; the table at
the end of handlers.py; else, here: the ShardedTensors become DTensors, the function runs on those, its results become
ShardedTensors again.  Results of no dims come back as plain tensors; all others as ShardedTensors, whatever layout the
op left: replicated and partial ones are laid out like an argument of their shape, else cut along dim 0.

A layout without placements (several shards on a rank, no grid) is worked on shard by shard where the function is
pointwise, which a run on meta tensors shows; otherwise it is refused, or moved if ``implicit_reshard()`` allows it.
The class ShardedTensor is an argument here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from shoal_dtensor import DTensor, Replicate, Shard, implicit_replication
from shoal_mesh import DeviceMesh

from . import bridge
from ._torch import tree_leaves, tree_map
from .errors import NotExpressibleError, UnsupportedOpError
from .groups import line_mesh
from .handlers import HANDLERS
from .pointwise import is_pointwise, run_shardwise
from .spec import CustomOp, _dispatch_custom_op, _has_custom_op

_CUSTOM_OPS: dict[Callable[..., Any], CustomOp] = {}
_MAY_RESHARD: ContextVar[bool] = ContextVar("implicit_reshard", default=False)

PLAIN_INDEX = {torch.nn.functional.embedding, torch.nn.functional.embedding_bag}
"""Functions whose result is plain when their first argument is: a look-up with plain indices gives plain vectors."""


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[[CustomOp], CustomOp]:
    """Decorator: run the decorated function in place of ``func`` whenever a ShardedTensor is among its arguments.

    The decorated function gets ``(types, args, kwargs, process_group)``.

    Example:
        >>> @custom_sharded_op_impl(torch.asin)
        ... def asin(types, args, kwargs, process_group): ...
    """

    def register(implementation: CustomOp) -> CustomOp:
        _CUSTOM_OPS[func] = implementation
        return implementation

    return register


_sharded_op_impl = custom_sharded_op_impl  # torch has one name for its own ops and one for the user's


@contextmanager
def implicit_reshard(allow: bool = True) -> Iterator[None]:
    """Let ops move layouts that have no placements to one that has (cut along dim 0), instead of refusing them."""
    token = _MAY_RESHARD.set(allow)
    try:
        yield
    finally:
        _MAY_RESHARD.reset(token)


def run(
    cls: Any, func: Callable[..., Any], types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Result of ``func``, some of whose arguments are ShardedTensors; all ranks call it.

    Raises:
        UnsupportedOpError: The function means nothing on a ShardedTensor, or its arguments are on several groups.
        NotExpressibleError: A layout has no placements, and the function is not pointwise.
    """
    handler = HANDLERS.get(func)
    tensors = _unique(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
    if tensors and (_CUSTOM_OPS or handler is None or not handler.metadata_only):
        group = tensors[0].process_group
        if func in _CUSTOM_OPS:
            return _CUSTOM_OPS[func](types, args, kwargs, group)
        if _has_custom_op(tensors[0].sharding_spec(), func):
            return _dispatch_custom_op(tensors[0].sharding_spec(), func, types, args, kwargs, group)
    if handler is not None:
        return handler.run(cls, func, args, kwargs)
    if not tensors:
        raise UnsupportedOpError(f"{_name(func)} got no ShardedTensor with a process group: it cannot be run on shards")
    if any(each.process_group is not tensors[0].process_group for each in tensors):
        raise UnsupportedOpError(f"{_name(func)} got ShardedTensors of different process groups; reshard is within one")
    return _Call(cls, func, tensors).run(args, kwargs)


def _unique(tensors: Iterator[Any]) -> list[Any]:
    return list({id(each): each for each in tensors}.values())


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", func))


class _Call:
    """One function call by conversion: where the tensors lie, and which of them the function writes to."""

    def __init__(self, cls: Any, func: Callable[..., Any], tensors: Sequence[Any]) -> None:
        self.cls, self.func, self.tensors = cls, func, tensors
        self.name = _name(func)
        self.initializer = getattr(func, "__module__", "") == "torch.nn.init"
        self.in_place = self.name == "__setitem__" or (self.name.endswith("_") and not self.name.endswith("__"))
        self.grids = {id(each): grid_or_none(each) for each in tensors}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse, work shard by shard, or convert; decided from layouts and sizes, so alike on every rank."""
        self._refuse_leaf(args, kwargs)
        if None in self.grids.values():
            if is_pointwise(self.func, args, kwargs, self.tensors):
                return run_shardwise(self.func, args, kwargs, self.tensors)
            self._refuse_layouts()
        home = self._home()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.initializer):
            return self._run_on(home, args, kwargs)

    def _refuse_leaf(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The shards are leaves, not the views of them that the op would write to: torch itself would not notice."""
        if self.initializer or not torch.is_grad_enabled():
            return
        written = [args[0]] if self.in_place and args else []
        written += tree_leaves(kwargs.get("out"))
        if any(isinstance(each, self.cls) and each.requires_grad and each.is_leaf for each in written):
            raise UnsupportedOpError(
                f"{self.name}: a leaf ShardedTensor that requires grad cannot be written in place; use torch.no_grad()"
            )

    def _refuse_layouts(self) -> None:
        if _MAY_RESHARD.get():
            return
        for each in self.tensors:
            try:
                bridge.grid_for(each)
            except NotExpressibleError as error:
                raise NotExpressibleError(
                    f"{self.name}: {error}. reshard() the tensor to a ChunkShardingSpec first, or make the call inside "
                    "implicit_reshard()"
                ) from None

    def _home(self) -> DeviceMesh:
        """The mesh to work on: that of the first tensor that has one, else a line of all ranks."""
        for each in self.tensors:
            if self.grids[id(each)] is not None:
                return bridge.mesh_for(each, self.grids[id(each)])
        first = self.tensors[0]
        return line_mesh(first.process_group, first._parts[0].device.type)

    def _at_home(self, tensor: Any, home: DeviceMesh) -> bool:
        grid = self.grids[id(tensor)]
        return grid is not None and bridge.mesh_for(tensor, grid) == home

    def _run_on(self, home: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        placed = {id(each): self._place(each, home) for each in self.tensors}
        before = {key: dtensor.grad_fn for key, dtensor in placed.items()}
        replicated = [Replicate()] * home.ndim

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, self.cls):
                return placed[id(leaf)]
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.dim() > 0:
                return DTensor.from_local(leaf, home, replicated, run_check=False)
            return leaf

        with implicit_replication():  # for tensors that the function makes inside
            result = self.func(*tree_map(convert, args), **tree_map(convert, kwargs))
        for each in self.tensors:
            self._write_back(each, placed[id(each)], before[id(each)], home)
        plain = self.func in PLAIN_INDEX and bool(args) and not isinstance(args[0], self.cls)
        originals = {id(placed[id(each)]): each for each in self.tensors}
        return tree_map(lambda leaf: self._back(leaf, originals, home, plain=plain), result)

    def _place(self, tensor: Any, home: DeviceMesh) -> DTensor:
        """The tensor on the home mesh: as it lies if it can, else moved, as a tensor of its shape that lies there."""
        if self._at_home(tensor, home):
            return bridge.to_dtensor(tensor)
        placements = self._layout_at_home(tensor.shape, home)
        if placements is None:
            grid = self.grids[id(tensor)]
            dim = grid.placements[0].dim if grid is not None else 0
            placements = (Shard(dim),) * home.ndim
        return bridge.onto(tensor, home, placements)

    def _layout_at_home(self, shape: torch.Size, home: DeviceMesh) -> tuple[Shard, ...] | None:
        """How a tensor of this shape lies on the home mesh already, if one does."""
        for each in self.tensors:
            if each.shape == shape and self._at_home(each, home):
                placements: tuple[Shard, ...] = self.grids[id(each)].placements
                return placements
        return None

    def _write_back(self, tensor: Any, dtensor: DTensor, before: Any, home: DeviceMesh) -> None:
        """Let the tensor have what the op wrote to its stand-in: values if it was moved, else the history."""
        if self._at_home(tensor, home):
            if dtensor.grad_fn is not before:
                tensor._replace_parts([dtensor.to_local()])
        elif self.in_place and tensor is self.tensors[0]:
            moved = bridge.from_dtensor(self.cls, dtensor, like=tensor).resharded(tensor.sharding_spec())
            for part, new in zip(tensor._parts, moved._parts, strict=True):
                part.copy_(new)

    def _back(self, leaf: Any, originals: dict[int, Any], home: DeviceMesh, *, plain: bool) -> Any:
        """A result as its caller sees it."""
        if not isinstance(leaf, DTensor):
            return leaf
        if id(leaf) in originals:
            return originals[id(leaf)]
        if leaf.dim() == 0 or plain:
            return leaf.full_tensor()
        if not all(placement.is_shard() for placement in leaf.placements):
            leaf = leaf.redistribute(placements=self._layout_at_home(leaf.shape, home) or _cut_further(leaf))
        return bridge.from_dtensor(self.cls, leaf, like=self.tensors[0])


def _cut_further(dtensor: DTensor) -> tuple[Any, ...]:
    """Placements with dim 0 cut along the axes that cut nothing yet; anew along all of them if one cuts it already."""
    placements = tuple(dtensor.placements)
    if any(placement.is_shard(0) for placement in placements):
        return (Shard(0),) * len(placements)
    return tuple(placement if placement.is_shard() else Shard(0) for placement in placements)


def grid_or_none(tensor: Any) -> Any:
    """The grid that a ShardedTensor's layout is, None if it is none."""
    try:
        return bridge.grid_for(tensor)
    except NotExpressibleError:
        return None
