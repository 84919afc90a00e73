"""Transports between the ranks of a group: the interface of shared memory and c10d backends.

There are two kinds: `shared_memory.exchange` for CPU tensors between ranks of one host, and
`collectives.c10d_transport`, which calls the backend of the process group. A communicator has one
transport, whose `carrier` chooses the transport of each message. A collective in flight is a
`Pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    # `typing.TypeVar` takes a default only from Python 3.13 on
    from typing_extensions import TypeVar

    R = TypeVar("R")
    V = TypeVar("V", default=Tensor)
else:
    from typing import TypeVar

    R = TypeVar("R")
    V = TypeVar("V")

# sizes of blocks, one per rank
Sizes = Sequence[int]
# a sequence of 1-D tensors, or a matrix with these tensors as rows
Flat = Sequence[Tensor] | Tensor
Receive = Callable[[Flat], None]


class Handle(Protocol):
    """A collective in flight, as the transport returns it. c10d's `Work` fits this protocol."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Pending(Generic[V]):
    """A collective in flight; `wait()` returns its result, the same tensor every time.

    Attributes:
        value: until `wait`, the tensors that the backend writes to; afterwards the result, which is
            these tensors passed through the functions of `then`.
        work: the handle that the transport returned; None when the collective is complete.

    Example:
        >>> def example() -> list[float]:
        ...     pending = all_reduce(torch.ones(2), comm_over((0, 1)), async_op=True)
        ...     return pending.then(lambda total: total * 10).wait().tolist()
        >>> launch(example, 2)
        [[20.0, 20.0], [20.0, 20.0]]
    """

    __slots__ = ("_then", "value", "work")

    def __init__(
        self, value: Any, work: Handle | None, then: Callable[[Any], V] | None = None
    ) -> None:
        self.value: Any = value
        self.work = work
        self._then = then

    def wait(self) -> V:
        """Return the result.

        On the CPU the result has arrived. On CUDA the current stream waits for it, and the host
        continues.
        """
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self._then is not None:
            self.value = self._then(self.value)
            self._then = None
        return self.value  # type: ignore[no-any-return]  # `value` may be tensors or the result

    def then(self, function: Callable[[V], R]) -> Pending[R]:
        """Pass the result through `function`; return the collective to use from now on."""
        first = self._then
        pending = cast("Pending[R]", self)
        if first is None:
            pending._then = function
        else:
            pending._then = lambda value: function(first(value))
        return pending

    def lend(self, tensors: Flat) -> None:
        """Set the result from tensors whose memory the transport overwrites after this call.

        The functions of `then` are applied now. Without such functions the tensors are copied.
        """
        if self._then is not None:
            self.value = self._then(tensors)
            self._then = None
        else:
            self.value = [tensor.clone() for tensor in tensors]

    def is_completed(self) -> bool:
        """Return whether the backend is done, so that `wait()` would not block."""
        return self.work is None or bool(self.work.is_completed())


class Transport(Protocol):
    """The collectives of a group.

    Blocks are contiguous and in the order of the group, along dim 0. Each function returns a handle
    to wait for. With `background` the caller computes between the start and the wait.
    """

    __slots__ = ()

    def carrier(self, tensor: Tensor, op: str, background: bool, uneven: bool) -> Transport:
        """Return the transport of a message: this one, or the one of the group's backend.

        `op` is the reduction, or '' for a message that is only moved. All ranks choose the same
        transport, because the choice depends on group, device, dtype and reduction only; for a
        message in the background also on its size, and on whether blocks are `uneven`.
        """
        return self

    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> Handle:
        """Reduce in place, `P -> R`."""

    def all_gather(self, tensor: Tensor, out: Tensor) -> Handle:
        """Gather blocks, `S(0) -> R`: (m, ...) -> (size * m, ...)."""

    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> Handle:
        """Reduce blocks and return this rank's one, `P -> S(0)`: (size * m, ...) -> (m, ...)."""

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Handle:
        """Exchange equal blocks, `S -> S`: (size * m, ...) -> (size * m, ...).

        Block j goes to rank j, block i comes from rank i.
        """

    def all_to_all_v(
        self, flat: Tensor, out: Tensor, send: list[int], receive: list[int]
    ) -> Handle:
        """Exchange 1-D blocks, `S -> S`.

        `send[j]` elements go to rank j, `receive[i]` elements come from rank i.
        """

    def broadcast_(self, tensor: Tensor, root: int) -> Handle:
        """Overwrite `tensor` with the one of the group's rank `root`, `one rank -> R`."""

    def start_packed(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        receive: Receive,
        sizes: Sizes,
        own_rank: int,
        op: str,
    ) -> Handle | None:
        """Send many tensors of one dtype in one message in the background.

        Returns None if the caller has to pack them. The kind is "all_gather", "reduce_scatter" or
        "all_reduce". `receive` is called with the arrived tensors, which it has to copy if they
        were gathered. `sizes` has the elements of every rank's block, except for an all-reduce;
        `own_rank` is the index of this rank's block.
        """
        return None


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of a contiguous tensor as bytes.

    `view(-1)` would keep the stride of a dim of one element, whatever it is: shape (1, 1) and
    strides (7, 3) give stride 3, which cannot be viewed as bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def split_divisor(dtype: torch.dtype, ranks: int) -> tuple[float, float]:
    """Return the factors before and after a sum that make it an average of a half type.

    In float16 the first factor is about the root of the number of ranks, so that neither large sums
    nor small terms leave the range. It is a power of two, which changes no digits. bfloat16 has the
    range of float32: the sum is divided afterwards, which needs no copy of the terms.

    Example:
        >>> split_divisor(torch.float16, 64), split_divisor(torch.bfloat16, 64)
        ((0.125, 0.125), (1.0, 0.015625))
    """
    bits = (ranks - 1).bit_length()
    # 64 ranks: 6 bits, of which float16 takes 3 before the sum
    before = (bits + 1) // 2 if dtype is torch.float16 else 0
    return 2.0**-before, 2.0**before / ranks
