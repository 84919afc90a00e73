"""Sharding of optimizer and AMP operators: element by element of their lists, all state cut alike."""

from __future__ import annotations

from torch import Tensor

from shoal_mesh import all_reduce

from ..spec import TensorMeta
from .local import cutting
from .rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .table import family

__all__ = ["OPTIM"]


def _state_rows(call: OpCall) -> list[Row]:
    """A parameter, its gradient and its state are cut alike; step counts, rates and scales are whole."""
    given = [a for a in call.op._schema.arguments if isinstance(call.get(a.name), TensorMeta)]
    cut = ["List" in str(a.type) and a.name != "state_steps" for a in given]
    return [Row(tuple(S(d) if each else R for each in cut), ()) for d in range(call.tensors[0].ndim)]


def _unscale_rows(call: OpCall) -> list[Row]:
    (gradient, *_rest) = call.tensors
    return [Row((S(d), R, R), ()) for d in range(gradient.ndim)]


def _unscale(decided: LocalCall) -> LocalFunction | None:
    """Unscale this rank's parts; an infinity anywhere is found everywhere."""
    *gradients, found, _scale = decided.inputs
    axes = tuple(sorted({axis for spec in gradients for axis in cutting(spec)}))
    if not axes:
        return None
    comm, op = found.mesh.comm(axes), decided.call.op

    def run(parts: list[Tensor], found_inf: Tensor, scale: Tensor) -> None:
        op(parts, found_inf, scale)
        found_inf.copy_(all_reduce(found_inf, comm, "max"))

    return run


_EACH = Rule(_state_rows, by_value=False, each=True, unordered=True)

OPTIM: Table = family(
    {
        "_fused_sgd_ _fused_adam_ _fused_adamw_ _fused_adagrad_": _EACH,
        "_amp_foreach_non_finite_check_and_unscale_": Rule(_unscale_rows, _unscale, by_value=False, each=True),
    }
)
