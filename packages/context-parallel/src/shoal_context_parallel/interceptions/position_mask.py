"""`PositionMask`: an attention mask by positions, in place of a tensor of queries times keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import without_torch_function
from ..errors import UnsupportedAttentionError
from ..sequence_layout import AttentionMask, Documents

# Attributes that do not depend on elements.
_SHAPE_QUERIES = (
    Tensor.shape.__get__,  # type: ignore[attr-defined]  # a descriptor of C
    Tensor.dtype.__get__,  # type: ignore[attr-defined]  # likewise
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]  # likewise
    Tensor.dim,
    Tensor.size,
)
# Functions that return the mask itself. They do not change which keys a query reads: even a slice
# of columns has the keys of the same positions.
_KEEPS_RULE = (
    Tensor.to,
    Tensor.contiguous,
    Tensor.expand,
    Tensor.__getitem__,
    Tensor.detach,
    Tensor.clone,
)


class PositionMask(Tensor):
    """A bool mask (1, 1, queries, keys) without elements of its own.

    Code between the function that makes masks and attention may read the shape of the mask, slice
    the mask and pass it on. Reading elements raises an error, because the mask does not have
    elements.

    Attributes:
        rule: the keys that each query reads, by global positions; attention uses it instead of
            elements.
    """

    rule: AttentionMask

    @classmethod
    def of(
        cls, rule: AttentionMask, rows: int, columns: int, device: torch.device | str
    ) -> PositionMask:
        """Make a mask of the shape (1, 1, rows, columns)."""
        # One element, expanded, so that the mask has a shape and takes no memory.
        element = torch.zeros((), dtype=torch.bool, device=device)
        mask = element.expand(1, 1, rows, columns).as_subclass(cls)
        mask.rule = rule
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _SHAPE_QUERIES:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        if func in _KEEPS_RULE and isinstance(args[0], PositionMask):
            return args[0]
        raise UnsupportedAttentionError(
            f"{getattr(func, '__name__', func)} of the mask of a sharded sequence is not "
            "supported: windows and chunks are computed from positions, and the elements of the "
            "mask do not exist. Use attn_implementation='eager', which gets all columns of this "
            "rank's rows"
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes contents
        return f"PositionMask({self.rule})"


def chunks_as_documents(size: int, length: int, documents: Documents | None) -> Documents:
    """Return documents whose queries read keys of their own chunk of `size` positions only.

    Queries also stay in their own document.

    Args:
        size: positions of a chunk.
        length: positions of the sequence.
        documents: the documents to which queries are limited; None for one document.

    Example:
        >>> chunks_as_documents(3, 5, None) == Documents.from_ids([0, 0, 0, 1, 1])
        True
    """
    chunks = torch.arange(length) // size
    if documents is None:
        return Documents.from_ids(chunks)
    # Example: of 2 chunks, chunk 1 of document 3 gets the id 3 * 2 + 1. No other pair of a document
    # and a chunk has this id.
    count = int(chunks[-1]) + 1
    return Documents.from_ids(documents.ids() * count + chunks)
