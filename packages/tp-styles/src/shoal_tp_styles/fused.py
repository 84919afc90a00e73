"""`PackedColwiseParallel`: one Linear that computes several things (q, k, v; gate, up), each cut on its own.

Rows of a fused weight lie block by block, so no cut of the whole serves: every rank needs a piece of each
block.  The style splits the weight into one DTensor parameter per block (`weight_q`, `weight_k`, ...), whose
local parts lie side by side in one buffer, so the product stays fused and nothing is copied.  Optimizers,
gradient norms and checkpoints see ordinary DTensors; a whole `weight` in a state dict is split on loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shoal_dtensor import Placement, Replicate, Shard

from .errors import LayoutError
from .sharding import Heads, ModuleSharding, Port
from .structure import TransposedLinear, out_features
from .style import DeclaredStyle, unsupported

__all__ = ["PackedColwiseParallel"]


@dataclass(frozen=True, kw_only=True, repr=False)
class PackedColwiseParallel(DeclaredStyle):
    """Cut each block of a fused Linear along its output features.

    The local output holds the rank's piece of every block, in the blocks' order.

    Args:
        blocks: name and number of output features of each block, in the order of the rows; or `Heads(count, size)` for
            blocks that are cut at heads.  Fewer heads than ranks are replicated over the ranks that share them (GQA).
            A number stands for so many equal blocks, named by their index.
        input_layouts: what a plain tensor that arrives means; Replicate if left out.

    Raises:
        LayoutError: if the blocks do not add up to the module's output features (when applied).

    Example:
        >>> from shoal_tp_styles import Heads
        >>> style = PackedColwiseParallel(blocks={"q": Heads(8, 64), "k": Heads(2, 64), "v": Heads(2, 64)})
        >>> style.sharding(nn.Linear(512, 768)).options["blocks"]["k"].features
        128
    """

    blocks: Mapping[str, int | Heads] | int
    input_layouts: Placement | None = None

    def __hash__(self) -> int:
        blocks = self.blocks if isinstance(self.blocks, int) else tuple(self.blocks.items())
        return hash((type(self), blocks, self.input_layouts, self.axis))

    def sharding(self, module: nn.Module) -> ModuleSharding:
        features = out_features(module)
        if features is None:
            raise unsupported("PackedColwiseParallel", module, (nn.Linear, TransposedLinear))
        given = self.blocks
        if isinstance(given, int):
            given = {str(number): features // given for number in range(given)}
        blocks = {
            name: block if isinstance(block, Heads) else Heads(block // self.multiple_of, self.multiple_of)
            for name, block in given.items()
        }
        total = sum(block.features for block in blocks.values())
        if total != features:
            raise LayoutError(f"PackedColwiseParallel: the blocks {given} have {total} features, the module {features}")
        port = Port(self.input_layouts or Replicate(), Replicate())
        return ModuleSharding(
            "PackedColwiseParallel",
            {"weight": Shard(0), "bias": Shard(0)},
            inputs=(port,),
            outputs=(Port(Shard(-1), Shard(-1)),),
            options={"blocks": blocks, "transposed": not isinstance(module, nn.Linear)},
        )
