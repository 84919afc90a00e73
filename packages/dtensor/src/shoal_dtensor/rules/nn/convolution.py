"""Sharding of convolutions: batch, output channels, input channels (partial sums), groups of channels.

Spatial dims too: ranks exchange the border rows that their windows share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import bound

from ...layout.spec import Spec
from ...layout.tensor_meta import contiguous_stride
from ..exchange import Halos, Windows, halo_traffic, windows_of
from ..language.local_ops import in_every_form, sharding_axes, with_arguments
from ..language.rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table, Traffic, family

Case = dict[str, Any]


def _cases(call: OpCall) -> Iterator[tuple[Case, Traffic | None]]:
    """Entries of input, weight, bias and `out`, case by case, with what the local function communicates."""
    source, channel, groups = call["input"], _channel(call), call["groups"]
    of_input, of_output = (0, 1) if call["transposed"] else (1, 0)
    if channel:
        yield {"input": S(0), "out": S(0)}, None
    if groups == 1:
        yield {"weight": S(of_output), "bias": S(0), "out": S(channel)}, None
        yield {"input": S(channel), "weight": S(of_input), "bias": P("sum"), "out": P("sum")}, None
    else:
        # 4 groups of 2 input and 3 output channels are sharded as 4 steps: input channels by 2, output channels by 3.
        # The weight is (12, 2, ...), transposed (8, 3, ...): it has 4 steps of 3 or 2 along its first dim.
        first, second, *_ = call["weight"].shape
        unit = first // groups
        taken, given = (unit, second) if call["transposed"] else (second, unit)
        case: Case = {"input": S(channel, taken), "bias": S(0, given), "out": S(channel, given)}
        yield case | {"weight": S(0, unit)}, None
    for dim, windows in _windows(call).items():
        yield {"input": S(dim), "out": S(dim, map=windows)}, halo_traffic(windows, source, dim)


def _windows(call: OpCall) -> dict[int, Windows]:
    """For every spatial dim its windows; none where `out=` targets would be those of the shards with halos."""
    result = call.get("grad_output") or call.outputs[0]
    has_targets = bool(call.schema.outs) and (call["transposed"] or "output_mask" in call.bound)
    if has_targets or 0 in call["weight"].shape:
        return {}
    return windows_of(call, call["input"], result, call["weight"].shape[2:], transposed=call["transposed"])


def _channel(call: OpCall) -> int:
    """The dim of channels, which is the first one where there is no batch."""
    return 1 if call["input"].ndim == call["weight"].ndim else 0


def convolution(call: OpCall) -> Iterator[Row]:
    for case, traffic in _cases(call):
        yield call.row(traffic=traffic, **case)
    for op in ("sum", "avg"):
        for factor in ("input", "weight"):
            yield call.row({factor: P(op), "bias": P(op), "out": P(op)})


def convolution_backward(call: OpCall) -> Iterator[Row]:
    """The gradient is sharded as the result (replicated where that is summed); replicated inputs get partial sums."""
    for case, traffic in _cases(call):
        is_summed = isinstance(case["out"], P)
        gradients = [case.get(name, P("sum")) for name in ("input", "weight", "bias")]
        if is_summed:
            gradients[2] = R
        entries: Case = {name: case[name] for name in ("input", "weight") if name in case}
        entries |= {f"out{i}": entry for i, entry in enumerate(gradients)}
        yield call.row(entries, grad_output=R if is_summed else case["out"], traffic=traffic)
    yield from call.linear("grad_output")


def _local_groups(call: OpCall, weight: Spec) -> int:
    """How many groups this rank has."""
    groups = int(call["groups"])
    return groups if groups == 1 else weight.local_shape[0] // max(weight.shape[0] // groups, 1)


def _in_global_memory_format(local_call: LocalCall) -> LocalFunction | None:
    """A result in the memory format of the global one, where the operands' shards suggest another to the kernel."""
    convolve, result = _convolve(local_call), local_call.outputs[0]
    is_contiguous = [spec.stride == contiguous_stride(spec.shape) for spec in (result, *local_call.inputs[:2])]
    if all(is_contiguous) or local_call.call.schema.outs:
        return convolve
    wanted = torch.contiguous_format if is_contiguous[0] else torch.channels_last
    function = convolve or local_call.call.op
    return lambda *args, **kwargs: function(*args, **kwargs).contiguous(memory_format=wanted)


def _convolve(local_call: LocalCall) -> LocalFunction | None:
    """Of nothing it is the bias; to what is cropped or filled up the bias is added afterwards."""
    call, (source, weight), shape = local_call.call, local_call.inputs[:2], local_call.outputs[0].local_shape
    halos, groups = Halos(source, _windows(call)), _local_groups(call, weight)
    empty = 0 in (*weight.local_shape, *shape, *halos.shape)
    if not (halos or empty):
        return None if groups == call["groups"] else with_arguments(call, groups=groups)
    convolve = with_arguments(call, groups=groups, **halos.unpadded(call, weight.ndim - 2))
    bias_last = empty or (call["transposed"] and bool(halos))
    per_channel = (-1, *(1,) * (len(shape) - 1 - _channel(call)))

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        wide = halos.fetch(x)
        if empty:
            result = bound(x.new_zeros(shape), wide, weight)
        else:
            result = halos.cropped(convolve(wide, weight, None if bias_last else bias, *args, **kwargs))
        return result + bias.view(per_channel) if bias_last and bias is not None else result

    return in_every_form(call, run) if empty else run


def _convolve_backward(local_call: LocalCall) -> LocalFunction | None:
    """Of nothing the gradients are zeros, but for the bias, which depends on no operand."""
    call, (gradient, source, weight) = local_call.call, local_call.inputs
    halos, channel, mask = Halos(source, _windows(call)), _channel(call), call["output_mask"]
    empty = 0 in (*gradient.local_shape, *weight.local_shape, *halos.shape)
    channels = gradient.local_shape[channel]
    sizes = {"groups": _local_groups(call, weight), "bias_sizes": call["bias_sizes"] and [channels]}
    if not (halos or empty):
        same = not sharding_axes(weight) and channels == gradient.shape[channel]
        return None if same else with_arguments(call, **sizes)
    bias_apart = empty or (call["transposed"] and bool(halos))
    wanted = [*mask[:2], mask[2] and not bias_apart]
    back = with_arguments(call, output_mask=wanted, **sizes, **halos.unpadded(call, weight.ndim - 2))
    others = [d for d in range(gradient.ndim) if d != channel]

    def run(gradient: Tensor, x: Tensor, weight: Tensor, *args: Any, **_: Any) -> tuple[Tensor | None, ...]:
        wide = halos.fetch(x)
        results: list[Any]
        if empty:
            results = [bound(torch.zeros_like(wide), gradient), bound(torch.zeros_like(weight), gradient), None]
        else:
            results = [*back(halos.uncropped(gradient), wide, weight, *args)]
        if bias_apart:
            results[2] = gradient.sum(others)
        if mask[0]:
            results[0] = halos.return_gradient(results[0])
        return tuple(result if wanted else None for result, wanted in zip(results, mask, strict=True))

    return in_every_form(call, run)


CONVOLUTION: Table = family(
    {
        "convolution": Rule(convolution, _in_global_memory_format),
        "convolution_backward": Rule(convolution_backward, _convolve_backward),
    }
)
