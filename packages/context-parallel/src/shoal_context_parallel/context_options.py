"""`ContextOptions`: the options of attention on a sharded sequence.

May import: sequence_layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from shoal_dtensor.errors import LayoutError, LayoutTypeError
from shoal_mesh import Comm
from shoal_mesh.internal import require

from .sequence_layout import AttentionMask, Documents, LayoutName, SequenceLayout, layout_named

# How keys and values reach the queries, see `context_parallel_attention`.
Method = Literal["allgather", "ring", "ulysses"]


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Options for attention of a sharded sequence, see `context_parallel_attention`."""

    method: Method = "allgather"
    layout: SequenceLayout | LayoutName = "contiguous"
    window: tuple[int | None, int | None] = (None, None)
    documents: Documents | None = None

    def __post_init__(self) -> None:
        methods = f"the method of context parallelism must be one of {', '.join(get_args(Method))}"
        require(self.method, str, methods, LayoutTypeError)
        if self.method not in get_args(Method):
            raise LayoutError(f"{methods}; got {self.method!r}")
        if isinstance(self.layout, str) and self.layout not in get_args(LayoutName):
            raise LayoutError(
                f"a layout's name must be 'contiguous' or 'head_tail', got {self.layout!r}"
            )
        if not isinstance(self.layout, str | SequenceLayout):
            raise LayoutTypeError(
                "the layout of context parallelism must be a SequenceLayout, 'contiguous' or "
                f"'head_tail'; got {type(self.layout).__name__}"
            )
        # The constructor raises LayoutError if the window or the documents are wrong.
        AttentionMask(window=self.window, documents=self.documents)

    def with_mask(self, mask: AttentionMask) -> ContextOptions:
        """Return these options with the window and the documents of another mask added.

        Documents of the mask take the place of the options' documents, which the mask contains.
        """
        left, right = self.window
        mask_left, mask_right = mask.window
        window = (_smaller_bound(left, mask_left), _smaller_bound(right, mask_right))
        documents = self.documents if mask.documents is None else mask.documents
        return replace(self, window=window, documents=documents)

    def layout_of(self, local_length: int, comm: Comm) -> SequenceLayout:
        """Return the layout of a sequence from the number of positions that this rank holds."""
        layout = self.layout
        if isinstance(layout, str):
            layout = layout_named(layout, local_length * comm.size, comm.size)
        axis = f"the {comm.size} ranks along {'x'.join(comm.axes)}"
        if layout.ranks != comm.size:
            raise LayoutError(
                f"the sequence layout is for {layout.ranks} ranks and does not fit {axis}"
            )
        held = layout.sizes[comm.rank]
        if held != local_length:
            raise LayoutError(
                f"attention of a sequence of {layout.length} positions over {axis}: this rank "
                f"holds {held} positions, but got {local_length} queries. Attention of other "
                "tensors (cross-attention, another sequence) belongs outside of context "
                "parallelism"
            )
        if self.documents is not None and self.documents.length != layout.length:
            raise LayoutError(
                f"documents= covers {self.documents.length} positions, but the sequence has "
                f"{layout.length}"
            )
        return layout


def _smaller_bound(bound: int | None, other: int | None) -> int | None:
    """Return the smaller of two bounds; None means unbounded."""
    if bound is None or other is None:
        return other if bound is None else bound
    return min(bound, other)
