"""The reduction of gradients over data axes: those of a group of parameters in one collective, beside what follows.

May import: sharded_parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from shoal_dtensor import Partial, Replicate, Shard, Spec
from shoal_dtensor.internal import Download, FakeTensor, ShardsInFlight, redistribute_shards
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

    @property
    def on_host(self) -> bool:
        """Whether leaves are in memory of the host, and their gradients are computed elsewhere."""
        return False


class GroupReduction:
    """The gradients of a group of parameters on their way to the layout of its leaves.

    Args:
        grads: of this pass; taken out one by one, so that none is held beside its sum with a kept one.
        with_kept: whether what the group keeps is reduced too.
        gives_back: whether `give_back` returns it.

    Attributes:
        group: the parameters.
        returned: those whose gradients go to autograd, and not to the leaves.
    """

    __slots__ = ("_flags", "_gradients", "_in_flight", "_kept", "_own", "group", "returned")

    def __init__(
        self,
        group: Group,
        grads: dict[int, Tensor | None],
        returned: Collection[int] = (),
        *,
        with_kept: bool = True,
        gives_back: bool = True,
    ) -> None:
        self.group: Group = group
        self.returned: Collection[int] = returned
        self._gradients: Callable[[], list[Tensor]] | None = None  # of a reduction that has been waited for
        self._flags: Tensor | None = None  # of the ranks together, where this one cannot know them
        kept: dict[int, Tensor] = {}
        if with_kept:  # otherwise the group goes on keeping it
            kept, group.kept = group.kept, {}
        self._kept: dict[int, Tensor] = kept.copy() if gives_back else {}
        shards, moves, own = [], [], []
        for i in group.trained:
            grad, before = grads.pop(i, None), kept.pop(i, None)
            own.append(grad is not None or before is not None)
            local, spec = group.parameters[i].gradient(before if grad is None else grad)
            shards.append(local if grad is None or before is None else local + before)
            moves.append((spec, group.parameters[i].reduced))
        self._own: list[bool] = own
        # Which gradients there are travels with them: one row of flags for each rank that holds a shard.
        source, target = moves[0]
        moves.append(_move_of_flags(source, group.axes, len(own), target.dtype))
        flags = shards[0].new_ones((group.axes.ranks_of_shards, len(own)), dtype=target.dtype)
        for at, there in enumerate(own):  # written on the device: the host waits for no copy
            if not there:
                flags[:, at].zero_()
        shards.append(flags)
        with purpose(f"{group.owner} reduces {group.name}"):
            self._in_flight: ShardsInFlight = redistribute_shards(shards, moves)

    def go_on(self) -> None:
        """Start the rest of it, over the axes of replicas, beside what follows; wait for it where it has started."""
        if self._gradients is None and not self._in_flight.reach_last_round():
            self.wait()

    def wait(self) -> None:
        """Have what follows on the device come after the reduction; gradients of the host are on their way to it."""
        if self._gradients is not None:
            return
        *reduced, flags = self._in_flight.wait()
        if self.group.divisor != 1:
            torch._foreach_div_(reduced, self.group.divisor)
        del self._in_flight  # which holds the gradients on the device
        self._gradients = Download(reduced).wait if self.group.on_host else lambda: reduced
        # A gradient that this rank has is there: nobody has to look.
        if not all(self._own) and not isinstance(flags, FakeTensor):
            self._flags = flags.reshape(-1, len(self._own))[0]

    def gradients(self) -> list[Tensor]:
        """The reduced local gradients; zeros for a parameter that had none on any rank."""
        self.wait()
        assert self._gradients is not None, "they are reduced"
        return self._gradients()

    def poll(self) -> None:
        """Take the reduced gradients if they are here, so that they hold up no other rank of the host."""
        if self._gradients is None and self.group.axes.mesh.device_type == "cpu":
            self._in_flight.poll()

    def give_back(self) -> None:
        """Return kept gradients to their group: the pass that was to deliver them has failed."""
        self.group.kept.update(self._kept)


def arrived(reductions: Sequence[GroupReduction]) -> list[dict[int, Tensor]]:
    """Of each reduction the gradients by parameter, without those that no rank had.

    The host reads flags from the device only where this rank lacks a gradient: once, those of all reductions.
    """
    for reduction in reductions:
        reduction.wait()
    asked = [reduction._flags for reduction in reductions if reduction._flags is not None]
    counts = torch.cat([flags.to(asked[0].device) for flags in asked]).tolist() if asked else []
    found, read = [], iter(counts)
    for reduction in reductions:
        there = reduction._own if reduction._flags is None else [*islice(read, len(reduction._own))]
        each = zip(reduction.group.trained, reduction.gradients(), there, strict=True)
        found.append({i: grad for i, grad, count in each if count})
    return found


@torch.no_grad()
def deliver(reductions: Sequence[GroupReduction]) -> None:
    """Add reduced gradients to those of the leaves, when all have arrived."""
    for reduction, grads in zip(reductions, arrived(reductions), strict=True):
        for i, grad in grads.items():
            if i not in reduction.returned:
                reduction.group.parameters[i].accumulate(grad)


@lru_cache(maxsize=1024)
def _move_of_flags(like: Spec, axes: DataAxes, count: int, dtype: torch.dtype) -> tuple[Spec, Spec]:
    """How flags travel with a gradient: partial over the data axes, reduced to one row on every rank."""
    placements = [p if isinstance(p, Partial) else Replicate() for p in like.placements]  # over the styles' axes
    flags = Spec(like.mesh, placements, (axes.ranks_of_shards, count), None, dtype)
    inner = flags.placements[axes.mesh.ndim :]
    return flags, flags.with_(placements=[*axes.placements(Shard(0)), *inner])
