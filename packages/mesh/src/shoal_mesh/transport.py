"""How the ranks of a group send one another tensors: what shared memory and the backends of c10d do each in their way.

A communicator has one transport. `shared_memory.exchange` is that between CPU ranks of one host,
`collectives.c10d_transport` the process group's own backend. What has been started is a `Pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    # with a default, which Python has from 3.13 on
    from typing_extensions import TypeVar

    R = TypeVar("R")
    V = TypeVar("V", default=Tensor)
else:
    from typing import TypeVar

    R = TypeVar("R")
    V = TypeVar("V")

Sizes = Sequence[int]  # of blocks, one per rank
# flat tensors, or a matrix of which they are the rows
Flat = Sequence[Tensor] | Tensor
Receive = Callable[[Flat], None]


class Handle(Protocol):
    """A collective under way; c10d's Work is one."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Pending(Generic[V]):
    """A collective under way. `wait()` returns its result; waiting again returns the same tensor.

    Attributes:
        value: what the backend writes to, before it has been passed through functions; the result
            once it has been waited for.
        work: what the transport has started; None when it is complete.

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
        self.value = value
        self.work = work
        self._then = then

    def wait(self) -> V:
        """The result. On the CPU it has arrived; on CUDA the current stream waits for it, the host does not."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self._then is not None:
            self.value, self._then = self._then(self.value), None
        return self.value  # type: ignore[no-any-return]  # of the functions, or of the backend

    def then(self, function: Callable[[V], R]) -> Pending[R]:
        """The same collective, its result passed through `function`; use the returned object from now on."""
        first = self._then
        pending = cast("Pending[R]", self)
        pending._then = function if first is None else lambda value: function(first(value))
        return pending

    def lend(self, tensors: Flat) -> None:
        """Take a result that others write to afterwards: it is passed through functions now, or else copied."""
        if self._then is not None:
            self.value, self._then = self._then(tensors), None
        else:
            self.value = [tensor.clone() for tensor in tensors]

    def is_completed(self) -> bool:
        """Whether the backend is done, so that `wait()` would not block."""
        return self.work is None or bool(self.work.is_completed())


class Transport(Protocol):
    """The collectives of a group. Blocks are contiguous and in the order of the group, along dim 0.

    Each function returns what to wait for. In the `background` the caller goes on before it waits.
    """

    __slots__ = ()

    def carrier(self, tensor: Tensor, op: str, background: bool, uneven: bool) -> Transport:
        """The transport of a message, reduced with `op` if given: this one, or that of the group's backend.

        The same on all ranks, it depends on group, device, dtype and reduction; in the background
        on the size, and on whether blocks are `uneven`.
        """
        return self

    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> Handle:
        """`P -> R`: in place."""

    def all_gather(self, tensor: Tensor, out: Tensor) -> Handle:
        """`S(0) -> R`: (m, ...) -> (size * m, ...)."""

    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> Handle:
        """`P -> S(0)`: (size * m, ...) -> (m, ...)."""

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Handle:
        """`S -> S`: (size * m, ...) -> (size * m, ...): block j goes to rank j, block i comes from rank i."""

    def all_to_all_v(
        self, flat: Tensor, out: Tensor, send: list[int], receive: list[int]
    ) -> Handle:
        """`S -> S`: 1-D blocks of `send[j]` elements for rank j -> `receive[i]` elements from rank i."""

    def broadcast_(self, tensor: Tensor, root: int) -> Handle:
        """`one rank -> R`: overwrite with the tensor of the group's rank `root`."""

    def packed(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        receive: Receive,
        sizes: Sizes,
        own: int,
        op: str,
    ) -> Handle | None:
        """Many tensors of one dtype in one message in the background; None where the caller packs them.

        The kind is "all_gather", "reduce_scatter" or "all_reduce". `receive` is called with what
        has arrived, which it has to copy if it was gathered. `sizes` are the elements of every
        rank's block, unless all reduce; `own` is which of them is this rank's.
        """
        return None


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view of a contiguous tensor as bytes.

    `view(-1)` would keep the stride of a dim of one element, whatever it is: shape (1, 1) and
    strides (7, 3) give stride 3, which cannot be viewed as bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
