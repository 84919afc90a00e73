"""The reduction of gradients over data axes: those of a group of parameters in one collective, beside what follows.

May import: global_losses, reducer, sharded_parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor, nn

from shoal_dtensor import Partial, Replicate, Shard, Spec
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import (
    FakeTensor,
    ShardsInFlight,
    download,
    given_away,
    redistribute_shards,
    takes,
)
from shoal_mesh import purpose

from .global_losses import divisor_of, ranks_of_loss
from .reducer import Reducer
from .sharded_parameters import DataAxes, ShardedParameter

Grads = dict[int, Tensor | None]  # by parameter
# likewise, with the layouts that they have
Kept = dict[int, tuple[Tensor, Spec]]


class Group(Reducer):
    """Parameters whose gradients travel together."""

    # the function that made it, for messages and profiles
    owner: str
    parameters: Sequence[ShardedParameter]
    # the indices of those that require gradients
    trained: list[int]
    # how many flags travel with the gradients beside one for each parameter
    extra_flags = 0

    def __init__(self, name: str, axes: DataAxes) -> None:
        self.name = name  # for messages and profiles
        self.axes = axes
        # by parameter the local gradient of earlier passes, and its layout
        self.kept: Kept = {}
        # whether a pass that added to the kept gradients was not finished
        self.spoiled = False
        # how many ranks share the loss of the kept gradients
        self.kept_ranks_of_loss = 1

    def add_to_kept(self, i: int, grad: Tensor, *, copy: bool = True) -> None:
        """Add a local gradient of the pass that is running to the kept one, in place, until that pass is finished.

        A copy of that would be held for all groups until the pass is over, only to be given back if
        it fails. The first one is copied itself: autograd may hand one tensor to several
        parameters.
        """
        self._check_same_loss(ranks_of_loss(self))
        self.spoiled = True
        local, spec = self.parameters[i].gradient(grad)
        if i in self.kept:
            kept, layout = self.kept[i]
            kept.add_(*_converted([local], [spec], [layout]))
        else:
            self.kept[i] = local.to(spec.dtype, copy=copy).contiguous(), spec

    def divide_by(self, *, adds: bool) -> float:
        """Return the divisor of summed gradients: of this pass if it adds some to the kept ones."""
        if adds or not self.kept:
            self._check_same_loss(ranks_of_loss(self))
        return divisor_of(self, self.kept_ranks_of_loss)

    def _check_same_loss(self, ranks: int) -> None:
        if not self.kept:
            self.kept_ranks_of_loss = ranks
        if self.divisor is None and ranks != self.kept_ranks_of_loss:
            raise StyleError(
                f"{self.owner}: the kept gradients of {self.name!r} and those of this backward "
                f"are of losses of {self.kept_ranks_of_loss} and {ranks} data-parallel ranks "
                "together, so no one number divides their sum. Call "
                "set_gradient_divide_factor(), which then holds for all of them, or reduce "
                "after each backward"
            )

    def extra_columns(self) -> Tensor | None:
        """Return the values of the extra flags on this rank, None for zeros."""
        return None

    def check_kept(self) -> None:
        """Raise StyleError if a backward that raised may have added to kept gradients."""
        if self.spoiled:
            raise StyleError(
                f"{self.owner}: a backward that added to kept gradients of {self.name!r} raised, "
                "so some kept ones are "
                "of that backward. Drop them with the outermost module's zero_grad(), and begin "
                "the step again"
            )

    def drop_kept(self) -> None:
        self.kept = {}
        self.spoiled = False


class ReducingModule(nn.Module):
    """What is added to a module's class: control over the reduction of gradients, as torch names it."""

    _made_by: str  # the function
    # whether a divisor is also that of the modules in it that have been passed before
    _divides_inside = True
    # those of the module and, unless with `recurse=False`, of those in it
    _reducers: Callable[..., Sequence[Reducer]]

    def extra_repr(self) -> str:
        """What the module shows of itself when it is printed."""
        return ", ".join(filter(None, [super().extra_repr(), self._made_by]))

    @takes(requires_gradient_sync=bool)
    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients; those of passes that do not are kept and reduced with the next."""
        for reducer in self._reducers(recurse):
            reducer.syncs = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which backward reduces no gradients: they are kept, and reduced with the next."""
        before = [(reducer, reducer.syncs) for reducer in self._reducers()]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for reducer, syncs in before:
                reducer.syncs = syncs

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what summed gradients are divided by: the number of ranks on the data axes by default.

        Without a factor, a DTensor loss over all of them counts once and is not divided. With
        batches of different sizes, let every rank divide its summed loss by the size of the
        global batch, and set 1 here. `fully_shard` takes it for this unit alone.
        """
        for reducer in self._reducers(self._divides_inside):
            reducer.divisor = float(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, also those that are kept for a pass that reduces."""
        super().zero_grad(set_to_none)
        for reducer in self._reducers():
            reducer.drop_kept()


class GroupReduction:
    """The gradients of a group of parameters on their way to the layout of its leaves, by default with kept ones.

    `grads` are taken out one by one, so that none is held beside its sum with a kept one. Those of
    `returned` go to autograd, and not to the leaves.
    """

    __slots__ = (
        "_divisor",
        "_flags",
        "_gradients",
        "_in_flight",
        "_kept",
        "_own",
        "extra",
        "group",
        "returned",
    )

    def __init__(
        self, group: Group, grads: Grads, returned: Collection[int] = (), *, with_kept: bool = True
    ) -> None:
        self.group: Group = group
        self.returned: Collection[int] = returned
        # of a reduction that has been waited for
        self._gradients: Callable[[], list[Tensor]] | None = None
        # of the ranks together, where this one cannot know them
        self._flags: Tensor | None = None
        # the extra flags, summed over the ranks
        self.extra: Tensor | None = None
        adds = any(grad is not None for grad in grads.values())
        self._divisor = group.divide_by(adds=adds or not with_kept)
        kept: Kept = {}
        if with_kept:  # otherwise the group goes on keeping it
            kept = group.kept
            group.kept = {}
        self._kept: Kept = {} if group.spoiled else kept.copy()
        shards, specs = self._taken(grads, kept)
        partial = [group.parameters[i].partial for i in group.trained]
        shards = _converted(shards, specs, partial)
        moves = [
            (spec, group.parameters[i].reduced)
            for i, spec in zip(group.trained, partial, strict=True)
        ]
        # Which gradients there are travels with them: one row of flags for each rank that holds a
        # shard.
        columns = len(self._own) + group.extra_flags
        moves.append(_move_of_flags(partial[0], group.axes, columns, moves[0][1].dtype))
        shards.append(shards[0].new_ones((group.axes.ranks_of_shards, columns)))
        # written on the device: the host waits for no copy
        for at, there in enumerate(self._own):
            if not there:
                shards[-1][:, at].zero_()
        if group.extra_flags:
            extra = group.extra_columns()
            shards[-1][:, len(self._own) :] = 0 if extra is None else extra
        with purpose(f"{group.owner} reduces {group.name}"):
            self._in_flight: ShardsInFlight = redistribute_shards(given_away(shards), moves)

    def _taken(self, grads: Grads, kept: Kept) -> tuple[list[Tensor], list[Spec]]:
        """The sums of gradients of this pass and kept ones, taken out one by one, and their layouts."""
        shards = []
        specs = []
        self._own: list[bool] = []  # whether this rank has one
        for i in self.group.trained:
            parameter = self.group.parameters[i]
            grad = grads.pop(i, None)
            before = kept.pop(i, None)
            self._own.append(grad is not None or before is not None)
            local, spec = parameter.gradient(grad) if grad is not None or before is None else before
            if grad is not None and before is not None:
                local, spec = before[0].add(*_converted([local], [spec], [before[1]])), before[1]
            shards.append(local.to(spec.dtype).contiguous())
            specs.append(spec)
        return shards, specs

    def go_on(self) -> None:
        """Start the rest of it, over the axes of replicas, beside what follows; wait for it where it has started."""
        if self._gradients is None and not self._in_flight.reach_last_round():
            self.wait()

    def wait(self) -> None:
        """Have what follows on the device come after the reduction; gradients of the host are on their way to it."""
        if self._gradients is not None:
            return
        *reduced, flags = self._in_flight.wait()
        if self._divisor != 1:
            torch._foreach_div_(reduced, self._divisor)
        # which holds the gradients on the device
        del self._in_flight
        group = self.group
        on_host = group.axes.mesh.device_type != "cpu" and any(
            group.parameters[i].leaf.is_cpu for i in group.trained
        )
        self._gradients = download(reduced) if on_host else lambda: reduced
        if isinstance(flags, FakeTensor):
            return
        row = flags.reshape(-1, len(self._own) + group.extra_flags)[0]
        self.extra = row[len(self._own) :]
        # A gradient that this rank has is there: nobody has to look.
        if not all(self._own):
            self._flags = row[: len(self._own)]

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

    The host reads flags from the device only where this rank lacks a gradient: once, those of all
    reductions.
    """
    for reduction in reductions:
        reduction.wait()
    asked = [reduction._flags for reduction in reductions if reduction._flags is not None]
    counts = torch.cat([flags.to(asked[0].device) for flags in asked]).tolist() if asked else []
    found = []
    read = iter(counts)
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


def _converted(grads: list[Tensor], specs: Sequence[Spec], wanted: Sequence[Spec]) -> list[Tensor]:
    """Local gradients in the layouts that all ranks expect, or that kept ones have.

    Inputs may leave them partial or sharded over the styles' axes where the parameters are
    replicated. A rank that has no gradient of a parameter cannot know that of the others.
    """
    others = [at for at, spec in enumerate(specs) if spec is not wanted[at]]  # specs are interned
    if others:
        # the model may have changed its dtype since
        sources = [grads[at].to(wanted[at].dtype) for at in others]
        moves = [(specs[at].with_(dtype=wanted[at].dtype), wanted[at]) for at in others]
        for at, local in zip(others, redistribute_shards(sources, moves).wait(), strict=True):
            grads[at] = local
    return grads


@lru_cache(maxsize=1024)
def _move_of_flags(
    partial: Spec, axes: DataAxes, count: int, dtype: torch.dtype
) -> tuple[Spec, Spec]:
    """How flags travel with a gradient: partial over the data axes, reduced to one row on every rank."""
    data = [Partial()] * axes.mesh.ndim
    inner = [Replicate()] * (partial.mesh.ndim - axes.mesh.ndim)
    flags = Spec(partial.mesh, [*data, *inner], (axes.ranks_of_shards, count), None, dtype=dtype)
    return flags, flags.with_(placements=[*axes.placements(Shard(0)), *inner])
