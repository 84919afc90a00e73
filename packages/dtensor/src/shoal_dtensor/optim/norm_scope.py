"""`NormScope`: ranks whose parameters count in one norm, for models with stages on several ranks.

A package that divides the parameters of a model among ranks registers a scope. `clip_grad_norm_`
then computes the norm of the whole model from any rank's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import ref

from torch import Tensor

from shoal_mesh import Comm

from ..errors import MixedTensorError


class NormScope(Protocol):
    """Ranks that hold different parameters of one model, such as the stages of a pipeline."""

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether this rank's part of the model has one of some parameters."""

    def counts(self, parameter: Tensor) -> bool:
        """Tell whether this rank counts a parameter, rather than another rank of the scope."""

    def comm(self) -> Comm:
        """Return the communicator of these ranks."""


# Weak references, so that a scope ends with its model.
_scopes: list[ref[NormScope]] = []


def register_norm_scope(scope: NormScope) -> None:
    """Have norms of a model's gradients be norms over all ranks of a scope, as long as it lives."""
    _scopes[:] = [reference for reference in _scopes if reference() is not None]
    _scopes.append(ref(scope))


def scope_of(parameters: Sequence[Tensor]) -> NormScope | None:
    """Return the scope that holds some parameters; None if there is none.

    Raises:
        MixedTensorError: if several scopes hold them.
    """
    if not _scopes:
        # the usual case, which compilers trace too
        return None
    found = []
    for reference in _scopes:
        scope = reference()
        if scope is not None and scope.holds(parameters):
            found.append(scope)
    if len(found) > 1:
        raise MixedTensorError(
            f"clip_grad_norm_: the parameters are of {len(found)} models with stages on several "
            "ranks; clip the gradients of each model by a call of its own"
        )
    return found[0] if found else None
