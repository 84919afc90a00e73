"""Pointwise functions, detected by a run on meta tensors; they are computed on each shard alone, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from shoal_dtensor.internal import Box

from .._torch import TorchDispatchMode, tree_leaves, tree_map


class _NotPointwise(Exception):  # noqa: N818, RUF100  # control flow; no user sees it
    """The function has an operator that is not elementwise."""


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
    """Whether the call can be computed shard by shard.

    The tensors have one layout, all operators are elementwise, and results have the size of the tensors.  It depends on
    sizes, dtypes and layouts, not on data, so all ranks decide the same.
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
    """Result of a pointwise call, computed on each local shard; no communication."""
    first = tensors[0]
    boxes: list[Box | None] = [shard.metadata.box for shard in first.local_shards()] or [None]
    known = {id(each): each for each in tensors}
    results = []
    for index, box in enumerate(boxes):

        def local(leaf: Any, index: int = index, box: Box | None = box) -> Any:
            if id(leaf) in known:
                return leaf._local_tensors[index]
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                return leaf.new_empty(0) if box is None else block_for(leaf, box, tuple(first.shape))
            return leaf

        results.append(func(*tree_map(local, args), **tree_map(local, kwargs)))
    flat = [tree_leaves(result) for result in results]
    joined = iter([_one(list(local_tensors), first, known) for local_tensors in zip(*flat, strict=True)])
    return tree_map(lambda _: next(joined), results[0])


def block_for(plain: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """The slice of a plain tensor that broadcasts against the shard with this box; dims of size 1 are not sliced."""
    own = box[len(shape) - plain.dim() :]
    return plain[tuple(slice(None) if n == 1 else slice(*span) for n, span in zip(plain.shape, own, strict=True))]


def _one(local_tensors: list[Any], first: Any, known: dict[int, Any]) -> Any:
    """The ShardedTensor of the results of all shards; an argument itself if its local tensors are the results."""
    if not isinstance(local_tensors[0], torch.Tensor):
        return local_tensors[0]
    for tensor in known.values():
        if all(new is old for new, old in zip(local_tensors, tensor._local_tensors, strict=True)):
            return tensor
    return first._with(local_tensors)
