"""Styles that shard output features or input features, of single, fused and tied weights.

One table per style: module type -> the sharded dims of its parameters, the dims of input and output
that hold the sharded features, and the lowering that computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from torch import nn

from shoal_dtensor import Partial, Placement, Replicate, Shard
from shoal_dtensor.errors import LayoutError, UnsupportedModuleError

from ..lowering.lowered import Lowered
from ..modules.channels import Channels
from ..modules.composed_linear import FusedColumn
from ..modules.embedding import ColumnEmbedding, EmbeddingBag, RowEmbedding
from ..modules.recurrent import RECURRENT, sharded_hidden_units
from ..modules.sharded_linear import ColumnLinear, RowLinear
from ..sharding.module_kinds import (
    TransposedLinear,
    class_of,
    is_grouped,
    keeps_forward,
    kinds_of,
    out_features,
)
from ..sharding.module_sharding import (
    FusedBlocks,
    Heads,
    HeadShard,
    ModuleSharding,
    Overlap,
    ParameterPlacement,
    Port,
    StyleOrigin,
)
from .activation import sharded_groups
from .style import DeclaredStyle, LayoutField, check_forward, unsupported_error

Layouts = Placement | tuple[Placement, ...] | None


class Features(NamedTuple):
    """The dims of a module's features.

    Attributes:
        parameters: the sharded dim of each parameter.
        input: the sharded dim of the input; None: the input is replicated.
        output: the sharded dim of the output; None: the output is a partial sum.
        lowering: the local computation.
        inputs: number of inputs.
    """

    parameters: Mapping[str, int]
    input: int | None
    output: int | None
    lowering: type[Lowered]
    inputs: int = 1


# By their number of spatial dims; the channels are the dim before the spatial ones.
_CONVOLUTIONS = (1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)
_TRANSPOSED = (1, nn.ConvTranspose1d), (2, nn.ConvTranspose2d), (3, nn.ConvTranspose3d)

COLWISE: dict[type[nn.Module], Features] = {
    nn.Linear: Features({"weight": 0, "bias": 0}, None, -1, ColumnLinear),
    TransposedLinear: Features({"weight": 1, "bias": 0}, None, -1, Channels),
    nn.Embedding: Features({"weight": 1}, None, -1, ColumnEmbedding),
    nn.EmbeddingBag: Features({"weight": 1}, None, -1, EmbeddingBag),
    nn.Bilinear: Features({"weight": 0, "bias": 0}, None, -1, Channels, inputs=2),
    **{
        conv: Features({"weight": 0, "bias": 0}, None, -1 - n, Channels)
        for n, conv in _CONVOLUTIONS
    },
    **{conv: Features({"weight": 1, "bias": 0}, None, -1 - n, Channels) for n, conv in _TRANSPOSED},
}

ROWWISE: dict[type[nn.Module], Features] = {
    nn.Linear: Features({"weight": 1}, -1, None, RowLinear),
    TransposedLinear: Features({"weight": 0}, -1, None, Channels),
    nn.Embedding: Features({"weight": 0}, None, None, RowEmbedding),
    nn.EmbeddingBag: Features({"weight": 0}, None, None, EmbeddingBag),
    **{conv: Features({"weight": 1}, -1 - n, None, Channels) for n, conv in _CONVOLUTIONS},
    **{conv: Features({"weight": 0}, -1 - n, None, Channels) for n, conv in _TRANSPOSED},
}

_Table = Mapping[type[nn.Module], Features]
_OF_HEADS: _Table = {kind: COLWISE[kind] for kind in (nn.Linear, TransposedLinear, nn.Embedding)}


class _TableRow(NamedTuple):
    """The row of a module in a style's table.

    Attributes:
        features: the dims of the module's features.
        lowering: the local computation; None for a subclass with its own forward.
    """

    features: Features
    lowering: type[Lowered] | None


def _row_of(style: str, table: _Table, module: nn.Module) -> _TableRow:
    """Return the module's row of the table, or raise UnsupportedModuleError."""
    for cls in kinds_of(module):
        if cls in table:
            features = table[cls]
            lowering = features.lowering if keeps_forward(module, cls) else None
            return _TableRow(features, lowering)
    raise unsupported_error(style, module, tuple(table))


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class _FeatureStyle(DeclaredStyle):
    """Base class of the column-wise and the row-wise style."""

    use_local_output: bool = True
    of_heads: Heads | None = field(
        default=None, init=False, metadata={"call": ".heads({0.count}, {0.size})"}
    )
    chunks: int = field(default=1, init=False, metadata={"call": ".overlapped({})"})

    def heads(self, count: int, size: int) -> Self:
        """Return the same style for a projection to (or from) `count` heads of `size` features.

        Shards hold complete heads; if there are fewer heads than ranks, neighboring ranks hold the
        same head (Linear only). An Embedding may hold features of heads too: a relative position
        bias has one feature for each.

        Example:
            >>> ColwiseParallel().heads(2, 64).of_heads
            Heads(count=2, size=64)
        """
        return self._with(of_heads=Heads(count, size))

    def overlapped(self, chunks: int) -> Self:
        """Return the same style for a Linear whose collective overlaps its product.

        The overlap is in chunks of dim 0.

        Columns gather a sharded input in chunks; rows reduce or scatter their output, and gather
        its gradient. Eager forwards overlap; compiled code orders collectives itself.

        Raises:
            LayoutError: if there is no chunk; (when it is applied) if columns get an input that
                needs no gather.
            UnsupportedModuleError: (when it is applied) to another module than a Linear with
                torch's forward, or one of `ColwiseParallel.heads`.

        Example:
            >>> ColwiseParallel(input_layouts=Shard(1)).overlapped(2)
            ColwiseParallel(input_layouts=Shard(dim=1)).overlapped(2)
        """
        if chunks < 1:
            raise LayoutError(f"overlapped: chunks must be at least 1, got {chunks}")
        return self._with(chunks=chunks)

    def _declared_sharding(
        self,
        style: str,
        table: _Table,
        module: nn.Module,
        default_input: Placement | None,
        *,
        default_output: Placement | None,
    ) -> ModuleSharding:
        """Return the sharding by a module's row of the table.

        The layouts outside the module are those of the style's fields, else the defaults, else the
        layouts inside.
        """
        input_layout = self.field_value("input_layouts") or default_input
        output_layout = self.field_value("output_layouts") or default_output
        # The channels of a grouped convolution are sharded inside, whatever the style.
        if is_grouped(module):
            self._overlap(module, None)
            return sharded_groups(self, module, input_layout, output_layout)
        features, lowering = _row_of(style, table, module)
        if features.input is None:
            # ColwiseParallel passes a default. RowwiseParallel passes none: as in torch, ids for
            # the rows of its table arrive sharded unless the style gives another layout.
            arrives: Placement = input_layout or Shard(-1)
            input_port = Port(arrives, Replicate())
        else:
            reads = Shard(features.input)
            input_port = Port(input_layout or reads, reads)
        computed: Placement = Partial() if features.output is None else Shard(features.output)
        parameters: dict[str, ParameterPlacement] = {}
        for name, dim in features.parameters.items():
            if self.of_heads:
                parameters[name] = HeadShard(dim, self.of_heads)
            else:
                parameters[name] = Shard(dim, multiple_of=self.multiple_of)
        output_port = Port(computed, output_layout or computed)
        return ModuleSharding(
            style,
            parameters,
            inputs=(input_port,) * features.inputs,
            outputs=(output_port,),
            lowering=lowering,
            local_outputs=self.use_local_output,
            options=self._overlap(module, lowering),
        )

    def _overlap(self, module: nn.Module, lowering: type[Lowered] | None) -> Overlap | None:
        """Return the options of a module's lowering, with overlap if the style requests it."""
        if self.chunks == 1:
            return None
        if lowering not in (ColumnLinear, RowLinear):
            raise UnsupportedModuleError(
                f"{type(self).__name__}.overlapped: the module must be a Linear with torch's "
                f"forward, got {type(module).__name__}; leave out overlapped()"
            )
        return Overlap(self.chunks)


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class ColwiseParallel(_FeatureStyle):
    """Style that shards a module along its output features: a rank computes some output columns.

    The sharded dims are, for each kind of module:

    - Linear: weight and bias `Shard(0)`. A Linear with a weight of shape (in, out) (GPT-2's
      `Conv1D`) is recognized by its structure.
    - Embedding and EmbeddingBag: weight `Shard(1)`.
    - Conv and ConvTranspose: output channels. With several groups, a rank has complete groups, and
      reads their input channels.
    - RNN, LSTM and GRU: hidden units. The state is gathered in every step of the sequence. The
      states have the layout of the output, which must be Replicate for a bidirectional module.

    Args:
        input_layouts: layout of a plain input; Replicate if left out. Inside it is replicated.
            Sharded tokens of an EmbeddingBag with offsets are each rank's own bags, of any number
            and length.
        output_layouts: layout of the output; the last dim sharded if left out (channels for Conv).
        use_local_output: return the plain local tensor instead of a DTensor.

    Example:
        >>> from torch import nn
        >>> ColwiseParallel().sharding(nn.Linear(4, 8)).parameters
        {'weight': Shard(dim=0), 'bias': Shard(dim=0)}
    """

    input_layouts: Layouts = LayoutField((Replicate(),))  # type: ignore[assignment]  # descriptor
    output_layouts: Layouts = LayoutField((Shard(-1),))  # type: ignore[assignment]  # descriptor

    @property
    def desired_input_layouts(self) -> tuple[Placement, ...]:
        """Layout of the input inside the module; no other layout can be assigned.

        Raises:
            LayoutError: if another layout is assigned.
        """
        return (Replicate(),)

    @desired_input_layouts.setter
    def desired_input_layouts(self, layouts: Layouts) -> None:
        if layouts not in (Replicate(), (Replicate(),)):
            raise LayoutError(
                "ColwiseParallel.desired_input_layouts: a column of the output is computed from "
                f"the whole input, got {layouts!r}; describe the layout of the arriving input "
                "with input_layouts"
            )

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if self.of_heads is not None:
            return self._of_heads(module, self.of_heads)
        if isinstance(module, RECURRENT):
            # Every gate has the same sharding, by single hidden units.
            if self.multiple_of > 1:
                raise LayoutError(
                    "ColwiseParallel.aligned: not supported for recurrent modules, whose hidden "
                    f"units are divided singly; got {self.multiple_of}"
                )
            self._overlap(module, None)
            return sharded_hidden_units(
                "ColwiseParallel",
                module,
                self.field_value("input_layouts") or Replicate(),
                self.field_value("output_layouts"),
                local_outputs=self.use_local_output,
            )
        sharding = self._declared_sharding(
            "ColwiseParallel", COLWISE, module, Replicate(), default_output=None
        )
        layout = sharding.input_port().layout
        is_gathered = isinstance(layout, Shard) and layout.multiple_of == 1
        if self.chunks > 1 and not is_gathered:
            raise LayoutError(
                "ColwiseParallel.overlapped: overlaps the gather of a sharded input with the "
                f"product, got input_layouts={layout!r}. Pass input_layouts=Shard(dim), or leave "
                "out overlapped(): the backward's collective overlaps the weight gradient in any "
                "case"
            )
        return sharding

    def _of_heads(self, module: nn.Module, heads: Heads) -> ModuleSharding:
        features = _row_of("ColwiseParallel.heads", _OF_HEADS, module).features
        weight: Any = module._parameters["weight"]
        if weight.shape[features.parameters["weight"]] != heads.features:
            raise LayoutError(
                f"ColwiseParallel.heads: {heads} need {heads.features} features, which {module} "
                "does not have"
            )
        if self.field_value("output_layouts") is not None or not self.use_local_output:
            raise LayoutError(
                "ColwiseParallel.heads returns local heads and cannot be combined with "
                "output_layouts and use_local_output=False"
            )
        if self.chunks > 1:
            raise UnsupportedModuleError(
                "ColwiseParallel: heads() and overlapped() cannot be combined; leave out one of "
                "them"
            )
        sharding = self._declared_sharding(
            "ColwiseParallel", _OF_HEADS, module, Replicate(), default_output=None
        )
        if not isinstance(module, nn.Linear):
            return sharding
        check_forward("ColwiseParallel.heads", module, nn.Linear)
        return replace(sharding, lowering=FusedColumn, options=FusedBlocks({"": heads}))


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class RowwiseParallel(_FeatureStyle):
    """Style that shards a module along its input features: a rank computes a partial output.

    The sharded dims are, for each kind of module:

    - Linear: weight `Shard(1)`. The bias is replicated, and added once after the reduction.
    - Embedding: weight `Shard(0)`. A rank returns zeros for tokens of other ranks.
    - Conv and ConvTranspose: input channels. With several groups, a rank has complete groups and
      computes their output channels, so nothing is summed.

    Args:
        input_layouts: layout of a plain input; the last dim sharded if left out. For bags the
            layout is the same as in `ColwiseParallel`.
        output_layouts: layout of the output; Replicate if left out.
        use_local_output: return the plain local tensor instead of a DTensor.

    Example:
        >>> from torch import nn
        >>> RowwiseParallel().sharding(nn.Linear(4, 8)).parameters
        {'weight': Shard(dim=1)}
    """

    input_layouts: Layouts = LayoutField((Shard(-1),))  # type: ignore[assignment]  # descriptor
    output_layouts: Layouts = LayoutField((Replicate(),))  # type: ignore[assignment]  # descriptor

    def sharding(self, module: nn.Module) -> ModuleSharding:
        return self._declared_sharding(
            "RowwiseParallel", ROWWISE, module, None, default_output=Replicate()
        )


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class TiedStyle(DeclaredStyle):
    """The style `of` with replicated inputs and outputs.

    A later call may replace it by a style of the module's own.
    """

    of: DeclaredStyle

    def sharding(self, module: nn.Module) -> ModuleSharding:
        sharding = self.of.sharding(module)
        return replace(sharding, style="tied weight", origin=StyleOrigin.TIED_WEIGHT)


def style_of_tied(module: nn.Module, placement: Placement) -> TiedStyle | None:
    """Return the style that gives the weight of a Linear or Embedding this placement, or None."""
    is_known = class_of(module) in (nn.Linear, nn.Embedding)
    if not is_known or not isinstance(placement, Shard) or placement.sizes is not None:
        return None
    # Rows of a Linear's weight are output features, rows of a table are input features.
    is_by_columns = (placement.dim == 0) == isinstance(module, nn.Linear)
    style: DeclaredStyle
    if is_by_columns:
        style = ColwiseParallel(output_layouts=Replicate())
    else:
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    return TiedStyle(of=style.aligned(placement.multiple_of))


@dataclass(kw_only=True, repr=False)
class PackedColwiseParallel(DeclaredStyle):
    """Style that shards each block of a fused Linear along its output features.

    The local output holds this rank's shard of every block, in the order of the blocks.

    Args:
        blocks: name and number of output features of each block, in the order of the rows; or
            `Heads(count, size)` for blocks with complete heads in each shard. Fewer heads than
            ranks are replicated over neighbouring ranks (GQA). A number stands for so many equal
            blocks, named by their index.
        input_layouts: layout of a plain input; Replicate if left out.

    Raises:
        LayoutError: if the blocks do not add up to the module's output features (when applied).

    Example:
        >>> from shoal_tp_styles import Heads
        >>> blocks = {"q": Heads(8, 64), "k": Heads(2, 64), "v": Heads(2, 64)}
        >>> style = PackedColwiseParallel(blocks=blocks)
        >>> style.sharding(nn.Linear(512, 768)).fused.blocks["k"].features
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
            raise unsupported_error("PackedColwiseParallel", module, (nn.Linear, TransposedLinear))
        kind = next(kind for kind in kinds_of(module) if kind in (TransposedLinear, nn.Linear))
        check_forward("PackedColwiseParallel", module, kind)
        sizes = self.blocks
        if isinstance(sizes, int):
            sizes = {str(number): features // sizes for number in range(sizes)}
        blocks: dict[str, Heads] = {}
        for name, block in sizes.items():
            if not isinstance(block, Heads):
                block = Heads(block // self.multiple_of, self.multiple_of, chunked=True)
            blocks[name] = block
        total = sum(block.features for block in blocks.values())
        if total != features:
            raise LayoutError(
                f"PackedColwiseParallel: the blocks {sizes} have {total} features, but the module "
                f"has {features}"
            )
        input_port = Port(self.input_layouts or Replicate(), Replicate())
        output_port = Port(Shard(-1), Shard(-1))
        return ModuleSharding(
            "PackedColwiseParallel",
            inputs=(input_port,),
            outputs=(output_port,),
            lowering=FusedColumn,
            options=FusedBlocks(blocks, transposed=kind is TransposedLinear),
        )
