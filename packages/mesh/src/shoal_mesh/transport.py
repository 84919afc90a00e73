"""How the ranks of a group send one another tensors: what shared memory and the backends of c10d do each in their way.

A communicator has one transport. `shared_memory.exchange` is that between CPU ranks of one host,
`collectives.c10d_transport` the process group's own backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Receive = Callable[[Sequence[Tensor] | Tensor], None]


class Handle(Protocol):
    """A collective under way; c10d's Work is one."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Transport(Protocol):
    """The collectives of a group. Blocks are contiguous and in the order of the group, along dim 0.

    Each function returns what to wait for, None when the result is there already. In the `background` the caller goes
    on before it waits.
    """

    __slots__ = ()

    def carrier(self, tensor: Tensor, op: str, background: bool, uneven: bool) -> Transport:
        """The transport of a message, reduced with `op` if given: this one, or that of the group's backend.

        The same on all ranks, it depends on group, device, dtype and reduction; in the background on the size, and on
        whether blocks are `uneven`.
        """
        return self

    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> Handle | None:
        """`P -> R`: in place."""

    def all_gather(self, tensor: Tensor, out: Tensor) -> Handle | None:
        """`S(0) -> R`: (m, ...) -> (size * m, ...)."""

    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> Handle | None:
        """`P -> S(0)`: (size * m, ...) -> (m, ...)."""

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Handle | None:
        """`S -> S`: (size * m, ...) -> (size * m, ...): block j goes to rank j, block i comes from rank i."""

    def all_to_all_v(self, flat: Tensor, out: Tensor, send: list[int], receive: list[int]) -> Handle | None:
        """`S -> S`: 1-D blocks of `send[j]` elements for rank j -> `receive[i]` elements from rank i."""

    def broadcast_(self, tensor: Tensor, root: int) -> Handle | None:
        """`one rank -> R`: overwrite with the tensor of the group's rank `root`."""

    def packed(
        self, kind: str, tensors: Sequence[Tensor], receive: Receive, sizes: Sequence[int], own: int, op: str
    ) -> Handle | None:
        """Many tensors in one message in the background; None where the caller packs them.

        Args:
            kind: "all_gather", "reduce_scatter" or "all_reduce".
            tensors: of one dtype, this rank's part of the message.
            receive: called with what has arrived, which it has to copy if it was gathered.
            sizes: elements of every rank's block; of an all-reduce none.
            own: which of them is this rank's.
            op: the reduction; "" for a gather.
        """
        return None


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view of a contiguous tensor as bytes.

    `view(-1)` would keep the stride of a dim of one element, whatever it is: shape (1, 1) and strides (7, 3) give
    stride 3, which cannot be viewed as bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
