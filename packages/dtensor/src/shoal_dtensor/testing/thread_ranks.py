"""Ranks as threads of one process, without process groups, which may communicate.

Each rank has a view of an abstract mesh. The members of a group exchange tensors by reference;
their groups implement the calls that `shoal_mesh.collectives` makes. One rank runs at a time, with
a default generator of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from math import prod
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shoal_mesh import Comm, DeviceMesh, abstract_mesh
from shoal_mesh.internal import accelerator

from .random_states import RandomStates
from .simulate import COMBINE, reduce_all

T = TypeVar("T")

# of a collective that is over
_DONE = SimpleNamespace(wait=lambda timeout=None: True, is_completed=lambda: True)


class Simulation:
    """State shared by the ranks of a mesh: turns to run, and meetings of their groups."""

    def __init__(self, shape: Sequence[int], names: Sequence[str] | None) -> None:
        self.shape: tuple[int, ...] = tuple(shape)
        self.names: Sequence[str] = names or [*map(str, range(len(shape)))]
        # groups in which a collective was started
        self.used: set[tuple[int, ...]] = set()
        # By a group's ranks: the values of the members that have arrived, by their index, and the
        # turns on which they wait.
        self.meetings: dict[tuple[int, ...], tuple[dict[int, Any], list[threading.Semaphore]]] = {}
        self.ready: deque[threading.Semaphore] = deque()  # of the ranks that can go on

    def pass_on(self) -> None:
        """Let the next rank run; if no rank can continue, fail the ranks that wait for others."""
        if not self.ready:
            for _, waiting in self.meetings.values():
                self.ready.extend(waiting)
            self.meetings.clear()
        if self.ready:
            self.ready.popleft().release()

    def connect(self, rank: int, ranks: tuple[int, ...]) -> Comm:
        """Return the communicator of a rank among these ranks."""
        index = ranks.index(rank)
        return Comm(
            cast("ProcessGroup", ThreadGroup(self, ranks, index)),
            name="threads",
            axes=tuple(self.names[axis] for axis in self.axes_of(ranks)),
            size=len(ranks),
            rank=index,
            line=ranks,
            order=None,
            backend="cpu:threads",
        )

    def axes_of(self, ranks: tuple[int, ...]) -> list[int]:
        """Return the mesh axes along which ranks differ."""
        strides = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        places = enumerate(zip(strides, self.shape, strict=True))
        return [
            axis for axis, (stride, n) in places if len({rank // stride % n for rank in ranks}) > 1
        ]

    @staticmethod
    def of(mesh: DeviceMesh) -> Simulation:
        """Return the simulation of one of `thread_meshes`."""
        return cast(ThreadGroup, mesh.comm(tuple(range(mesh.ndim))).group).simulation


@dataclass(eq=False)
class ThreadGroup:
    """The process group of one member of a meeting, with the methods that collectives call."""

    simulation: Simulation
    ranks: tuple[int, ...]
    index: int

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all members by index; other ranks run until the last one arrives."""
        simulation = self.simulation
        brought, waiting = simulation.meetings.setdefault(self.ranks, ({}, []))
        brought[self.index] = value
        simulation.used.add(self.ranks)
        if len(brought) == len(self.ranks):
            del simulation.meetings[self.ranks]
            simulation.ready.extend(waiting)
        else:
            # ranks share the process's default generators
            states = RandomStates.capture()
            waiting.append(turn := threading.Semaphore(0))
            simulation.pass_on()
            turn.acquire()
            states.restore()
            if len(brought) < len(self.ranks):
                raise threading.BrokenBarrierError(
                    f"of ranks {self.ranks}, which meet here, some do not come"
                )
        return [brought[index] for index in range(len(self.ranks))]

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        op = next(name for name in COMBINE if opts.reduceOp == getattr(ReduceOp, name.upper()))
        for tensor in tensors:
            tensor.copy_(reduce_all(self.exchange(tensor.clone()), op))
        return _DONE

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        output.copy_(
            torch.cat([value.reshape(-1) for value in self.exchange(tensor.clone())]).view(
                output.shape
            )
        )
        return _DONE

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        total = tensor.clone()
        self.allreduce([total], opts)
        output.copy_(total.view(-1).chunk(len(self.ranks))[self.index].view(output.shape))
        return _DONE

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        opts: Any = None,
    ) -> Any:
        rows = list(sent) or [tensor.shape[0] // len(self.ranks)] * len(self.ranks)
        blocks = self.exchange(torch.split(tensor.clone(), rows))
        output.copy_(torch.cat([from_rank[self.index] for from_rank in blocks]))
        return _DONE

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            tensor.copy_(self.exchange(tensor.clone())[opts.rootRank])
        return _DONE


ThreadMesh = DeviceMesh  # what a thread's view is


def thread_meshes(shape: Sequence[int], names: Sequence[str] | None = None) -> list[DeviceMesh]:
    """Return each rank's view of a mesh, row-major, with communication between them.

    They are for `on_threads`.

    Args:
        shape: shape of the mesh.
        names: names of the mesh axes.
    """
    connect = Simulation(shape, names).connect
    return [
        abstract_mesh(shape, names, rank=rank, connect=partial(connect, rank))
        for rank in range(prod(shape))
    ]


def simulate_ranks(mesh: DeviceMesh, run: Callable[[DeviceMesh], T]) -> list[T]:
    """Return the results of `run` on each rank of a mesh, one thread per rank, one at a time.

    Args:
        mesh: the mesh, which may be an `abstract_mesh`; no process group is used.
        run: called with each rank's view of the mesh; gradients are off unless it turns them on.

    Raises:
        Exception: the exception of `run` on some rank.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> def program(mesh: DeviceMesh) -> torch.Tensor:
        ...     return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).sum().full_tensor()
        >>> simulate_ranks(abstract_mesh((2,)), program)
        [tensor(6.), tensor(6.)]
    """
    views = thread_meshes(mesh.shape, mesh.mesh_dim_names)
    return on_threads([partial(run, view) for view in views], views)


def on_threads(
    functions: Sequence[Callable[[], T]],
    meshes: Sequence[DeviceMesh],
    seed: int = 0,
    threads: Executor | None = None,
) -> list[T]:
    """Return the results of the functions, one thread each; raise the first failure for all.

    Args:
        functions: one per rank.
        meshes: their meshes.
        seed: seed of every rank's default generator.
        threads: an executor that runs all of the functions at a time; new threads for this call
            when left out.

    Raises:
        Exception: the exception of a function; the others continue until they wait for its rank.

    Example:
        >>> from shoal_mesh import all_reduce
        >>> meshes = thread_meshes((2,))
        >>> on_threads([lambda mesh=mesh: all_reduce(torch.ones(2), (mesh, 0)) for mesh in meshes], meshes)
        [tensor([2., 2.]), tensor([2., 2.])]
    """
    simulation = Simulation.of(meshes[0])
    # no stack is formatted
    set_seed = torch.manual_seed if accelerator() else torch.default_generator.manual_seed

    def work(function: Callable[[], T], turn: threading.Semaphore) -> T:
        with turn:
            try:
                with torch.no_grad():
                    set_seed(seed)
                    return function()
            finally:
                simulation.pass_on()

    turns = [threading.Semaphore(0) for _ in functions]
    pool = nullcontext(threads) if threads else ThreadPoolExecutor(len(functions))
    with torch.random.fork_rng(devices=()), pool as workers:
        ranks = [*map(workers.submit, repeat(work), functions, turns)]
        simulation.ready.extend(turns)
        simulation.pass_on()
        wait(ranks)
    for rank in sorted(
        ranks, key=lambda rank: isinstance(rank.exception(), threading.BrokenBarrierError)
    ):
        # raises the exceptions of the functions; exceptions caused by another rank's failure come
        # last
        rank.result()
    return [rank.result() for rank in ranks]
