"""Operators on lists that do the same to every element: one by one, or those of one mesh by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._torch import OpOverload, shares_memory


def must_run_sequentially(moved: Sequence[tuple[Any, Any]], written: Sequence[int | str], args: Sequence[Any]) -> bool:
    """Whether a `foreach` call must take its elements one by one, because one writes what is redistributed for another.

    Args:
        moved: what is redistributed: each a list and the index in it, or all arguments and a position.
        written: the positions of the lists that are written to; args: the arguments.
    """
    count = len(args[0])
    targets = [tensor for place in written if isinstance(place, int) for tensor in args[place]]
    tensors = [container[at] for container, at in moved]
    return count > 1 and (
        len({*map(id, targets)}) < len(targets)
        or any(one is not other and shares_memory(one, other) for one in tensors for other in targets)
    )


def run_sequentially(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run a `foreach` operator on one element of its lists after the other."""
    for i in range(count := len(args[0])):
        _run_on(op, [i], count, args, kwargs)


def run_by_kind(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """A function that runs a `foreach` operator by itself on the elements of each mesh, and on the plain ones.

    An element is what the lists have at one position; plain tensors without dims go with any kind.  None if all
    elements are of one kind, if an element is of two kinds, or if a tensor with dims is shared by all.

    Args:
        cls: the DTensor class.
        op: the overload.
        args, kwargs: its arguments.
    """
    values = [*args, *kwargs.values()]
    count = len(next(value for value in values if isinstance(value, list | tuple)))
    lists = [value for value in values if _is_walked(value, count)]
    shared = [value for value in values if isinstance(value, torch.Tensor) and value.ndim]
    kinds = [{*_kinds(cls, element)} for element in zip(*lists, strict=True)]
    groups: dict[Any, list[int]] = {None: [], **{kind: [] for own in kinds for kind in own}}
    if shared or any(len(own) > 1 for own in kinds) or len(set().union(*kinds)) < 2:
        return None
    first = next(kind for kind in groups if kind is not None)
    for i, own in enumerate(kinds):
        groups[next(iter(own), first)].append(i)

    def run(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = [None] * count
        for group in filter(None, groups.values()):
            result = _run_on(op, group, count, args, kwargs)
            for i, item in zip(group, result or (), strict=bool(result)):
                results[i] = item
        return results if op._schema.returns else None

    return run


def _kinds(cls: Any, tensors: Sequence[Any]) -> Iterator[Any]:
    """The mesh of each DTensor; None for a plain tensor with dims."""
    for tensor in tensors:
        if isinstance(tensor, cls):
            yield tensor._spec.mesh
        elif isinstance(tensor, torch.Tensor) and tensor.ndim:
            yield None


def _is_walked(value: Any, count: int) -> bool:
    """Whether a list has something for every element."""
    return isinstance(value, list | tuple) and len(value) == count


def _run_on(op: OpOverload, indices: Sequence[int], count: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator returns for some of the `count` elements of its lists."""

    def chosen(value: Any) -> Any:
        return [value[i] for i in indices] if _is_walked(value, count) else value

    return op(*map(chosen, args), **{name: chosen(value) for name, value in kwargs.items()})
