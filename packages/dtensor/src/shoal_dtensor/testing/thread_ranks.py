"""Ranks as threads of one process, without process groups: for checking local functions that communicate.

A `ThreadMesh` is a mesh whose communicators meet at a barrier and pass tensors by reference.  Its groups answer the
calls that `shoal_mesh.collectives` makes, so local functions run unchanged.  One rank runs at a time, with a default
generator of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shoal_mesh import Comm, DeviceMesh

TIMEOUT = 60.0  # seconds that a rank waits for the others

# How a reduction takes two tensors, by its name; an average is a sum that is divided afterwards.
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class Turns:
    """Whose turn it is: ranks share the process's default generator, so each puts its own state in place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[int, Tensor] = {}

    def take(self) -> None:
        """Wait for this thread's turn."""
        self._lock.acquire()
        state = self._states.get(threading.get_ident())
        if state is not None:
            torch.set_rng_state(state)

    def give(self) -> None:
        """Let another thread run."""
        self._states[threading.get_ident()] = torch.get_rng_state()
        self._lock.release()


class Meeting:
    """Where the members of one communicator exchange values."""

    def __init__(self, size: int, turns: Turns) -> None:
        self.barrier: threading.Barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.values: list[Any] = [None] * size
        self.turns = turns
        self.used: bool = False

    def exchange(self, index: int, value: Any) -> list[Any]:
        """Everybody's values, in index order."""
        self.values[index], self.used = value, True
        self.turns.give()
        try:
            self.barrier.wait()
            values = list(self.values)
            self.barrier.wait()
        finally:
            self.turns.take()
        return values


class Done:
    """The handle of a collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class ThreadGroup:
    """The process group of one member of a meeting: those of its calls that the collectives make."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.meeting = meeting
        self.index = index

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        asked = ReduceOp.SUM if opts is None else opts.reduceOp
        op = next(name for name in COMBINE if asked == getattr(ReduceOp, name.upper()))
        for tensor in tensors:
            values = self.meeting.exchange(self.index, tensor.clone())
            total = reduce(COMBINE[op], values)
            tensor.copy_(total / len(values) if op == "avg" else total)
        return Done()

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        values = self.meeting.exchange(self.index, tensor.clone())
        output.copy_(torch.cat([value.reshape(-1) for value in values]).view(output.shape))
        return Done()

    def allgather(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None) -> Done:
        for parts, tensor in zip(outputs, tensors, strict=True):
            for part, value in zip(parts, self.meeting.exchange(self.index, tensor.clone()), strict=True):
                part.copy_(value.view(part.shape))
        return Done()

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        total = tensor.clone()
        self.allreduce([total], opts)
        output.copy_(total.view(-1).chunk(len(self.meeting.values))[self.index].view(output.shape))
        return Done()

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Done:
        count = len(self.meeting.values)
        rows = list(sent) or [tensor.shape[0] // count] * count
        blocks = self.meeting.exchange(self.index, torch.split(tensor.clone(), rows))
        output.copy_(torch.cat([from_rank[self.index] for from_rank in blocks]))
        return Done()

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        for tensor in tensors:
            tensor.copy_(self.meeting.exchange(self.index, tensor.clone())[opts.rootRank if opts else 0])
        return Done()


class ThreadMesh:
    """A mesh of threads as one of them sees it."""

    __class__ = DeviceMesh  # type: ignore[assignment]  # to isinstance: what asks for a mesh gets one without groups
    device_type = "cpu"
    mesh_dim_names = None

    def __init__(
        self, shape: tuple[int, ...], coordinate: tuple[int, ...], meetings: dict[Any, Meeting], turns: Turns
    ) -> None:
        self.turns = turns
        self.shape = shape
        self.ndim: int = len(shape)
        self.axis_names: tuple[str, ...] = tuple(map(str, range(len(shape))))
        self._coordinate, self._meetings = coordinate, meetings
        self._comms: dict[tuple[int, ...], Comm] = {}

    def get_coordinate(self) -> tuple[int, ...]:
        return self._coordinate

    def size(self, mesh_dim: int | None = None) -> int:
        return prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def ranks_along(self, axes: int | tuple[int, ...], coordinate: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Global ranks along some axes through a coordinate, row-major over the axes."""
        axes = (axes,) if isinstance(axes, int) else tuple(axes)
        at = self._coordinate if coordinate is None else coordinate
        ranks = []
        for place in product(*(range(self.shape[axis]) for axis in axes)):
            moved = dict(zip(axes, place, strict=True))
            rank = 0
            for axis, n in enumerate(self.shape):
                rank = rank * n + moved.get(axis, at[axis])
            ranks.append(rank)
        return tuple(ranks)

    def comm(self, axes: int | tuple[int, ...]) -> Comm:
        """The communicator along some axes, index row-major over them in the order asked for."""
        axes = (axes,) if isinstance(axes, int) else tuple(axes)
        comm = self._comms.get(axes)
        if comm is None:
            comm = self._comms[axes] = self._make(axes)
        return comm

    def _make(self, axes: tuple[int, ...]) -> Comm:
        fixed = tuple(-1 if axis in axes else c for axis, c in enumerate(self._coordinate))
        size, index = prod(self.shape[axis] for axis in axes), 0
        for axis in axes:
            index = index * self.shape[axis] + self._coordinate[axis]
        meeting = self._meetings.setdefault((axes, fixed), Meeting(size, self.turns))
        names = tuple(self.axis_names[axis] for axis in axes)
        return Comm(
            cast("ProcessGroup", ThreadGroup(meeting, index)),
            name="threads",
            axes=names,
            size=size,
            rank=index,
            line=self.ranks_along(axes),
            order=None,
            backend="cpu:threads",
        )


def axes_used(mesh: ThreadMesh) -> set[int]:
    """The mesh axes over which any rank of the mesh started a collective."""
    return {axis for (axes, _), meeting in mesh._meetings.items() if meeting.used for axis in axes}


def thread_meshes(shape: tuple[int, ...]) -> list[ThreadMesh]:
    """One mesh per coordinate, row-major, that communicate with each other: for `on_threads`.

    Args:
        shape: of the mesh.
    """
    meetings: dict[Any, Meeting] = {}
    turns = Turns()
    return [ThreadMesh(shape, coordinate, meetings, turns) for coordinate in product(*map(range, shape))]


def on_threads(functions: Sequence[Callable[[], Any]], meshes: Sequence[ThreadMesh], seed: int = 0) -> list[Any]:
    """What the functions return, each run on a thread of its own; the first failure is raised for all.

    Args:
        functions: one per rank.
        meshes: theirs.
        seed: of every rank's default generator.

    Raises:
        Exception: what a function raised; the others are woken from the barriers they wait at.

    Example:
        >>> from shoal_mesh import all_reduce
        >>> meshes = thread_meshes((2,))
        >>> on_threads([lambda mesh=mesh: all_reduce(torch.ones(2), (mesh, 0)) for mesh in meshes], meshes)
        [tensor([2., 2.]), tensor([2., 2.])]
    """
    results: list[Any] = [None] * len(functions)
    failures: list[BaseException] = []

    def work(index: int) -> None:
        turns = meshes[index].turns
        turns.take()
        try:
            with torch.no_grad():
                torch.manual_seed(seed)
                results[index] = functions[index]()
        except BaseException as error:
            failures.append(error)
            for meeting in list(meshes[index]._meetings.values()):
                meeting.barrier.abort()
        finally:
            turns.give()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(functions))]
    with torch.random.fork_rng(devices=()):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    real = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
    if failures:
        raise (real or failures)[0]
    return results
