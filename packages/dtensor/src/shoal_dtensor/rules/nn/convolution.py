"""Sharding of convolutions: batch, output channels, input channels (partial sums), groups of channels.

Spatial dims too: ranks exchange the border rows that their windows share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import bound

from ...layout.spec import Spec
from ...layout.tensor_meta import contiguous_stride
from ..exchange.halo import Halo, SlidingWindows, halo_traffic, with_halos, without_halos
from ..language.local_ops import in_every_form, sharding_axes, with_arguments
from ..language.rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table, Traffic
from ..language.rule_tables import family
from .conv_transpose import conv_transpose, conv_transpose_backward, conv_transpose_windows

PARAMETERS = ("stride", "padding", "dilation")
Case = dict[str, Any]


def _cases(call: OpCall) -> Iterator[tuple[Case, Traffic | None]]:
    """Entries of input, weight, bias and `out`, case by case, with what the local function communicates."""
    is_batched = call["input"].ndim == call["weight"].ndim
    channel, groups = (1 if is_batched else 0), call["groups"]
    of_input, of_output = (0, 1) if call["transposed"] else (1, 0)
    if is_batched:
        yield {"input": S(0), "out": S(0)}, None
    if groups == 1:
        yield {"weight": S(of_output), "bias": S(0), "out": S(channel)}, None
        yield {"input": S(channel), "weight": S(of_input), "bias": P("sum"), "out": P("sum")}, None
    else:
        # 4 groups of 2 input and 3 output channels are sharded as 4 steps: input channels by 2, output channels by 3.
        taken, given = _channels_per_group(call)
        case: Case = {"input": S(channel, taken), "bias": S(0, given), "out": S(channel, given)}
        yield case | {"weight": S(0, taken if call["transposed"] else given)}, None
    yield from _spatial_cases(call)


def _channels_per_group(call: OpCall) -> tuple[int, int]:
    """Input and output channels per group."""
    weight, groups = call["weight"].shape, call["groups"]
    return (weight[0] // groups, weight[1]) if call["transposed"] else (weight[1], weight[0] // groups)


def _windows(call: OpCall) -> dict[int, SlidingWindows]:
    """For every spatial dim of the input its windows; none if the convolution is transposed."""
    source, weight = call["input"], call["weight"]
    count = weight.ndim - 2
    if call["transposed"] or 0 in weight.shape:
        return {}
    stride, padding, dilation = ([*call[n]] * (count if len(call[n]) == 1 else 1) for n in PARAMETERS)
    windows = {}
    for i in range(count):
        dim, kernel = source.ndim - count + i, weight.shape[2 + i]
        outputs = (source.shape[dim] + 2 * padding[i] - dilation[i] * (kernel - 1) - 1) // stride[i] + 1
        windows[dim] = SlidingWindows(source.shape[dim], outputs, kernel, stride[i], padding[i], dilation[i])
    return windows


def _spatial_cases(call: OpCall) -> Iterator[tuple[Case, Traffic | None]]:
    source = call["input"]
    if call.schema.outs and (call["transposed"] or "output_mask" in call.bound):
        return  # the targets would be those of the shards with halos
    result = (call.get("grad_output") or call.outputs[0]).shape
    for dim, windows in (conv_transpose_windows(call, result) if call["transposed"] else _windows(call)).items():
        row_bytes = source.dtype.itemsize * prod(n for d, n in enumerate(source.shape) if d != dim)
        yield {"input": S(dim), "out": S(dim, map=windows)}, halo_traffic(windows, row_bytes)


def convolution(call: OpCall) -> Iterator[Row]:
    for case, traffic in _cases(call):
        yield call.row(traffic=traffic, **case)
    for op in ("sum", "avg"):
        for factor in ("input", "weight"):
            partial: Case = {factor: P(op), "bias": P(op), "out": P(op)}
            yield call.row(**partial)


def convolution_backward(call: OpCall) -> Iterator[Row]:
    """The gradient is sharded as the result (replicated where that is summed); replicated inputs get partial sums."""
    for case, traffic in _cases(call):
        is_summed = isinstance(case["out"], P)
        gradients = [case.get(name, P("sum")) for name in ("input", "weight", "bias")]
        if is_summed:
            gradients[2] = R
        inputs: Case = {name: case[name] for name in ("input", "weight") if name in case}
        results: Case = {f"out{i}": entry for i, entry in enumerate(gradients)}
        yield call.row(grad_output=R if is_summed else case["out"], traffic=traffic, **inputs, **results)
    yield from call.linear("grad_output")


def _halos(call: OpCall, source: Spec) -> list[Halo]:
    return [Halo(source, dim, windows) for dim, windows in _windows(call).items() if sharding_axes(source, (dim,))]


def _padding(call: OpCall, halos: Sequence[Halo]) -> list[int]:
    """The padding of the other dims; along sharded ones the shards are padded with their halos."""
    count = call["weight"].ndim - 2
    padding = [*call["padding"]] * (count if len(call["padding"]) == 1 else 1)
    for halo in halos:
        padding[halo.dim - (call["input"].ndim - count)] = 0
    return padding


def _local_groups(call: OpCall, weight: Spec) -> int:
    """How many groups this rank has."""
    per_group = _channels_per_group(call)[0 if call["transposed"] else 1]
    return int(call["groups"]) if call["groups"] == 1 else weight.local_shape[0] // max(per_group, 1)


def _in_global_memory_format(decided: LocalCall) -> LocalFunction | None:
    """A result in the memory format of the global one, whatever the shards of the operands suggest to the kernel."""
    convolve, result = _convolve(decided), decided.outputs[0]
    is_contiguous = [spec.stride == contiguous_stride(spec.shape) for spec in (result, *decided.inputs[:2])]
    if all(is_contiguous) or decided.call.schema.outs:
        return convolve
    wanted = torch.contiguous_format if is_contiguous[0] else torch.channels_last
    function = convolve or decided.call.op
    return lambda *args, **kwargs: function(*args, **kwargs).contiguous(memory_format=wanted)


def _convolve(decided: LocalCall) -> LocalFunction | None:
    call, (source, weight), result = decided.call, decided.inputs[:2], decided.outputs[0]
    halos, nothing = _halos(call, source), _bias_alone(decided)
    empty = 0 in weight.local_shape or 0 in result.local_shape or (0 in source.local_shape and not halos)
    groups = _local_groups(call, weight)
    if call["transposed"] and (transposed := conv_transpose(decided, groups)) is not None:
        return transposed
    if not halos:
        return nothing if empty else None if groups == call["groups"] else with_arguments(call, groups=groups)
    convolve = nothing if empty else with_arguments(call, groups=groups, padding=_padding(call, halos))
    return lambda x, *args, **kwargs: convolve(with_halos(x, halos), *args, **kwargs)


def _convolve_backward(decided: LocalCall) -> LocalFunction | None:
    call, (gradient, source, weight) = decided.call, decided.inputs
    halos = _halos(call, source)
    empty = 0 in gradient.local_shape or 0 in weight.local_shape or (0 in source.local_shape and not halos)
    channel = 1 if gradient.ndim == weight.ndim else 0
    groups, bias = _local_groups(call, weight), [gradient.local_shape[channel]]
    sizes = {"groups": groups, "bias_sizes": None if call["bias_sizes"] is None else bias}
    if call["transposed"] and (transposed := conv_transpose_backward(decided, sizes)) is not None:
        return transposed
    if not halos:
        if empty:
            return _bias_gradient_alone(decided)
        same = not sharding_axes(weight) and bias[0] == gradient.shape[channel]
        return None if same else with_arguments(call, **sizes)
    convolve = _bias_gradient_alone(decided) if empty else with_arguments(call, padding=_padding(call, halos), **sizes)

    def run(gradient: Tensor, x: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        of_input, *others = convolve(gradient, with_halos(x, halos), *args)
        return None if of_input is None else without_halos(of_input, halos), *others

    return run


def _bias_alone(decided: LocalCall) -> LocalFunction:
    """The result on a rank without elements of an operand: zeros, and the bias that it has."""
    shape, is_batched = decided.outputs[0].local_shape, decided["input"].ndim == decided["weight"].ndim
    rest = (-1, *(1,) * (len(shape) - 1 - is_batched))

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *__: Any, **___: Any) -> Tensor:
        result = bound(x.new_zeros(shape), weight)
        return result if bias is None else result + bias.view(rest)

    return in_every_form(decided.call, run)


def _bias_gradient_alone(decided: LocalCall) -> LocalFunction:
    """Gradients on a rank without elements of an operand: zeros, but for the bias, which depends on no operand."""
    mask = decided.call["output_mask"]

    def run(gradient: Tensor, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> tuple[Tensor | None, ...]:
        channel = 1 if gradient.ndim == weight.ndim else 0
        of_bias = gradient.sum([d for d in range(gradient.ndim) if d != channel])
        gradients = (bound(torch.zeros_like(x), gradient), bound(torch.zeros_like(weight), gradient), of_bias)
        return tuple(each if wanted else None for each, wanted in zip(gradients, mask, strict=True))

    return in_every_form(decided.call, run)


CONVOLUTION: Table = family(
    {
        "convolution": Rule(convolution, _in_global_memory_format),
        "convolution_backward": Rule(convolution_backward, _convolve_backward),
    }
)
