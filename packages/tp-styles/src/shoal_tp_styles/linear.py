"""`ColwiseParallel` and `RowwiseParallel`: features cut along the output, or along the input.

One table per style: module type -> which dims of which parameters are cut, and the dims of the input
and the output that carry the cut features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from shoal_dtensor import Partial, Placement, Replicate, Shard

from .errors import LayoutError
from .sharding import HeadCut, Heads, ModuleSharding, Port
from .structure import TransposedLinear, kinds_of
from .style import DeclaredStyle, unsupported

__all__ = ["COLWISE", "ROWWISE", "ColwiseParallel", "RowwiseParallel"]


@dataclass(frozen=True, slots=True)
class Features:
    """Where a module's features lie: parameter dims that are cut, and the dims of input and output (None: uncut)."""

    parameters: Mapping[str, int]
    input: int | None
    output: int | None
    inputs: int = 1


COLWISE: dict[type[nn.Module], Features] = {
    nn.Linear: Features({"weight": 0, "bias": 0}, None, -1),
    TransposedLinear: Features({"weight": 1, "bias": 0}, None, -1),
    nn.Embedding: Features({"weight": 1}, None, -1),
    nn.EmbeddingBag: Features({"weight": 1}, None, -1),
    nn.Bilinear: Features({"weight": 0, "bias": 0}, None, -1, inputs=2),
    nn.Conv1d: Features({"weight": 0, "bias": 0}, None, -2),
    nn.Conv2d: Features({"weight": 0, "bias": 0}, None, -3),
    nn.Conv3d: Features({"weight": 0, "bias": 0}, None, -4),
}

ROWWISE: dict[type[nn.Module], Features] = {
    nn.Linear: Features({"weight": 1}, -1, None),
    TransposedLinear: Features({"weight": 0}, -1, None),
    nn.Embedding: Features({"weight": 0}, None, None),
    nn.EmbeddingBag: Features({"weight": 0}, None, None),
    nn.Conv1d: Features({"weight": 1}, -2, None),
    nn.Conv2d: Features({"weight": 1}, -3, None),
    nn.Conv3d: Features({"weight": 1}, -4, None),
}

OF_HEADS: dict[type[nn.Module], Features] = {
    kind: COLWISE[kind] for kind in (nn.Linear, TransposedLinear, nn.Embedding)
}


def _features(style: str, table: dict[type[nn.Module], Features], module: nn.Module) -> Features:
    for kind in kinds_of(module):
        if kind in table:
            return table[kind]
    raise unsupported(style, module, tuple(table))


@dataclass(frozen=True, kw_only=True, repr=False)
class ColwiseParallel(DeclaredStyle):
    """Cut a module along its output features: every rank computes some columns of the output.

    Linear: weight and bias `Shard(0)`; Embedding and EmbeddingBag: weight `Shard(1)`; Conv: output channels.  A Linear
    that holds its weight as (in, out) (GPT-2's `Conv1D`) is known by its structure.

    Args:
        input_layouts: what a plain tensor that arrives means; Replicate if left out.  Inside it is replicated.
        output_layouts: layout of the output; the last dim sharded if left out (channels for Conv).
        use_local_output: give the plain local tensor instead of a DTensor.

    Example:
        >>> from torch import nn
        >>> ColwiseParallel().sharding(nn.Linear(4, 8)).parameters
        {'weight': Shard(dim=0), 'bias': Shard(dim=0)}
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True
    of_heads: Heads | None = field(default=None, init=False)

    def heads(self, count: int, size: int) -> Self:
        """The same style for a projection to `count` heads of `size` features.

        Heads are not cut through; where there are fewer heads than ranks, neighbouring ranks hold the same head (Linear
        only).  An Embedding may hold features of heads too: a relative position bias has one feature for each.

        Example:
            >>> ColwiseParallel().heads(2, 64).of_heads
            Heads(count=2, size=64)
        """
        return self._with(of_heads=Heads(count, size))

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if self.of_heads is not None:
            return self._of_heads(module, self.of_heads)
        features = _features("ColwiseParallel", COLWISE, module)
        assert features.output is not None, "every column-wise module cuts its output"
        natural = Shard(features.output)
        port = Port(self.input_layouts or Replicate(), Replicate())
        return ModuleSharding(
            "ColwiseParallel",
            {name: Shard(dim, multiple_of=self.multiple_of) for name, dim in features.parameters.items()},
            inputs=(port,) * features.inputs,
            outputs=(Port(natural, self.output_layouts or natural),),
            local_outputs=self.use_local_output,
        )

    def _of_heads(self, module: nn.Module, heads: Heads) -> ModuleSharding:
        features = _features("ColwiseParallel.heads", OF_HEADS, module)
        weight: Any = module._parameters["weight"]
        if weight.shape[features.parameters["weight"]] != heads.features:
            raise LayoutError(
                f"ColwiseParallel.heads: {heads} have {heads.features} features, which {module} does not give"
            )
        if self.output_layouts is not None or not self.use_local_output:
            raise LayoutError(
                "ColwiseParallel.heads gives local heads; output_layouts and use_local_output=False do not go with it"
            )
        return ModuleSharding(
            "ColwiseParallel",
            {name: HeadCut(dim, heads) for name, dim in features.parameters.items()},
            inputs=(Port(self.input_layouts or Replicate(), Replicate()),),
            outputs=(Port(Shard(-1), Shard(-1)),),
            options={"blocks": {"": heads}} if isinstance(module, nn.Linear) else {},
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class RowwiseParallel(DeclaredStyle):
    """Cut a module along its input features: every rank computes a partial sum of the whole output.

    Linear: weight `Shard(1)`, the bias replicated and added once after the reduction; Embedding: weight
    `Shard(0)`, tokens of other ranks masked; Conv: input channels.

    Args:
        input_layouts: what a plain tensor that arrives means; the last dim sharded if left out.
        output_layouts: layout of the output; Replicate if left out.
        use_local_output: give the plain local tensor instead of a DTensor.

    Example:
        >>> from torch import nn
        >>> RowwiseParallel().sharding(nn.Linear(4, 8)).parameters
        {'weight': Shard(dim=1)}
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True
    of_heads: Heads | None = field(default=None, init=False)
    chunks: int = field(default=1, init=False)

    def heads(self, count: int, size: int) -> Self:
        """The same style for a projection from `count` heads of `size` features, cut as `ColwiseParallel.heads`."""
        return self._with(of_heads=Heads(count, size))

    def overlapped(self, chunks: int) -> Self:
        """The same style for a Linear whose reduction runs beside its product, in so many chunks of dim 0."""
        if chunks < 1:
            raise LayoutError(f"overlapped: the number of chunks is at least 1, got {chunks}")
        return self._with(chunks=chunks)

    def sharding(self, module: nn.Module) -> ModuleSharding:
        features = _features("RowwiseParallel", ROWWISE, module)
        desired: Placement = Replicate() if features.input is None else Shard(features.input)
        arriving = Shard(-1) if features.input is None else Shard(features.input)
        cut = {
            name: HeadCut(dim, self.of_heads) if self.of_heads else Shard(dim, multiple_of=self.multiple_of)
            for name, dim in features.parameters.items()
        }
        return ModuleSharding(
            "RowwiseParallel",
            cut,
            inputs=(Port(self.input_layouts or arriving, desired),),
            outputs=(Port(Partial(), self.output_layouts or Replicate()),),
            local_outputs=self.use_local_output,
            options={"chunks": self.chunks} if self.chunks > 1 and isinstance(module, nn.Linear) else {},
        )
