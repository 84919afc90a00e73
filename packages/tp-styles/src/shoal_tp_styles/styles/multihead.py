"""`HeadParallel`: nn.MultiheadAttention with its heads sharded."""

from __future__ import annotations

from torch import nn

from shoal_dtensor import Placement, Replicate
from shoal_dtensor.errors import UnsupportedModuleError
from shoal_mesh.internal import dataclass

from ..modules.attention import OWN_PROJECTIONS, AttentionHeads
from ..sharding.dim_shards import Heads, HeadShard
from ..sharding.module_kinds import keeps_forward
from ..sharding.module_sharding import FusedBlocks, ModuleSharding, Port
from .style import DeclaredStyle, unsupported


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class HeadParallel(DeclaredStyle):
    """Give each rank some heads of an `nn.MultiheadAttention`: projections by columns, the output projection by rows.

    Query, key and value arrive replicated; the output leaves replicated (or sharded, by `output_layouts`), after one
    reduction.  The fused `in_proj_weight` stays one parameter; of each of its three blocks a rank holds the rows of its
    heads, as of the three weights where `kdim` or `vdim` are given.

    Args:
        output_layouts: layout of the output; Replicate if left out.

    Example:
        >>> HeadParallel().sharding(nn.MultiheadAttention(8, 4)).fused.blocks["q"]
        Heads(count=4, size=2)
    """

    output_layouts: Placement | None = None

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if not isinstance(module, nn.MultiheadAttention):
            raise unsupported("HeadParallel", module, (nn.MultiheadAttention,))
        if module.bias_k is not None or module.add_zero_attn:
            raise UnsupportedModuleError(
                "HeadParallel: bias_k/bias_v and add_zero_attn are not supported; distribute the module with "
                "shoal_dtensor.distribute_module"
            )
        if not keeps_forward(module, nn.MultiheadAttention):
            raise UnsupportedModuleError(
                f"HeadParallel: {type(module).__name__} has a forward of its own, which would not be called"
            )
        heads = Heads(module.num_heads, module.head_dim)
        # One weight each where keys or values have dims of their own.
        projections = () if module._qkv_same_embed_dim else OWN_PROJECTIONS
        port = Port(Replicate(), Replicate())
        return ModuleSharding(
            "HeadParallel",
            {"out_proj.weight": HeadShard(1, heads)} | dict.fromkeys(projections, HeadShard(0, heads)),
            inputs=(port, port, port),
            outputs=(Port(Replicate(), self.output_layouts or Replicate()), None),
            lowering=AttentionHeads,
            options=FusedBlocks(dict.fromkeys("qkv", heads), prefix="in_proj_"),
        )
