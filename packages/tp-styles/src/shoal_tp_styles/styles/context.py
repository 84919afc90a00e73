"""`ContextParallel`: attention of a sequence that is sharded over the axis."""

from __future__ import annotations

from typing import Literal

from torch import nn

from shoal_context_parallel import Documents, SequenceLayout
from shoal_context_parallel.internal import ContextOptions, Method
from shoal_mesh.internal import dataclass

from ..modules.context_attention import ContextAttention
from ..sharding.module_sharding import ModuleSharding
from .style import DeclaredStyle


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class ContextParallel(DeclaredStyle):
    """Let calls of `F.scaled_dot_product_attention` in a module be those of the sequence over all ranks of the axis.

    For a module of any kind: an attention, a block, a whole model. Its inputs are this rank's positions. Parameters
    stay as they are; their gradients are those of this rank's positions, and are reduced as over data ranks
    (`replicate`, `fully_shard`). Other styles on the same module or inside of it use other axes.
    A checkpoint goes around the module, not inside of it: what runs again in backward has to pass through its forward.

    Args:
        method: how keys and values reach the queries, see `context_parallel_attention`.
        layout: which positions each rank holds. A name is for sequences of which all ranks hold equally many.
        window: (left, right): keys before and behind the query's own position that it may read; None: no bound.
        documents: of packed sequences that are the same in every batch; else use `context_parallel`.

    Example:
        >>> ContextParallel(method="ring", layout="head_tail").on("context").axis
        'context'
    """

    method: Method = "ring"
    layout: SequenceLayout | Literal["contiguous", "head_tail"] = "contiguous"
    window: tuple[int | None, int | None] = (None, None)
    documents: Documents | None = None

    def sharding(self, module: nn.Module) -> ModuleSharding:
        return ModuleSharding(
            "ContextParallel",
            lowering=ContextAttention,
            options=ContextOptions(self.method, self.layout, self.window, self.documents),
            distributes=False,
        )
