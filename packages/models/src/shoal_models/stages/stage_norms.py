"""`StageNorms`: norms of gradients over all stages of a model, for `clip_grad_norm_`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from shoal_mesh import Comm

from .tied_weights import TiedWeights


class StageNorms:
    """The scope of a norm over all stages: each rank adds the parameters of its stage.

    Args:
        model: the model with this stage's parameters.
        comm: the communicator along the axis of the stages.
        tied: the weights that the stage at the other end holds too, or None.
    """

    def __init__(self, model: nn.Module, comm: Comm, tied: TiedWeights | None) -> None:
        self._model = weakref.ref(model)
        self._comm = comm
        self._tied = tied

    def comm(self) -> Comm:
        """Return the communicator over which norms are added."""
        return self._comm

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether one of the parameters is of this stage's model."""
        own = self._own_ids()
        return any(id(parameter) in own for parameter in parameters)

    def counts(self, parameter: Tensor) -> bool:
        """Tell whether this rank adds a parameter to the norm.

        Each parameter is added once. The first stage adds tied weights, and parameters that are not
        of the model, which all ranks have.
        """
        is_first_stage = self._comm.rank == 0
        if is_first_stage:
            return True
        is_tied = self._tied is not None and self._tied.holds(parameter)
        return id(parameter) in self._own_ids() and not is_tied

    def _own_ids(self) -> set[int]:
        model = self._model()
        return set() if model is None else {id(param) for param in model.parameters()}
