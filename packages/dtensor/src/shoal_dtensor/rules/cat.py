"""Sharding of operators that put tensors together or make a dim longer: cat, stack, pad.

Along the dim that grows, the sharded operand stays where it is and its first and last piece take in what stands
before and after it; nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..spec import Spec
from .local import or_empty
from .notation import linear_rows
from .rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .view import any_partial
from .window import Extend

__all__ = ["CAT"]

aten = torch.ops.aten


def _ends(spec: Spec, dim: int) -> tuple[bool, bool]:
    """Whether this rank holds the first and the last piece of a dim."""
    cut = spec.cut(dim)
    piece = cut.index(spec.coordinate or (0,) * spec.mesh.ndim)
    return piece == 0, piece == len(cut.sizes) - 1


# --- cat and stack ----------------------------------------------------------------------------------------------------


def cat_rows(call: OpCall) -> list[Row]:
    (result,), tensors = call.outputs, call.tensors
    dim = int(call["dim"]) % max(result.ndim, 1)
    # torch lets 1-D tensors without elements pass, whatever the other shapes.
    joined = [i for i, t in enumerate(tensors) if t.ndim == result.ndim]
    others = [d for d in range(result.ndim) if d != dim]
    rows = [Row(tuple(S(d) if i in joined else R for i in range(len(tensors))), (S(d),)) for d in others]
    lengths = [t.shape[dim] if i in joined else 0 for i, t in enumerate(tensors)]
    for i in joined:
        extend = Extend(sum(lengths[:i]), sum(lengths[i + 1 :]))
        rows.append(Row(tuple(S(dim) if j == i else R for j in range(len(tensors))), (S(dim, cut=extend),)))
    return rows + any_partial(len(tensors), 1)


def cat_local(call: LocalCall) -> LocalFunction | None:
    """Along the dim, a rank joins what it holds of the operands that its piece of the result covers."""
    (result,) = call.outputs
    dim = int(call.call["dim"]) % max(result.ndim, 1)
    joined = [i for i, spec in enumerate(call.inputs) if spec.ndim == result.ndim]
    if not result.ndim or not any(call.inputs[i].cuts[dim].axes for i in joined):
        return None
    op, chosen = call.call.op, _covered(call, joined, dim)
    dtypes = {spec.dtype for spec in call.inputs}

    def run(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        parts = [tensors[i] for i in chosen] or [tensors[joined[0]].narrow(dim, 0, 0)]
        # Which tensors a rank joins must not decide the type of the result.
        typed = parts if len(dtypes) == 1 else [t.to(result.dtype) for t in parts]
        return op(typed, *args, **kwargs)

    return run


def _covered(call: LocalCall, joined: Sequence[int], dim: int) -> list[int]:
    """The operands of which this rank holds elements that belong to its piece of the result.

    Of two operands that different axes cut, one has all its elements on one coordinate; a rank there may hold them,
    and those of uncut operands, without being the one that joins them.
    """
    where = call.outputs[0].coordinate or (0,) * call.outputs[0].mesh.ndim
    start, stop = call.outputs[0].cut(dim).interval(where)
    found, before = [], 0
    for i in joined:
        first, last = call.inputs[i].cut(dim).interval(where)
        if start <= before + first < before + last <= stop:
            found.append(i)
        before += call.inputs[i].shape[dim]
    return found


def stack_rows(call: OpCall) -> list[Row]:
    (result,), count = call.outputs, len(call.tensors)
    dim = int(call["dim"]) % result.ndim
    kept = [Row((S(d),) * count, (S(d + (d >= dim)),)) for d in range(result.ndim - 1)]
    return kept + any_partial(count, 1)


# --- pad --------------------------------------------------------------------------------------------------------------


def _pads(call: OpCall) -> dict[int, tuple[int, int]]:
    """For every padded dim how much it grows at its start and its end."""
    pad, ndim = [int(n) for n in call["pad"]], call.tensors[0].ndim
    return {ndim - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2) if (pad[i], pad[i + 1]) != (0, 0)}


def pad_rows(call: OpCall) -> list[Row]:
    pads = _pads(call)
    rows = [Row((S(d),), (S(d, cut=Extend(*pads[d])) if d in pads else S(d),)) for d in range(call.tensors[0].ndim)]
    fills = any(max(pair) > 0 for pair in pads.values())
    zero = call["value"] == 0
    return rows + (any_partial(1, 1) if not fills else linear_rows((0,), 1, 1) if zero else [])


def pad_local(call: LocalCall) -> LocalFunction | None:
    """Each rank pads only the ends that it holds; a negative width takes off the pieces that reach there."""
    (source,), pads = call.inputs, _pads(call.call)
    if not any(source.cuts[d].axes for d in pads):
        return None
    local: list[int] = []
    for d in reversed(range(source.ndim)):
        before, after = pads.get(d, (0, 0))
        first, last = _ends(source, d)
        start, stop = source.box(source.coordinate or (0,) * source.mesh.ndim)[d]
        low = before if before >= 0 and first else -min(max(0, -before - start), stop - start)
        end = source.shape[d] - stop
        high = after if after >= 0 and last else -min(max(0, -after - end), stop - start + min(low, 0))
        local += [low, high]
    op = call.call.op
    return lambda x, pad, *args, **kwargs: op(x, local, *args, **kwargs)


def _edge_pads(dims: int) -> Callable[[OpCall], list[Row]]:
    """Reflecting and replicating pads read the last `dims` dims whole; batch and channels may be cut."""

    def rows(call: OpCall) -> list[Row]:
        count = len(call.tensors)
        kept = [Row((S(d),) * count, (S(d),)) for d in range(call.tensors[0].ndim - dims)]
        return kept + (any_partial(1, 1) if count == 1 else linear_rows((0,), count, 1))

    return rows


# --- the table -----------------------------------------------------------------------------------------------------


def _pad_table() -> Table:
    table: Table = {}
    for kind in ("reflection", "replication"):
        for dims in (1, 2, 3):
            rule = Rule(_edge_pads(dims), or_empty)
            table[getattr(aten, f"{kind}_pad{dims}d").default] = rule
            table[getattr(aten, f"{kind}_pad{dims}d_backward").default] = rule
    return table


CAT: Table = _pad_table() | {
    aten.cat.default: Rule(cat_rows, cat_local),
    aten.cat.out: Rule(cat_rows, cat_local),
    aten.stack.default: Rule(stack_rows),
    aten.stack.out: Rule(stack_rows),
    aten.constant_pad_nd.default: Rule(pad_rows, pad_local),
}
