"""Transposed convolutions of a cut dim: each rank makes a range of outputs, from the inputs that reach into it.

What a widened piece makes without padding is cropped, or filled up with zeros, to the range; the bias comes after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..chunks import Cut
from ..spec import Spec
from .halo import Halo, Interval, narrowed, widened
from .local import cutting, replacing
from .rule import LocalCall, LocalFunction, OpCall

__all__ = ["Spread", "spread", "spread_back", "spread_windows"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Input `i` adds to the outputs `i * stride - padding + dilation * j` for `j` below `kernel`; a map of cuts.

    Each piece makes as many outputs as it takes strides, the last one also what is left.

    Example:
        >>> Spread(4, 8, kernel=2, stride=2)(Cut((0,), (2,), (3, 1))).sizes
        (6, 2)
    """

    length: int
    made: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __call__(self, cut: Cut) -> Cut:
        ends = [min(offset * self.stride, self.made) for offset in cut.offsets]
        bounds = [end if offset < self.length else self.made for end, offset in zip(ends, cut.offsets, strict=True)]
        bounds = [0, *bounds[1:], self.made]
        return Cut(cut.axes, cut.axis_sizes, tuple(b - a for a, b in pairwise(bounds)))

    def reads(self, outputs: Interval) -> Interval:
        """The inputs that reach into a range of outputs."""
        if outputs[0] >= outputs[1]:
            return 0, 0
        reach = self.dilation * (self.kernel - 1)
        first = max(-(-(outputs[0] + self.padding - reach) // self.stride), 0)
        last = min((outputs[1] - 1 + self.padding) // self.stride + 1, self.length)
        return min(first, self.length), max(last, min(first, self.length))

    @property
    def overlap(self) -> int:
        """About how many inputs a piece needs of others."""
        return max(-(-(self.dilation * (self.kernel - 1) + 1) // self.stride) - 1, 0)

    def start(self, first: int) -> int:
        """Where the outputs of inputs from `first` on begin."""
        return first * self.stride - self.padding

    def size(self, inputs: int) -> int:
        """How many outputs so many inputs reach."""
        return (inputs - 1) * self.stride + self.dilation * (self.kernel - 1) + 1 if inputs else 0


def spread_windows(call: OpCall, made: Sequence[int]) -> dict[int, Spread]:
    """For every spatial dim of the input what its elements reach in an output of shape `made`."""
    source, weight = call["input"], call["weight"]
    count = weight.ndim - 2
    stride, padding, dilation = ([*call[n]] * (count if len(call[n]) == 1 else 1) for n in _PARAMETERS)
    if 0 in weight.shape:
        return {}
    dims = enumerate(range(source.ndim - count, source.ndim))
    return {
        d: Spread(source.shape[d], made[d], weight.shape[2 + i], stride[i], padding[i], dilation[i]) for i, d in dims
    }


_PARAMETERS = ("stride", "padding", "dilation")


def _halos(call: OpCall, source: Spec, made: Spec) -> list[Halo]:
    return [Halo(source, d, w) for d, w in spread_windows(call, made.shape).items() if cutting(source, (d,))]


def _unpadded(call: OpCall, halos: Sequence[Halo], **changes: Any) -> LocalFunction:
    """The operator without padding along the cut dims."""
    count = call["weight"].ndim - 2
    for name in ("padding", "output_padding"):
        value = [*call[name]] * (count if len(call[name]) == 1 else 1)
        for halo in halos:
            value[halo.dim - (call["input"].ndim - count)] = 0
        changes[name] = value
    return replacing(call, **changes)


def _widths(halos: Sequence[Halo], made: Spec) -> list[int]:
    """How much longer this rank's outputs are than what its widened piece reaches, at both ends of every dim."""
    widths = [0] * (2 * made.ndim)
    for halo in halos:
        window, (first, last) = halo.sliding, halo.widened()
        assert isinstance(window, Spread), "made here"
        begin, held = made.offset(halo.dim), made.local_shape[halo.dim]
        before = window.start(first) - begin
        at = 2 * (made.ndim - 1 - halo.dim)
        widths[at : at + 2] = before, held - before - window.size(last - first)
    return widths


def spread(decided: LocalCall, groups: int) -> LocalFunction | None:
    """The transposed convolution of a piece; None where no spatial dim is cut."""
    call, source, made = decided.call, decided.inputs[0], decided.outputs[0]
    halos = _halos(call, source, made)
    if not halos:
        return None
    widths, shape = _widths(halos, made), made.local_shape
    nothing = 0 in shape or 0 in decided.inputs[1].local_shape or any(h.widened()[0] == h.widened()[1] for h in halos)
    alone = _unpadded(call, halos, groups=groups, bias=None)
    channel = 1 if source.ndim == decided.inputs[1].ndim else 0

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        wide = widened(x, halos)
        empty = nothing or 0 in wide.shape
        result = x.new_zeros(shape) if empty else torch.constant_pad_nd(alone(wide, weight, None, *args), widths)
        return result if bias is None else result + bias.view(-1, *(1,) * (x.ndim - channel - 1))

    return run


def spread_back(decided: LocalCall, sizes: dict[str, Any]) -> LocalFunction | None:
    """The gradients of a piece, of the weight and of the bias; None where no spatial dim is cut."""
    call, (gradient, source, weight) = decided.call, decided.inputs[:3]
    halos = _halos(call, source, gradient)
    if not halos:
        return None
    widths, mask = [-n for n in _widths(halos, gradient)], call["output_mask"]
    empty = 0 in gradient.local_shape or 0 in weight.local_shape or any(h.widened()[0] == h.widened()[1] for h in halos)
    back = _unpadded(call, halos, output_mask=[*mask[:2], False], **sizes)
    channel = 1 if source.ndim == weight.ndim else 0
    others = [d for d in range(gradient.ndim) if d != channel]

    def run(gradient: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        wide = widened(x, halos)
        if empty or 0 in wide.shape:
            of_input, of_weight = torch.zeros_like(wide), torch.zeros_like(weight)
        else:
            of_input, of_weight, _ = back(torch.constant_pad_nd(gradient, widths), wide, weight, *args)
        return (
            narrowed(of_input, halos) if mask[0] else None,
            of_weight if mask[1] else None,
            gradient.sum(others) if mask[2] else None,
        )

    return run
