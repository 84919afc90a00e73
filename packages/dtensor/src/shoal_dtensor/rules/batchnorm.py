"""Sharding of batch normalisation, on one mesh axis: channels are free; a cut batch takes an all-reduce of statistics.

The statistics are those of the whole batch, however it is cut: what is called synchronised batch norm elsewhere.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..spec import TensorMeta
from .local import across, cutting, filling_out, zeros
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["BATCHNORM"]

SOURCES = ("input", "grad_out")
VECTORS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")


def _names(call: OpCall) -> list[str]:
    outs = {a.name for a in call.op._schema.arguments if a.is_out}
    order = [a.name for a in call.op._schema.arguments if a.name not in outs]
    return [name for name in order if isinstance(call.get(name), TensorMeta)]


def _vector(meta: TensorMeta, channels: int) -> Entry:
    return S(0) if meta.ndim == 1 and meta.shape[0] == channels else R


def _training(call: OpCall) -> bool:
    """Whether the batch's own statistics are used."""
    names = ("training", "train", "update")
    return next((bool(call[name]) for name in names if name in call.bound), "no_update" not in call.op.__name__)


def _channel_row(call: OpCall) -> Row:
    channels = call["input"].shape[1]
    inputs = tuple(S(1) if n in SOURCES else _vector(call[n], channels) for n in _names(call))
    # Without the batch's statistics there are none to return: what stands for them is empty, see `_fixed`.
    known = _training(call) or "output_mask" in call.bound
    made: list[Entry] = [S(1) if t.ndim > 1 else _vector(t, channels) if known else R for t in call.outputs]
    return Row(inputs, tuple(made))


def _forward(call: OpCall) -> list[Row]:
    source = call["input"]
    names, traffic = _names(call), 0
    if _training(call):
        traffic = 2 * source.shape[1] * source.dtype.itemsize
    rows = [_channel_row(call)]
    for d in [d for d in range(source.ndim) if d != 1]:
        inputs = tuple(S(d) if n in SOURCES else R for n in names)
        rows.append(Row(inputs, tuple(S(d) if t.ndim > 1 else R for t in call.outputs), traffic=traffic))
    return rows


def _backward(call: OpCall) -> list[Row]:
    source, names, mask = call["input"], _names(call), call["output_mask"]
    traffic = 2 * source.shape[1] * source.dtype.itemsize if _training(call) else 0
    rows = [_channel_row(call)]
    for d in [d for d in range(source.ndim) if d != 1]:
        made: tuple[Entry, ...] = (S(d), P("sum"), P("sum"))
        kept = tuple(e for e, wanted in zip(made, mask, strict=True) if wanted)
        rows.append(Row(tuple(S(d) if n in SOURCES else R for n in names), kept, traffic=traffic))
    return rows


def _other_dims(ndim: int) -> list[int]:
    return [d for d in range(ndim) if d != 1]


def _shaped(vector: Tensor, ndim: int) -> Tensor:
    """A channel vector, broadcastable to the input."""
    return vector.view(1, -1, *(1,) * (ndim - 2))


def _normalise(decided: LocalCall) -> LocalFunction | None:
    """Statistics over all axes that cut a dim other than the channels; running statistics are updated alike."""
    call, spec = decided.call, decided.inputs[0]
    dims = _other_dims(spec.ndim)
    axes, count = cutting(spec, dims), prod(spec.shape[d] for d in dims)
    if not _training(call):
        return _fixed(decided) if cutting(spec) else None
    if not axes:
        return zeros(decided) if 0 in spec.local_shape else None
    kinds = [made.dtype for made in decided.outputs]
    momentum, eps, reserve = call["momentum"], call["eps"], len(decided.outputs) == 4
    positions = {a.name: i for i, a in enumerate(call.op._schema.arguments)}

    def run(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        def vector(name: str) -> Tensor | None:
            place = positions.get(name)
            return None if place is None else args[place]

        x = args[0].to(kinds[1])
        mean = across(x.sum(dims), spec, axes) / count
        centred = x - _shaped(mean, x.ndim)
        variance = across((centred * centred).sum(dims), spec, axes) / count
        rstd = (variance + eps).rsqrt()
        weight, bias = vector("weight"), vector("bias")
        result = centred * _shaped(rstd if weight is None else rstd * weight, x.ndim)
        result = result if bias is None else result + _shaped(bias, x.ndim)
        _update(vector("running_mean"), mean, momentum)
        _update(vector("running_var"), variance * (count / max(count - 1, 1)), momentum)
        made = (result.to(kinds[0]), mean, rstd)
        return (*made, args[0].new_empty((0,), dtype=kinds[3])) if reserve else made

    return filling_out(call, run)


def _fixed(decided: LocalCall) -> LocalFunction:
    """With given statistics: the kernel on this piece, and nothing in place of statistics of the batch."""
    op, made = getattr(torch.ops.aten, decided.call.op.__name__.split(".")[0]), decided.outputs[0]  # without `out=`

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        result = x.new_empty(made.local_shape) if 0 in made.local_shape else op(x, *args, **kwargs)[0]
        return (result, *(x.new_empty((0,), dtype=spec.dtype) for spec in decided.outputs[1:]))

    return filling_out(decided.call, run)


def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(value.to(running.dtype), momentum)


def _normalise_backward(decided: LocalCall) -> LocalFunction | None:
    call, spec = decided.call, decided.inputs[1]
    dims = _other_dims(spec.ndim)
    axes, count = cutting(spec, dims), prod(spec.shape[d] for d in dims)
    if not axes or not _training(call):
        return zeros(decided) if 0 in spec.local_shape else None
    mask, dtype = call["output_mask"], spec.dtype
    positions = {a.name: i for i, a in enumerate(call.op._schema.arguments)}
    saved_mean, saved_rstd = (
        positions[n] for n in ("save_mean", "save_invstd" if "save_invstd" in positions else "save_var")
    )

    def run(gradient: Tensor, x: Tensor, weight: Tensor | None, *rest: Any, **_: Any) -> tuple[Tensor | None, ...]:
        mean, rstd = _shaped(rest[saved_mean - 3], x.ndim), _shaped(rest[saved_rstd - 3], x.ndim)
        normal = (x - mean) * rstd
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        first, second = (_shaped(total, x.ndim) for total in across(sums, spec, axes) / count)
        scale = rstd if weight is None else rstd * _shaped(weight, x.ndim)
        wide = ((gradient - first - normal * second) * scale, sums[1], sums[0])
        kinds = (dtype, sums.dtype, sums.dtype)
        return tuple(g.to(k) if wanted else None for g, k, wanted in zip(wide, kinds, mask, strict=True))

    return filling_out(call, run)


BATCHNORM: Table = family(
    {
        "native_batch_norm _native_batch_norm_legit _batch_norm_with_update": Rule(_forward, _normalise),
        "_batch_norm_no_update": Rule(_forward, _normalise),
        "native_batch_norm_backward batch_norm_backward": Rule(_backward, _normalise_backward),
    },
    unordered=True,
)
