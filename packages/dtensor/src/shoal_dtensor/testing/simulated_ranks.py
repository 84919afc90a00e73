"""`simulate_ranks`: a program on n ranks that are threads of this process, without process groups.

Each rank has a view of an abstract mesh whose communicators meet at a barrier and pass tensors by reference.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations
from typing import Any, TypeVar

from shoal_mesh import Comm, DeviceMesh, MeshError, abstract_mesh

from .thread_ranks import ThreadMesh, on_threads, thread_meshes

T = TypeVar("T")


def simulate_ranks(mesh: DeviceMesh, run: Callable[[DeviceMesh], T]) -> list[T]:
    """What `run` returns on each rank of a mesh, each on a thread of its own, one at a time.

    Args:
        mesh: also an `abstract_mesh`; no process group is used.
        run: called with each rank's view of the mesh; gradients are off unless it turns them on.

    Raises:
        Exception: what `run` raised on some rank.

    Example:
        >>> import torch
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> def program(mesh: DeviceMesh) -> torch.Tensor:
        ...     return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).sum().full_tensor()
        >>> simulate_ranks(abstract_mesh((2,)), program)
        [tensor(6.), tensor(6.)]
    """
    shape = tuple(chain.from_iterable(_primes(size) for size in mesh.shape)) or (1,)
    threads = thread_meshes(shape)
    views = [_view(mesh, rank, each) for rank, each in enumerate(threads)]
    results: list[Any] = on_threads([lambda view=view: run(view) for view in views], threads)  # type: ignore[misc]
    return results


def _view(mesh: DeviceMesh, rank: int, threads: ThreadMesh) -> DeviceMesh:
    every = range(threads.ndim)
    choices = [axes for count in range(threads.ndim + 1) for axes in combinations(every, count)]

    def connect(ranks: tuple[int, ...]) -> Comm:
        for axes in choices:
            if threads.ranks_along(axes) == ranks:
                return threads.comm(axes)
        raise MeshError(f"rank {rank} of {mesh!r}: the simulation has no group of the ranks {ranks}")

    return abstract_mesh(mesh.shape, mesh.mesh_dim_names, rank=rank, connect=connect)


def _primes(size: int) -> list[int]:
    """Prime factors: a group of an unflattened axis consists of some axes of the threads."""
    factors, factor = [], 2
    while size > 1:
        while size % factor == 0:
            factors.append(factor)
            size //= factor
        factor += 1
    return factors
