"""Ranks as threads of one process that can communicate without process groups.

Each rank has a view of an abstract mesh. The groups of the view belong to the scheduler of a lab on
threads, without a default group. The state of c10d in this process is neither read nor changed, so
plans can be tried inside a running job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from math import prod
from typing import TypeVar

import torch

from ..groups.process_groups import Comm
from ..mesh.create import abstract_mesh
from ..mesh.device_mesh import DeviceMesh
from .c10d.group import LabGroup
from .c10d.link import RankFacts
from .isolation.threads import Conductor, ThreadLink, run_on_threads
from .rank_state import seed_torch
from .scheduling.posted_calls import GroupKey

T = TypeVar("T")


class Simulation:
    """The ranks of a mesh, which communicate in the groups of their views.

    Args:
        shape: shape of the mesh.
        names: names of the mesh axes; None for a mesh without names.

    Attributes:
        shape: shape of the mesh.
        names: names of the mesh axes, or None.
        links: the link of each rank.
    """

    def __init__(self, shape: Sequence[int], names: Sequence[str] | None) -> None:
        self.shape: tuple[int, ...] = tuple(shape)
        self.names: Sequence[str] | None = names
        size = prod(self.shape)
        conductor = Conductor(size)
        self.links = [ThreadLink(RankFacts(rank, size), conductor) for rank in range(size)]

    @property
    def used_groups(self) -> set[tuple[int, ...]]:
        """The ranks of groups in which the last run started a collective."""
        return self.links[0].conductor.used_groups

    def views(self) -> list[DeviceMesh]:
        """Return each rank's view of the mesh, row-major."""
        views = []
        for rank in range(len(self.links)):
            connect = partial(self.connect, rank)
            views.append(abstract_mesh(self.shape, self.names, rank=rank, connect=connect))
        return views

    def connect(self, rank: int, ranks: tuple[int, ...]) -> Comm:
        """Return the communicator of a rank among these ranks.

        Args:
            rank: the rank.
            ranks: the ranks of the group, in the order of the group.
        """
        names = self.names or [*map(str, range(len(self.shape)))]
        axes = [names[axis] for axis in self.axes_of(ranks)]
        return Comm(
            SimulatedGroup(self, rank, ranks),
            name="threads",
            axes=tuple(axes),
            size=len(ranks),
            rank=ranks.index(rank),
            line=ranks,
            order=None,
            backend="cpu:threads",
        )

    def axes_of(self, ranks: tuple[int, ...]) -> list[int]:
        """Return the mesh axes along which ranks differ."""
        axes = []
        for axis, size in enumerate(self.shape):
            # Example: of 4 x 2 ranks, 0 2 4 6 differ along axis 0, which has the stride 2.
            stride = prod(self.shape[axis + 1 :])
            coords = {rank // stride % size for rank in ranks}
            if len(coords) > 1:
                axes.append(axis)
        return axes

    @staticmethod
    def of(mesh: DeviceMesh) -> Simulation:
        """Return the simulation of one of `thread_meshes`."""
        group = mesh.comm(tuple(range(mesh.ndim))).group
        assert isinstance(group, SimulatedGroup), "a view of `thread_meshes`"
        return group.simulation

    def run(
        self, functions: Sequence[Callable[[], T]], seed: int = 0, threads: Executor | None = None
    ) -> list[T]:
        """Return the results of functions that run on the ranks; see `on_threads`."""
        # In another run no rank has run yet.
        conductor = Conductor(len(self.links))
        for link in self.links:
            link.join(conductor)

        def run_seeded(function: Callable[[], T]) -> T:
            with torch.no_grad():
                seed_torch(seed)
                return function()

        works = [partial(run_seeded, function) for function in functions]
        return run_on_threads(works, self.links, threads=threads)


class SimulatedGroup(LabGroup):
    """The group of one rank of a simulation.

    Args:
        simulation: the simulation.
        rank: the rank.
        ranks: the ranks of the group, in the order of the group.
    """

    def __init__(self, simulation: Simulation, rank: int, ranks: tuple[int, ...]) -> None:
        super().__init__(simulation.links[rank], GroupKey("threads", ranks))
        self.simulation = simulation


ThreadMesh = DeviceMesh  # the class of a thread's view


def thread_meshes(shape: Sequence[int], names: Sequence[str] | None = None) -> list[DeviceMesh]:
    """Return each rank's view of a mesh, row-major, with communication between them.

    They are for `on_threads`.

    Args:
        shape: shape of the mesh.
        names: names of the mesh axes.
    """
    return Simulation(shape, names).views()


def simulate_ranks(mesh: DeviceMesh, run: Callable[[DeviceMesh], T]) -> list[T]:
    """Return the results of `run` on each rank of a mesh, one thread per rank, one at a time.

    Args:
        mesh: the mesh, which may be an `abstract_mesh`; no process group is used.
        run: called with each rank's view of the mesh; gradients are off unless it turns them on.

    Raises:
        Exception: the exception of `run` on some rank.

    Example:
        >>> from shoal_mesh import all_reduce
        >>> def program(mesh: DeviceMesh) -> torch.Tensor:
        ...     return all_reduce(torch.tensor(mesh.get_rank()), (mesh, 0))
        >>> simulate_ranks(abstract_mesh((4,)), program)
        [tensor(6), tensor(6), tensor(6), tensor(6)]
    """
    simulation = Simulation(mesh.shape, mesh.mesh_dim_names)
    return simulation.run([partial(run, view) for view in simulation.views()])


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
        >>> sums = [lambda mesh=mesh: all_reduce(torch.ones(2), (mesh, 0)) for mesh in meshes]
        >>> on_threads(sums, meshes)
        [tensor([2., 2.]), tensor([2., 2.])]
    """
    return Simulation.of(meshes[0]).run(functions, seed, threads)
