"""Sharding of optimizer and AMP operators: element by element of their lists, all state cut alike."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from shoal_mesh import all_reduce

from .local import cutting
from .notation import pointwise
from .rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .table import family

__all__ = ["OPTIM"]

_EACH = replace(pointwise(), each=True)


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
        "_fused_sgd _fused_adam _fused_adamw _fused_adagrad": _EACH,
        "_amp_foreach_non_finite_check_and_unscale": Rule(_unscale_rows, _unscale, by_value=False, each=True),
    }
)
