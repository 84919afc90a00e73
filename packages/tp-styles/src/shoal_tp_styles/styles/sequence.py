"""`SequenceParallel`: parameters replicated, activations sharded along the sequence."""

from __future__ import annotations

from torch import nn

from shoal_dtensor import Placement, Shard
from shoal_mesh.internal import dataclass

from ..lowering.lowered import Lowered
from ..modules.norm import TOKENWISE, SequenceDropout, Tokenwise, is_norm
from ..modules.recurrent import RECURRENT, Recurrent
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
