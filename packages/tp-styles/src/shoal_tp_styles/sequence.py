"""`SequenceParallel`: parameters replicated, activations cut along the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal_dtensor import Shard

from .sharding import ModuleSharding, Port
from .style import DeclaredStyle

__all__ = ["SequenceParallel"]


@dataclass(frozen=True, kw_only=True, repr=False)
class SequenceParallel(DeclaredStyle):
    """Run a module that treats every token alone on the ranks' own parts of the sequence.

    For LayerNorm, RMSNorm, Dropout, activations and modules of your own of that kind.  A plain input is
    taken as the rank's part of the sequence; a DTensor is redistributed to it.  The gradients of the
    replicated parameters are summed over the axis before anyone sees them.

    Args:
        sequence_dim: the dim of the activations that is cut.
        use_local_output: give the plain local tensor instead of a DTensor.

    Example:
        >>> from torch import nn
        >>> SequenceParallel().sharding(nn.LayerNorm(8)).placement("weight", 4)
        Replicate()
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def sharding(self, module: nn.Module) -> ModuleSharding:
        port = Port(Shard(self.sequence_dim), Shard(self.sequence_dim))
        return ModuleSharding("SequenceParallel", inputs=(port,), outputs=(port,), local_outputs=self.use_local_output)
