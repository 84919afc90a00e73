"""Transposed convolutions of a sharded dim: each rank computes a range of outputs, from the inputs that reach into it.

What a shard with halos gives without padding is cropped, or filled up with zeros, to the range; the bias comes after.

4 inputs, kernel 3, stride 2, padding 1 and 7 outputs; input `i` adds to the outputs 2i-1, 2i, 2i+1:

    rank 0 holds inputs 0 1    computes outputs 0..3, reads inputs 0 1 2    (input 2 adds to output 3)
    rank 1 holds inputs 2 3    computes outputs 4..6, reads inputs 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import bound, dataclass

from ...layout.dim_sharding import DimSharding
from ...layout.spec import Spec
from ..exchange.halo import Halo, Interval, with_halos, without_halos
from ..language.local_ops import sharding_axes, with_arguments
from ..language.rule import LocalCall, LocalFunction, OpCall, Traffic


@dataclass(frozen=True, slots=True)
class TransposedWindows:
    """Input `i` adds to the outputs `i * stride - padding + dilation * j` for `j` below `kernel`; a map of shardings.

    Each shard of n inputs computes `n * stride` outputs, the last one also what is left.

    Attributes:
        length: how many inputs.
        outputs: how many outputs.

    Example:
        >>> TransposedWindows(4, 8, kernel=2, stride=2)(DimSharding((0,), (2,), (3, 1))).sizes
        (6, 2)
    """

    length: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __call__(self, sharding: DimSharding) -> DimSharding:
        ends = [min(offset * self.stride, self.outputs) for offset in sharding.offsets]
        pairs = zip(ends, sharding.offsets, strict=True)
        bounds = [end if offset < self.length else self.outputs for end, offset in pairs]
        bounds = [0, *bounds[1:], self.outputs]
        return DimSharding(sharding.axes, sharding.axis_sizes, tuple(b - a for a, b in pairwise(bounds)))

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
        """Inputs that reach into one output besides its own, so about the size of a halo."""
        return max(-(-(self.dilation * (self.kernel - 1) + 1) // self.stride) - 1, 0)

    def traffic(self, row_bytes: int) -> Traffic | None:
        """Bytes of border rows that a rank receives, given those of one row; None for windows of one input."""
        received = max(1, self.overlap * row_bytes)
        return None if self.kernel == 1 else lambda ranks: received

    def start(self, first: int) -> int:
        """Where the outputs of inputs from `first` on begin."""
        return first * self.stride - self.padding

    def size(self, inputs: int) -> int:
        """How many outputs so many inputs reach."""
        return (inputs - 1) * self.stride + self.dilation * (self.kernel - 1) + 1 if inputs else 0


def conv_transpose_windows(call: OpCall, shape: Sequence[int]) -> dict[int, TransposedWindows]:
    """For every spatial dim of the input what its elements reach in an output of that shape."""
    source, weight = call["input"], call["weight"]
    count = weight.ndim - 2
    stride, padding, dilation = ([*call[n]] * (count if len(call[n]) == 1 else 1) for n in _PARAMETERS)
    if 0 in weight.shape:
        return {}
    dims = enumerate(range(source.ndim - count, source.ndim))
    return {
        d: TransposedWindows(source.shape[d], shape[d], weight.shape[2 + i], stride[i], padding[i], dilation[i])
        for i, d in dims
    }


_PARAMETERS = ("stride", "padding", "dilation")


def _halos(call: OpCall, source: Spec, result: Spec) -> list[Halo]:
    return [
        Halo(source, d, w) for d, w in conv_transpose_windows(call, result.shape).items() if sharding_axes(source, (d,))
    ]


def _unpadded(call: OpCall, halos: Sequence[Halo], **changes: Any) -> LocalFunction:
    """The operator without padding along the sharded dims."""
    count = call["weight"].ndim - 2
    for name in ("padding", "output_padding"):
        value = [*call[name]] * (count if len(call[name]) == 1 else 1)
        for halo in halos:
            value[halo.dim - (call["input"].ndim - count)] = 0
        changes[name] = value
    return with_arguments(call, **changes)


def _widths(halos: Sequence[Halo], result: Spec) -> list[int]:
    """How much longer this rank's outputs are than what its inputs reach, at both ends of every dim.

    In the example above the inputs 0 1 2 reach outputs -1..5, and rank 0 computes 0..3: widths -1 and -2.
    """
    widths = [0] * (2 * result.ndim)
    for halo in halos:
        window, (first, last) = halo.windows, halo.reads
        assert isinstance(window, TransposedWindows), "the windows of `_halos`"
        begin, held = result.offset(halo.dim), result.local_shape[halo.dim]
        before = window.start(first) - begin
        at = 2 * (result.ndim - 1 - halo.dim)
        widths[at : at + 2] = before, held - before - window.size(last - first)
    return widths


def conv_transpose(decided: LocalCall, groups: int) -> LocalFunction | None:
    """The transposed convolution of a shard; None where no spatial dim is sharded."""
    call, source, target = decided.call, decided.inputs[0], decided.outputs[0]
    halos = _halos(call, source, target)
    if not halos:
        return None
    widths, shape = _widths(halos, target), target.local_shape
    nothing = 0 in shape or 0 in decided.inputs[1].local_shape or any(h.reads[0] == h.reads[1] for h in halos)
    convolve = _unpadded(call, halos, groups=groups, bias=None)
    channel = 1 if source.ndim == decided.inputs[1].ndim else 0

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        wide = with_halos(x, halos)
        empty = nothing or 0 in wide.shape
        if empty:
            result = bound(x.new_zeros(shape), wide, weight)
        else:
            result = torch.constant_pad_nd(convolve(wide, weight, None, *args), widths)
        return result if bias is None else result + bias.view(-1, *(1,) * (x.ndim - channel - 1))

    return run


def conv_transpose_backward(decided: LocalCall, sizes: dict[str, Any]) -> LocalFunction | None:
    """The gradients of a shard, of the weight and of the bias; None where no spatial dim is sharded."""
    call, (gradient, source, weight) = decided.call, decided.inputs[:3]
    halos = _halos(call, source, gradient)
    if not halos:
        return None
    widths, mask = [-n for n in _widths(halos, gradient)], call["output_mask"]
    empty = 0 in gradient.local_shape or 0 in weight.local_shape or any(h.reads[0] == h.reads[1] for h in halos)
    back = _unpadded(call, halos, output_mask=[*mask[:2], False], **sizes)
    channel = 1 if source.ndim == weight.ndim else 0
    others = [d for d in range(gradient.ndim) if d != channel]

    def run(gradient: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        wide = with_halos(x, halos)
        if empty or 0 in wide.shape:
            of_input, of_weight = bound(torch.zeros_like(wide), gradient), bound(torch.zeros_like(weight), gradient)
        else:
            of_input, of_weight, _ = back(torch.constant_pad_nd(gradient, widths), wide, weight, *args)
        return (
            without_halos(of_input, halos) if mask[0] else None,
            of_weight if mask[1] else None,
            gradient.sum(others) if mask[2] else None,
        )

    return run
