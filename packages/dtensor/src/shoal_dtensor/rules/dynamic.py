"""Sharding of operators whose result's length depends on data: nonzero, masked_select, unique.

Each rank finds its own results; everyone gathers them all, so the result is replicated and as long as on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_gather, all_gather_v

from ..spec import Spec
from .local import cutting
from .rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .table import family

__all__ = ["DYNAMIC"]

aten = torch.ops.aten


def _gathered(spec: Spec, axes: tuple[int, ...], *found: Tensor) -> list[Tensor]:
    """What all ranks along mesh axes found, one after the other; how much differs from rank to rank."""
    comm = spec.mesh.comm(axes)
    counts = all_gather(torch.tensor([len(found[0])], device=found[0].device), comm).tolist()
    return [all_gather_v(tensor.contiguous(), comm, counts) for tensor in found]


def _ordered(spec: Spec, axes: tuple[int, ...], places: Tensor, *found: Tensor) -> list[Tensor]:
    """`found` of all ranks in the row-major order of their global coordinates `places`, `(count, ndim)`."""
    places, *all_found = _gathered(spec, axes, places, *found)
    flat = torch.zeros_like(places[:, 0])
    for d, size in enumerate(spec.shape):
        flat = flat * size + places[:, d]
    order = flat.argsort()
    return [places[order], *(tensor[order] for tensor in all_found)]


def _offset(spec: Spec, places: Tensor) -> Tensor:
    return places + torch.tensor(spec.local_offset, dtype=places.dtype, device=places.device)


# --- nonzero and masked_select ----------------------------------------------------------------------------------------


def _few(call: OpCall) -> int:
    """Bytes of the results, of which nothing is known; fewer than the input's, or gathering it would be as good."""
    return call.tensors[0].shape[0] if call.tensors[0].ndim else 0


def _nonzero_rows(call: OpCall) -> list[Row]:
    return [Row((S(d),), (R,), traffic=_few(call)) for d in range(call.tensors[0].ndim)]


def _nonzero_local(decided: LocalCall) -> LocalFunction | None:
    (spec,), axes = decided.inputs, cutting(decided.inputs[0])
    if not axes:
        return None
    return lambda x: _ordered(spec, axes, _offset(spec, x.nonzero()))[0]


def _masked_select_rows(call: OpCall) -> list[Row]:
    source, mask = call.tensors
    if source.shape != mask.shape:
        return []
    return [Row((S(d), S(d)), (R,), traffic=_few(call)) for d in range(source.ndim)]


def _masked_select_local(decided: LocalCall) -> LocalFunction | None:
    spec, axes = decided.inputs[0], cutting(decided.inputs[0])
    if not axes:
        return None

    def run(x: Tensor, mask: Tensor) -> Tensor:
        return _ordered(spec, axes, _offset(spec, mask.nonzero()), x[mask])[1]

    return run


# --- unique -----------------------------------------------------------------------------------------------------------


def _unique_rows(call: OpCall) -> list[Row]:
    """Where each element went (`return_inverse`) is as large as the input: then it is gathered."""
    if call.get("return_inverse"):
        return []
    outputs = (R,) * len(call.op._schema.returns)
    return [Row((S(d),), outputs, traffic=_few(call)) for d in range(call.tensors[0].ndim)]


def _unique_local(decided: LocalCall) -> LocalFunction | None:
    (spec,), axes = decided.inputs, cutting(decided.inputs[0])
    if not axes:
        return None
    counted, triple = bool(decided.call.get("return_counts")), len(decided.call.op._schema.returns) == 3

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values, counts = torch.unique(x, return_counts=True)
        values, counts = _gathered(spec, axes, values, counts)
        values, inverse = torch.unique(values, return_inverse=True)
        total = torch.zeros(len(values), dtype=counts.dtype, device=x.device).index_add_(0, inverse, counts)
        nothing = x.new_empty(0, dtype=torch.int64)
        return (values, nothing, total if counted else nothing)[: 3 if triple else 2]

    return run


DYNAMIC: Table = {
    aten.nonzero.default: Rule(_nonzero_rows, _nonzero_local, dynamic=True),
    aten.masked_select.default: Rule(_masked_select_rows, _masked_select_local, dynamic=True),
} | family(
    {"_unique2.default _unique.default": Rule(_unique_rows, _unique_local, dynamic=True)},
)
