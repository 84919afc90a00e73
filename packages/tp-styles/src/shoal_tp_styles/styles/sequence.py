"""`SequenceParallel`: activations sharded along the sequence; `ContextParallel`: attention of a sharded sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from shoal_context_parallel import Documents, SequenceLayout
from shoal_context_parallel.internal import ContextOptions, Method
from shoal_dtensor import Placement, Shard

from ..lowering.lowered import Lowered
from ..modules.norm import TOKENWISE, SequenceDropout, Tokenwise, is_norm
from ..modules.recurrent import RECURRENT, Recurrent
from ..modules.wrapped_forward import ContextAttention
from ..sharding.module_kinds import class_of
from ..sharding.module_sharding import ModuleSharding, Port
from .style import DeclaredStyle

# By exact type: a subclass may treat tokens otherwise.
_LOWERINGS: dict[type[nn.Module], type[Lowered]] = {
    **dict.fromkeys(TOKENWISE, Tokenwise),
    **dict.fromkeys(RECURRENT, Recurrent),
    nn.Dropout: SequenceDropout,
}


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class SequenceParallel(DeclaredStyle):
    """Run a module that treats every token alone on each rank's shard of the sequence.

    For LayerNorm, RMSNorm, Dropout, activations and modules of your own of that kind; RNN, LSTM and GRU along their
    batch dim.  A plain input is this rank's shard of the sequence; a DTensor is redistributed to it.  The gradients of
    the replicated parameters are summed over the axis before hooks and optimizers see them.

    Args:
        sequence_dim: the dim of the activations that is sharded.
        use_local_output: return the plain local tensor instead of a DTensor.

    Example:
        >>> from torch import nn
        >>> SequenceParallel().sharding(nn.LayerNorm(8)).placements("weight", (4,))
        (Replicate(),)
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    @property
    def sequence_sharding(self) -> tuple[Placement, ...]:
        """`Shard(sequence_dim)` in torch's form; assigning it sets `sequence_dim`."""
        return (Shard(self.sequence_dim),)

    @sequence_sharding.setter
    def sequence_sharding(self, value: tuple[Shard, ...]) -> None:
        (sharding,) = value
        self.sequence_dim = sharding.dim

    def sharding(self, module: nn.Module) -> ModuleSharding:
        port = Port(Shard(self.sequence_dim), Shard(self.sequence_dim))
        return ModuleSharding(
            "SequenceParallel",
            inputs=(port,),
            outputs=(port,),
            lowering=_LOWERINGS.get(class_of(module)) or (Tokenwise if is_norm(module) else None),
            local_outputs=self.use_local_output,
        )


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
