"""Redistributions of one collective each, of equal blocks along dim 0: what travels together is decided once.

Parameters that are gathered and gradients that are reduced, again and again the same ones, are nearly always such.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shoal_mesh import Comm
from shoal_mesh.internal import PackedPending, all_gather_packed, all_reduce_packed, dataclass, reduce_scatter_packed

from ..layout.spec import Spec
from .execution.coalesce import Task, key_of
from .execution.execute import closing, comm_of, identity, kernels_of
from .execution.kernels import Kernel
from .plan import plan
from .steps import AllGather, AllReduce, ReduceScatter

Moves = tuple[tuple[Spec, Spec], ...]


@dataclass(frozen=True, slots=True, eq=False)
class EvenBatch:
    """Redistributions that travel in one collective.

    Attributes:
        members: their positions among all.
        comm: what it runs over.
        kernels: what is done on this rank, for each.
        lengths: elements of each that one rank has before a gather, or after a reduce-scatter.
        shapes: of the results on this rank.
    """

    members: tuple[int, ...]
    comm: Comm
    kernels: tuple[Kernel, ...]
    lengths: list[int]
    shapes: tuple[torch.Size, ...]

    @property
    def kind(self) -> str:
        """Which collective."""
        collective = self.kernels[0].collective
        assert collective is not None, "a batch communicates"
        return collective.kind

    def start(self, shards: Sequence[Tensor]) -> PackedPending:
        """The collective, started."""
        comm, collective = self.comm, self.kernels[0].collective
        assert collective is not None, "a batch communicates"
        sizes = [sum(self.lengths)] * comm.size
        if collective.kind == "reduce_scatter":
            rows = [shards[i].reshape(comm.size, n) for i, n in zip(self.members, self.lengths, strict=True)]
            return reduce_scatter_packed(rows, comm, sizes, collective.op)
        flat = [shards[i].reshape(-1) for i in self.members]
        if collective.kind == "all_gather":
            return all_gather_packed(flat, comm, sizes)
        return all_reduce_packed(flat, comm, collective.op)

    def take(self, arrived: Sequence[Tensor] | Tensor, results: list[Tensor], places: Sequence[Tensor]) -> None:
        """Fill in the results, in their places if there are any."""
        if self.kind == "all_gather":
            rows = arrived if isinstance(arrived, Tensor) else torch.stack(list(arrived))
            for i, shape in zip(self.members, self.shapes, strict=True):
                results[i] = places[i] if places else rows.new_empty(shape)
            into = [results[i].view(self.comm.size, n) for i, n in zip(self.members, self.lengths, strict=True)]
            torch._foreach_copy_(into, list(torch.split(rows, self.lengths, 1)))
            return
        parts = torch.split(arrived[0], self.lengths) if self.kind == "reduce_scatter" else arrived
        for i, part, shape, kernel in zip(self.members, parts, self.shapes, self.kernels, strict=True):
            part = part.view(shape)
            part = part if kernel.finish is None else kernel.finish(part, part)
            results[i] = places[i].copy_(part) if places else part


@lru_cache(maxsize=256)
def even_batches(moves: Moves, version: int) -> tuple[EvenBatch, ...] | None:
    """The collectives of moves that are done in one round, those without communication in none; None for others.

    Args:
        moves: the spec that each tensor has, and the spec that it is to have.
        version: of the topology, which plans depend on.
    """
    together: dict[object, list[tuple[int, Task]]] = {}
    for i, (src, dst) in enumerate(moves):
        way = plan(src, dst)
        if way.steps:
            work = kernels_of(way)
            if len(way.steps) > 1 or closing(way) is not identity or not _is_even(work[0], way.steps[0]):
                return None
            task = Task(way, torch.empty(0, dtype=src.dtype), work)
            together.setdefault(key_of(task, way.steps[0]), []).append((i, task))
    return tuple(_batch(members) for members in together.values())


def _is_even(work: Kernel, step: object) -> bool:
    if work.collective is None or work.prepare is not None:
        return False
    kind = "all_gather" if isinstance(step, AllGather) else "reduce_scatter" if isinstance(step, ReduceScatter) else ""
    kind = "all_reduce" if isinstance(step, AllReduce) else kind
    return work.collective.kind == kind and work.collective.dim == 0


def _batch(members: list[tuple[int, Task]]) -> EvenBatch:
    ways = [task.plan for _, task in members]
    gathers = isinstance(ways[0].steps[0], AllGather)
    first = members[0][1].kernels[0].collective
    assert first is not None, "a batch communicates"
    return EvenBatch(
        tuple(i for i, _ in members),
        comm_of(first, ways[0].src.mesh),
        tuple(task.kernels[0] for _, task in members),
        [(way.src if gathers else way.dst).local_shape.numel() for way in ways],
        tuple(way.dst.local_shape for way in ways),
    )
