"""Sharding of resampling to multiples of a sharded dim: each rank enlarges its shard, with the rows beside it.

Halos of as many rows as an output reads to either side are added, all is enlarged, and what the halos gave is left out;
at the ends of the dim nothing is added, so the kernel does there what it does with the global tensor.  Linear, by 2:

    rank 1 holds rows 4 5 6 7, reads 3 4 5 6 7 8, enlarges them to 12 rows, and keeps rows 2..9 of those
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal_mesh.internal import bound

from ..exchange.halo import Halos, Windows, halo_traffic
from ..language.local_ops import with_arguments
from ..language.rule import LocalCall, LocalFunction, OpCall, P, Row, Rule, S, Table
from ..language.rule_tables import family
from .planes import planes, spatial_dims

# With float32 scales a nearest neighbour is exact up to a factor of 40; 41 / 41 rounds down.
LARGEST = 16
# How many inputs to either side of its own an output reads.
BESIDE = {"nearest": 0, "linear": 1, "cubic": 2, "lanczos": 3}


def _windows(call: OpCall) -> dict[int, Windows]:
    """For every spatial dim that becomes a multiple of itself its windows: each input makes as many outputs."""
    if call.get("align_corners") or "scale_factors" in call.bound:
        return {}
    if call.schema.outs:  # the targets would be those of the shards with halos
        return {}
    gradient, spatial = call.get("grad_output"), spatial_dims(call)
    small = call.tensors[0].shape if gradient is None else call["input_size"]
    large = (gradient or call.outputs[0]).shape
    beside = next(count for kind, count in BESIDE.items() if kind in call.op.__name__)
    given = ("scales",) if spatial == 1 else ("scales_d", "scales_h", "scales_w")[-spatial:]
    windows = {}
    for dim, name in enumerate(given, len(small) - spatial):
        n, factor = small[dim], large[dim] // max(small[dim], 1)
        if factor * n == large[dim] and 1 <= factor <= LARGEST and call.get(name) in (None, float(factor)):
            windows[dim] = Windows(n, large[dim], factor, factor, transposed=True, beside=beside)
    return windows


def upsample(call: OpCall) -> Iterator[Row]:
    """The rows of planes, then one per spatial dim that becomes a multiple of itself."""
    (source,) = call.tensors
    yield from planes(call, next(iter(call.places)))
    for dim, windows in _windows(call).items():
        traffic = halo_traffic(windows, source, dim)
        if "grad_output" in call.places:
            yield call.row(grad_output=S(dim, windows.stride), out=S(dim), traffic=traffic)
        else:
            yield call.row(self=S(dim), out=S(dim, windows.stride), traffic=traffic)


def _enlarged(halos: Halos, windows: Mapping[int, Windows], shape: Sequence[int]) -> list[int]:
    """The spatial sizes that `shape` has when shards with their halos are enlarged."""
    spatial = range(2, len(shape))
    return [halos.shape[d] * windows[d].stride if d in halos.dims else shape[d] for d in spatial]


def _upsample(local_call: LocalCall) -> LocalFunction | None:
    call, target = local_call.call, local_call.outputs[0]
    windows = _windows(call)
    halos = Halos(local_call.inputs[0], windows)
    if not halos:
        return None
    enlarge = with_arguments(call, output_size=_enlarged(halos, windows, target.shape))

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wide = halos.fetch(x)
        if 0 in target.local_shape:
            return bound(x.new_empty(target.local_shape), wide)
        return halos.cropped(enlarge(wide, *args, **kwargs)).contiguous()

    return run


def _upsample_backward(local_call: LocalCall) -> LocalFunction:
    """What the others' outputs read of a shard comes back from them."""
    call, gradient, source = local_call.call, local_call.inputs[0], local_call.outputs[0]
    windows = _windows(call)
    halos = Halos(source, windows)
    back = with_arguments(call, output_size=_enlarged(halos, windows, gradient.shape), input_size=halos.shape)

    def run(gradient: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if 0 in gradient.shape:
            return halos.return_gradient(gradient.new_zeros(halos.shape))
        return halos.return_gradient(back(halos.uncropped(gradient), *args, **kwargs))

    return run


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


_UPSAMPLE = Rule(upsample, _upsample, skip_empty=True)
_UPSAMPLE_BACKWARD = Rule(upsample, _upsample_backward, skip_empty=True)

RESAMPLING: Table = family(
    {
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d": _UPSAMPLE,
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d": _UPSAMPLE,
        "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d": _UPSAMPLE,
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa": _UPSAMPLE,
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward": _UPSAMPLE_BACKWARD,
        "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward": _UPSAMPLE_BACKWARD,
        "_upsample_nearest_exact3d_backward upsample_linear1d_backward": _UPSAMPLE_BACKWARD,
        "upsample_bilinear2d_backward upsample_trilinear3d_backward": _UPSAMPLE_BACKWARD,
        "upsample_bicubic2d_backward": _UPSAMPLE_BACKWARD,
        "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward": _UPSAMPLE_BACKWARD,
        "grid_sampler_2d grid_sampler_3d": Rule(grid_sampler, skip_empty=True),
        "grid_sampler_2d_backward grid_sampler_3d_backward": Rule(grid_sampler_backward, skip_empty=True),
    }
)
