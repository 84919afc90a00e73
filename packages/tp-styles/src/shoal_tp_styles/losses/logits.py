"""Layout of logits: `Vocab`, the classes of each rank, and `LogitRows`, all dims but the classes.

Other mesh axes may shard the rows: every rank computes the loss of its own rows, and sums are
reduced over these axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shoal_dtensor import DTensor, Placement, Replicate, Shard, StridedShard, full_tensor
from shoal_dtensor.errors import LayoutError, OperatorIndexError
from shoal_dtensor.internal import (
    FakeTensor,
    assert_on_device,
    current_arithmetic,
    is_compiling,
    shard_sizes,
)
from shoal_mesh import Comm, DeviceMesh, differentiable
from shoal_mesh.internal import OldAttribute, tree_sum

# Dims that are sharded, with the mesh axes that shard each of them, outermost first.
ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Vocab:
    """The classes that this rank holds.

    Attributes:
        comm: communicator over which the classes are sharded.
        sizes: number of classes on each of its ranks.
        real: number of classes that are not padding; padding comes last, never wins and enters no
            sum.
    """

    comm: Comm
    sizes: tuple[int, ...]
    real: int | None = None

    @classmethod
    def of(cls, logits: Tensor, dim: int, real: int | None = None) -> Vocab:
        """Return the sharding of a DTensor's class dim.

        Raises:
            LayoutError: if the class dim is not sharded on exactly one mesh axis, or another axis
                holds partial values.
        """
        if not isinstance(logits, DTensor):
            raise LayoutError(
                "plain logits need vocab=Vocab(comm, sizes), the number of classes on each rank"
            )
        sharding = logits.spec.dim_sharding(dim)
        if len(sharding.axes) != 1 or logits.spec.partials:
            raise LayoutError(
                f"the class dim {dim} of the logits must be sharded on exactly one mesh axis, got "
                f"{logits.spec}"
            )
        return cls(logits.device_mesh.comm(sharding.axes[0]), tuple(sharding.sizes), real)

    @classmethod
    def even(cls, mesh: DeviceMesh, size: int, axis: int | str = 0) -> Vocab:
        """Shard `size` classes like `torch.chunk` over one axis of a mesh."""
        comm = mesh.comm(axis)
        return cls(comm, tuple(shard_sizes(size, Shard(0), comm.size)))

    @property
    def first(self) -> int:
        """Global index of the first class of this rank."""
        return sum(self.sizes[: self.comm.rank])

    @property
    def total(self) -> int:
        """Number of classes without padding."""
        return sum(self.sizes) if self.real is None else self.real

    @property
    def own_classes(self) -> int:
        """Number of classes of this rank, without padding."""
        return max(0, min(self.sizes[self.comm.rank], self.total - self.first))

    own = OldAttribute("own_classes")

    def sum_of_classes(self, tensor: Tensor) -> Tensor:
        """Sum over this rank's classes, (..., own) -> (...).

        Inside `invariant_arithmetic` the classes are added in its fixed tree of sums.
        """
        arithmetic = current_arithmetic()
        if arithmetic is None:
            return tensor.sum(-1)
        arithmetic.own_blocks(self.comm.size, sum(self.sizes), "the classes of a loss")
        if self.total != sum(self.sizes) or len(set(self.sizes)) > 1:
            raise LayoutError(
                "invariant_arithmetic: all ranks must hold equal numbers of classes, without "
                f"padding; got {self}"
            )
        return tree_sum(tensor.movedim(-1, 0))

    def shard(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's shard of a tensor with one entry per class along `dim`."""
        tensor = full_tensor(tensor)
        # A rank with padding alone holds no class, and begins where the classes end: of 9 real
        # classes in shards of 4 4 4 the ranks hold 4 4 1, of 7 they hold 4 3 0.
        first = min(self.first, self.total - self.own_classes)
        return tensor.narrow(dim, first, self.own_classes)


class LocalLogits(NamedTuple):
    """This rank's part of logits.

    Attributes:
        values: this rank's rows and classes; the classes come last and have no padding.
        vocab: the classes of each rank.
        rows: the layout of the rows.
    """

    values: Tensor
    vocab: Vocab
    rows: LogitRows


def local_logits(logits: Tensor, vocab: Vocab | None, dim: int) -> LocalLogits:
    """Return this rank's logits, their vocabulary, and the layout of their rows."""
    dim = dim + logits.ndim if dim < 0 else dim
    rows = LogitRows.of(logits, dim)
    if vocab is None or isinstance(logits, DTensor):
        real = None if vocab is None else vocab.real
        vocab = Vocab.of(logits, dim, real)
    if isinstance(logits, DTensor):
        logits = logits.to_local(grad_placements=logits.placements)
    values = logits.movedim(dim, -1).narrow(-1, 0, vocab.own_classes)
    return LocalLogits(values, vocab, rows)


def check_targets(targets: Tensor, vocab: Vocab, ignored: int | None = None) -> None:
    """Refuse targets that are not classes, before anything is sent.

    No rank would find the logit of such a target, and the loss would be wrong without an error. The
    ranks that share the classes have the same targets, so all of them raise. Compiled code and
    accelerators report a wrong target when the assertion runs on the device.
    """
    is_valid = (targets >= 0) & (targets < vocab.total)
    allowed = f"0 to {vocab.total - 1}"
    if ignored is not None:
        is_valid |= targets == ignored
        allowed += f", or ignore_index ({ignored})"
    if is_compiling() or not targets.is_cpu or isinstance(targets, FakeTensor):
        message = f"a target is out of bounds: targets must be {allowed}"
        assert_on_device(is_valid.all(), message)
    elif not is_valid.all():
        wrong = targets[~is_valid].reshape(-1)[0].item()
        raise OperatorIndexError(f"target {wrong} is out of bounds: targets must be {allowed}")


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The layout of the rows of logits.

    A tensor of rows has one entry per row, and no class dim.

    Attributes:
        mesh: the mesh of the logits; None for plain logits, of which every rank has all rows.
        placements: placements of a tensor of rows, one per mesh axis.
        order: shard order of a tensor of rows.
        shape: global shape of a tensor of rows; None where every rank has all rows.
    """

    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    order: ShardOrder = ()
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, logits: Tensor, class_dim: int) -> LogitRows:
        """Return the rows of logits whose class dim is `class_dim`."""
        if not isinstance(logits, DTensor):
            return cls()
        class_dim %= logits.ndim
        spec = logits.spec
        order = []
        for dim, axes in spec.shard_order:
            if dim != class_dim:
                order.append((_row_dim(dim, class_dim), axes))
        if not order:
            return cls()
        placements: list[Placement] = []
        for placement in spec.placements:
            if isinstance(placement, Shard | StridedShard) and placement.dim != class_dim:
                placements.append(placement.on_dim(_row_dim(placement.dim, class_dim)))
            else:
                placements.append(Replicate())
        shape = [size for dim, size in enumerate(logits.shape) if dim != class_dim]
        return cls(spec.mesh, tuple(placements), tuple(order), tuple(shape))

    @property
    def comm(self) -> Comm | None:
        """Communicator of the ranks with other rows of the same classes; None if there are none."""
        axes = tuple(sorted(axis for _, sharding in self.order for axis in sharding))
        return self.mesh.comm(axes) if self.mesh is not None and axes else None

    def shard(self, target: Tensor) -> Tensor:
        """Return this rank's rows of a tensor with one entry per row.

        A plain tensor is the same on all ranks.
        """
        if self.mesh is None:
            return full_tensor(target)
        if not isinstance(target, DTensor):
            target = DTensor.from_local(target, self.mesh, [Replicate()] * self.mesh.ndim)
        return target.redistribute(placements=self.placements, shard_order=self.order).to_local()

    def total(self, loss: Tensor) -> Tensor:
        """Sum the losses of all rows (`P -> R`); gradients pass.

        Inside `invariant_arithmetic` the sum follows its tree.
        """
        if current_arithmetic() is None:
            local_sum = loss.sum()
        else:
            local_sum = tree_sum(loss.flatten())
        if self.comm is None:
            return local_sum
        return differentiable.all_reduce_replicated(local_sum, self.comm)


def _row_dim(dim: int, class_dim: int) -> int:
    """Return the dim of a tensor of rows that is a dim of the logits other than the class dim."""
    return dim - 1 if dim > class_dim else dim
