"""Losses that data-parallel ranks share, and the division of their gradients.

A backward begins at a plain loss, of which each rank has its own, or at a DTensor loss, which the
ranks of its mesh share. For plain losses, data parallelism sums the ranks' gradients and divides by
the number of ranks: this is the gradient of the mean loss. A gradient that crosses from DTensors to
a plain parameter comes from a shared loss, and needs another division:

    a shard on each rank        from_local(x, mesh, [Shard(0)]): the sum over ranks is the whole
                                gradient, so it is divided by 1. The pass records these ranks.
    the whole on each rank      from_local(p, mesh, [Replicate()]), or a plain parameter among
                                DTensors: the sum would count it once for each of these ranks, so
                                it is divided here by their number.

The opposite crossing is `full_tensor()`, outside of a forward, of a parameter that `fully_shard`
holds. Each rank computes with all values, so the gradients are summed and divided as for plain
losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Spec
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import (
    FakeTensor,
    FromLocal,
    install_crossings,
    live_owners,
    nodes_below,
    running_notes,
    running_pass,
)
from shoal_mesh import DeviceMesh

from .reducer import Reducer

Ranks = frozenset[int]
NO_RANKS: Ranks = frozenset()


@dataclass(slots=True)
class LossOfRanks:
    """The loss at which a backward pass began, for one set of data-parallel ranks.

    Crossings are gradients between plain tensors and DTensors. The first crossing over these ranks
    shows the origin: gradients that leave DTensors come from a DTensor loss ("global"). Gradients
    that enter DTensors as shards or summands of ranks come from a loss of each rank ("local").
    Gradients that enter as equal ones, through `full_tensor()`, come from a plain loss that may in
    part or whole be one loss of all ranks ("unclear").
    """

    origin: Literal["global", "local", "unclear"] | None = None
    # ranks that hold shards of the gradient of one loss
    sharing: Ranks = NO_RANKS
    # the same for the origin "unclear": a part of the loss may be each rank's own
    unclear: Ranks = NO_RANKS
    # whether a gradient entered DTensors as shards, so that each rank has a loss of its own
    enters_as_shards: bool = False

    def begin_at(self, origin: Literal["global", "local", "unclear"]) -> None:
        """Record the origin, unless an earlier crossing has shown it."""
        if self.origin is None:
            self.origin = origin

    def add_sharing(self, ranks: Ranks) -> None:
        """Record ranks that each have a shard of a gradient."""
        if self.origin == "global":
            self.sharing |= ranks
        elif self.origin == "unclear":
            self.unclear |= ranks


@dataclass(slots=True)
class LossesOfPass:
    """The losses of a backward pass by sets of data-parallel ranks.

    A program may have models with different data axes. A crossing over ranks 0 and 1 does not
    concern a reducer over ranks 0 and 2.
    """

    by_data: dict[Ranks, LossOfRanks] = field(default_factory=dict)
    _reducers: dict[int, Reducer] = field(default_factory=dict)

    def over(self, data: Ranks) -> LossOfRanks:
        """Return the record of the loss for these data-parallel ranks."""
        return self.by_data.setdefault(data, LossOfRanks())

    def reducer_of(self, parameter: Tensor) -> Reducer | None:
        """Return the reducer that delivers the gradient of a parameter, or None."""
        if not self._reducers:
            for owner in live_owners():
                assert isinstance(owner, Reducer), "notes of this type were made here"
                self._reducers.update((id(leaf), owner) for leaf in owner.leaves())
        return self._reducers.get(id(parameter))


@dataclass(frozen=True, slots=True)
class DataCrossing:
    """The ranks that hold copies or shards of a tensor, for one set of data-parallel ranks."""

    data: Ranks
    # the ranks that hold copies of this rank's shard, including ranks outside of `data`
    replicated: Ranks
    # the ranks that hold the shards of the tensor, including ranks outside of `data`
    sharded: Ranks


def divisor_of(reducer: Reducer, ranks_of_loss: int) -> float:
    """Return the divisor of summed gradients.

    It is the divisor that the user has set. By default a loss counts once if `ranks_of_loss` ranks
    share it: the divisor is the number of such losses.
    """
    if reducer.divisor is not None:
        return reducer.divisor
    return reducer.axes.mesh.size() / ranks_of_loss


def ranks_of_loss(reducer: Reducer) -> int:
    """Return how many data-parallel ranks share one loss in the passes that run.

    It is 1 if each rank has its own loss.

    Raises:
        StyleError: if that is unknown and the divisor of gradients is not set.
    """
    data = ranks_of(reducer.axes.mesh)
    passes = running_notes(LossesOfPass)
    losses = [one.by_data[data] for one in passes if data in one.by_data]
    if reducer.is_on_data_axes and not any(loss.enters_as_shards for loss in losses):
        return len(data)
    if reducer.divisor is None and any(len(loss.unclear & data) > 1 for loss in losses):
        raise StyleError(
            "a backward began at a plain loss and went through full_tensor() or to_local() of a "
            "DTensor, and through from_local() of this rank's shard. Either the loss is shared "
            "by all data-parallel ranks and its gradients must be summed, or each rank has its "
            "own loss and the gradients must be averaged; this graph does not show which. Call "
            "backward() on the DTensor loss, or set_gradient_divide_factor(1) where the whole "
            "loss is global, or pass grad_placements=[Partial()] to full_tensor() where each "
            "rank adds the result to a loss of its own"
        )
    sharing = NO_RANKS.union(*(loss.sharing for loss in losses)) & data
    return max(len(sharing), 1)


class _DataCrossings:
    """The crossings of gradients over data axes."""

    def enter(self, node: Any, grad: Tensor, spec: Spec) -> tuple[Tensor, Spec]:
        """Return the gradient that a DTensor gets from the result of `to_local()`, and its layout.

        For the values of a parameter that each rank uses by default, it is a summand of the ranks'
        sum.
        """
        crossings = _data_crossings(spec.mesh, _is_replicated(spec))
        if isinstance(grad, FakeTensor) or not crossings:
            return grad, spec
        losses = running_pass().note(LossesOfPass)
        reducer = _reducer_of_values(node, losses)
        for crossing in crossings:
            loss = losses.over(crossing.data)
            loss.enters_as_shards |= bool(crossing.sharded)
            if reducer is None:
                loss.begin_at("unclear" if crossing.replicated else "local")
        if reducer is None:
            return grad, spec
        if not _copies(crossings) or not node.by_default:
            return grad, spec
        # A number computed from parameters with dims is a loss of all ranks.
        if not grad.ndim and _has_leaf_with_dims(node):
            return grad, spec
        return _summand(grad, spec, reducer)

    def leave(self, node: Any, grad: Tensor, spec: Spec) -> Tensor:
        """Return the gradient of a plain tensor from which a DTensor was made.

        If a reducer sums the gradient over ranks that each have the whole of it, it is divided by
        their number.
        """
        crossings = _data_crossings(spec.mesh, _is_replicated(spec))
        if isinstance(grad, FakeTensor) or not crossings:
            return grad
        losses = running_pass().note(LossesOfPass)
        for crossing in crossings:
            loss = losses.over(crossing.data)
            loss.begin_at("global")
            loss.add_sharing(crossing.sharded)
        replicated = _copies(crossings)
        reducers = {*_reducers_below(node, losses)} if replicated else set()
        if reducers <= {None}:
            return grad
        shares = {_share(losses, reducer, replicated) for reducer in reducers}
        if len(shares) > 1:
            raise StyleError(
                "a plain tensor is treated as replicated among DTensors, but it was computed "
                "from parameters whose gradients data parallelism sums in different ways, or "
                "does not sum. Make a DTensor of each: DTensor.from_local(parameter, mesh, "
                "[Replicate()])"
            )
        for crossing in crossings:
            loss = losses.over(crossing.data)
            if loss.origin == "global":
                loss.add_sharing(crossing.replicated)
        (share,) = shares
        return grad if share == 1 else grad * share


def _share(losses: LossesOfPass, reducer: Reducer | None, replicated: Ranks) -> float:
    """Return the factor with which the reduction counts a gradient, whole on each rank, once."""
    if reducer is None:
        return 1
    data = ranks_of(reducer.axes.mesh)
    if losses.over(data).origin == "unclear" and reducer.divisor is None:
        # the reduction takes the mean of the equal gradients
        return 1
    return 1 / max(len(replicated & data), 1)


def _summand(grad: Tensor, spec: Spec, reducer: Reducer) -> tuple[Tensor, Spec]:
    """Return the gradient of a parameter's values on each rank as a summand.

    The summands are added over the ranks that hold the values, and divided as the reducer divides.
    With 2 replicas of 2 shards, `to_local()` shows a shard on 2 of 4 ranks: divided by 4, the
    gradient would be half of the correct one.
    """
    data = ranks_of(reducer.axes.mesh)
    over = [axis for axis, p in enumerate(spec.placements) if p.is_replicate()]
    axes = [axis for axis in over if {*_along(spec.mesh, axis)} <= data]
    placements: list[Placement] = [*spec.placements]
    holders = 1
    for axis in axes:
        placements[axis] = Partial()
        holders *= spec.mesh.shape[axis]
    divisor = divisor_of(reducer, ranks_of_loss(reducer)) * holders / len(data)
    return grad / divisor, spec.with_(placements=placements)


def _reducer_of_values(node: Any, losses: LossesOfPass) -> Reducer | None:
    """Return the reducer of the parameters that a DTensor is computed from.

    Returns None if it is computed from anything else, too.
    """
    reducers: set[Reducer | None] = set()
    for below in nodes_below(node, _is_from_local):
        leaf = getattr(below, "variable", None)
        if leaf is not None:
            reducers.add(losses.reducer_of(leaf) if isinstance(leaf, DTensor) else None)
        if None in reducers or _is_from_local(below):
            return None
    return next(iter(reducers)) if len(reducers) == 1 else None


def _has_leaf_with_dims(node: Any) -> bool:
    """Return whether a DTensor is computed from a parameter with at least one dim."""
    leaves = (getattr(below, "variable", None) for below in nodes_below(node, _is_from_local))
    return any(leaf is not None and leaf.ndim for leaf in leaves)


def _reducers_below(node: Any, losses: LossesOfPass) -> Iterator[Reducer | None]:
    """Yield the reducers of all parameters that a tensor depends on; None for one without."""

    def takes_whole(below: Any) -> bool:
        return _takes_whole(below) and _reducer_of_values(below, losses) is None

    for below in nodes_below(node, takes_whole):
        leaf = getattr(below, "variable", None)
        if leaf is not None:
            yield losses.reducer_of(leaf)
        elif takes_whole(below):
            yield None


def _is_from_local(node: Any) -> bool:
    return getattr(node, "_forward_cls", None) is FromLocal


def _takes_whole(node: Any) -> bool:
    """Return whether a node needs one loss's whole gradient on each rank, as `full_tensor()`."""
    shares = getattr(getattr(node, "_forward_cls", None), "gradient_shares", None)
    return shares is not None and shares(node) is None


@lru_cache(maxsize=4096)
def _is_replicated(spec: Spec) -> tuple[bool, ...]:
    return tuple(isinstance(p, Replicate) for p in spec.placements)


def _along(mesh: DeviceMesh, *axes: int) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    return () if coordinate is None else tuple(mesh.ranks_along(axes, tuple(coordinate)))


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """Return the global ranks that this rank averages gradients with."""
    return frozenset(mesh.comm(tuple(range(mesh.ndim))).ranks)


_watched: set[Ranks] = set()


def watch(mesh: DeviceMesh) -> None:
    """Record crossings of gradients between DTensors and plain tensors over a mesh from now on."""
    install_crossings(_CROSSINGS)
    ranks = ranks_of(mesh)
    if ranks not in _watched and len(ranks) > 1:
        _watched.add(ranks)
        _data_crossings.cache_clear()


@lru_cache(maxsize=4096)
def _data_crossings(mesh: DeviceMesh, is_replicated: tuple[bool, ...]) -> tuple[DataCrossing, ...]:
    """Return the crossings of a layout, one for each watched set of data-parallel ranks.

    A set is left out if it has at most one of the ranks with copies, and at most one of the ranks
    with shards.
    """
    copies = _along_all(mesh, is_replicated, wanted=True)
    shards = _along_all(mesh, is_replicated, wanted=False)
    found = []
    for data in sorted(_watched, key=sorted):
        replicated = copies if len(copies & data) > 1 else NO_RANKS
        sharded = shards if len(shards & data) > 1 else NO_RANKS
        if replicated or sharded:
            found.append(DataCrossing(data, replicated, sharded))
    return tuple(found)


def _along_all(mesh: DeviceMesh, is_replicated: tuple[bool, ...], *, wanted: bool) -> Ranks:
    """Return the ranks along all axes that are replicated, or with `wanted=False` that are not."""
    axes = [axis for axis, replicated in enumerate(is_replicated) if replicated is wanted]
    return frozenset(_along(mesh, *axes)) if axes else NO_RANKS


def _copies(crossings: tuple[DataCrossing, ...]) -> Ranks:
    """Return the ranks that hold copies over any data axes."""
    return NO_RANKS.union(*(crossing.replicated for crossing in crossings))


_CROSSINGS = _DataCrossings()
