"""Many tensors in one collective beside computation, without a second copy of what is sent and received.

Between CPU ranks of one host tensors are packed straight into shared memory and taken straight from it. Elsewhere they
are packed into a message for the backend. The functions return at once. The tensors that they get are flat, of one
dtype, in the same order on all ranks, and must not be written to before the result has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..argument_types import require_each
from ..errors import CollectiveError, CollectiveTypeError
from ..events import Event, in_observed, observers, run_observed
from ..groups.process_groups import Comm
from ..transport import Handle, Receive
from . import backend_calls
from .even import all_reduce_
from .operands import Along, check_operand, check_sizes, resolve
from .pending import Pending, wait_noted
from .tree_sums import in_tree
from .uneven import all_gather_v, reduce_scatter_v
from .wire import reduction, require_op


class PackedPending:
    """A collective of many tensors under way. What it brings are flat tensors, in an order that its function says.

    Example:
        >>> def example() -> list[list[float]]:
        ...     pending = all_reduce_packed([torch.ones(2), torch.ones(1)], comm_over((0, 1)))
        ...     sums: list[list[float]] = []
        ...     pending.wait(lambda flat: sums.extend(tensor.tolist() for tensor in flat))
        ...     return sums
        >>> launch(example, 2)[0]
        [[2.0, 2.0], [2.0]]
    """

    __slots__ = ("_kept", "_of_others", "_sizes", "_unpack", "_work", "waits")

    def __init__(self, sizes: Sequence[int] = (), of_others: bool = False) -> None:
        self._sizes, self._of_others = sizes, of_others
        self._work: Handle | None = None
        self._unpack: Receive | None = None
        self._kept: Sequence[Tensor] | Tensor | None = None
        self.waits: list[tuple[float, float]] | None = None  # where an observer has asked for them

    def wait(self, unpack: Receive) -> None:
        """Block until it is complete, and have `unpack` called with what it brings.

        What a gather brings is memory that others write to afterwards: it has to be copied.
        """
        if self._kept is not None:
            unpack(self._kept)
        elif (work := self._work) is not None:
            self._unpack = unpack
            wait_noted(work.wait, self.waits)
            if isinstance(work, Pending):
                self.receive(_in_rows(work.wait(), self._sizes))
        self._work = self._kept = None

    def is_completed(self) -> bool:
        """Whether `wait` would not block. What can be done without waiting is done."""
        return self._work is None or self._work.is_completed()

    def receive(self, tensors: Sequence[Tensor] | Tensor) -> None:
        """Take what has arrived; it is kept if nobody has waited for it yet."""
        if self._unpack is not None:
            self._unpack(tensors)
        elif not self._of_others:
            self._kept = tensors
        else:
            self._kept = tensors.clone() if isinstance(tensors, Tensor) else [tensor.clone() for tensor in tensors]

    def over(self, work: Handle) -> PackedPending:
        """This, of work that has been started."""
        self._work = work
        return self


def all_gather_packed(tensors: Sequence[Tensor], comm: Along, sizes: Sequence[int]) -> PackedPending:
    """`S -> R`: every rank's tensors; what arrives is one flat tensor for each rank, in index order.

    Where all are of one size, that may be a matrix of a row for each rank.

    Args:
        tensors: flat, of one dtype, together `sizes[comm.rank]` long.
        comm: a communicator of n ranks, or (mesh, axes).
        sizes: (n,) elements of every rank, 0 allowed; equal on all ranks.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: `sizes` does not fit the ranks or the tensors, or a tensor requires grad.

    Example:
        >>> def example() -> list[list[int]]:
        ...     pending = all_gather_packed([torch.arange(2), torch.arange(1)], comm_over((0, 1)), (3, 3))
        ...     rows: list[list[int]] = []
        ...     pending.wait(lambda flat: rows.extend(row.tolist() for row in flat))
        ...     return rows
        >>> launch(example, 2)[0]
        [[0, 1, 0], [0, 1, 0]]
    """
    comm = _checked(tensors, comm)
    check_sizes(sizes, comm)
    if (own := sum(tensor.numel() for tensor in tensors)) != sizes[comm.rank]:
        raise CollectiveError(f"rank {comm.rank} gives {own} elements, but sizes say {tuple(sizes)}")

    def start() -> PackedPending:
        pending = PackedPending(sizes, of_others=True)
        work = backend_calls.packed("all_gather", tensors, comm, pending.receive, sizes)
        return pending.over(work or all_gather_v(_joined(tensors), comm, sizes, async_op=True))

    return _observed("all_gather_into_tensor", tensors, comm, "", sizes, start)


def reduce_scatter_packed(
    tensors: Sequence[Tensor], comm: Along, sizes: Sequence[int], op: str = "sum"
) -> PackedPending:
    """`P -> S`: what arrives is one flat tensor, this rank's block of the reduction of the ranks' tensors.

    Args:
        tensors: of one dtype; flat: those for the first rank, then those for the second, and so on; or matrices of n
            rows, row i of each for rank i.
        comm: a communicator of n ranks, or (mesh, axes).
        sizes: (n,) elements for every rank in index order, 0 allowed; equal on all ranks.
        op: as for `all_reduce`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: `sizes` does not fit the ranks or the tensors, or a tensor requires grad.

    Example:
        >>> def example() -> list[int]:
        ...     pending = reduce_scatter_packed([torch.arange(2), torch.arange(3)], comm_over((0, 1)), (2, 3))
        ...     block: list[int] = []
        ...     pending.wait(lambda flat: block.extend(flat[0].tolist()))
        ...     return block
        >>> launch(example, 2)
        [[0, 2], [0, 2, 4]]
    """
    comm = _checked(tensors, comm, rows=True)
    reduction(tensors[0].dtype, op if type(op) is str else require_op(op))
    total = check_sizes(sizes, comm)
    if (own := sum(tensor.numel() for tensor in tensors)) != total:
        raise CollectiveError(f"rank {comm.rank} gives {own} elements, which is not the sum of {tuple(sizes)}")

    def start() -> PackedPending:
        pending, work = PackedPending((sizes[comm.rank],)), None
        if not in_tree(tensors[0], op):
            work = backend_calls.packed("reduce_scatter", tensors, comm, pending.receive, sizes, op)
        return pending.over(work or reduce_scatter_v(_joined(tensors), comm, sizes, 0, op, async_op=True))

    return _observed("reduce_scatter_tensor", tensors, comm, op, sizes, start)


def all_reduce_packed(tensors: Sequence[Tensor], comm: Along, op: str = "sum") -> PackedPending:
    """`P -> R`: what arrives is the reduction of every tensor, in memory of its own.

    Args:
        tensors: flat, of one dtype.
        comm: a communicator, or (mesh, axes).
        op: as for `all_reduce`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: as for `all_reduce`.

    Example:
        >>> def example() -> list[float]:
        ...     sums: list[float] = []
        ...     pending = all_reduce_packed([torch.ones(2)], comm_over((0, 1)), "avg")
        ...     pending.wait(lambda flat: sums.extend(flat[0].tolist()))
        ...     return sums
        >>> launch(example, 2)[0]
        [1.0, 1.0]
    """
    comm = _checked(tensors, comm)
    reduction(tensors[0].dtype, op if type(op) is str else require_op(op))
    sizes = [tensor.numel() for tensor in tensors]

    def start() -> PackedPending:
        pending, work = PackedPending(sizes), None
        if not in_tree(tensors[0], op):
            work = backend_calls.packed("all_reduce", tensors, comm, pending.receive, op=op)
        return pending.over(work or all_reduce_(torch.cat(list(tensors)), comm, op, async_op=True))

    return _observed("all_reduce", tensors, comm, op, sizes, start)


def _checked(tensors: Sequence[Tensor], along: Along, rows: bool = False) -> Comm:
    require_each(tensors, Tensor, "a packed collective takes a list of flat tensors", CollectiveTypeError)
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
            check_operand(tensor)
    comm = resolve(along)
    shape = (comm.size,) if rows and tensors and tensors[0].ndim == 2 else ()
    if not tensors or any(t.dtype != tensors[0].dtype or t.shape[:-1] != shape or not t.ndim for t in tensors):
        got = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors]
        raise CollectiveError(f"a packed collective takes flat tensors of one dtype, got {got}")
    return comm


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The message; a single tensor is it."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat(list(tensors), -1).view(-1)


def _in_rows(arrived: Tensor, sizes: Sequence[int]) -> Sequence[Tensor] | Tensor:
    """A tensor of some sizes as one of each."""
    alike = any(sizes) and all(n == sizes[0] for n in sizes)  # no set of them: symbols have no hash
    return arrived.view(len(sizes), -1) if alike else torch.split(arrived, list(sizes))


def _observed(
    op: str,
    tensors: Sequence[Tensor],
    comm: Comm,
    reduce_op: str,
    sizes: Sequence[int],
    start: Callable[[], PackedPending],
) -> PackedPending:
    """What is started, reported to observers as one collective."""
    if observers and not in_observed() and comm.size > 1:
        return run_observed(Event(op, comm, tuple(tensors), reduce_op, same={"sizes": tuple(sizes)}), start)
    return start()
