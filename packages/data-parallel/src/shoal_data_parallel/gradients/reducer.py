"""The base of all objects that deliver gradients of parameters, reduced over data axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal_mesh import DeviceMesh

if TYPE_CHECKING:
    from ..parameters.data_axes import DataAxes


class Reducer:
    """The part of a module that reduces gradients."""

    axes: DataAxes
    # the module, if `replicate` made the reducer
    module: Any
    # whether backwards reduce gradients; otherwise this rank keeps them for a later backward
    syncs: bool = True
    # whether gradients are reduced over replicas too, or over shards alone
    all_reduces: bool = True
    # whether torch.autograd.grad returns zeros for gradients that are kept: pipeline stages split a
    # backward into such calls
    returns_zero_gradients: bool = False
    # whether modules see DTensors on the data axes, so that all ranks share one loss
    is_on_data_axes: bool = False
    # whether a forward has ended, and no backward has reached its parameters since
    awaits_backward: bool = False
    # the divisor of summed gradients; None for the number of ranks, or for 1 with a loss of all
    # ranks
    divisor: float | None = None

    @property
    def data_mesh(self) -> DeviceMesh:
        return self.axes.mesh

    def leaves(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients it delivers, and their replicas.

        Autograd accumulates in the replicas.
        """
        return ()

    def drop_kept(self) -> None:
        """Drop kept gradients."""

    def after_conversion(self) -> None:
        """Adapt to parameters that a conversion of the module has changed."""

    def begin_pass(self) -> None:
        """Prepare for a backward pass of replicas."""

    def end_pass(self) -> None:
        """Prepare for the end of a backward pass of replicas, also after an error."""
