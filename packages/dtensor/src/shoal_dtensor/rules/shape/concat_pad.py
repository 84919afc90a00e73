"""Sharding of operators that put tensors together or make a dim longer: cat, stack, pad.

Along the dim that grows, the sharded operand stays where it is, and its first and last shard take in what comes before
and after it: `cat([a, x, b])` with x of 4 rows on 2 ranks is a, x[:2] on rank 0 and x[2:], b on rank 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...layout.spec import Spec
from ..language.rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .slice_maps import PadMap
from .views import same_dims

aten: Any = torch.ops.aten


def _is_end(spec: Spec, dim: int) -> tuple[bool, bool]:
    """Whether this rank holds the first and the last shard of a dim."""
    sharding = spec.dim_sharding(dim)
    shard = sharding.index(spec.coordinate or (0,) * spec.mesh.ndim)
    return shard == 0, shard == sharding.shards - 1


# --- cat and stack ----------------------------------------------------------------------------------------------------


def cat(call: OpCall) -> Iterator[Row]:
    (result,), tensors = call.outputs, call.tensors
    dim = int(call["dim"]) % max(result.ndim, 1)
    # torch lets 1-D tensors without elements pass beside tensors of any shape.
    joined = [i for i, t in enumerate(tensors) if t.ndim == result.ndim]
    for d in (d for d in range(result.ndim) if d != dim):
        yield call.row(tensors=[S(d) if i in joined else R for i in range(len(tensors))], out=S(d))
    lengths = [t.shape[dim] if i in joined else 0 for i, t in enumerate(tensors)]
    for i in joined:
        padded = PadMap(sum(lengths[:i]), sum(lengths[i + 1 :]))
        yield call.row(tensors=[S(dim) if j == i else R for j in range(len(tensors))], out=S(dim, map=padded))
    yield from call.keeping_partials("tensors")


def _cat(local_call: LocalCall) -> LocalFunction | None:
    """Along the dim, a rank joins what it holds of the operands that its shard of the result covers."""
    (result,) = local_call.outputs
    dim = int(local_call.call["dim"]) % max(result.ndim, 1)
    joined = [i for i, spec in enumerate(local_call.inputs) if spec.ndim == result.ndim]
    if not result.ndim or not any(local_call.inputs[i].dim_shardings[dim].axes for i in joined):
        return None
    op, chosen = local_call.call.op, _covered(local_call, joined, dim)
    dtypes = {spec.dtype for spec in local_call.inputs}

    def run(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        operands = [tensors[i] for i in chosen] or [tensors[joined[0]].narrow(dim, 0, 0)]
        if torch.compiler.is_compiling():  # a compiler must see that every rank uses all of them, as in `bound`
            operands = [tensors[i] if i in chosen else tensors[i].narrow(dim, 0, 0) for i in joined]
        # Which tensors a rank joins must not decide the dtype of the result.
        typed = operands if len(dtypes) == 1 else [t.to(result.dtype) for t in operands]
        return op(typed, *args, **kwargs)

    return run


def _covered(local_call: LocalCall, joined: Sequence[int], dim: int) -> list[int]:
    """The operands of which this rank holds elements that belong to its shard of the result.

    Of two operands that different axes shard, one has all its elements on one coordinate; a rank there may hold them,
    and those of replicated operands, without being the one that joins them.
    """
    where = local_call.outputs[0].coordinate or (0,) * local_call.outputs[0].mesh.ndim
    start, stop = local_call.outputs[0].dim_sharding(dim).interval(where)
    chosen, before = [], 0
    for i in joined:
        first, last = local_call.inputs[i].dim_sharding(dim).interval(where)
        if start <= before + first < before + last <= stop:
            chosen.append(i)
        before += local_call.inputs[i].shape[dim]
    return chosen


def stack(call: OpCall) -> Iterator[Row]:
    dim = int(call["dim"]) % call.outputs[0].ndim
    yield from same_dims(call, ((d, d + (d >= dim)) for d in range(call.outputs[0].ndim - 1)), "tensors")
    yield from call.keeping_partials("tensors")


# --- pad --------------------------------------------------------------------------------------------------------------


def _pads(call: OpCall) -> dict[int, tuple[int, int]]:
    """For every padded dim how much it grows at its start and its end."""
    pad, ndim = [int(n) for n in call["pad"]], call["self"].ndim
    return {ndim - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2) if (pad[i], pad[i + 1]) != (0, 0)}


def constant_pad_nd(call: OpCall) -> Iterator[Row]:
    pads = _pads(call)
    for d in range(call["self"].ndim):
        yield call.row(self=S(d), out=S(d, map=PadMap(*pads[d])) if d in pads else S(d))
    if all(max(pair) <= 0 for pair in pads.values()):
        yield from call.keeping_partials("self")
    elif call["value"] == 0:
        yield from call.linear("self")


def _constant_pad_nd(local_call: LocalCall) -> LocalFunction | None:
    """Each rank pads only the ends that it holds; a negative width takes elements off the shards that reach there.

    Of 6 elements on 2 ranks, with pad (2, -4), rank 0 pads by (2, -1) and rank 1 by (0, -3).
    """
    source, pads = local_call["self"], _pads(local_call.call)
    if not any(source.dim_shardings[d].axes for d in pads):
        return None
    local: list[int] = []
    for d in reversed(range(source.ndim)):
        before, after = pads.get(d, (0, 0))
        first, last = _is_end(source, d)
        start, stop = source.box(source.coordinate or (0,) * source.mesh.ndim)[d]
        low = before if before >= 0 and first else -min(max(0, -before - start), stop - start)
        end = source.shape[d] - stop
        high = after if after >= 0 and last else -min(max(0, -after - end), stop - start + min(low, 0))
        local += [low, high]
    op = local_call.call.op
    return lambda x, pad, *args, **kwargs: op(x, local, *args, **kwargs)


def reflection_pad(call: OpCall) -> Iterator[Row]:
    """Reflecting and replicating pads read all of the padded dims, the last ones; batch and channels may be sharded."""
    padded = len(call["padding"]) // 2
    name = "grad_output" if "grad_output" in call.bound else "self"
    for d in range(call["self"].ndim - padded):
        entries: dict[str, Any] = {"self": S(d), name: S(d)}
        yield call.row(out=S(d), **entries)
    yield from call.keeping_partials("self") if name == "self" else call.linear("grad_output")


_REFLECTION = Rule(reflection_pad, skip_empty=True)

CONCAT_PAD: Table = {
    aten.cat.default: Rule(cat, _cat),
    aten.cat.out: Rule(cat, _cat),
    aten.stack.default: Rule(stack),
    aten.stack.out: Rule(stack),
    aten.constant_pad_nd.default: Rule(constant_pad_nd, _constant_pad_nd),
} | {
    getattr(aten, f"{kind}_pad{dims}d{form}").default: _REFLECTION
    for kind in ("reflection", "replication")
    for dims in (1, 2, 3)
    for form in ("", "_backward")
}
