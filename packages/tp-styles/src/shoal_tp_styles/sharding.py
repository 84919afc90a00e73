"""`ModuleSharding`: how one module is parallel on one mesh axis.  Declared, not applied.

A style turns a module into this record without a mesh; `apply.py` is the only file that acts on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_dtensor import Placement, Replicate, Shard
from shoal_mesh import DeviceMesh

from .errors import LayoutError

__all__ = ["HeadCut", "Heads", "ModuleSharding", "Port"]


@dataclass(frozen=True, slots=True)
class Heads:
    """Features that come in heads, which must not be cut through.

    With at least as many heads as ranks, each rank gets some, as equally as possible (six heads on four ranks: 2, 2,
    1, 1).  With fewer (the key and value heads of grouped-query attention), each head is held by several neighbouring
    ranks; the ranks must then be a multiple of the heads.

    Attributes:
        count: number of heads.
        size: features of one head.
    """

    count: int
    size: int

    @property
    def features(self) -> int:
        """Number of features of all heads."""
        return self.count * self.size

    def shared(self, ranks: int) -> bool:
        """Whether several ranks hold one head."""
        return self.count < ranks and ranks % self.count == 0

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The one-axis mesh itself, or the same ranks as (heads, ranks that share one)."""
        ranks = mesh.size()
        if not self.shared(ranks):
            return mesh
        names = mesh.mesh_dim_names and (f"{mesh.axis_names[0]}_heads", f"{mesh.axis_names[0]}_sharing")
        return mesh.unflatten(0, (self.count, ranks // self.count), names)

    def placements(self, mesh: DeviceMesh, dim: int = 0) -> tuple[Placement, ...]:
        """How a parameter with these features along `dim` lies on `self.mesh(mesh)`."""
        if self.shared(mesh.size()):
            return Shard(dim, multiple_of=self.size), Replicate()
        return (HeadCut(dim, self).on(mesh.size()),)


@dataclass(frozen=True, slots=True)
class HeadCut:
    """A parameter dim that is cut at heads, over a number of ranks that is known when the style is applied."""

    dim: int
    heads: Heads

    def on(self, ranks: int) -> Shard:
        """The placement over so many ranks.

        Raises:
            LayoutError: if there are fewer heads than ranks.

        Example:
            >>> HeadCut(0, Heads(6, 8)).on(4)
            Shard(dim=0, sizes=(16, 16, 8, 8))
        """
        count, size = self.heads.count, self.heads.size
        if count < ranks:
            raise LayoutError(
                f"{count} heads cannot be cut over {ranks} ranks; fewer heads than ranks are shared only where the "
                "ranks are a multiple of the heads, and not by row-wise styles"
            )
        if count % ranks == 0:
            return Shard(self.dim, multiple_of=size)
        return Shard(self.dim, sizes=tuple(size * (count // ranks + (rank < count % ranks)) for rank in range(ranks)))


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor that crosses the boundary of a module.

    Attributes:
        layout: of an input, what a plain tensor that arrives means; of an output, what the computation gives.
        desired: of an input, what the computation wants; of an output, what leaves the module.
    """

    layout: Placement
    desired: Placement


@dataclass(frozen=True, slots=True)
class ModuleSharding:
    """Placements of a module's parameters, inputs and outputs along one mesh axis.

    Attributes:
        kind: the style's name; with the module's type it selects the lowering.
        parameters: placement of each named parameter or buffer; those not named are replicated.
        inputs: one port per positional input, None where the input passes through; None: all pass through.
        keywords: ports of keyword inputs.
        outputs: one port per output, None where it passes through; None: all pass through.
        local_inputs: the module's forward sees plain local tensors.
        local_outputs: what leaves the module are plain local tensors.
        strict: a number of inputs or outputs other than the number of ports is an error.
        options: further facts for the lowering.
    """

    kind: str
    parameters: Mapping[str, Placement | HeadCut] = field(default_factory=dict)
    inputs: tuple[Port | None, ...] | None = None
    keywords: Mapping[str, Port] = field(default_factory=dict)
    outputs: tuple[Port | None, ...] | None = None
    local_inputs: bool = False
    local_outputs: bool = True
    strict: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    def placement(self, name: str, ranks: int) -> Placement:
        """The placement of a parameter or buffer over so many ranks."""
        placement = self.parameters.get(name, Replicate())
        return placement.on(ranks) if isinstance(placement, HeadCut) else placement

    def cuts(self, name: str) -> bool:
        """Whether a parameter is cut."""
        return isinstance(self.parameters.get(name), Shard | HeadCut)

    @property
    def distributes(self) -> bool:
        """Whether parameters become DTensors (False for styles that only prepare inputs or outputs)."""
        return not self.kind.startswith("Prepare")
