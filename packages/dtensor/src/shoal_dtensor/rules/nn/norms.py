"""Sharding of norms: layer norm and RMS norm, of trailing dims; group norm; batch norm.

Dims that the statistics do not reduce may be sharded, channels only at the borders of groups. Where
a dim that the statistics reduce is sharded, the norm is computed in plain torch around an
all-reduce of the statistics: batch norm is synchronized. Gradients of weight and bias are partial
sums where a dim that they are summed over is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout.tensor_meta import TensorMeta
from ..language.local_ops import (
    all_reduce_traffic,
    all_reduced,
    bytes_of,
    in_every_form,
    keepdim_shape,
    sharding_axes,
    with_arguments,
)
from ..language.rule import (
    Entry,
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    Rule,
    S,
    Table,
    family,
)


def _dims(call: OpCall) -> tuple[list[int], list[int]]:
    """Return the input's dims that every statistic reduces, and the dims of weight and bias."""
    ndim = call["input"].ndim
    if "normalized_shape" in call.arguments:
        # Example: [1, 2] for an input of (8, 6, 5) and a normalized shape of (6, 5).
        last = [*range(ndim - len(call["normalized_shape"]), ndim)]
        return last, last
    spatial = [*range(2, ndim)]
    if "group" in call.arguments:
        return spatial, [1]
    return [0, *spatial], [1]


def _unit(call: OpCall) -> int:
    """Return the number of channels that share statistics.

    For example, 6 channels in 3 groups of 2 are 3 steps, so a rank has 0, 2, 4 or 6 channels.
    """
    return call["C"] // call["group"] if "group" in call.arguments else 1


class _EntriesOfDim(NamedTuple):
    """The entries of a norm's tensors when one dim of its input is sharded."""

    source: S
    parameters: Entry
    statistics: Entry


def _shardings(call: OpCall) -> Iterator[_EntriesOfDim]:
    """Yield the entries for every dim of the input; dims that the statistics reduce come last."""
    reduced, parameter_dims = _dims(call)
    free = [d for d in range(call["input"].ndim) if d not in reduced]
    for d in (*free, *reduced):
        unit = _unit(call) if d == 1 else 1
        parameters = S(parameter_dims.index(d), unit) if d in parameter_dims else R
        statistics = S(free.index(d)) if d in free else R
        yield _EntriesOfDim(S(d, unit), parameters, statistics)


def _is_training(call: OpCall) -> bool:
    """Tell whether a norm uses the batch's own statistics; only batch norms may not."""
    for name in ("training", "train", "update"):
        if name in call.arguments:
            return bool(call[name])
    name = call.op.__name__
    return "no_update" not in name and "no_training" not in name


def _per_channel(source: TensorMeta) -> TensorMeta:
    """Return the description of one number for each channel of a batch norm's input."""
    return TensorMeta((source.shape[1],), (1,), source.dtype)


def norm(call: OpCall) -> Iterator[Row]:
    """Yield the rows of a norm and of its gradients, by the input and by weight and bias."""
    is_gradient = "grad_out" in call.places
    is_training = _is_training(call)
    statistics_metas = call.outputs[1:]
    # For a gradient, two sums of the size of a statistic are all-reduced.
    if is_gradient:
        statistics_metas = (call.get("rstd") or _per_channel(call["input"]),) * 2
    traffic = all_reduce_traffic(bytes_of(*statistics_metas)) if is_training else None
    # The other tensors than input and gradient. Reserved outputs of some overloads are empty.
    present = [name for name, place in call.places.items() if place]
    vectors = [name for name in present if call[name].shape != (0,)]
    for source, parameters, statistics in _shardings(call):
        entries: dict[str, Entry] = {"input": source, "out0": source}
        for name in vectors:
            if name in ("mean", "rstd"):
                entries[name] = statistics
            elif name != "input":
                entries[name] = parameters
        if is_gradient:
            entries["grad_out"] = source
            entries["out"] = P("sum") if parameters is R else parameters
        else:
            for i, meta in enumerate(statistics_metas, 1):
                # With given statistics, the outputs for the statistics of the batch are empty (see
                # `_with_given_statistics`).
                is_returned = is_training and meta.shape != (0,)
                entries[f"out{i}"] = statistics if is_returned else R
        yield call.row(entries, traffic=traffic if statistics is R else None)


class Statistics:
    """The dims, shape and count that the statistics of a norm reduce.

    Example: an input of (8, 6, 5) is sharded by its last dim into 3 + 2 elements, so rank 0 has (8,
    6, 3). A group norm of 3 groups views it as (8, 3, 6). Its statistics are (8, 3, 1), each over
    10 global elements, and its weight and bias are viewed as (1, 6, 1).
    """

    def __init__(self, local_call: LocalCall) -> None:
        call = local_call.call
        self.spec = local_call["input"]
        local = self.spec.local_shape
        reduced, parameter_dims = _dims(call)
        unit = _unit(call)
        # the mesh axes over which the statistics are summed
        self.axes = sharding_axes(self.spec, reduced)
        # the number of global elements of each statistic: 2 * 5 in the example
        self.count = unit * prod(self.spec.shape[d] for d in reduced)
        # The shape of the local input in which statistics reduce whole dims, and these dims. Then
        # the shape in which weight and bias broadcast to the local input.
        self.shape: Sequence[int] = local
        self.dims = reduced
        self.parameters = [n if d in parameter_dims else 1 for d, n in enumerate(local)]
        if "group" in call.arguments:
            # In the example, (8, 6, 3) is viewed as (8, 3, 6).
            batch, channels, *spatial = local
            self.shape = (batch, channels // unit, unit * prod(spatial))
            self.dims = [2]

    def means(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the means over `dims` of all ranks for each tensor, with one all-reduce."""
        # In the example, 2 tensors of (8, 3, 6) give sums of (2, 8, 3, 1).
        sums = torch.stack([value.sum(self.dims, keepdim=True) for value in values])
        means = all_reduced(sums, self.spec, self.axes) / self.count
        return means.unbind()

    def broadcastable(self, statistic: Tensor) -> Tensor:
        """Return a statistic in a view that broadcasts to `shape`: (8, 3, 1) in the example."""
        return statistic.reshape(keepdim_shape(self.shape, self.dims))


def _norm(local_call: LocalCall) -> LocalFunction | None:
    """Return the local function of a norm or of its gradient.

    If a dim that the statistics reduce is sharded, the ranks compute them together.
    """
    call = local_call.call
    is_gradient = "grad_out" in local_call.call.places
    reduced, _ = _dims(call)
    if sharding_axes(local_call["input"], reduced) and _is_training(call):
        normalize = _normalize_backward if is_gradient else _normalize
        return normalize(local_call, Statistics(local_call))
    if "group" not in call.arguments:
        return None if is_gradient else _with_given_statistics(local_call)
    batch, channels, *_ = local_call["input"].local_shape
    if (batch, channels) == (call["N"], call["C"]):
        return None
    # Example: 4 of 6 channels are 4 * 3 // 6 = 2 of 3 groups.
    groups = channels * call["group"] // max(call["C"], 1)
    return with_arguments(call, N=batch, C=channels, group=groups)


def _wide(x: Tensor) -> Tensor:
    """Convert `x` to the dtype in which statistics are computed."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _normalize(local_call: LocalCall, statistics: Statistics) -> LocalFunction:
    """Normalize with mean = (sum of x) / count, variance = (sum of (x - mean) ** 2) / count.

    The sums are over all shards.
    """
    call = local_call.call
    names = call.schema.positional
    parameters = statistics.parameters
    outputs = local_call.outputs
    eps = call["eps"]
    if eps is None:
        eps = torch.finfo(local_call["input"].dtype).eps

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        x = arguments["input"]
        weight = arguments["weight"]
        bias = arguments.get("bias")
        centered = _wide(x).reshape(statistics.shape)
        other_results = []
        # RMS norm does not have a bias and does not subtract a mean.
        if "bias" in arguments:
            (mean,) = statistics.means(centered)
            other_results.append(mean)
            centered = centered - mean
        (variance,) = statistics.means(centered * centered)
        rstd = (variance + eps).rsqrt()
        other_results.append(rstd)
        result = (centered * rstd).reshape(x.shape)
        if weight is not None:
            result = result * weight.reshape(parameters)
        if bias is not None:
            result = result + bias.reshape(parameters)
        if "momentum" in arguments:
            _update_running(arguments, mean, variance, statistics.count)
            # the reserved output that some overloads need for their gradient
            other_results.append(x.new_empty(0))
        pairs = zip((result, *other_results), outputs, strict=False)
        return tuple(t.to(spec.dtype).reshape(spec.local_shape) for t, spec in pairs)

    return in_every_form(call, run)


def _update_running(
    arguments: Mapping[str, Any], mean: Tensor, variance: Tensor, count: int
) -> None:
    """Update running statistics, equal on every rank; the running variance is unbiased."""
    # Example: the factor is 10 / 9 for 10 elements.
    unbiased = variance * (count / max(count - 1, 1))
    for name, value in (("running_mean", mean), ("running_var", unbiased)):
        running = arguments.get(name)
        if running is not None:
            new = value.reshape(-1).to(running.dtype)
            running.lerp_(new, arguments["momentum"])


def _normalize_backward(local_call: LocalCall, statistics: Statistics) -> LocalFunction:
    """Compute the input's gradient from two means, each a sum over all shards / count.

    The gradient of RMS norm needs only one mean.
    """
    call = local_call.call
    names = call.schema.positional
    mask = call["output_mask"]
    mean_name = next((name for name in ("mean", "save_mean") if name in names), "")
    rstd_name = next(name for name in ("rstd", "save_invstd", "save_var") if name in names)

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        x = arguments["input"]
        weight = arguments["weight"]
        rstd = statistics.broadcastable(arguments[rstd_name])
        gradient = _wide(arguments["grad_out"])
        scaled = gradient if weight is None else gradient * weight.reshape(statistics.parameters)
        scaled = scaled.reshape(statistics.shape)
        centered = _wide(x).reshape(statistics.shape)
        if mean_name:
            centered = centered - statistics.broadcastable(arguments[mean_name])
        normal = centered * rstd
        if mean_name:
            mean, projection = statistics.means(scaled, scaled * normal)
            of_input = (scaled - mean - normal * projection) * rstd
        else:
            (projection,) = statistics.means(scaled * normal)
            of_input = (scaled - normal * projection) * rstd
        of_weight = (gradient * normal.reshape(x.shape)).sum_to_size(statistics.parameters)
        of_bias = gradient.sum_to_size(statistics.parameters)
        # `outputs` has a spec for each wanted result only.
        specs = iter(local_call.outputs)
        results: list[Tensor | None] = []
        for is_wanted, result in zip(mask, (of_input, of_weight, of_bias), strict=False):
            if not is_wanted:
                results.append(None)
                continue
            spec = next(specs)
            results.append(result.to(spec.dtype).reshape(spec.local_shape))
        return tuple(results)

    return in_every_form(call, run)


def _with_given_statistics(local_call: LocalCall) -> LocalFunction | None:
    """Run the kernel of a batch norm with given statistics on this shard.

    The outputs for the statistics of the batch are empty.
    """
    if _is_training(local_call.call) or not sharding_axes(local_call["input"]):
        return None
    # The default overload does not have `out=` arguments.
    name, _, _ = local_call.call.op.__name__.partition(".")
    op = getattr(torch.ops.aten, name)
    statistics = local_call.outputs[1:]

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        result, *_ = op(x, *args, **kwargs)
        return (result, *(x.new_empty((0,), dtype=spec.dtype) for spec in statistics))

    return in_every_form(local_call.call, run)


_BATCH_NORMS = (
    "native_batch_norm _native_batch_norm_legit _batch_norm_with_update _batch_norm_no_update"
)
_NORM = Rule(norm, _norm, skip_empty=True, linear="grad_out")
_NORM_OF_SHAPE = replace(_NORM, sizes=("normalized_shape",))

NORMS: Table = family(
    {
        "native_layer_norm _fused_rms_norm": _NORM_OF_SHAPE,
        "native_layer_norm_backward _fused_rms_norm_backward": replace(
            _NORM_OF_SHAPE, skip_empty=False
        ),
        f"{_BATCH_NORMS} native_batch_norm_backward batch_norm_backward": _NORM,
        "_native_batch_norm_legit_no_training": _NORM,
    },
    unordered=True,
) | family({"native_group_norm native_group_norm_backward": _NORM})
