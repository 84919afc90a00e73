"""Exchanges of a few integers among the ranks of a mesh, which the program does not call itself.

The integers are, for example, digests of values, shapes of shards or states of generators.

`V -> R` begins the docstring of a collective from integers that may differ by rank (V, varying) to
integers that are equal on all ranks (R, replicated). P(min) is a pending minimum over the ranks.

May import: _torch.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shoal_mesh import Comm, DeviceMesh, all_gather, all_reduce
from shoal_mesh.errors import LockstepError
from shoal_mesh.internal import comm_of_threads

from ._torch.operators import out_of_sight

# seconds that a thread waits for the threads of other ranks: the default timeout of c10d
TIMEOUT = 1800.0


def rows_of_ranks(mesh: DeviceMesh, about: Callable[[], str], numbers: Tensor) -> list[list[int]]:
    """`V -> R`: return the integers of every rank by its row-major index; one all-gather.

    Main threads call this in the same order on all ranks. Other threads may call in any order,
    concurrently with collectives of the main thread. They exchange rows in a process group of their
    own, and `about`, a text that is equal on all ranks, identifies the rows that belong together.
    If no thread of some rank has called with the same text within half an hour, a LockstepError is
    raised. `numbers` have the shape (n,) and the dtype int64, and are on a device whose tensors the
    mesh's groups can send.
    """
    meeting = _Meeting.of(mesh)
    comm = mesh.comm(tuple(range(mesh.ndim)))
    if meeting is None:
        return _gather(comm, numbers)
    row_of_rank = meeting.rows(about(), numbers)
    return [row_of_rank[rank] for rank in comm.line]


def extremes_of_ranks(
    mesh: DeviceMesh, about: Callable[[], str], numbers: Tensor
) -> list[tuple[int, int]]:
    """`P(min), P(max) -> R`: return the lowest and highest value of each number; one all-reduce.

    The arguments are the arguments of `rows_of_ranks`.
    """
    if in_other_threads(mesh):
        columns = zip(*rows_of_ranks(mesh, about, numbers), strict=True)
        return [(min(column), max(column)) for column in columns]
    both = torch.stack([-numbers, numbers])
    comm = mesh.comm(tuple(range(mesh.ndim)))
    lowest, highest = all_reduce(both, comm, "max").tolist()
    return [(-low, high) for low, high in zip(lowest, highest, strict=True)]


def in_other_threads(mesh: DeviceMesh) -> bool:
    """Tell whether this thread may call in another order than the threads of other ranks.

    The main thread and threads of simulated ranks may not.
    """
    return _Meeting.of(mesh) is not None


def one_thread_at_a_time(
    mesh: DeviceMesh, about: Callable[[], str]
) -> AbstractContextManager[object]:
    """Return a block that one thread of this rank at a time may enter for the same `about`.

    In the main thread the block does not wait.
    """
    meeting = _Meeting.of(mesh)
    if meeting is None:
        return nullcontext()
    return meeting.locks.setdefault(about(), threading.Lock())


def _gather(comm: Comm, numbers: Tensor) -> list[list[int]]:
    with out_of_sight():
        rows: list[list[int]] = all_gather(numbers.unsqueeze(0), comm).tolist()
    return rows


class _Meeting:
    """Exchange of numbers between threads of a group's ranks, in rounds of one row per rank.

    A round is one all-gather, to which each rank may contribute the row of a different call. Rows
    that belong to calls of other threads of this rank are stored until these threads take them. A
    thread waits until rounds of other threads have brought the rows that it lacks.
    """

    _of_group: ClassVar[WeakKeyDictionary[object, _Meeting]] = WeakKeyDictionary()
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._changed = threading.Condition()
        # digest of `about` -> for each rank, its rows that no thread has taken yet
        self._rows: dict[int, list[deque[list[int]]]] = {}
        # the locks of `one_thread_at_a_time`, by `about`
        self.locks: dict[str, threading.Lock] = {}

    @classmethod
    def of(cls, mesh: DeviceMesh) -> _Meeting | None:
        """Return the exchange of a mesh; None in the main thread and for simulated ranks."""
        in_main = threading.current_thread() is threading.main_thread()
        comm = None if in_main else comm_of_threads(mesh.comm(tuple(range(mesh.ndim))))
        if comm is None:
            return None
        with cls._making:
            return cls._of_group.setdefault(comm.group, cls(comm))

    def rows(self, about: str, numbers: Tensor) -> dict[int, list[int]]:
        """Return the rows of all ranks by global rank."""
        digest = hashlib.blake2b(about.encode(), digest_size=7).digest()
        key = int.from_bytes(digest, "little")
        own_row = torch.cat([numbers.new_tensor([key]), numbers])
        with self._changed:
            for rank, (key_of_rank, *row) in enumerate(_gather(self._comm, own_row)):
                if key_of_rank not in self._rows:
                    self._rows[key_of_rank] = [deque() for _ in range(self._comm.size)]
                self._rows[key_of_rank][rank].append(row)
            self._changed.notify_all()
            rows_of_key = self._rows[key]
            if not self._changed.wait_for(lambda: all(rows_of_key), TIMEOUT):
                waiting = zip(self._comm.ranks, rows_of_key, strict=True)
                missing = [rank for rank, rows in waiting if not rows]
                raise LockstepError(
                    f"no thread of ranks {missing} has reached {about} within {TIMEOUT:.0f} s: "
                    "the threads of all ranks must make the same calls, in any order",
                    tuple(missing),
                )
            ranks = zip(self._comm.line, rows_of_key, strict=True)
            result = {rank: rows.popleft() for rank, rows in ranks}
            if not any(rows_of_key):
                del self._rows[key]
            return result
