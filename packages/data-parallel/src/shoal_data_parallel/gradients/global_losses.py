"""Losses that data-parallel ranks share, and the division of their gradients.

A backward begins at a plain loss, of which each rank has its own, or at a DTensor loss, which the
ranks of its mesh share. For plain losses, data parallelism sums the ranks' gradients and divides by
the number of ranks: this is the gradient of the mean loss.

A gradient crosses where it goes from a DTensor to a plain tensor, or back. If it leaves DTensors
for a plain parameter, it comes from a shared loss, and needs another division. There are two cases.
The numbers are an example of 2 ranks, where the gradient of the shared loss is 8:

    a shard on each rank        from_local(x, mesh, [Shard(0)]). The ranks have 3 and 5, and the sum
                                over ranks is the whole gradient 8, so it is divided by 1. The pass
                                records that these ranks share the loss.
    the whole on each rank      from_local(p, mesh, [Replicate()]), or a plain parameter among
                                DTensors. The ranks have 8 and 8, and the sum would count 8 twice.
                                So each 8 is divided here by the number of ranks, to 4 and 4.

The opposite crossing is that of `full_tensor()`, outside of a forward, of a parameter that
`fully_shard` holds. Example: each rank computes a plain loss `F.linear(rows, full_weight).mean()`
of its own rows. The ranks' gradients 3 and 5 are then summed and divided as for plain losses, to 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

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
Origin = Literal["global", "local", "unclear"]


@dataclass(slots=True)
class LossOfRanks:
    """The loss at which a backward pass began, for one set of data-parallel ranks.

    A backward runs from the loss to the parameters, so the first crossing over these ranks shows
    the origin. In the examples `out` is a DTensor:

    | origin    | program                            | first crossing of the gradient              |
    | --------- | ---------------------------------- | ------------------------------------------- |
    | "global"  | out.mean().backward()              | it leaves DTensors                          |
    | "local"   | out.to_local().mean().backward(),  | it enters DTensors as shards or as summands |
    |           | `out` sharded by rows              | of the ranks, so each rank has its own loss |
    | "unclear" | loss = out.mean().full_tensor();   | it enters DTensors as one gradient, equal   |
    |           | (loss + own_loss).backward()       | on all ranks. The plain loss may be one     |
    |           |                                    | loss of all ranks, in whole or in part      |
    """

    origin: Origin | None = None
    # ranks that hold shards of the gradient of one loss
    sharing: Ranks = NO_RANKS
    # ranks that hold shards of a gradient of the origin "unclear": they share a loss, unless each
    # rank has added a loss of its own
    perhaps_sharing: Ranks = NO_RANKS
    # whether a gradient entered DTensors as shards, so that each rank has a loss of its own
    enters_as_shards: bool = False

    def begin_at(self, origin: Origin) -> None:
        """Record the origin, unless an earlier crossing has shown it."""
        if self.origin is None:
            self.origin = origin

    def add_sharing(self, ranks: Ranks) -> None:
        """Record ranks that each have a shard of a gradient."""
        if self.origin == "global":
            self.sharing |= ranks
        elif self.origin == "unclear":
            self.perhaps_sharing |= ranks


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
                assert isinstance(owner, Reducer), "only reducers call register_owner"
                self._reducers.update((id(leaf), owner) for leaf in owner.leaves())
        return self._reducers.get(id(parameter))


@dataclass(frozen=True, slots=True)
class DataCrossing:
    """The ranks over which a tensor's gradient crosses, for one set of data-parallel ranks."""

    data: Ranks
    # the ranks that hold copies of this rank's shard, including ranks outside of `data`
    ranks_with_copies: Ranks
    # the ranks that hold the shards of the tensor, including ranks outside of `data`
    ranks_with_shards: Ranks


def count_sharing_ranks(reducer: Reducer) -> int:
    """Count the data-parallel ranks that share one loss in the passes that run.

    The count is 1 if each rank has its own loss.

    Raises:
        StyleError: if that is unknown and the divisor of gradients is not set.
    """
    data = ranks_of(reducer.axes.mesh)
    passes = running_notes(LossesOfPass)
    losses = [one.by_data[data] for one in passes if data in one.by_data]
    # The model computes on DTensors on the data axes, so its loss is one loss of all ranks, and no
    # gradient need cross. But if a gradient has entered as shards, each rank has called
    # `to_local()` and has computed a loss of its own.
    each_has_own_loss = any(loss.enters_as_shards for loss in losses)
    if reducer.is_on_data_axes and not each_has_own_loss:
        return len(data)
    is_unclear = any(len(loss.perhaps_sharing & data) > 1 for loss in losses)
    if reducer.divisor is None and is_unclear:
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

        Each rank may use a parameter's values in a loss of its own. If the user did not pass
        `grad_placements`, the ranks' gradients are therefore taken as summands (`Partial`).
        """
        crossings = _data_crossings(spec.mesh, _is_replicated(spec))
        if isinstance(grad, FakeTensor) or not crossings:
            return grad, spec
        losses = running_pass().note(LossesOfPass)
        reducer = _reducer_of_values(node, losses)
        for crossing in crossings:
            loss = losses.over(crossing.data)
            loss.enters_as_shards |= bool(crossing.ranks_with_shards)
            # A gradient of a parameter's values does not show the origin: the values may be used
            # by a loss of each rank, or by a penalty of all ranks.
            if reducer is None:
                loss.begin_at("unclear" if crossing.ranks_with_copies else "local")
        if reducer is None:
            return grad, spec
        # this may be the only way to the reducer, for a loss of parameters alone
        reducer.awaits_backward = False
        has_copies = bool(_copies(crossings))
        # set by `to_local()`: true if the user did not pass `grad_placements`
        takes_default_placements = node.by_default
        if not has_copies or not takes_default_placements:
            return grad, spec
        # A number that was computed from parameters with dims is a penalty that all ranks share,
        # such as `weight.square().sum().full_tensor()`. All ranks have its whole gradient, and a
        # sum of them would count the penalty once for each rank.
        if grad.ndim == 0 and _has_leaf_with_dims(node):
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
            loss.add_sharing(crossing.ranks_with_shards)
        factor = _factor_of_copies(node, losses, _copies(crossings))
        if factor is None:
            return grad
        # Ranks with copies share a loss only if a reducer sums their gradients, therefore they are
        # recorded after `_factor_of_copies`. With the origin "unclear" they need no record, because
        # the mean of equal gradients is correct for a loss of all ranks too.
        for crossing in crossings:
            loss = losses.over(crossing.data)
            if loss.origin == "global":
                loss.add_sharing(crossing.ranks_with_copies)
        return grad if factor == 1 else grad * factor

    def check_factor(self, node: Any, number: Tensor) -> None:
        """Refuse a rank's loss as the factor of a DTensor that is computed from parameters.

        Example: `model(rows).mean() * model.log_sigma.exp()`, where `log_sigma` is a shard. Each
        rank would multiply the gradient of `log_sigma` by its own loss, not by the mean of losses.

        Raises:
            StyleError: if the number is computed from parameters of a data-parallel module.
        """
        if isinstance(number, FakeTensor) or number.grad_fn is None:
            return
        inputs = [below for below, _ in node.next_functions if below is not None]
        # While a checkpoint runs again inside of a backward, the number is no input of its node.
        if number.grad_fn not in inputs:
            return
        losses = running_pass().note(LossesOfPass)
        others = [below for below in inputs if below != number.grad_fn]
        if any(_is_of_shards(below, losses) for below in others) and _is_of_rank(number, losses):
            raise StyleError(
                "a plain number that a data-parallel module computed, such as the loss of this "
                "rank's rows, was multiplied by a DTensor of parameters outside of a forward. A "
                "plain number counts as equal on all ranks, so each rank would take the gradient "
                "of its own loss for the mean. Multiply by the values of the parameter: loss * "
                "model.log_sigma.full_tensor().exp(). If the number is equal on all ranks, make it "
                "a DTensor: DTensor.from_local(number, mesh, [Replicate()])"
            )


def _is_of_shards(node: Any, losses: LossesOfPass) -> bool:
    """Return whether a DTensor on data axes is computed from parameters of one reducer alone."""
    reducer = _reducer_of_values(node, losses)
    if reducer is None:
        return False
    data = ranks_of(reducer.axes.mesh)
    meshes = {leaf.device_mesh for leaf in _leaves_below(node, _is_from_local)}
    # a mesh of tensor-parallel ranks has one of the data-parallel ranks
    return any(len(ranks_of(mesh) & data) > 1 for mesh in meshes)


def _is_of_rank(number: Tensor, losses: LossesOfPass) -> bool:
    """Return whether a plain number is computed by a module whose gradients a reducer delivers.

    The search ends at nodes such as `full_tensor()`, whose result is equal on all ranks.
    """
    for below in nodes_below(number.grad_fn, _takes_whole_gradient):
        leaf = getattr(below, "variable", None)
        if leaf is not None and losses.reducer_of(leaf) is not None:
            return True
        # The node of a reentrant checkpoint does not have the parameters that its backward uses.
        if getattr(below, "_forward_cls", None) is CheckpointFunction:
            return True
    return False


def _leaves_below(node: Any, ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the parameters from which a tensor is computed; see `nodes_below`."""
    for below in nodes_below(node, ends):
        leaf = getattr(below, "variable", None)
        if leaf is not None:
            yield leaf


def _factor_of_copies(node: Any, losses: LossesOfPass, copies: Ranks) -> float | None:
    """Return the factor of a gradient that each of the ranks `copies` has whole.

    Returns None if no reducer sums the gradient over ranks with copies.

    Raises:
        StyleError: if the gradient goes to parameters that need different factors.
    """
    if not copies:
        return None
    reducers = set(_reducers_below(node, losses))
    if not reducers or reducers == {None}:
        return None
    factors = {_factor_for(reducer, losses, copies) for reducer in reducers}
    if len(factors) > 1:
        raise StyleError(
            "a plain tensor is treated as replicated among DTensors, but it was computed "
            "from parameters whose gradients data parallelism sums in different ways, or "
            "does not sum. Make a DTensor of each: DTensor.from_local(parameter, mesh, "
            "[Replicate()])"
        )
    return factors.pop()


def _factor_for(reducer: Reducer | None, losses: LossesOfPass, copies: Ranks) -> float:
    """Return the factor of a whole gradient, so that the sum of a reducer counts it once.

    Example: 2 ranks each have the gradient 8. With the factor 1 / 2, their sum is 4 + 4 = 8.

    Args:
        reducer: the reducer that sums the gradient; None if no reducer does.
        losses: the losses of the pass.
        copies: the ranks that each have the whole gradient.
    """
    if reducer is None:
        return 1
    data = ranks_of(reducer.axes.mesh)
    if losses.over(data).origin == "unclear" and reducer.divisor is None:
        # the reduction takes the mean of the equal gradients
        return 1
    return 1 / max(len(copies & data), 1)


def _summand(grad: Tensor, spec: Spec, reducer: Reducer) -> tuple[Tensor, Spec]:
    """Return the gradient of a parameter's values on each rank as a summand.

    The summands are added over the ranks that hold the values, and divided as the reducer divides.

    Example: 2 replicas of 2 shards are 4 data-parallel ranks. `to_local()` gives one shard to the 2
    ranks that hold it, whose losses give it the gradients 3 and 5. The reducer would divide a sum
    of 4 gradients by 4, but this sum has 2: (3 + 5) / 4 = 2 is half of the mean. So the divisor is
    4 * 2 / 4 = 2.
    """
    data = ranks_of(reducer.axes.mesh)
    placements: list[Placement] = [*spec.placements]
    holders = 1
    for axis, placement in enumerate(spec.placements):
        if placement.is_replicate() and data.issuperset(_along(spec.mesh, axis)):
            placements[axis] = Partial()
            holders *= spec.mesh.shape[axis]
    # the divisor of a sum of one gradient from each rank of `data`: by default the number of losses
    divisor_of_all = reducer.divisor
    if divisor_of_all is None:
        divisor_of_all = len(data) / count_sharing_ranks(reducer)
    divisor = divisor_of_all * holders / len(data)
    return grad / divisor, spec.with_(placements=placements)


def _reducer_of_values(node: Any, losses: LossesOfPass) -> Reducer | None:
    """Return the reducer of the parameters that a DTensor is computed from.

    Returns None if it is computed from anything else, too.
    """
    reducers: set[Reducer | None] = set()
    # The search goes no further at a node of `from_local()`, but yields the node itself.
    for below in nodes_below(node, _is_from_local):
        leaf = getattr(below, "variable", None)
        if leaf is not None:
            reducers.add(losses.reducer_of(leaf) if isinstance(leaf, DTensor) else None)
        if None in reducers or _is_from_local(below):
            return None
    return next(iter(reducers)) if len(reducers) == 1 else None


def _has_leaf_with_dims(node: Any) -> bool:
    """Return whether a DTensor is computed from a parameter with at least one dim."""
    return any(leaf.ndim for leaf in _leaves_below(node, _is_from_local))


def _reducers_below(node: Any, losses: LossesOfPass) -> Iterator[Reducer | None]:
    """Yield the reducers of all parameters that a tensor depends on; None for one without.

    The search ends at a node such as `full_tensor()`, which takes the whole gradient, so that no
    reducer need sum it. An exception is `full_tensor()` of a parameter's values, see `enter`.
    """

    # Cached, because `nodes_below` and the loop both ask, and the answer searches the graph.
    @cache
    def ends_search(below: Any) -> bool:
        return _takes_whole_gradient(below) and _reducer_of_values(below, losses) is None

    for below in nodes_below(node, ends_search):
        leaf = getattr(below, "variable", None)
        if leaf is not None:
            yield losses.reducer_of(leaf)
        elif ends_search(below):
            yield None


def _is_from_local(node: Any) -> bool:
    return getattr(node, "_forward_cls", None) is FromLocal


def _takes_whole_gradient(node: Any) -> bool:
    """Tell whether the backward of a node needs the whole gradient of one loss on each rank.

    A `Function` declares this by a method `gradient_shares(node)`. It returns the ranks whose
    gradients the backward adds, and None if the backward takes a whole gradient, like that of
    `full_tensor()`.
    """
    function = getattr(node, "_forward_cls", None)
    gradient_shares = getattr(function, "gradient_shares", None)
    return gradient_shares is not None and gradient_shares(node) is None


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
        ranks_with_copies = copies if len(copies & data) > 1 else NO_RANKS
        ranks_with_shards = shards if len(shards & data) > 1 else NO_RANKS
        if ranks_with_copies or ranks_with_shards:
            found.append(DataCrossing(data, ranks_with_copies, ranks_with_shards))
    return tuple(found)


def _along_all(mesh: DeviceMesh, is_replicated: tuple[bool, ...], *, wanted: bool) -> Ranks:
    """Return the ranks along all axes that are replicated, or with `wanted=False` that are not."""
    axes = [axis for axis, replicated in enumerate(is_replicated) if replicated is wanted]
    return frozenset(_along(mesh, *axes)) if axes else NO_RANKS


def _copies(crossings: tuple[DataCrossing, ...]) -> Ranks:
    """Return the ranks that hold copies over any data axes."""
    return NO_RANKS.union(*(crossing.ranks_with_copies for crossing in crossings))


_CROSSINGS = _DataCrossings()
