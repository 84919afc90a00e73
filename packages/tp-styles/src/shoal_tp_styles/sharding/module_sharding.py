"""`ModuleSharding`: the declaration of how one module is parallel on one or two mesh axes.

A style returns the declaration for a module, and `apply` acts on it. A dim of heads or of experts
is declared by a `HeadShard` or an `ExpertOwner`. Its shards follow from the number of ranks when
the style is applied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from shoal_dtensor import Placement, Replicate, Shard, StridedShard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import shard_sizes
from shoal_mesh import DeviceMesh
from shoal_mesh.internal import OldAttribute


@dataclass(frozen=True, slots=True)
class Heads:
    """Features that belong to heads; a shard holds complete heads.

    With at least as many heads as ranks, each rank holds some, as equally as possible (six heads on
    four ranks: 2, 2, 1, 1). With fewer (the key and value heads of grouped-query attention), each
    head is replicated over several neighbouring ranks; the number of ranks must then be a multiple
    of the number of heads.

    Attributes:
        count: number of heads.
        size: features of one head.
        chunked: whether these are plain features. They are divided as by `torch.chunk`, in units of
            `size`, because the row-wise weight that follows is divided in this way.

    Example:
        >>> heads = Heads(count=2, size=8)
        >>> heads.features, heads.replicated(4)
        (16, True)
    """

    count: int
    size: int
    chunked: bool = field(default=False, repr=False)

    @property
    def features(self) -> int:
        """Number of features of all heads."""
        return self.count * self.size

    def replicated(self, ranks: int) -> bool:
        """Tell whether each head is held by several of so many ranks, as 2 heads on 4 ranks."""
        return not self.chunked and self.count < ranks and ranks % self.count == 0

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the one-axis mesh, or the same ranks as (heads, ranks that hold the same head)."""
        ranks = mesh.size()
        if not self.replicated(ranks):
            return mesh
        names = None
        if mesh.mesh_dim_names:
            axis = mesh.axis_names[0]
            names = (f"{axis}_heads", f"{axis}_replicas")
        # Example: 2 heads on 4 ranks -> a mesh of shape (2, 2).
        return mesh.unflatten(0, (self.count, ranks // self.count), names)

    def placements(self, mesh: DeviceMesh) -> tuple[Placement, ...]:
        """Return placements on `self.mesh(mesh)` for a parameter with these features as rows."""
        if self.replicated(mesh.size()):
            # Example: 2 heads of 8 rows on 4 ranks -> the ranks hold 0:8, 0:8, 8:16, 8:16.
            return Shard(0, multiple_of=self.size), Replicate()
        return (HeadShard(0, self).on(mesh.size()),)


@dataclass(frozen=True, slots=True)
class HeadShard:
    """A parameter dim sharded by heads; the number of ranks is known when the style is applied.

    Attributes:
        dim: the dim.
        heads: heads of one block.
        blocks: number of equal blocks in the dim, such as gate and up; each block is sharded.
    """

    dim: int
    heads: Heads
    blocks: int = 1

    def on(self, ranks: int) -> Shard | StridedShard:
        """Return the placement over so many ranks.

        Raises:
            LayoutError: if there are fewer heads than ranks.

        Example:
            >>> HeadShard(0, Heads(6, 8)).on(4)
            Shard(dim=0, sizes=(16, 16, 8, 8))
            >>> HeadShard(1, Heads(6, 1), blocks=2).on(3)
            StridedShard(dim=1, sf=2, sizes=(2, 2, 2))
        """
        heads = self.heads
        count = heads.count
        size = heads.size
        if count < ranks and not heads.chunked:
            raise LayoutError(
                f"{count} heads cannot be sharded over {ranks} ranks; fewer heads than ranks are "
                "replicated only where the number of ranks is a multiple of the number of heads, "
                "and not by row-wise styles"
            )
        if count % ranks == 0 or heads.chunked:
            shard = Shard(self.dim, multiple_of=size)
        else:
            # Example: 6 heads on 4 ranks -> 2, 2, 1, 1.
            heads_of_ranks = [count // ranks + (rank < count % ranks) for rank in range(ranks)]
            shard = Shard(self.dim, sizes=tuple(size * held for held in heads_of_ranks))
        if self.blocks == 1:
            return shard
        # Example: gate and up of 6 features each, on 3 ranks -> [2, 2, 2] in each block.
        in_block = shard_sizes(heads.features, shard, ranks)
        return StridedShard(self.dim, split_factor=self.blocks, sizes=in_block)


@dataclass(frozen=True, slots=True)
class ExpertOwner:
    """Placement of a parameter of one expert: one rank holds all its rows, the other ranks none.

    Attributes:
        expert: index of the expert.
        experts: number of experts.
        rows: elements of dim 0.
    """

    expert: int
    experts: int
    rows: int

    def on(self, ranks: int) -> Placement:
        """Return the placement over so many ranks."""
        # Example: 3 experts on 2 ranks -> up to 2 experts per rank, so the owners are 0 0 1.
        experts_per_rank = -(-self.experts // ranks)
        owner = self.expert // experts_per_rank
        return Shard(0, sizes=tuple(self.rows * (rank == owner) for rank in range(ranks)))


class StyleOrigin(Enum):
    """The reason why a module is parallel; a style of a plan takes the place of the others.

    Attributes:
        PLAN: a plan or a call gives the module a style.
        TIED_WEIGHT: the module shares a weight with a module that a plan names.
        ARITHMETIC: the active arithmetic (such as `invariant_arithmetic`) has replaced its forward.
    """

    PLAN = auto()
    TIED_WEIGHT = auto()
    ARITHMETIC = auto()


Options = TypeVar("Options")

# Placement of a parameter; a HeadShard or an ExpertOwner becomes one for a number of ranks.
ParameterPlacement = Placement | HeadShard | ExpertOwner


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor that enters or leaves a module.

    Attributes:
        layout: for an input, the layout of a plain tensor that arrives; for an output, the layout
            that the computation returns.
        desired: for an input, the layout that the computation needs; for an output, the layout that
            leaves the module.
    """

    layout: Placement
    desired: Placement


@dataclass(frozen=True, slots=True)
class FusedBlocks:
    """A fused weight (and bias); each of its blocks of rows is sharded separately.

    Attributes:
        blocks: features of each block by name, in the order of the rows. Plain features are a
            `Heads` too, with `chunked`. A single block has the name "".
        prefix: the fused parameters are `<prefix>weight` and `<prefix>bias`.
        transposed: the fused weight has shape (in, out) instead of (out, in).
    """

    blocks: Mapping[str, Heads]
    prefix: str = ""
    transposed: bool = False

    @property
    def features(self) -> int:
        """Rows of the fused weight."""
        return sum(heads.features for heads in self.blocks.values())

    @property
    def names(self) -> tuple[str, str]:
        """Names of the fused weight and bias."""
        return f"{self.prefix}weight", f"{self.prefix}bias"

    @property
    def is_one_block(self) -> bool:
        """True if there is a single block; its parameter keeps the name of the fused parameter."""
        return "" in self.blocks

    def parts(self, fused_name: str) -> dict[str, Heads]:
        """Return the features of each block by parameter name, for a split fused weight or bias.

        Args:
            fused_name: one of `names`. The parameter of block q of `weight` is `weight_q`.
        """
        parts: dict[str, Heads] = {}
        for block, heads in self.blocks.items():
            name = f"{fused_name}_{block}" if block else fused_name
            parts[name] = heads
        return parts

    def splits(self, ranks: int) -> bool:
        """Tell whether each block becomes a separate parameter.

        If all blocks are equal, a rank has the same rows of each block, and one `StridedShard` of
        the fused dim describes them. If blocks differ, or several ranks hold the same head, no
        placement of the fused dim describes the rows of the ranks.
        """
        differ = len({*self.blocks.values()}) > 1
        return differ or any(heads.replicated(ranks) for heads in self.blocks.values())

    def placement(self, name: str, ranks: int) -> Shard | StridedShard:
        """Return the placement of the fused weight or bias, as one parameter, over `ranks`."""
        heads = next(iter(self.blocks.values()))
        is_transposed_weight = self.transposed and name == self.names[0]
        dim = 1 if is_transposed_weight else 0
        return HeadShard(dim, heads, len(self.blocks)).on(ranks)

    def rows(self, ranks: int) -> list[int]:
        """Return the rows of all blocks on each rank."""
        # Example: a block of 4 heads and a block of 2 heads, with 8 rows per head, on 4 ranks ->
        # 16 rows on each rank: one head of the first block, and one of the second, which two ranks
        # hold.
        rows = [0] * ranks
        for heads in self.blocks.values():
            if heads.replicated(ranks):
                sizes = [heads.size] * ranks
            else:
                sizes = shard_sizes(heads.features, HeadShard(0, heads).on(ranks), ranks)
            rows = [total + size for total, size in zip(rows, sizes, strict=True)]
        return rows


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter beside a Linear: `scale * B A x`, A: (rank, in), B: (out, rank).

    Attributes:
        rank: inner size.
        scale: factor of the adapter's product.
        train_base: the Linear's own parameters get gradients too.
    """

    rank: int
    scale: float
    train_base: bool


@dataclass(frozen=True, slots=True)
class Overlap:
    """A Linear in chunks of dim 0; a chunk's collective overlaps another chunk's product."""

    chunks: int


@dataclass(frozen=True, slots=True)
class LatentFeatures:
    """Number of last features of a Linear that each rank's heads read.

    A column-wise layer reads the features before them.
    """

    rotary: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts that tokens are routed to.

    Attributes:
        count: number of experts.
        grouped: True if the module's forward takes rows sorted by expert and the number of rows of
            each expert; False if it takes tokens, the experts chosen for each token, and the
            weights of the choices.
        listed: True if the experts are the children of a ModuleList, False if they are packed along
            dim 0 of parameters.
        capacity: most rows that an expert gets, as a multiple of an equal share; None: no limit.
    """

    count: int
    grouped: bool
    listed: bool
    capacity: float | None = None


@dataclass(frozen=True, slots=True)
class ModuleSharding:
    """Placements of a module's parameters, inputs and outputs along one or two mesh axes.

    Attributes:
        style: the style's name, for messages.
        parameters: placement of each named parameter or buffer; parameters without an entry are
            replicated.
        second_axis: the placement of each parameter along the second axis of a style that acts on
            two axes; None: one axis.
        inputs: one port per positional input, None where the input passes through; None: all pass
            through.
        keywords: ports of keyword inputs.
        outputs: one port per output, None where it passes through; None: all pass through.
        lowering: the subclass of `Lowered` that computes the forward on local tensors; None: the
            module's own forward runs on DTensors.
        options: options that the lowering needs in addition to placements, by type; None: no
            options.
        local_inputs: whether the module's own forward gets plain local tensors.
        local_outputs: whether plain local tensors leave the module.
        distributes: whether parameters become DTensors (False for styles that only prepare inputs
            or outputs).
        own_parameters: whether only parameters of the module itself become DTensors, and its
            children may have styles of their own.
        strict: whether a number of inputs or outputs other than the number of ports is an error.
        origin: why the module is parallel.
    """

    style: str
    parameters: Mapping[str, ParameterPlacement] = field(default_factory=dict)
    second_axis: Mapping[str, ParameterPlacement] | None = None
    inputs: tuple[Port | None, ...] | None = None
    keywords: Mapping[str, Port] = field(default_factory=dict)
    outputs: tuple[Port | None, ...] | None = None
    lowering: type[Any] | None = None
    options: object = None
    local_inputs: bool = False
    local_outputs: bool = True
    distributes: bool = True
    own_parameters: bool = False
    strict: bool = False
    origin: StyleOrigin = field(default=StyleOrigin.PLAN, repr=False)

    @property
    def axes(self) -> int:
        """Number of mesh axes on which the style acts."""
        return 1 if self.second_axis is None else 2

    def placements(self, name: str, mesh_shape: tuple[int, ...]) -> tuple[Placement, ...]:
        """Return the placements of a parameter or buffer on a mesh of this shape."""
        fused = self.fused
        if fused is not None and name in fused.names and not fused.splits(mesh_shape[0]):
            return (fused.placement(name, mesh_shape[0]),)
        along_axes = (self.parameters, self.second_axis or {})
        requested = [declared.get(name, Replicate()) for declared in along_axes]
        placements = []
        for placement, ranks in zip(requested, mesh_shape, strict=False):
            if not isinstance(placement, Placement):
                placement = placement.on(ranks)
            placements.append(placement)
        return tuple(placements)

    def shards(self, name: str) -> bool:
        """Tell whether a parameter is sharded."""
        if self.fused is not None and name in self.fused.names:
            return True
        declared = [self.parameters.get(name)]
        if self.second_axis is not None:
            declared.append(self.second_axis.get(name))
        return any(isinstance(entry, Shard | HeadShard | ExpertOwner) for entry in declared)

    def owners(self, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """Return the modules whose own parameters the declaration describes, with their paths."""
        return [("", module)] if self.own_parameters else module.named_modules()

    def input_port(self, index: int = 0) -> Port:
        """Return the port of a positional input; replicated if none is declared."""
        return _port(self.inputs, index)

    def output_port(self, index: int = 0) -> Port:
        """Return the port of an output; replicated if none is declared."""
        return _port(self.outputs, index)

    def options_of(self, cls: type[Options]) -> Options:
        """Return the options, for a lowering whose style declares options of this type."""
        assert isinstance(self.options, cls), f"{self.style} declares {cls.__name__}"
        return self.options

    @property
    def fused(self) -> FusedBlocks | None:
        """The blocks of a fused weight, if the module has one."""
        return self.options if isinstance(self.options, FusedBlocks) else None


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module, recorded on meta tensors of global shape.

    Attributes:
        module: the module before it is parallel.
        sharding: the declaration of a style for the module.
        args: positional arguments; a tensor that `requires_grad` gets a gradient.
        kwargs: keyword arguments.
        outputs: the results of the forward, as a tuple.
        ranks: size of the mesh axis.
        axis_sizes: size of each axis that the style acts on.
    """

    module: nn.Module
    sharding: ModuleSharding
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Any, ...]
    ranks: int
    axis_sizes: tuple[int, ...] = ()

    def input(self, index: int = 0) -> Tensor | None:
        """Return an input by position, also if it came by keyword; None if it is not a tensor."""
        arguments = (*self.args, *self.kwargs.values())
        if index >= len(arguments):
            return None
        argument = arguments[index]
        return argument if isinstance(argument, Tensor) else None

    @property
    def output(self) -> Tensor:
        """The first output."""
        first: Tensor = self.outputs[0]
        return first

    def trained_parameters(self, *names: str) -> list[nn.Parameter]:
        """Return the parameters of these names that exist and get gradients."""
        params = dict(self.module.named_parameters())
        return [params[name] for name in names if name in params and params[name].requires_grad]

    trained = OldAttribute("trained_parameters")


class Collective(NamedTuple):
    """One collective of a module's forward or backward.

    Attributes:
        op: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        nbytes: bytes of the global tensor.
        backward: whether it runs in the backward.
        once_for: modules that declare the same key run this collective once, together; None: the
            module runs it alone.
        ranks: number of ranks that take part; None: all of the axis.
        chunks: number of messages in which it is sent.
    """

    op: str
    nbytes: int
    backward: bool = False
    once_for: Hashable = None
    ranks: int | None = None
    chunks: int = 1


def _port(ports: tuple[Port | None, ...] | None, index: int) -> Port:
    if ports and index < len(ports):
        port = ports[index]
        if port is not None:
            return port
    return Port(Replicate(), Replicate())
