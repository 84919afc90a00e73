"""A norm and two projections, and the plan under which the norm works on shards of the sequence."""

from __future__ import annotations

from torch import Tensor, nn

from shoal_dtensor import Shard
from shoal_tp_styles import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

__all__ = ["PLAN", "NormMLP"]

PLAN: dict[str, ParallelStyle] = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


class NormMLP(nn.Module):
    """Of 16 features and a number of hidden ones."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(16),
            nn.Linear(16, hidden),
            nn.Linear(hidden, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(x)).relu())
        return out
