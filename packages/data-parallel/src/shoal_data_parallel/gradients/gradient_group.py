"""Groups of parameters whose gradients are reduced together, and their control by the user.

A `Group` keeps gradients of passes that did not reduce them, until a later pass or the user does.
`ReducingModule` has the methods with which users control this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal_dtensor import Spec
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import check_types, redistribute_shards, running_notes

from ..parameters.data_axes import DataAxes
from ..parameters.sharded_parameters import ShardedParameter
from .communication import Communication
from .global_losses import LossesOfPass, count_sharing_ranks
from .reducer import Reducer

# by index of the parameter: a gradient, or None if this pass has none
Grads = dict[int, Tensor | None]
# by index of the parameter: a local gradient and its layout
Kept = dict[int, tuple[Tensor, Spec]]
# by index of the parameter: a sum over the shards, and a flag that is not zero if any of the ranks
# had a gradient
Scattered = dict[int, tuple[Tensor, Tensor]]


class Group(Reducer):
    """Parameters whose gradients are reduced together."""

    # the function that made it, for messages and profiles
    made_by: str
    parameters: Sequence[ShardedParameter]
    # the indices of the parameters that require gradients
    trained: list[int]
    # how many flags are sent with the gradients, in addition to one per parameter
    extra_flags = 0

    def __init__(self, name: str, axes: DataAxes) -> None:
        # for messages and profiles
        self.name = name
        self.axes = axes
        # computed once, because every backward reads them
        self.num_ranks = axes.mesh.size()
        self.has_replicas = axes.has_replicas
        self.num_leaf_shards = axes.num_leaf_shards
        # by parameter the local gradient of earlier passes, and its layout
        self.kept: Kept = {}
        # the same, reduced over the shards but not over the replicas
        self.scattered: Scattered = {}
        # whether a pass that added to the kept gradients still runs, or has failed
        self.partially_accumulated = False
        # how many ranks share the loss of the kept gradients
        self.kept_sharing_ranks = 1
        self.communication = Communication()

    @property
    def holds_gradients(self) -> bool:
        """True if the group has gradients of earlier passes that are not fully reduced."""
        return bool(self.kept or self.scattered)

    def add_scattered(self, sums: Scattered) -> None:
        """Add sums over the shards to the sums of earlier passes."""
        for i, (gradient, flag) in sums.items():
            if i in self.scattered:
                earlier, earlier_flag = self.scattered[i]
                gradient = earlier + gradient
                flag = earlier_flag + flag
            self.scattered[i] = (gradient, flag)

    def add_to_kept(self, i: int, grad: Tensor, *, copy: bool = True) -> None:
        """Add a local gradient of the running pass to the kept one, in place.

        This is not undone if the pass fails: copies would have to be held for all groups until the
        pass is over. The first gradient is copied itself, because autograd may pass one tensor to
        several parameters.
        """
        self._check_same_loss(self._count_sharing_ranks())
        self.partially_accumulated = True
        local, spec = self.parameters[i].gradient(grad)
        if i in self.kept:
            kept, layout = self.kept[i]
            kept.add_(*in_wanted_layouts([local], [spec], [layout]))
        else:
            self.kept[i] = local.to(spec.dtype, copy=copy).contiguous(), spec

    def divide_by(self, *, adds: bool) -> float:
        """Return the divisor of summed gradients.

        It is the divisor that the user has set, and otherwise the number of losses. Example: 8
        ranks in groups of 2 that share a loss have 4 losses.

        Args:
            adds: whether the pass reduces gradients of its own. Their loss must be shared by as
                many ranks as the loss of kept gradients.
        """
        if adds or not self.holds_gradients:
            self._check_same_loss(self._count_sharing_ranks())
        if self.divisor is not None:
            return self.divisor
        return self.num_ranks / self.kept_sharing_ranks

    def _count_sharing_ranks(self) -> int:
        """Count the ranks that share the loss of the running backward."""
        if not (self.is_on_data_axes or running_notes(LossesOfPass)):
            # No gradient went from a DTensor to a plain tensor or back: each rank has its own loss.
            return 1
        return count_sharing_ranks(self)

    def _check_same_loss(self, ranks: int) -> None:
        if not self.holds_gradients:
            self.kept_sharing_ranks = ranks
        if self.divisor is None and ranks != self.kept_sharing_ranks:
            raise StyleError(
                f"{self.made_by}: the kept gradients of {self.name!r} belong to a loss shared by "
                f"{self.kept_sharing_ranks} data-parallel ranks, and the gradients of this "
                f"backward to a loss shared by {ranks}, so their sum has no common divisor. Call "
                "set_gradient_divide_factor(), whose divisor then applies to all gradients, or "
                "reduce after each backward"
            )

    def extra_columns(self) -> Tensor | None:
        """Return the values of the extra flags on this rank; None for zeros."""
        return None

    def check_kept(self) -> None:
        """Raise StyleError if a backward that raised may have added to kept gradients."""
        if self.partially_accumulated:
            raise StyleError(
                f"{self.made_by}: a backward raised while it added to the kept gradients of "
                f"{self.name!r}, so some kept gradients include it and some do not. Drop all of "
                "them with the outermost module's zero_grad(), and begin the step again"
            )

    def drop_kept(self) -> None:
        self.kept = {}
        self.scattered = {}
        self.partially_accumulated = False


class ReducingModule(nn.Module):
    """A base of modules with control over the reduction of gradients, under torch's names."""

    _made_by: str  # the name of the function
    # whether `set_gradient_divide_factor` also holds for inner modules with reducers of their own
    _divides_inside = True
    # the reducers of the module and, unless `recurse=False`, of inner modules
    _reducers: Callable[..., Sequence[Reducer]]

    if TYPE_CHECKING:
        # The class of the user's module is the second base, with methods that checkers do not know.
        def __getattr__(self, name: str) -> Any: ...

    def reduce_gradients(self) -> None:
        """Reduce the gradients that were kept, without another backward.

        All ranks call it.

        Raises:
            StyleError: if a backward is running, or if a backward raised after it had added to kept
                gradients.
        """
        raise NotImplementedError("each kind of module has one")

    def extra_repr(self) -> str:
        """Return the text of the module for its printed form."""
        return ", ".join(filter(None, [super().extra_repr(), self._made_by]))

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """Convert the module, as `Module.to` and its like do, and tell the reducers.

        `to_empty()` leaves memory without values, which is filled with NaN to be recognized.
        """
        on_meta = [name for name, param in self.named_parameters() if param.is_meta]
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # of torch
        for param in map(self.get_parameter, on_meta):
            if not param.is_meta and (param.is_floating_point() or param.is_complex()):
                param.detach().fill_(torch.nan)
        for reducer in self._reducers(recurse=False):
            reducer.after_conversion()
        return result

    @check_types(requires_gradient_sync=bool)
    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients.

        Gradients of passes that do not reduce are kept, and reduced with the next ones.
        """
        for reducer in self._reducers(recurse):
            reducer.syncs = requires_gradient_sync
            reducer.all_reduces = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Open a block in which backward keeps gradients, to be reduced with the next ones."""
        before = [(reducer, reducer.syncs, reducer.all_reduces) for reducer in self._reducers()]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for reducer, syncs, all_reduces in before:
                reducer.syncs = syncs
                reducer.all_reduces = all_reduces

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of summed gradients: by default the number of data-parallel ranks.

        Without a factor, gradients of a DTensor loss of all these ranks are not divided, so that
        the loss counts once. With batches of different sizes, let every rank divide its summed loss
        by the size of the global batch, and set 1 here. `fully_shard` applies it to this unit
        alone.
        """
        for reducer in self._reducers(self._divides_inside):
            reducer.divisor = float(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, including gradients kept for a later reduction."""
        super().zero_grad(set_to_none)
        for reducer in self._reducers():
            reducer.drop_kept()


def in_wanted_layouts(
    grads: list[Tensor], specs: Sequence[Spec], wanted: Sequence[Spec]
) -> list[Tensor]:
    """Return local gradients in the wanted layouts, which all ranks expect or kept gradients have.

    A gradient may be partial or sharded over the styles' axes although its parameter is replicated
    there. A rank that does not have a gradient of the parameter cannot determine this layout, so
    ranks send gradients only in layouts that they all know.
    """
    others = [at for at, spec in enumerate(specs) if spec is not wanted[at]]  # specs are interned
    if others:
        # the user may have changed the model's dtype since the kept gradients were computed
        sources = [grads[at].to(wanted[at].dtype) for at in others]
        moves = [(specs[at].with_(dtype=wanted[at].dtype), wanted[at]) for at in others]
        for at, local in zip(others, redistribute_shards(sources, moves).wait(), strict=True):
            grads[at] = local
    return grads
