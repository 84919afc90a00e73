"""The structure of an operator's arguments: which of them are lists, and where the tensors are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .spec import Spec, TensorMeta

__all__ = ["indices_at", "is_list", "metas_of", "numbered", "places_of", "specs_in"]


def metas_of(value: Any) -> Any:
    """An argument with what every tensor of it is in place of its spec."""
    if isinstance(value, Spec):
        return value.tensor_meta
    return tuple(metas_of(item) for item in value) if is_list(value) else value


def specs_in(value: Any) -> Iterator[Spec]:
    """The specs in an argument, in order."""
    if isinstance(value, Spec):
        yield value
    elif is_list(value):
        for item in value:
            yield from specs_in(item)


def is_list(value: Any) -> bool:
    """Whether an argument is several; what describes one tensor is a tuple too."""
    return isinstance(value, list | tuple) and not isinstance(value, TensorMeta | torch.Size)


def places_of(arguments: Iterable[tuple[int | str, Any]]) -> Iterator[tuple[int | str, int | None]]:
    """Where each tensor is: the position or name of its argument, its index there if that is a list."""
    for place, value in arguments:
        if isinstance(value, TensorMeta):
            yield place, None
        elif is_list(value):
            yield from ((place, i) for i, item in enumerate(value) if isinstance(item, TensorMeta))


def numbered(value: Any, numbers: Iterator[int]) -> Any:
    """The structure of an argument with each tensor replaced by its flat index."""
    if isinstance(value, TensorMeta):
        return next(numbers)
    return [numbered(item, numbers) for item in value] if is_list(value) else None


def indices_at(place: Any, element: int) -> Iterator[int]:
    """The flat indices that element `element` of a `foreach` call reads from an argument."""
    found = place[element] if isinstance(place, list) and place else place
    if isinstance(found, int):
        yield found
