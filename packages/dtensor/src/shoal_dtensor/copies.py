"""Views that had to be redistributed: they share no memory with their base, and follow it all the same.

Such a view is told by its base's version that it was written to.  Its values are then taken from the base anew, before
anything reads them, on all ranks at once because all ranks write and read in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ._torch import OpOverload, is_tracing
from .errors import InPlaceError
from .spec import Spec
from .wrapping import tensors_in

__all__ = ["follow", "followed"]


class _Source(NamedTuple):
    """Where a view's values come from.

    Attributes:
        op, args, kwargs: the call that made it; `base` is the first tensor among its arguments.
        item: which of the call's outputs it is.
        spec: of the base when it was made.
        version: of the base when the values were taken.
    """

    op: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    item: int
    base: Any
    spec: Spec
    version: int


def follow(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> Any:
    """What a view operator has made by copying; its tensors will follow the base from here on."""
    base = next(tensors_in([*args, *kwargs.values()]))
    if not (is_tracing() or base.is_inference()):  # there nothing is written, or nobody counts
        for item, view in enumerate(tensors_in([made])):
            view._source = _Source(op, args, kwargs, item, base, base._spec, base._version)
    return made


def followed(slot: Any) -> property:
    """The attribute of such views that is read in place of the slot that holds their local tensor."""
    return property(lambda view: _now(view, slot.__get__(view)), lambda view, local: slot.__set__(view, local))


def _now(view: Any, local: torch.Tensor) -> torch.Tensor:
    """The local tensor of such a view, whose values were `local` when it was last read.

    Raises:
        InPlaceError: if the base has changed its shape in place since.
    """
    source: _Source | None = view.__dict__.get("_source")
    if source is None or source.base._version == source.version:
        return local
    base = source.base
    if base._spec is not source.spec:
        raise InPlaceError(
            f"a view made by {source.op} of {source.spec!r} is read after its base was made {base._spec!r}; take the "
            f"view again"
        )
    with torch.no_grad():
        made = [*tensors_in([source.op(*source.args, **source.kwargs)])][source.item]
    view._local_tensor = found = made._local_tensor
    view._source = source._replace(version=base._version)
    return found  # type: ignore[no-any-return]  # a tensor
