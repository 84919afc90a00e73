"""Sharding of convolutions, on one mesh axis: batch, output channels, input channels (partial sums), whole groups.

Spatial dims too: ranks exchange the border rows that their windows share.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..spec import Spec, TensorMeta, contiguous_stride
from .halo import Halo, Sliding, narrowed, widened
from .local import cutting, filling_out, replacing
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family
from .transposed import spread, spread_back, spread_windows

__all__ = ["CONV"]


def _cases(call: OpCall) -> list[dict[str, Entry]]:
    """How input, weight, bias and result lie, case by case; the result's entry says whether it is summed."""
    batched = call["input"].ndim == call["weight"].ndim
    channel, groups, turned = (1 if batched else 0), call["groups"], call["transposed"]
    into, out = (0, 1) if turned else (1, 0)
    cases: list[dict[str, Entry]] = [{"input": S(0), "result": S(0)}] if batched else []
    if groups == 1:
        cases.append({"weight": S(out), "bias": S(0), "result": S(channel)})
        cases.append({"input": S(channel), "weight": S(into), "bias": P("sum"), "result": P("sum")})
        return cases
    taken, made = _channels(call)
    case: dict[str, Entry] = {"input": S(channel, taken), "bias": S(0, made), "result": S(channel, made)}
    case["weight"] = S(0, taken if turned else made)
    return [*cases, case]


def _channels(call: OpCall) -> tuple[int, int]:
    """Input and output channels per group."""
    weight, groups = call["weight"].shape, call["groups"]
    return (weight[0] // groups, weight[1]) if call["transposed"] else (weight[1], weight[0] // groups)


def _windows(call: OpCall) -> dict[int, Sliding]:
    """For every spatial dim of the input its windows; none if the convolution is transposed."""
    source, weight = call["input"], call["weight"]
    count = weight.ndim - 2
    if call["transposed"] or 0 in weight.shape:
        return {}
    stride, padding, dilation = ([*call[n]] * (count if len(call[n]) == 1 else 1) for n in _PARAMETERS)
    found = {}
    for i in range(count):
        dim, kernel = source.ndim - count + i, weight.shape[2 + i]
        made = (source.shape[dim] + 2 * padding[i] - dilation[i] * (kernel - 1) - 1) // stride[i] + 1
        found[dim] = Sliding(source.shape[dim], made, kernel, stride[i], padding[i], dilation[i])
    return found


_PARAMETERS = ("stride", "padding", "dilation")


def _spatial_cases(call: OpCall) -> list[tuple[dict[str, Entry], int]]:
    """Like `_cases`, each with the bytes of border rows that a rank takes from others."""
    source, cases = call["input"], []
    if "out" in call.op.__name__ and (call["transposed"] or "output_mask" in call.bound):
        return []  # the targets would be those of the widened pieces
    made = (call.get("grad_output") or call.outputs[0]).shape
    windows = spread_windows(call, made) if call["transposed"] else _windows(call)
    for dim, sliding in windows.items():
        slab = source.dtype.itemsize * prod(source.shape) // max(source.shape[dim], 1)
        case: dict[str, Entry] = {"input": S(dim), "result": S(dim, cut=sliding)}
        cases.append((case, max(1, sliding.overlap * slab)))
    return cases


def _halos(call: OpCall, source: Spec) -> list[Halo]:
    return [Halo(source, dim, sliding) for dim, sliding in _windows(call).items() if cutting(source, (dim,))]


def _without_padding(call: OpCall, halos: Sequence[Halo]) -> list[int]:
    """The padding of the dims that are not cut; where a dim is cut, the pieces are padded one by one."""
    count = call["weight"].ndim - 2
    padding = [*call["padding"]] * (count if len(call["padding"]) == 1 else 1)
    for halo in halos:
        padding[halo.dim - (call["input"].ndim - count)] = 0
    return padding


def _present(call: OpCall, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(call.get(name), TensorMeta))


def _forward(call: OpCall) -> list[Row]:
    names = _present(call, "input", "weight", "bias")
    cases = [*((case, 0) for case in _cases(call)), *_spatial_cases(call)]
    rows = [Row(tuple(case.get(n, R) for n in names), (case["result"],), traffic=traffic) for case, traffic in cases]
    for op in ("sum", "avg"):
        for factor in ("input", "weight"):
            lying = {factor: P(op), "bias": P(op)}
            rows.append(Row(tuple(lying.get(n, R) for n in names), (P(op),)))
    return rows


def _backward(call: OpCall) -> list[Row]:
    """The gradient comes as the result lies (whole where that was summed); what is whole then gets a partial sum."""
    mask = call["output_mask"]
    rows = []
    for case, traffic in [*((case, 0) for case in _cases(call)), *_spatial_cases(call)]:
        summed = isinstance(case["result"], P)
        gradient = R if summed else case["result"]
        made: list[Entry] = [case.get(name, P("sum")) for name in ("input", "weight", "bias")]
        if summed:
            made[2] = R
        inputs = (gradient, case.get("input", R), case.get("weight", R))
        rows.append(Row(inputs, tuple(e for e, wanted in zip(made, mask, strict=True) if wanted), traffic=traffic))
    return rows + [Row((P(op), R, R), (P(op),) * sum(mask)) for op in ("sum", "avg")]


def _local_groups(call: OpCall, weight: Spec) -> int:
    """How many groups this rank has."""
    per_group = _channels(call)[0 if call["transposed"] else 1]
    return int(call["groups"]) if call["groups"] == 1 else weight.local_shape[0] // max(per_group, 1)


def _laid(decided: LocalCall) -> LocalFunction | None:
    """A result in the memory format that the whole has, whatever pieces of the operands suggest to the kernel."""
    convolve, made = _convolve(decided), decided.outputs[0]
    is_contiguous = [spec.stride == contiguous_stride(spec.shape) for spec in (made, *decided.inputs[:2])]
    if all(is_contiguous) or "out" in decided.call.bound:
        return convolve
    wanted = torch.contiguous_format if is_contiguous[0] else torch.channels_last
    function = convolve or decided.call.op
    return lambda *args, **kwargs: function(*args, **kwargs).contiguous(memory_format=wanted)


def _convolve(decided: LocalCall) -> LocalFunction | None:
    call, (source, weight), made = decided.call, decided.inputs[:2], decided.outputs[0]
    halos, nothing = _halos(call, source), _zeros(decided, [True])
    empty = 0 in weight.local_shape or 0 in made.local_shape or (0 in source.local_shape and not halos)
    groups = _local_groups(call, weight)
    if call["transposed"] and (turned := spread(decided, groups)) is not None:
        return turned
    if not halos:
        return nothing if empty else None if groups == call["groups"] else replacing(call, groups=groups)
    convolve = nothing if empty else replacing(call, groups=groups, padding=_without_padding(call, halos))
    return lambda x, *args, **kwargs: convolve(widened(x, halos), *args, **kwargs)


def _convolve_backward(decided: LocalCall) -> LocalFunction | None:
    call, (gradient, source, weight) = decided.call, decided.inputs
    halos = _halos(call, source)
    empty = 0 in gradient.local_shape or 0 in weight.local_shape or (0 in source.local_shape and not halos)
    channel = 1 if gradient.ndim == weight.ndim else 0
    groups, bias = _local_groups(call, weight), [gradient.local_shape[channel]]
    sizes = {"groups": groups, "bias_sizes": None if call["bias_sizes"] is None else bias}
    if call["transposed"] and (turned := spread_back(decided, sizes)) is not None:
        return turned
    if not halos:
        if empty:
            return _zeros(decided, call["output_mask"])
        same = not cutting(weight) and bias[0] == gradient.shape[channel]
        return None if same else replacing(call, **sizes)
    convolve = _nothing(call) if empty else replacing(call, padding=_without_padding(call, halos), **sizes)

    def run(gradient: Tensor, x: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        of_input, *others = convolve(gradient, widened(x, halos), *args)
        return None if of_input is None else narrowed(of_input, halos), *others

    return run


def _nothing(call: OpCall) -> LocalFunction:
    """Gradients of a rank that makes no outputs, or has no channels to make them of."""
    mask = call["output_mask"]

    def run(gradient: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        channel = 1 if gradient.ndim == weight.ndim else 0
        made = (torch.zeros_like(x), torch.zeros_like(weight), _of_bias(gradient, channel))
        return tuple(each if wanted else None for each, wanted in zip(made, mask, strict=True))

    return run


def _zeros(decided: LocalCall, mask: Sequence[bool]) -> LocalFunction:
    """What a rank without elements of an operand adds: nothing (a bias that it has is still added)."""
    specs = iter(decided.outputs)
    wanted = [next(specs) if present else None for present in mask]
    channel = 1 if decided.inputs[0].ndim == decided.inputs[1].ndim else 0
    rest = (-1, *(1,) * (decided.inputs[0].ndim - channel - 1))
    forward = len(mask) == 1

    def run(first: Tensor, second: Tensor, third: Any, *_: Any, **__: Any) -> Any:
        made = [None if spec is None else first.new_zeros(spec.local_shape) for spec in wanted]
        if not forward:
            return *made[:2], None if made[2] is None else _of_bias(first, channel)
        result = made[0]
        return result if third is None or result is None else result + third.view(rest)

    return filling_out(decided.call, run)


def _of_bias(gradient: Tensor, channel: int) -> Tensor:
    """The gradient of the bias, which does not depend on the operand that is empty."""
    return gradient.sum([d for d in range(gradient.ndim) if d != channel])


CONV: Table = family(
    {
        "convolution": Rule(_forward, _laid),
        "convolution_backward": Rule(_backward, _convolve_backward),
    }
)
