"""`Vocab`: which classes of a sharded vocabulary this rank holds."""

from __future__ import annotations

from torch import Tensor

from shoal_dtensor import DTensor, Replicate
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import current_arithmetic
from shoal_mesh import Comm, DeviceMesh
from shoal_mesh.internal import dataclass, tree_sum


@dataclass(frozen=True, slots=True)
class Vocab:
    """Which classes this rank holds.

    Attributes:
        comm: communicator over which the classes are sharded.
        sizes: number of classes on each of its ranks.
        real: number of classes that are not padding; padding comes last, never wins and enters no sum.
    """

    comm: Comm
    sizes: tuple[int, ...]
    real: int | None = None

    @classmethod
    def of(cls, logits: Tensor, dim: int, real: int | None = None) -> Vocab:
        """The sharding of a DTensor's class dim.

        Raises:
            LayoutError: if the class dim is not sharded on exactly one mesh axis, or another axis holds partial values.
        """
        if not isinstance(logits, DTensor):
            raise LayoutError("plain logits need vocab=Vocab(comm, sizes): which classes each rank holds")
        sharding = logits.spec.dim_sharding(dim)
        if len(sharding.axes) != 1 or logits.spec.partials:
            raise LayoutError(
                f"the class dim {dim} of the logits must be sharded on exactly one mesh axis, got {logits.spec}"
            )
        return cls(logits.device_mesh.comm(sharding.axes[0]), tuple(sharding.sizes), real)

    @classmethod
    def even(cls, mesh: DeviceMesh, size: int, axis: int | str = 0) -> Vocab:
        """`size` classes sharded like `torch.chunk` over one axis of a mesh."""
        comm = mesh.comm(axis)
        step = -(-size // comm.size)
        return cls(comm, tuple(max(0, min(step, size - rank * step)) for rank in range(comm.size)))

    @property
    def first(self) -> int:
        """Global index of the first class of this rank."""
        return sum(self.sizes[: self.comm.rank])

    @property
    def total(self) -> int:
        """Number of classes without padding."""
        return sum(self.sizes) if self.real is None else self.real

    @property
    def own(self) -> int:
        """Number of classes of this rank, without padding."""
        return max(0, min(self.sizes[self.comm.rank], self.total - self.first))

    def sum_of_classes(self, tensor: Tensor) -> Tensor:
        """(..., own) -> (...): the sum over this rank's classes; a node of the tree inside `invariant_arithmetic`."""
        arithmetic = current_arithmetic()
        if arithmetic is None:
            return tensor.sum(-1)
        arithmetic.own_blocks(self.comm.size, sum(self.sizes), "the classes of a loss")
        if self.total != sum(self.sizes) or len(set(self.sizes)) > 1:
            raise LayoutError(f"invariant_arithmetic: ranks hold equally many classes without padding, got {self}")
        return tree_sum(tensor.movedim(-1, 0))

    def shard(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """This rank's shard of a tensor with one entry per class along `dim`."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        # A rank with padding alone holds no class, and begins where the classes end.
        return tensor.narrow(dim, min(self.first, self.total - self.own), self.own)


def local_logits(logits: Tensor, vocab: Vocab | None, dim: int) -> tuple[Tensor, Vocab]:
    """This rank's logits with the classes last and without padding, and their vocabulary."""
    dim = dim + logits.ndim if dim < 0 else dim
    if vocab is None or isinstance(logits, DTensor):
        vocab = Vocab.of(logits, dim, None if vocab is None else vocab.real)
    if isinstance(logits, DTensor):
        logits = logits.to_local(grad_placements=logits.placements)
    return logits.movedim(dim, -1).narrow(-1, 0, vocab.own), vocab


def plain(tensor: Tensor | None) -> Tensor | None:
    """A target or weight as a plain replicated tensor."""
    if isinstance(tensor, DTensor):
        if not all(isinstance(placement, Replicate) for placement in tensor.placements):
            tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        return tensor.to_local()
    return tensor
