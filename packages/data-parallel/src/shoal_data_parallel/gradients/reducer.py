"""The base of all objects that deliver gradients of parameters, reduced over data axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal_mesh import DeviceMesh

if TYPE_CHECKING:
    from ..parameters.sharded_parameters import DataAxes


class Reducer:
    """The part of a module that reduces gradients."""

    axes: DataAxes
    # of a replicated module, the module
    module: Any
    # whether backward does; otherwise this rank keeps them for the next backward that does
    syncs: bool = True
    # False: over shards alone, and not over replicas
    all_reduces: bool = True
    # while gradients are kept, torch.autograd.grad returns zeros: pipeline stages split a backward so
    returns_zero_gradients: bool = False
    # whether modules see DTensors on the data axes, so that all ranks share one loss
    is_on_data_axes: bool = False
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

    def begin_pass(self) -> None:
        """Prepare for a backward pass of replicas."""

    def end_pass(self) -> None:
        """Prepare for the end of a backward pass of replicas, also after an error."""
