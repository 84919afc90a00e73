"""Sharding of optimizer and AMP operators: element by element of their lists, all state sharded alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shoal_mesh import all_reduce

from ..language.local_ops import all_reduce_traffic, sharding_axes
from ..language.rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from ..language.rule_tables import family


def fused_optimizer(call: OpCall) -> Iterator[Row]:
    """A parameter, its gradient and its state are sharded alike; step counts, rates and scales are replicated."""
    shared = {a.name for a in call.op._schema.arguments if "List" not in str(a.type)} | {"state_steps"}
    for d in range(call.tensors[0].ndim):
        entries: dict[str, Any] = {name: R if name in shared else S(d) for name in call.places}
        yield call.row(**entries | {f"out{i}": entries[name] for i, name in enumerate(call.schema.written)})


def unscale(call: OpCall) -> Iterator[Row]:
    """An infinity anywhere is reported everywhere."""
    for d in range(call.tensors[0].ndim):
        yield call.row(self=S(d), out0=S(d), traffic=all_reduce_traffic(call["found_inf"].dtype.itemsize))


def _unscale(local_call: LocalCall) -> LocalFunction | None:
    """found_inf = maximum over shards of found_inf."""
    *gradients, found_inf, _scale = local_call.inputs
    axes = tuple(sorted({axis for spec in gradients for axis in sharding_axes(spec)}))
    if not axes:
        return None
    comm, op = found_inf.mesh.comm(axes), local_call.call.op

    def run(gradients: list[Tensor], found_inf: Tensor, scale: Tensor) -> None:
        op(gradients, found_inf, scale)
        found_inf.copy_(all_reduce(found_inf, comm, "max"))

    return run


OPTIMIZER: Table = family(
    {
        "_fused_sgd_ _fused_adam_ _fused_adamw_ _fused_adagrad_": Rule(
            fused_optimizer, by_value=False, kind="each", unordered=True
        ),
        "_amp_foreach_non_finite_check_and_unscale_": Rule(unscale, _unscale, by_value=False, kind="each"),
    }
)
