"""Resampling to whole multiples of a cut dim: each rank enlarges its piece, with the rows beside it that are read.

A piece is widened by as many rows as an output reads to either side, enlarged, and what the added rows made is left
out; at the ends of the dim nothing is added, so the kernel does there what it does with the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..chunks import Cut
from ..spec import Spec
from .halo import Halo, Interval, narrowed, widened
from .local import cutting, or_empty, replacing
from .rule import LocalCall, LocalFunction, OpCall, Row, S

__all__ = ["enlarged", "enlarged_back", "enlarged_rows"]

# With float32 scales a nearest neighbour is exact up to a factor of 40; 41 / 41 rounds down.
LARGEST = 16


@dataclass(frozen=True, slots=True)
class Enlarged:
    """Output `o` reads the inputs around `o / factor`, up to `reach` of them to either side; a map of cuts.

    Example:
        >>> Enlarged(8, 2, 1).reads((4, 8))
        (1, 5)
    """

    length: int
    factor: int
    reach: int

    def __call__(self, cut: Cut) -> Cut:
        return cut.scaled(self.factor)

    def reads(self, outputs: Interval) -> Interval:
        """What a range of outputs reads of the input."""
        if outputs[0] >= outputs[1]:
            return 0, 0
        first, last = outputs[0] // self.factor, -(-outputs[1] // self.factor)
        return max(first - self.reach, 0), min(last + self.reach, self.length)


def _reach(call: OpCall) -> int:
    """How many inputs to either side of its own an output reads."""
    name = call.op.__name__
    kinds = {"nearest": 0, "linear": 1, "cubic": 2, "lanczos": 3}
    return next(reach for kind, reach in kinds.items() if kind in name)


def _scales(call: OpCall, spatial: int) -> list[float | None]:
    """The factors that the caller gave, for every spatial dim."""
    names = ("scales",) if spatial == 1 else ("scales_d", "scales_h", "scales_w")[-spatial:]
    return [call.get(name) for name in names]


def _windows(call: OpCall, spatial: int) -> dict[int, Enlarged]:
    """For every spatial dim that becomes a whole multiple of itself what its outputs read."""
    if call.get("align_corners") or "scale_factors" in call.bound:
        return {}
    if any(argument.is_out for argument in call.op._schema.arguments):  # targets would be those of the widened pieces
        return {}
    gradient = call.get("grad_output")
    small = [*call["input_size"]] if gradient is not None else [*call.tensors[0].shape]
    large = (gradient or call.outputs[0]).shape
    found = {}
    for i, scale in enumerate(_scales(call, spatial)):
        dim = len(small) - spatial + i
        factor = large[dim] // max(small[dim], 1)
        if factor * small[dim] == large[dim] and 1 <= factor <= LARGEST and scale in (None, float(factor)):
            found[dim] = Enlarged(small[dim], factor, _reach(call))
    return found


def enlarged_rows(planes: Callable[[OpCall], list[Row]], spatial: int) -> Callable[[OpCall], list[Row]]:
    """The rows of `planes`, then one per spatial dim that becomes a multiple of itself."""

    def rows(call: OpCall) -> list[Row]:
        found, source = planes(call), call.tensors[0]
        for dim, window in _windows(call, spatial).items():
            slab = source.dtype.itemsize * prod(source.shape) // max(source.shape[dim], 1)
            pair = (S(dim), S(dim, window.factor))
            given, made = reversed(pair) if "grad_output" in call.bound else pair
            found.append(Row((given,), (made,), traffic=2 * window.reach * slab))
        return found

    return rows


def _halos(call: OpCall, source: Spec, spatial: int) -> list[Halo]:
    return [Halo(source, dim, w) for dim, w in _windows(call, spatial).items() if cutting(source, (dim,))]


def _sized(call: OpCall, shape: Sequence[int], halos: Sequence[Halo], spatial: int) -> LocalFunction:
    """The operator for an input of that shape, which is enlarged along the dims of `halos`."""
    gradient = call.get("grad_output")
    large = [*(gradient or call.outputs[0]).shape]
    for halo in halos:
        large[halo.dim] = shape[halo.dim] * _factor(halo)
    changes = {} if gradient is None else {"input_size": [*shape]}
    return replacing(call, output_size=large[-spatial:], **changes)


def _factor(halo: Halo) -> int:
    assert isinstance(halo.sliding, Enlarged), "made here"
    return halo.sliding.factor


def _widened_shape(shape: Sequence[int], halos: Sequence[Halo]) -> list[int]:
    wide = [*shape]
    for halo in halos:
        first, last = halo.widened()
        wide[halo.dim] = last - first
    return wide


def _before(source: Spec, halo: Halo) -> int:
    """How many outputs of the widened piece come before those of the piece itself."""
    return (source.offset(halo.dim) - halo.widened()[0]) * _factor(halo) if source.local_shape[halo.dim] else 0


def enlarged(spatial: int) -> Callable[[LocalCall], LocalFunction | None]:
    """The forward operator on a piece."""

    def local(decided: LocalCall) -> LocalFunction | None:
        call, source, made = decided.call, decided.inputs[0], decided.outputs[0]
        halos = _halos(call, source, spatial)
        if not halos:
            return or_empty(decided)
        shape = _widened_shape(source.local_shape, halos)
        enlarge = _sized(call, shape, halos, spatial)
        ranges = [(halo.dim, _before(source, halo), made.local_shape[halo.dim]) for halo in halos]

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            wide = widened(x, halos)
            if 0 in made.local_shape:
                return x.new_empty(made.local_shape)
            result: Tensor = enlarge(wide, *args, **kwargs)
            for dim, first, count in ranges:
                result = result.narrow(dim, first, count)
            return result.contiguous()

        return run

    return local


def enlarged_back(spatial: int) -> Callable[[LocalCall], LocalFunction | None]:
    """The gradient of a piece: what the others' outputs read of it comes back from them."""

    def local(decided: LocalCall) -> LocalFunction | None:
        call, gradient, source = decided.call, decided.inputs[0], decided.outputs[0]
        halos = _halos(call, source, spatial)
        shape = _widened_shape(source.local_shape, halos)
        if not halos and 0 in source.local_shape:
            return or_empty(decided)
        back, widths = _sized(call, shape, halos, spatial), [0] * (2 * source.ndim)
        for halo in halos:
            before, at = _before(source, halo), 2 * (source.ndim - 1 - halo.dim)
            rest = shape[halo.dim] * _factor(halo) - before - gradient.local_shape[halo.dim]
            widths[at : at + 2] = before, rest

        def run(gradient: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if 0 in gradient.shape:
                return narrowed(gradient.new_zeros(shape), halos)
            return narrowed(back(torch.constant_pad_nd(gradient, widths), *args, **kwargs), halos)

        return run

    return local
