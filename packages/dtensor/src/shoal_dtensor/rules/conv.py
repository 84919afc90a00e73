"""Sharding of convolutions, on one mesh axis: batch, output channels, input channels (partial sums), whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..spec import Spec, TensorMeta
from .local import cutting, filling_out, replacing
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

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


def _present(call: OpCall, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(call.get(name), TensorMeta))


def _forward(call: OpCall) -> list[Row]:
    names = _present(call, "input", "weight", "bias")
    rows = [Row(tuple(case.get(n, R) for n in names), (case["result"],)) for case in _cases(call)]
    for op in ("sum", "avg"):
        for factor in ("input", "weight"):
            lying = {factor: P(op), "bias": P(op)}
            rows.append(Row(tuple(lying.get(n, R) for n in names), (P(op),)))
    return rows


def _backward(call: OpCall) -> list[Row]:
    """The gradient comes as the result lies (whole where that was summed); what is whole then gets a partial sum."""
    mask = call["output_mask"]
    rows = []
    for case in _cases(call):
        summed = isinstance(case["result"], P)
        gradient = R if summed else case["result"]
        made: list[Entry] = [case.get(name, P("sum")) for name in ("input", "weight", "bias")]
        if summed:
            made[2] = R
        inputs = (gradient, case.get("input", R), case.get("weight", R))
        rows.append(Row(inputs, tuple(e for e, wanted in zip(made, mask, strict=True) if wanted)))
    return rows + [Row((P(op), R, R), (P(op),) * sum(mask)) for op in ("sum", "avg")]


def _local_groups(call: OpCall, weight: Spec) -> int:
    """How many groups this rank has."""
    per_group = _channels(call)[0 if call["transposed"] else 1]
    return int(call["groups"]) if call["groups"] == 1 else weight.local_shape[0] // max(per_group, 1)


def _convolve(decided: LocalCall) -> LocalFunction | None:
    call, weight, made = decided.call, decided.inputs[1], decided.outputs[0]
    if any(0 in spec.local_shape for spec in (*decided.inputs[:2], made)):
        return _zeros(decided, [True])
    groups = _local_groups(call, weight)
    return None if groups == call["groups"] else replacing(call, groups=groups)


def _convolve_backward(decided: LocalCall) -> LocalFunction | None:
    call, (gradient, _source, weight) = decided.call, decided.inputs
    if any(0 in spec.local_shape for spec in decided.inputs):
        return _zeros(decided, call["output_mask"])
    channel = 1 if gradient.ndim == weight.ndim else 0
    groups, bias = _local_groups(call, weight), [gradient.local_shape[channel]]
    if not cutting(weight) and bias[0] == gradient.shape[channel]:
        return None
    return replacing(call, groups=groups, bias_sizes=None if call["bias_sizes"] is None else bias)


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
            return tuple(_with_bias_gradient(made, first, channel))
        result = made[0]
        return result if third is None or result is None else result + third.view(rest)

    return filling_out(decided.call, run)


def _with_bias_gradient(made: list[Tensor | None], gradient: Tensor, channel: int) -> list[Tensor | None]:
    """The bias gradient does not depend on the operand that is empty."""
    if made[2] is not None:
        made[2] = gradient.sum([d for d in range(gradient.ndim) if d != channel])
    return made


CONV: Table = family(
    {
        "convolution": Rule(_forward, _convolve),
        "convolution_backward": Rule(_backward, _convolve_backward),
    }
)
