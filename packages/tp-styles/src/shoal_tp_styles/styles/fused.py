"""`PackedColwiseParallel`: one Linear that computes several projections (q, k, v; gate, up), each sharded on its own.

A fused weight holds its blocks of rows one after the other, and every rank needs a shard of each block.  Equal blocks
are equal runs of the fused rows, so the weight stays one parameter, a DTensor with a `StridedShard`; checkpoints have
the names and the values of one device.  Blocks of different sizes, and heads that several ranks hold, are no sharding
of the fused rows: there the style makes one DTensor parameter per block (`weight_q`, `weight_k`, ...), whose local
shards are adjacent in one buffer, so the product stays fused and nothing is copied.  A fused `weight` in a state dict
is split on loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shoal_dtensor import Placement, Replicate, Shard
from shoal_dtensor.errors import LayoutError, UnsupportedModuleError

from ..modules.composed_linear import FusedColumn
from ..sharding.dim_shards import Heads
from ..sharding.module_kinds import TransposedLinear, keeps_forward, kinds_of, out_features
from ..sharding.module_sharding import FusedBlocks, ModuleSharding, Port
from .style import DeclaredStyle, unsupported


@dataclass(kw_only=True, repr=False)
class PackedColwiseParallel(DeclaredStyle):
    """Shard each block of a fused Linear along its output features.

    The local output holds this rank's shard of every block, in the blocks' order.

    Args:
        blocks: name and number of output features of each block, in the order of the rows; or `Heads(count, size)` for
            blocks with complete heads in each shard.  Fewer heads than ranks are replicated over neighbouring ranks
            (GQA).  A number stands for so many equal blocks, named by their index.
        input_layouts: layout of a plain input; Replicate if left out.

    Raises:
        LayoutError: if the blocks do not add up to the module's output features (when applied).

    Example:
        >>> from shoal_tp_styles import Heads
        >>> style = PackedColwiseParallel(blocks={"q": Heads(8, 64), "k": Heads(2, 64), "v": Heads(2, 64)})
        >>> style.sharding(nn.Linear(512, 768)).fused.blocks["k"].features
        128
    """

    blocks: Mapping[str, int | Heads] | int
    input_layouts: Placement | None = None

    def __hash__(self) -> int:
        blocks = self.blocks if isinstance(self.blocks, int) else tuple(self.blocks.items())
        return hash((type(self), blocks, self.input_layouts, self.axis))

    def _heads(self, block: int | Heads) -> Heads:
        unit = self.multiple_of
        return block if isinstance(block, Heads) else Heads(block // unit, unit, chunked=True)

    def sharding(self, module: nn.Module) -> ModuleSharding:
        features = out_features(module)
        if features is None:
            raise unsupported("PackedColwiseParallel", module, (nn.Linear, TransposedLinear))
        kind = next(kind for kind in kinds_of(module) if kind in (TransposedLinear, nn.Linear))
        if not keeps_forward(module, kind):
            raise UnsupportedModuleError(
                f"PackedColwiseParallel: {type(module).__name__} has a forward of its own, which would not be called"
            )
        given = self.blocks
        if isinstance(given, int):
            given = {str(number): features // given for number in range(given)}
        blocks = {name: self._heads(block) for name, block in given.items()}
        total = sum(block.features for block in blocks.values())
        if total != features:
            raise LayoutError(f"PackedColwiseParallel: the blocks {given} have {total} features, the module {features}")
        port = Port(self.input_layouts or Replicate(), Replicate())
        return ModuleSharding(
            "PackedColwiseParallel",
            inputs=(port,),
            outputs=(Port(Shard(-1), Shard(-1)),),
            lowering=FusedColumn,
            options=FusedBlocks(blocks, transposed=kind is TransposedLinear),
        )
