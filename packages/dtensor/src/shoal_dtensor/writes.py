"""Writes: which are refused before anything runs, on all ranks alike, and what is left to do about the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ._torch import OpOverload, count_write, shares_memory
from .errors import InPlaceError
from .spec import Spec, TensorMeta

__all__ = ["check_outs", "check_writes", "count_writes", "despite_overlap", "in_turn", "one_by_one"]


def check_writes(op: OpOverload, specs: Sequence[Spec], writes: Sequence[int], copies: frozenset[int]) -> None:
    """Refuse writes that would not do what they do on one device.

    Args:
        op: the overload.
        specs: of all its tensors; writes: the indices of those that are written to.
        copies: the indices of views whose storage is not their base's.

    Raises:
        InPlaceError: if one of them is such a view, or has elements that share memory.
    """
    if copies.intersection(writes):
        raise InPlaceError(
            f"{op} writes to a view whose base had to be redistributed to take it, so the write would not "
            f"reach the base; write to the base itself, or redistribute the base before taking the view"
        )
    for spec in (specs[i] for i in writes):
        # Kernels see this too, but not on ranks whose part is empty, and the others would go on without them.
        if 0 not in spec.shape and any(n > 1 and step == 0 for n, step in zip(spec.shape, spec.stride, strict=True)):
            raise InPlaceError(
                f"{op} writes to an expanded tensor of shape {tuple(spec.shape)} and stride {spec.stride}: several of "
                f"its elements are one place in memory; write to the tensor before expand, or to a clone"
            )


def check_outs(op: OpOverload, outs: Sequence[Spec], made: Sequence[TensorMeta]) -> None:
    """Refuse `out=` tensors of another shape than the results.

    Raises:
        InPlaceError: if there is one.
    """
    for out, meta in zip(outs, made, strict=False):
        if tuple(out.shape) != tuple(meta.shape):
            raise InPlaceError(
                f"{op} got out= of shape {tuple(out.shape)} for a result of shape {tuple(meta.shape)}: a DTensor is "
                f"not resized; pass one of the result's shape"
            )


def despite_overlap(call: Callable[..., Any]) -> Callable[..., Any]:
    """A local function that writes to its first argument, also where another argument overlaps with it.

    Kernels refuse overlaps, but not on a rank whose part is empty or one element, and the others would stop without it:
    where ranks' parts differ, the arguments are read before the first one is written to, on every rank.
    """

    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(first, *args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith("unsupported operation: some elements of the input tensor"):
                raise
        return call(first, *(arg.clone() if isinstance(arg, Tensor) else arg for arg in args), **kwargs)

    return run


def count_writes(places: Sequence[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let autograd know that these arguments were written to: what it has saved of them is no longer what it was."""
    for place in places:
        count_write(args[place] if isinstance(place, int) else kwargs[place])


def in_turn(moved: Sequence[tuple[Any, Any]], silent: Sequence[int | str], args: Sequence[Any]) -> bool:
    """Whether a `foreach` call must take its elements in turn, because one writes what is redistributed for another.

    Args:
        moved: what is redistributed: each a list and the index in it, or all arguments and a position.
        silent: the positions of the lists that are written to; args: the arguments.
    """
    count = len(args[0])
    written = [tensor for place in silent if isinstance(place, int) for tensor in args[place]]
    tensors = [container[at] for container, at in moved]
    return count > 1 and (
        len({*map(id, written)}) < len(written)
        or any(one is not other and shares_memory(one, other) for one in tensors for other in written)
    )


def one_by_one(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run a `foreach` operator on one element of its lists after the other."""
    count = len(args[0])

    def element(value: Any, i: int) -> Any:
        return [value[i]] if isinstance(value, list | tuple) and len(value) == count else value

    for i in range(count):
        op(*[element(value, i) for value in args], **{name: element(value, i) for name, value in kwargs.items()})
