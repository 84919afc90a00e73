"""Styles of modules that a plan does not name, but that hold a weight which it shards in another module."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from shoal_dtensor import Placement, Replicate, Shard
from shoal_mesh.internal import dataclass

from ..apply.apply import TIED
from ..sharding.module_kinds import class_of
from ..sharding.module_sharding import ModuleSharding
from .linear import ColwiseParallel, RowwiseParallel
from .style import DeclaredStyle

_TIED = (nn.Linear, nn.Embedding)


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class TiedStyle(DeclaredStyle):
    """The style `of`, until a later call gives the module one of its own.

    Replicated inputs and outputs: to the rest of the model the module does what it did.
    """

    of: DeclaredStyle

    def sharding(self, module: nn.Module) -> ModuleSharding:
        return replace(self.of.sharding(module), style=TIED)


def style_of_tied(module: nn.Module, placement: Placement) -> TiedStyle | None:
    """The style under which the weight of a Linear or Embedding is placed so; None if there is none.

    Example:
        >>> style_of_tied(nn.Linear(4, 8), Shard(0))
        TiedStyle(of=ColwiseParallel(output_layouts=Replicate()))
    """
    if not isinstance(placement, Shard) or placement.sizes is not None or class_of(module) not in _TIED:
        return None
    columns = (placement.dim == 0) == isinstance(module, nn.Linear)
    whole = Replicate()
    style: DeclaredStyle
    if columns:
        style = ColwiseParallel(output_layouts=whole)
    else:
        style = RowwiseParallel(input_layouts=whole, output_layouts=whole)
    return TiedStyle(of=style.aligned(placement.multiple_of))
