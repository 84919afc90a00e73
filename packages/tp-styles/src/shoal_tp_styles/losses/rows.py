"""`LogitRows`: all dims of logits but the classes, which other mesh axes may shard (data or sequence parallelism).

Every rank computes the loss of its own rows; sums over rows are then summed over those axes.
"""

from __future__ import annotations

from torch import Tensor

from shoal_dtensor import DTensor, Placement, Replicate, Shard, StridedShard
from shoal_dtensor.internal import current_arithmetic
from shoal_mesh import Comm, DeviceMesh, all_reduce, differentiable
from shoal_mesh.internal import dataclass, tree_sum

Order = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The layout of the rows of logits.

    Attributes:
        mesh: of the logits; None for plain ones, of which every rank has all rows.
        placements: of a tensor with one entry per row (no class dim), one per mesh axis.
        order: its shard order.
        shape: global shape of such a tensor; None where every rank has all rows.
    """

    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    order: Order = ()
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, logits: Tensor, class_dim: int) -> LogitRows:
        """The rows of logits whose class dim is `class_dim`."""
        if not isinstance(logits, DTensor):
            return _ALL_ROWS
        class_dim %= logits.ndim
        spec = logits.spec
        placements = tuple(_without(p, class_dim) for p in spec.placements)
        order = tuple((d - (d > class_dim), axes) for d, axes in spec.shard_order if d != class_dim)
        shape = tuple(n for d, n in enumerate(logits.shape) if d != class_dim)
        return cls(spec.mesh, placements, order, shape) if order else _ALL_ROWS

    @property
    def comm(self) -> Comm | None:
        """Between ranks with other rows of the same classes; None if every rank has all rows."""
        axes = tuple(sorted(axis for _, sharding in self.order for axis in sharding))
        return self.mesh.comm(axes) if self.mesh is not None and axes else None

    def shard(self, target: Tensor) -> Tensor:
        """The entries of this rank's rows, of a tensor with one entry per row.

        A plain one is the same on all ranks and has all rows; a DTensor is redistributed to the rows' layout.
        """
        if self.mesh is None:
            return target.full_tensor() if isinstance(target, DTensor) else target
        if not isinstance(target, DTensor):
            target = DTensor.from_local(target, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return target.redistribute(placements=self.placements, shard_order=self.order).to_local()

    def global_shape(self, local: Tensor) -> tuple[int, ...]:
        """Global shape of a tensor with one entry per row, of which `local` is this rank's shard."""
        return tuple(local.shape) if self.shape is None else self.shape

    def sum_of_own(self, loss: Tensor) -> Tensor:
        """The sum of the losses of this rank's rows; a node of the tree inside `invariant_arithmetic`."""
        return loss.sum() if current_arithmetic() is None else tree_sum(loss.flatten())

    def total(self, tensor: Tensor) -> Tensor:
        """`P -> R`: a sum over this rank's rows becomes the sum over all rows; gradients pass."""
        return tensor if self.comm is None else differentiable.all_reduce_replicated(tensor, self.comm)

    def count(self, tensor: Tensor) -> Tensor:
        """`P -> R`: the same without gradients, for weights and numbers of rows."""
        return tensor if self.comm is None else all_reduce(tensor, self.comm)


_ALL_ROWS = LogitRows()


def _without(placement: Placement, class_dim: int) -> Placement:
    """The placement of the rows that a placement of the logits implies."""
    if not isinstance(placement, Shard | StridedShard) or placement.dim == class_dim:
        return Replicate()
    return placement.on_dim(placement.dim - (placement.dim > class_dim))
