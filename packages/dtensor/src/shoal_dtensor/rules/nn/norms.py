"""Sharding of norms: layer norm and RMS norm, of trailing dims; group norm; batch norm.

Dims that the statistics do not reduce may be sharded, channels only at the borders of groups. Where
a dim that the statistics reduce is sharded, the norm is computed in plain torch around an
all-reduce of the statistics: batch norm is synchronized. Gradients of weight and bias are partial
sums where a dim that they are summed over is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...layout.tensor_meta import TensorMeta
from ..language.local_ops import (
    all_reduce_traffic,
    all_reduced,
    bytes_of,
    in_every_form,
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
    if "normalized_shape" in call.bound:
        last = [*range(ndim - len(call["normalized_shape"]), ndim)]  # (8, 6, 5) over (6, 5): [1, 2]
        return last, last
    return [*range(2, ndim)] if "group" in call.bound else [0, *range(2, ndim)], [1]


def _unit(call: OpCall) -> int:
    """Return the number of channels that share statistics.

    6 channels in 3 groups of 2 are 3 steps, so a rank has 2, 4 or 6 channels.
    """
    return call["C"] // call["group"] if "group" in call.bound else 1


def _shardings(call: OpCall) -> Iterator[tuple[S, Entry, Entry]]:
    """Yield for every dim the entries of the input, of weight and bias, and of the statistics.

    The dims that the statistics reduce come last.
    """
    over, parameters = _dims(call)
    free = [d for d in range(call["input"].ndim) if d not in over]
    for d in (*free, *over):
        unit = _unit(call) if d == 1 else 1
        of_parameters = S(parameters.index(d), unit) if d in parameters else R
        yield S(d, unit), of_parameters, S(free.index(d)) if d in free else R


def _is_training(call: OpCall) -> bool:
    """Tell whether a norm uses the batch's own statistics; only batch norms may not."""
    names = ("training", "train", "update")
    return next(
        (bool(call[name]) for name in names if name in call.bound),
        "no_update" not in call.op.__name__,
    )


def norm(call: OpCall) -> Iterator[Row]:
    """Yield the rows of a norm and of its gradients, by the input and by weight and bias."""
    is_gradient = "grad_out" in call.places
    training = _is_training(call)
    made = call.outputs[1:]
    # two sums as large as a statistic are all-reduced
    if is_gradient:
        source_meta = call["input"]
        made = (
            call.get("rstd") or TensorMeta((source_meta.shape[1],), (1,), source_meta.dtype),
        ) * 2
    traffic = all_reduce_traffic(bytes_of(*made)) if training else None
    # Tensors beside the input and the gradient; reserved outputs of some overloads are empty.
    vectors = [name for name, place in call.places.items() if place and call[name].shape != (0,)]
    for source, parameters, statistics in _shardings(call):
        entries = {name: statistics if name in ("mean", "rstd") else parameters for name in vectors}
        entries |= {"input": source, "out0": source}
        if is_gradient:
            entries |= {"grad_out": source, "out": P("sum") if parameters is R else parameters}
        else:
            # without the batch's statistics there are none to return: what stands for them is
            # empty: `_with_given`
            entries |= {
                f"out{i}": statistics if training and t.shape != (0,) else R
                for i, t in enumerate(made, 1)
            }
        yield call.row(entries, traffic=traffic if statistics is R else None)


class Statistics:
    """The dims, shape and count that the statistics of a norm reduce.

    If an input (8, 6, 5) is sharded by its last dim into 3 + 2 elements, rank 0 has (8, 6, 3). A
    group norm of 3 groups splits that into (8, 3, 6), with statistics (8, 3, 1) over 10 elements
    each, and parameters (6, 1).
    """

    def __init__(self, local_call: LocalCall) -> None:
        call = local_call.call
        self.spec = local_call["input"]
        local = self.spec.local_shape
        (over, having) = _dims(call)
        unit = _unit(call)
        # the mesh axes over which they are summed
        self.axes = sharding_axes(self.spec, over)
        # of how many elements: (8, 6, 5), unit 2: 2 * 5
        self.count = unit * prod(self.spec.shape[d] for d in over)
        # The shape of the local input in which they are over whole `dims`, and that of weight and
        # bias beside it.
        self.shape: Sequence[int] = local
        self.dims = over
        self.parameters = [n if d in having else 1 for d, n in enumerate(local)]
        if "group" in call.bound:
            # (8, 6, 3): (8, 3, 6)
            self.shape = (local[0], local[1] // unit, unit * prod(local[2:]))
            self.dims = [2]

    def means(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the means over `dims` of all ranks for each tensor, with one all-reduce."""
        # 2 of (8, 3, 6): (2, 8, 3, 1)
        sums = torch.stack([value.sum(self.dims, keepdim=True) for value in values])
        return (all_reduced(sums, self.spec, self.axes) / self.count).unbind()

    def given(self, statistic: Tensor) -> Tensor:
        """Reshape a statistic that an operator is given, or returns, to broadcast to `shape`."""
        # (8, 3, 6): (8, 3, 1)
        return statistic.reshape([1 if d in self.dims else n for d, n in enumerate(self.shape)])


def _norm(local_call: LocalCall) -> LocalFunction | None:
    call = local_call.call
    is_gradient = "grad_out" in local_call.call.places
    if sharding_axes(local_call["input"], _dims(call)[0]) and _is_training(call):
        return (_normalise_backward if is_gradient else _normalise)(
            local_call, Statistics(local_call)
        )
    if "group" not in call.bound:
        return None if is_gradient else _with_given(local_call)
    # 4 of 6 channels are 4 * 3 // 6 = 2 of 3 groups
    batch, channels = local_call["input"].local_shape[:2]
    sizes = {"N": batch, "C": channels, "group": channels * call["group"] // max(call["C"], 1)}
    return None if (batch, channels) == (call["N"], call["C"]) else with_arguments(call, **sizes)


def _wide(x: Tensor) -> Tensor:
    """Convert `x` to the dtype in which statistics are computed."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _normalise(local_call: LocalCall, statistics: Statistics) -> LocalFunction:
    """Normalize with mean = (sum of x) / count, variance = (sum of (x - mean) ** 2) / count.

    The sums are sums over all shards.
    """
    call = local_call.call
    names = call.schema.positional
    parameters = statistics.parameters
    outputs = local_call.outputs
    eps = torch.finfo(local_call["input"].dtype).eps if call["eps"] is None else call["eps"]

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = dict(zip(names, args, strict=False)) | kwargs
        x = given["input"]
        weight = given["weight"]
        bias = given.get("bias")
        centred = _wide(x).reshape(statistics.shape)
        made = []
        # RMS norm, which does not have a mean, uses 0
        if "bias" in given:
            made = [*statistics.means(centred)]
            centred = centred - made[0]
        (variance,) = statistics.means(centred * centred)
        made.append((variance + eps).rsqrt())
        result = (centred * made[-1]).reshape(x.shape)
        result = result if weight is None else result * weight.reshape(parameters)
        result = result if bias is None else result + bias.reshape(parameters)
        if "momentum" in given:
            # Running statistics, equal on every rank; the running variance is unbiased.
            # of 10 elements: 10 / 9
            unbiased = variance * (statistics.count / max(statistics.count - 1, 1))
            for name, value in (("running_mean", made[0]), ("running_var", unbiased)):
                if (running := given.get(name)) is not None:
                    running.lerp_(value.reshape(-1).to(running.dtype), given["momentum"])
            # the reserved output that some overloads need for their gradient
            made.append(x.new_empty(0))
        pairs = zip((result, *made), outputs, strict=False)
        return tuple(t.to(spec.dtype).reshape(spec.local_shape) for t, spec in pairs)

    return in_every_form(call, run)


def _normalise_backward(local_call: LocalCall, statistics: Statistics) -> LocalFunction:
    """Compute the input's gradient from two means, which are sums over shards / count.

    The gradient of RMS norm needs only one mean.
    """
    call = local_call.call
    names = call.schema.positional
    mask = call["output_mask"]
    mean_name = next((name for name in ("mean", "save_mean") if name in names), "")
    rstd_name = next(name for name in ("rstd", "save_invstd", "save_var") if name in names)

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        given = dict(zip(names, args, strict=False)) | kwargs
        x = given["input"]
        weight = given["weight"]
        rstd = statistics.given(given[rstd_name])
        gradient = _wide(given["grad_out"])
        normal = _wide(x).reshape(statistics.shape)
        scaled = gradient if weight is None else gradient * weight.reshape(statistics.parameters)
        scaled = scaled.reshape(statistics.shape)
        normal = (normal - statistics.given(given[mean_name]) if mean_name else normal) * rstd
        *first, second = statistics.means(*([scaled] if mean_name else []), scaled * normal)
        of_input = (scaled - sum(first) - normal * second) * rstd
        of_weight = gradient * normal.reshape(x.shape)
        results = (of_input, *(t.sum_to_size(statistics.parameters) for t in (of_weight, gradient)))
        wanted = compress(results, mask)
        made = iter(
            [
                t.to(s.dtype).reshape(s.local_shape)
                for t, s in zip(wanted, local_call.outputs, strict=True)
            ]
        )
        return tuple(next(made) if wanted else None for wanted in mask)

    return in_every_form(call, run)


def _with_given(local_call: LocalCall) -> LocalFunction | None:
    """Run the kernel of a batch norm with given statistics on this shard.

    The outputs for the statistics of the batch are empty.
    """
    if _is_training(local_call.call) or not sharding_axes(local_call["input"]):
        return None
    op = getattr(torch.ops.aten, local_call.call.op.__name__.split(".")[0])  # without `out=`

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return (
            op(x, *args, **kwargs)[0],
            *(x.new_empty((0,), dtype=spec.dtype) for spec in local_call.outputs[1:]),
        )

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
    },
    unordered=True,
) | family({"native_group_norm native_group_norm_backward": _NORM})
