"""Ranks as threads of one process, without process groups: for programs and local functions that communicate.

Each rank has a view of an abstract mesh.  Communicators meet at a barrier and pass tensors by reference; their groups
answer the calls that `shoal_mesh.collectives` makes.  One rank runs at a time, with a default generator of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shoal_mesh import Comm, DeviceMesh, abstract_mesh
from shoal_mesh.internal import accelerator

from .simulate import COMBINE, reduce_all

T = TypeVar("T")

TIMEOUT = 60.0  # seconds that a rank waits for the others
_DONE = SimpleNamespace(wait=lambda timeout=None: True, is_completed=lambda: True)  # of a collective that is over


class Simulation:
    """What the ranks of a mesh share: their turns, and where each group of them meets."""

    def __init__(self, shape: Sequence[int], names: Sequence[str] | None) -> None:
        self.shape: tuple[int, ...] = tuple(shape)
        self.names: Sequence[str] = names or [*map(str, range(len(shape)))]
        # By a group's ranks, in its order: where its members wait for each other, and what each of them brings.
        self.meetings: dict[tuple[int, ...], tuple[threading.Barrier, list[Any]]] = {}
        self.used: set[tuple[int, ...]] = set()  # groups in which a collective was started
        self._turn = threading.Lock()
        self._states: dict[int, Tensor] = {}  # ranks share the process's default generator: each puts its state there

    def take_turn(self) -> None:
        """Wait for this thread's turn."""
        self._turn.acquire()
        state = self._states.get(threading.get_ident())
        if state is not None:
            torch.set_rng_state(state)

    def give_turn(self) -> None:
        """Let another thread run."""
        self._states[threading.get_ident()] = torch.get_rng_state()
        self._turn.release()

    def connect(self, rank: int, ranks: tuple[int, ...]) -> Comm:
        """The communicator of a rank among some."""
        self.meetings.setdefault(ranks, (threading.Barrier(len(ranks), timeout=TIMEOUT), [None] * len(ranks)))
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
        """The mesh axes along which ranks differ."""
        strides = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        places = enumerate(zip(strides, self.shape, strict=True))
        return [axis for axis, (stride, n) in places if len({rank // stride % n for rank in ranks}) > 1]

    @staticmethod
    def of(mesh: DeviceMesh) -> Simulation:
        """That of one of `thread_meshes`."""
        return cast(ThreadGroup, mesh.comm(tuple(range(mesh.ndim))).group).simulation


@dataclass(eq=False)
class ThreadGroup:
    """The process group of one member of a meeting: those of its calls that the collectives make."""

    simulation: Simulation
    ranks: tuple[int, ...]
    index: int

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's values, in index order."""
        barrier, brought = self.simulation.meetings[self.ranks]
        brought[self.index] = value
        self.simulation.used.add(self.ranks)
        self.simulation.give_turn()
        try:
            barrier.wait()
            values = list(brought)
            barrier.wait()
        finally:
            self.simulation.take_turn()
        return values

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        op = next(name for name in COMBINE if opts.reduceOp == getattr(ReduceOp, name.upper()))
        for tensor in tensors:
            tensor.copy_(reduce_all(self.exchange(tensor.clone()), op))
        return _DONE

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        output.copy_(torch.cat([value.reshape(-1) for value in self.exchange(tensor.clone())]).view(output.shape))
        return _DONE

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        total = tensor.clone()
        self.allreduce([total], opts)
        output.copy_(total.view(-1).chunk(len(self.ranks))[self.index].view(output.shape))
        return _DONE

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
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
    """Each rank's view of a mesh, row-major, that communicate with each other: for `on_threads`.

    Args:
        shape: of the mesh.
        names: of its axes.
    """
    connect = Simulation(shape, names).connect
    return [abstract_mesh(shape, names, rank=rank, connect=partial(connect, rank)) for rank in range(prod(shape))]


def simulate_ranks(mesh: DeviceMesh, run: Callable[[DeviceMesh], T]) -> list[T]:
    """What `run` returns on each rank of a mesh, each on a thread of its own, one at a time.

    Args:
        mesh: also an `abstract_mesh`; no process group is used.
        run: called with each rank's view of the mesh; gradients are off unless it turns them on.

    Raises:
        Exception: what `run` raised on some rank.

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
    functions: Sequence[Callable[[], T]], meshes: Sequence[DeviceMesh], seed: int = 0, threads: Executor | None = None
) -> list[T]:
    """What the functions return, each run on a thread of its own; the first failure is raised for all.

    Args:
        functions: one per rank.
        meshes: theirs.
        seed: of every rank's default generator.
        threads: what runs the functions, all of them at a time; new threads for this call when left out.

    Raises:
        Exception: what a function raised; the others are woken from the barriers they wait at.

    Example:
        >>> from shoal_mesh import all_reduce
        >>> meshes = thread_meshes((2,))
        >>> on_threads([lambda mesh=mesh: all_reduce(torch.ones(2), (mesh, 0)) for mesh in meshes], meshes)
        [tensor([2., 2.]), tensor([2., 2.])]
    """
    simulation = Simulation.of(meshes[0])
    set_seed = torch.manual_seed if accelerator() else torch.default_generator.manual_seed  # no stack is formatted

    def work(function: Callable[[], T]) -> T:
        simulation.take_turn()
        try:
            with torch.no_grad():
                set_seed(seed)
                return function()
        except BaseException:
            for barrier, _ in list(simulation.meetings.values()):
                barrier.abort()
            raise
        finally:
            simulation.give_turn()

    pool = nullcontext(threads) if threads else ThreadPoolExecutor(len(functions))
    with torch.random.fork_rng(devices=()), pool as workers:
        ranks = [workers.submit(work, function) for function in functions]
        wait(ranks)
    for rank in sorted(ranks, key=lambda rank: isinstance(rank.exception(), threading.BrokenBarrierError)):
        rank.result()  # raises what it raised; those last that another one's failure has woken
    return [rank.result() for rank in ranks]
