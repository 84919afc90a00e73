"""Functions that treat every element alone, found out by running them on meta tensors: they need no layout at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ._torch import TorchDispatchMode, tree_leaves, tree_map
from .boxes import Box


class _NotPointwise(Exception):  # noqa: N818, RUF100  # control flow, never seen by a user
    """An op that mixes elements was met."""


class _OnlyPointwise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class is untyped
    """Raises at the first operator that is not elementwise."""

    ALSO: ClassVar = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten._to_copy.default}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.ALSO and (
            torch.Tag.pointwise not in func.tags or torch.Tag.nondeterministic_seeded in func.tags
        ):
            raise _NotPointwise
        return func(*args, **(kwargs or {}))


def is_pointwise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> bool:
    """Whether the call can be made shard by shard: alike layouts, elementwise operators only, results of that size.

    The same on every rank: it looks at sizes, dtypes and layouts, not at data.
    """
    first = tensors[0]
    if any(each._layout != first._layout for each in tensors):
        return False

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
        return leaf

    meta_args, meta_kwargs = tree_map(to_meta, args), tree_map(to_meta, kwargs)
    try:
        with torch.no_grad(), _OnlyPointwise():  # type: ignore[no-untyped-call]  # as above
            result = func(*meta_args, **meta_kwargs)
    except _NotPointwise:
        return False
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return bool(outputs) and all(each.shape == first.shape for each in outputs)


def run_shardwise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> Any:
    """Result of a pointwise call, computed on each local shard by itself; no communication."""
    first = tensors[0]
    boxes: list[Box | None] = [shard.metadata.box for shard in first.local_shards()] or [None]
    known = {id(each): each for each in tensors}
    results = []
    for index, box in enumerate(boxes):

        def local(leaf: Any, index: int = index, box: Box | None = box) -> Any:
            if id(leaf) in known:
                return leaf._parts[index]
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                return leaf.new_empty(0) if box is None else part_of(leaf, box, tuple(first.shape))
            return leaf

        results.append(func(*tree_map(local, args), **tree_map(local, kwargs)))
    return _joined(results, first, known)


def part_of(plain: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """The part of a plain tensor that broadcasts against the box; dims of size 1 stay."""
    own = box[len(shape) - plain.dim() :]
    return plain[tuple(slice(None) if n == 1 else slice(*edges) for n, edges in zip(plain.shape, own, strict=True))]


def _joined(results: list[Any], first: Any, known: dict[int, Any]) -> Any:
    """The ShardedTensors whose parts the results are; an argument itself where its parts were returned."""
    flat = [tree_leaves(result) for result in results]
    if isinstance(results[0], torch.Tensor):
        return _one([leaves[0] for leaves in flat], first, known)
    joined = iter([_one(list(parts), first, known) for parts in zip(*flat, strict=True)])
    return tree_map(lambda _: next(joined), results[0])


def _one(parts: list[Any], first: Any, known: dict[int, Any]) -> Any:
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    for tensor in known.values():
        if all(new is old for new, old in zip(parts, tensor._parts, strict=True)):
            return tensor
    return first._with(parts)
