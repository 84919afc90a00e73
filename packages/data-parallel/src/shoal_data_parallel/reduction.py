"""The reduction of gradients over data axes: those of a group of parameters in one collective, beside what follows.

May import: sharded_parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from shoal_dtensor import Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.internal import FakeTensor, ShardsInFlight, redistribute_shards
from shoal_mesh import purpose

from .sharded_parameters import DataAxes


class ReducedParameter(Protocol):
    """A parameter whose gradients are reduced.

    Attributes:
        reduced: the layout and dtype in which its gradient arrives.
    """

    @property
    def reduced(self) -> Spec: ...

    def gradient(self, grad: Tensor | None) -> tuple[Tensor, Spec]:
        """The local gradient and its layout before the reduction; None counts as zeros."""

    def accumulate(self, reduced: Tensor) -> None:
        """Add a reduced local gradient to the leaf's."""


class Group:
    """Parameters whose gradients travel together.

    Attributes:
        owner: the function that made it, for messages and profiles.
        name: of the group, likewise.
        parameters: the parameters; `trained` the indices of those that require gradients.
        axes: the data axes.
        kept: local gradients of earlier passes, by parameter.
        divisor: what summed gradients are divided by: by default the number of ranks.
    """

    owner: str
    parameters: Sequence[ReducedParameter]
    trained: list[int]

    def __init__(self, name: str, axes: DataAxes) -> None:
        self.name = name
        self.axes = axes
        self.kept: dict[int, Tensor] = {}
        self.divisor: float = float(axes.mesh.size())


class Reduction:
    """The gradients of a group of parameters on their way to the layout of its leaves.

    Attributes:
        group: the parameters.
        returned: those whose gradients go to autograd, and not to the leaves.
    """

    __slots__ = ("_in_flight", "_kept", "_present", "_reduced", "group", "returned")

    def __init__(
        self,
        group: Group,
        grads: Mapping[int, Tensor | None],
        returned: Collection[int] = (),
        *,
        with_kept: bool = True,
    ) -> None:
        self.group: Group = group
        self.returned: Collection[int] = returned
        self._reduced: list[Tensor | None] | None = None
        self._kept: dict[int, Tensor] = {}
        if with_kept:  # otherwise the group goes on keeping it
            self._kept, group.kept = group.kept, {}
        shards, moves, present = [], [], []
        for i in group.trained:
            grad, kept = grads.get(i), self._kept.get(i)
            local, spec = group.parameters[i].gradient(grad)
            present.append(float(grad is not None or kept is not None))
            shards.append(local if kept is None else local + kept)
            moves.append((spec, group.parameters[i].reduced))
        self._present: list[float] = present
        # Which gradients there are travels with them: one row of flags for each rank that holds a shard.
        source, target = moves[0]
        moves.append(_move_of_flags(source, group.axes, len(present), target.dtype))
        row = torch.tensor(present, dtype=target.dtype, device=shards[0].device)
        shards.append(row.repeat(group.axes.ranks_of_shards, 1))
        with purpose(f"{group.owner} reduces {group.name}"):
            self._in_flight: ShardsInFlight = redistribute_shards(shards, moves)

    def wait(self) -> list[Tensor | None]:
        """The reduced local gradients; None for a parameter that had none on any rank."""
        if self._reduced is None:
            *reduced, flags = self._in_flight.wait()
            if self.group.divisor != 1:
                torch._foreach_div_(reduced, self.group.divisor)
            there = self._present if isinstance(flags, FakeTensor) else flags.reshape(-1, len(reduced))[0].tolist()
            self._reduced = [grad if count else None for grad, count in zip(reduced, there, strict=True)]
        return self._reduced

    def poll(self) -> None:
        """Take the reduced gradients if they are here, so that they hold up no other rank."""
        if self._reduced is None:
            self._in_flight.poll()

    def give_back(self) -> None:
        """Return kept gradients to their group: the pass that was to deliver them has failed."""
        self.group.kept.update(self._kept)


@torch.no_grad()
def deliver(reductions: Sequence[Reduction]) -> None:
    """Add reduced gradients to those of the leaves, when all have arrived."""
    arrived = [(reduction, reduction.wait()) for reduction in reductions]
    for reduction, grads in arrived:
        for i, grad in zip(reduction.group.trained, grads, strict=True):
            if grad is not None and i not in reduction.returned:
                reduction.group.parameters[i].accumulate(grad)


@lru_cache(maxsize=1024)
def _move_of_flags(like: Spec, axes: DataAxes, count: int, dtype: torch.dtype) -> tuple[Spec, Spec]:
    """How flags travel with a gradient: partial over the data axes, reduced to one row on every rank."""
    flags = Spec(like.mesh, _replicated_inside(like), (axes.ranks_of_shards, count), None, dtype)
    inner = flags.placements[axes.mesh.ndim :]
    return flags, flags.with_(placements=[*axes.placements(Shard(0)), *inner])


def _replicated_inside(spec: Spec) -> list[Placement]:
    """Partial over the data axes, replicated over those of the styles."""
    return [p if isinstance(p, Partial) else Replicate() for p in spec.placements]
