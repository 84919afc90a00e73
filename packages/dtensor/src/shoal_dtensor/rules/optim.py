"""Sharding of optimizer and AMP operators: element by element of their lists, all state cut alike."""

from __future__ import annotations


from torch import Tensor

from shoal_mesh import all_reduce

from .local import cutting
from .rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .table import family

__all__ = ["OPTIM"]


def _state_rows(call: OpCall) -> list[Row]:
    """A parameter, its gradient and its state are cut alike; step counts, rates and scales are whole."""
    shape = call.tensors[0].shape
    return [Row(tuple(S(d) if t.shape == shape else R for t in call.tensors), ()) for d in range(len(shape))]


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


OPTIM: Table = family(
    {
        "_fused_sgd_ _fused_adam_ _fused_adamw_ _fused_adagrad_": Rule(_state_rows, by_value=False, each=True),
        "_amp_foreach_non_finite_check_and_unscale_": Rule(_unscale_rows, _unscale, by_value=False, each=True),
    }
)
