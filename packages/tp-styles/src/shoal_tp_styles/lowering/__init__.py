"""What a style does with the module types it knows: local computation with explicit collectives.

`LOWERINGS` maps (style, module type) to the stand-in for the module's forward.  A subclass that keeps its
parent's forward is lowered as its parent.  What is not in the table runs through DTensor dispatch
(`Boundary`): the same results, slower.
"""

from __future__ import annotations

from torch import nn

from ..sharding import ModuleSharding
from ..structure import TransposedLinear, kinds_of
from .adapter import AdapterColumn, AdapterRow
from .attention import AttentionHeads
from .bags import ColumnEmbeddingBag, RowEmbeddingBag
from .boundary import Boundary
from .channels import ColumnChannels, RowChannels
from .dropout import SequenceDropout
from .embedding import ColumnEmbedding, RowEmbedding
from .forward import Lowered
from .groups import ChannelGroups
from .linear import ColumnLinear
from .norm import TOKENWISE, Tokenwise, is_norm
from .overlap import OverlappedRow
from .packed import PackedColumn
from .recurrent import RECURRENT, Recurrent
from .rows import RowLinear

__all__ = ["LOWERINGS", "Boundary", "Lowered", "lowering_of"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

LOWERINGS: dict[tuple[str, type[nn.Module]], type[Lowered]] = {
    ("ColwiseParallel", nn.Linear): ColumnLinear,
    ("RowwiseParallel", nn.Linear): RowLinear,
    ("ColwiseParallel", nn.Embedding): ColumnEmbedding,
    ("RowwiseParallel", nn.Embedding): RowEmbedding,
    **{("ColwiseParallel", kind): ColumnChannels for kind in (*CONVOLUTIONS, nn.Bilinear, TransposedLinear)},
    **{("RowwiseParallel", kind): RowChannels for kind in (*CONVOLUTIONS, TransposedLinear)},
    ("LoRA ColwiseParallel", nn.Linear): AdapterColumn,
    ("LoRA RowwiseParallel", nn.Linear): AdapterRow,
    ("ColwiseParallel", nn.EmbeddingBag): ColumnEmbeddingBag,
    ("RowwiseParallel", nn.EmbeddingBag): RowEmbeddingBag,
    ("ChannelParallel", nn.GroupNorm): ChannelGroups,
    **{("SequenceParallel", kind): Tokenwise for kind in TOKENWISE},
    ("SequenceParallel", nn.Dropout): SequenceDropout,
    **{("SequenceParallel", kind): Recurrent for kind in RECURRENT},
}


def lowering_of(sharding: ModuleSharding, module: nn.Module) -> type[Lowered] | None:
    """The stand-in for a module under a style; None where there is none."""
    kind = sharding.kind
    if "blocks" in sharding.options:
        return AttentionHeads if kind == "HeadParallel" else PackedColumn
    if "forward" in module.__dict__:
        return None
    # Tokenwise looks its computation up by the exact type; the others only need the parent's forward.
    kinds = kinds_of(module)
    exact = LOWERINGS.get((kind, kinds[0]))
    if exact is RowLinear and "chunks" in sharding.options:
        return OverlappedRow
    if exact is not None or kind == "SequenceParallel":
        return Tokenwise if exact is None and is_norm(module) else exact
    for parent in kinds[1:]:
        found = LOWERINGS.get((kind, parent))
        if found is not None:
            return found if type(module).forward is getattr(parent, "forward", None) else None
    return None
