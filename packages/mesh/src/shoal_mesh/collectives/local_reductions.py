"""Reductions that a backend has not, such as those on bits over NCCL: values are moved, and reduced on arrival."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from ..transport import Handle

ON_BITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class Moves(Protocol):
    """What is needed of the transport below."""

    def all_gather(self, tensor: Tensor, out: Tensor) -> Handle | None: ...

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Handle | None: ...


class _ReducedAtTheEnd:
    """Values under way: once they have come, the ranks' rows (size, n) are reduced into the target (n,)."""

    def __init__(self, work: Handle | None, rows: Tensor, target: Tensor, op: str) -> None:
        self._work, self._rows, self._target, self._op = work, rows, target, op
        self._done = False

    def wait(self) -> None:
        if not self._done:
            self._done = True
            if self._work is not None:
                self._work.wait()
            self._target.copy_(reduce(ON_BITS[self._op], self._rows.unbind()))

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def all_reduce_here(tensor: Tensor, size: int, op: str, moves: Moves) -> Handle:
    """`P -> R`: in place, by an all-gather."""
    flat = tensor.view(-1)
    rows = flat.new_empty((size, flat.numel()))
    return _ReducedAtTheEnd(moves.all_gather(flat, rows.view(-1)), rows, flat, op)


def reduce_scatter_here(tensor: Tensor, out: Tensor, size: int, op: str, moves: Moves) -> Handle:
    """`P -> S(0)`: (size * m, ...) -> (m, ...), by an all-to-all."""
    rows = torch.empty_like(tensor).view(size, -1)
    return _ReducedAtTheEnd(moves.all_to_all(tensor.view(-1), rows.view(-1)), rows, out.view(-1), op)
