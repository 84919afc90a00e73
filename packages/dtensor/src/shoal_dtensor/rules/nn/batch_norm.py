"""Sharding of batch normalisation: channels are free; a sharded batch takes an all-reduce of statistics.

The statistics are those of the global batch, however it is sharded: synchronised batch norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...layout.tensor_meta import TensorMeta
from ..language.local_ops import all_reduce_traffic, all_reduced, in_every_form, sharding_axes
from ..language.rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table, Traffic
from ..language.rule_tables import family


def _is_training(call: OpCall) -> bool:
    """Whether the batch's own statistics are used."""
    names = ("training", "train", "update")
    return next((bool(call[name]) for name in names if name in call.bound), "no_update" not in call.op.__name__)


def _per_channel(meta: TensorMeta, channels: int) -> Entry:
    """The entry of a vector when channels are sharded; those without an element per channel are replicated."""
    return S(0) if meta.shape == (channels,) else R


def _vectors(call: OpCall) -> dict[str, Any]:
    """Entries of all tensor arguments that have an element per channel."""
    channels = call["input"].shape[1]
    return {name: _per_channel(call[name], channels) for name, place in call.places.items() if place}


def _two_sums(call: OpCall) -> Traffic | None:
    """The all-reduce of two numbers per channel, where the batch's own statistics are used."""
    source = call["input"]
    return all_reduce_traffic(2 * source.shape[1] * source.dtype.itemsize) if _is_training(call) else None


def batch_norm(call: OpCall) -> Iterator[Row]:
    source, (_, *statistics) = call["input"], call.outputs
    # Without the batch's statistics there are none to return: what stands for them is empty, see `_with_given`.
    results: dict[str, Any] = {
        f"out{i}": _per_channel(t, source.shape[1]) if _is_training(call) else R for i, t in enumerate(statistics, 1)
    }
    yield call.row(**_vectors(call) | results | {"input": S(1), "out0": S(1)})
    for d in _other_dims(source.ndim):
        yield call.row(input=S(d), out0=S(d), traffic=_two_sums(call))


def batch_norm_backward(call: OpCall) -> Iterator[Row]:
    yield call.row(**_vectors(call) | {"grad_out": S(1), "input": S(1), "out0": S(1), "out": S(0)})
    for d in _other_dims(call["input"].ndim):
        yield call.row(grad_out=S(d), input=S(d), out0=S(d), out=P("sum"), traffic=_two_sums(call))


def _other_dims(ndim: int) -> list[int]:
    return [d for d in range(ndim) if d != 1]


def _shaped(vector: Tensor, ndim: int) -> Tensor:
    """A channel vector, broadcastable to the input."""
    return vector.view(1, -1, *(1,) * (ndim - 2))


def _normalise(decided: LocalCall) -> LocalFunction | None:
    """Mean = (sum over shards of x) / count; variance = (sum over shards of (x - mean) ** 2) / count.

    Shards are those of all dims but the channels.  Running statistics are updated alike on every rank.
    """
    call, spec = decided.call, decided.inputs[0]
    dims = _other_dims(spec.ndim)
    axes, count = sharding_axes(spec, dims), prod(spec.shape[d] for d in dims)
    if not _is_training(call):
        return _with_given(decided) if sharding_axes(spec) else None
    if not axes:
        return None
    dtypes = [output.dtype for output in decided.outputs]
    momentum, eps, reserve = call["momentum"], call["eps"], len(decided.outputs) == 4
    positions = {a.name: i for i, a in enumerate(call.op._schema.arguments)}

    def run(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        def vector(name: str) -> Tensor | None:
            place = positions.get(name)
            return None if place is None else args[place]

        x = args[0].to(dtypes[1])
        mean = all_reduced(x.sum(dims), spec, axes) / count
        centred = x - _shaped(mean, x.ndim)
        variance = all_reduced((centred * centred).sum(dims), spec, axes) / count
        rstd = (variance + eps).rsqrt()
        weight, bias = vector("weight"), vector("bias")
        result = centred * _shaped(rstd if weight is None else rstd * weight, x.ndim)
        result = result if bias is None else result + _shaped(bias, x.ndim)
        _update(vector("running_mean"), mean, momentum)
        _update(vector("running_var"), variance * (count / max(count - 1, 1)), momentum)
        results = (result.to(dtypes[0]), mean, rstd)
        return (*results, args[0].new_empty((0,), dtype=dtypes[3])) if reserve else results

    return in_every_form(call, run)


def _with_given(decided: LocalCall) -> LocalFunction:
    """With given statistics: the kernel on this shard, and nothing in place of statistics of the batch."""
    op = getattr(torch.ops.aten, decided.call.op.__name__.split(".")[0])  # without `out=`

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return (op(x, *args, **kwargs)[0], *(x.new_empty((0,), dtype=spec.dtype) for spec in decided.outputs[1:]))

    return in_every_form(decided.call, run)


def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(value.to(running.dtype), momentum)


def _normalise_backward(decided: LocalCall) -> LocalFunction | None:
    """The two means of the gradient that the input's needs are sums over shards / count."""
    call, spec = decided.call, decided["input"]
    dims = _other_dims(spec.ndim)
    axes, count = sharding_axes(spec, dims), prod(spec.shape[d] for d in dims)
    if not axes or not _is_training(call):
        return None
    mask, dtype = call["output_mask"], spec.dtype
    positions = {a.name: i for i, a in enumerate(call.op._schema.arguments)}
    saved_mean, saved_rstd = (
        positions[n] for n in ("save_mean", "save_invstd" if "save_invstd" in positions else "save_var")
    )

    def run(gradient: Tensor, x: Tensor, weight: Tensor | None, *rest: Any, **_: Any) -> tuple[Tensor | None, ...]:
        mean, rstd = _shaped(rest[saved_mean - 3], x.ndim), _shaped(rest[saved_rstd - 3], x.ndim)
        normal = (x - mean) * rstd
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        first, second = (_shaped(total, x.ndim) for total in all_reduced(sums, spec, axes) / count)
        scale = rstd if weight is None else rstd * _shaped(weight, x.ndim)
        wide = ((gradient - first - normal * second) * scale, sums[1], sums[0])
        dtypes = (dtype, sums.dtype, sums.dtype)
        return tuple(g.to(k) if wanted else None for g, k, wanted in zip(wide, dtypes, mask, strict=True))

    return in_every_form(call, run)


BATCH_NORM: Table = family(
    {
        "native_batch_norm _native_batch_norm_legit _batch_norm_with_update _batch_norm_no_update": Rule(
            batch_norm, _normalise, skip_empty=True
        ),
        "native_batch_norm_backward batch_norm_backward": Rule(
            batch_norm_backward, _normalise_backward, skip_empty=True
        ),
    },
    unordered=True,
)
