"""Resampling to multiples of a sharded dim: each rank enlarges its shard, with the rows beside it that are read.

Halos of as many rows as an output reads to either side are added, all is enlarged, and what the halos gave is left out;
at the ends of the dim nothing is added, so the kernel does there what it does with the global tensor.  Linear, by 2:

    rank 1 holds rows 4 5 6 7, reads 3 4 5 6 7 8, enlarges them to 12 rows, and keeps rows 2..9 of those
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import bound, dataclass

from ...layout.dim_sharding import DimSharding
from ...layout.spec import Spec
from ..exchange.halo import Halo, Interval, halo_traffic, with_halos, without_halos
from ..language.local_ops import sharding_axes, with_arguments
from ..language.rule import LocalCall, LocalFunction, OpCall, P, Row, Rule, S, Table
from ..language.rule_tables import family
from .planes import RowFunction, planes

# With float32 scales a nearest neighbour is exact up to a factor of 40; 41 / 41 rounds down.
LARGEST = 16


@dataclass(frozen=True, slots=True)
class EnlargedWindows:
    """Output `o` reads the inputs around `o / factor`, up to `reach` of them to either side; a map of shardings.

    Example:
        >>> EnlargedWindows(8, 2, 1).reads((4, 8))
        (1, 5)
    """

    length: int
    factor: int
    reach: int

    def __call__(self, sharding: DimSharding) -> DimSharding:
        return sharding.scaled(self.factor)

    @property
    def overlap(self) -> int:
        """Rows of a halo, at both sides."""
        return 2 * self.reach

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


def _windows(call: OpCall, spatial: int) -> dict[int, EnlargedWindows]:
    """For every spatial dim that becomes a multiple of itself what its outputs read."""
    if call.get("align_corners") or "scale_factors" in call.bound:
        return {}
    if call.schema.outs:  # the targets would be those of the shards with halos
        return {}
    gradient = call.get("grad_output")
    small = [*call["input_size"]] if gradient is not None else [*call.tensors[0].shape]
    large = (gradient or call.outputs[0]).shape
    windows = {}
    for i, scale in enumerate(_scales(call, spatial)):
        dim = len(small) - spatial + i
        factor = large[dim] // max(small[dim], 1)
        if factor * small[dim] == large[dim] and 1 <= factor <= LARGEST and scale in (None, float(factor)):
            windows[dim] = EnlargedWindows(small[dim], factor, _reach(call))
    return windows


def _upsample(spatial: int) -> RowFunction:
    """The rows of planes, then one per spatial dim that becomes a multiple of itself."""

    def upsample(call: OpCall) -> Iterator[Row]:
        source = call.tensors[0]
        yield from planes(spatial, linear=next(iter(call.places)))(call)
        for dim, windows in _windows(call, spatial).items():
            row_bytes = source.dtype.itemsize * prod(n for d, n in enumerate(source.shape) if d != dim)
            traffic = halo_traffic(windows, row_bytes)
            if "grad_output" in call.places:
                yield call.row(grad_output=S(dim, windows.factor), out=S(dim), traffic=traffic)
            else:
                yield call.row(self=S(dim), out=S(dim, windows.factor), traffic=traffic)

    return upsample


def _halos(call: OpCall, source: Spec, spatial: int) -> list[Halo]:
    return [Halo(source, dim, w) for dim, w in _windows(call, spatial).items() if sharding_axes(source, (dim,))]


def _sized(call: OpCall, shape: Sequence[int], halos: Sequence[Halo], spatial: int) -> LocalFunction:
    """The operator for an input of that shape, which is enlarged along the dims of `halos`."""
    gradient = call.get("grad_output")
    large = [*(gradient or call.outputs[0]).shape]
    for halo in halos:
        large[halo.dim] = shape[halo.dim] * _factor(halo)
    changes = {} if gradient is None else {"input_size": [*shape]}
    return with_arguments(call, output_size=large[-spatial:], **changes)


def _factor(halo: Halo) -> int:
    assert isinstance(halo.windows, EnlargedWindows), "the windows of `_halos`"
    return halo.windows.factor


def _shape_with_halos(shape: Sequence[int], halos: Sequence[Halo]) -> list[int]:
    wide = [*shape]
    for halo in halos:
        first, last = halo.reads
        wide[halo.dim] = last - first
    return wide


def _before(source: Spec, halo: Halo) -> int:
    """How many outputs of the shard with halos come before those of the shard itself."""
    return (source.offset(halo.dim) - halo.reads[0]) * _factor(halo) if source.local_shape[halo.dim] else 0


def _enlarge(spatial: int) -> Callable[[LocalCall], LocalFunction | None]:
    """The forward operator on a shard."""

    def local(decided: LocalCall) -> LocalFunction | None:
        call, source, target = decided.call, decided.inputs[0], decided.outputs[0]
        halos = _halos(call, source, spatial)
        if not halos:
            return None
        shape = _shape_with_halos(source.local_shape, halos)
        enlarge = _sized(call, shape, halos, spatial)
        ranges = [(halo.dim, _before(source, halo), target.local_shape[halo.dim]) for halo in halos]

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            wide = with_halos(x, halos)
            if 0 in target.local_shape:
                return bound(x.new_empty(target.local_shape), wide)
            result: Tensor = enlarge(wide, *args, **kwargs)
            for dim, first, count in ranges:
                result = result.narrow(dim, first, count)
            return result.contiguous()

        return run

    return local


def _enlarge_backward(spatial: int) -> Callable[[LocalCall], LocalFunction | None]:
    """The gradient of a shard: what the others' outputs read of it comes back from them."""

    def local(decided: LocalCall) -> LocalFunction | None:
        call, gradient, source = decided.call, decided.inputs[0], decided.outputs[0]
        halos = _halos(call, source, spatial)
        shape = _shape_with_halos(source.local_shape, halos)
        back, widths = _sized(call, shape, halos, spatial), [0] * (2 * source.ndim)
        for halo in halos:
            before, at = _before(source, halo), 2 * (source.ndim - 1 - halo.dim)
            rest = shape[halo.dim] * _factor(halo) - before - gradient.local_shape[halo.dim]
            widths[at : at + 2] = before, rest

        def run(gradient: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if 0 in gradient.shape:
                return without_halos(gradient.new_zeros(shape), halos)
            return without_halos(back(torch.constant_pad_nd(gradient, widths), *args, **kwargs), halos)

        return run

    return local


# --- sampling at given places -----------------------------------------------------------------------------------------


def grid_sampler(call: OpCall) -> Iterator[Row]:
    """Batch, channels of the image, rows and columns of the grid."""
    yield call.row(input=S(0), grid=S(0), out=S(0))
    yield call.row(input=S(1), out=S(1))
    yield from (call.row(grid=S(d - 1), out=S(d)) for d in range(2, call["input"].ndim))
    yield from call.linear("input")


def grid_sampler_backward(call: OpCall) -> Iterator[Row]:
    yield call.row(grad_output=S(0), input=S(0), grid=S(0), out=S(0))
    yield call.row(grad_output=S(1), input=S(1), out0=S(1), out1=P("sum"))
    for d in range(2, call["input"].ndim):
        yield call.row(grad_output=S(d), grid=S(d - 1), out0=P("sum"), out1=S(d - 1))
    yield from call.linear("grad_output")


def _upsampling(spatial: int) -> Rule:
    return Rule(_upsample(spatial), _enlarge(spatial), skip_empty=True)


def _upsampling_backward(spatial: int) -> Rule:
    return Rule(_upsample(spatial), _enlarge_backward(spatial), skip_empty=True)


RESAMPLING: Table = family(
    {
        "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d": _upsampling(1),
        "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d": _upsampling(2),
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa": _upsampling(2),
        "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d": _upsampling(3),
        "upsample_nearest1d_backward _upsample_nearest_exact1d_backward": _upsampling_backward(1),
        "upsample_linear1d_backward": _upsampling_backward(1),
        "upsample_nearest2d_backward _upsample_nearest_exact2d_backward": _upsampling_backward(2),
        "upsample_bilinear2d_backward upsample_bicubic2d_backward": _upsampling_backward(2),
        "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward": _upsampling_backward(2),
        "upsample_nearest3d_backward _upsample_nearest_exact3d_backward": _upsampling_backward(3),
        "upsample_trilinear3d_backward": _upsampling_backward(3),
        "grid_sampler_2d grid_sampler_3d": Rule(grid_sampler, skip_empty=True),
        "grid_sampler_2d_backward grid_sampler_3d_backward": Rule(grid_sampler_backward, skip_empty=True),
    }
)
