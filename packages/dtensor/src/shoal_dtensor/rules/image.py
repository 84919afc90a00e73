"""Sharding of pooling, resampling and sampling of images, on one mesh axis.

Every plane is treated for itself, so the dims before the spatial ones are free.  Pooling windows also slide along cut
spatial dims, and planes grow to whole multiples, with the border rows of other ranks; else spatial dims are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from ..spec import Spec, TensorMeta
from .enlarge import enlarged, enlarged_back, enlarged_rows
from .halo import Halo, Sliding, narrowed, widened
from .local import cutting, or_empty, replacing, zeros
from .notation import linear_rows
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["IMAGE"]


def _planes(spatial: int, *, linear: bool = False) -> Callable[[OpCall], list[Row]]:
    """Rows for the leading dims that all operands share."""

    def rows(call: OpCall) -> list[Row]:
        operands = (*call.tensors, *call.outputs)
        count, made = len(call.tensors), len(call.outputs)
        free = min(t.ndim for t in operands) - spatial
        found = [
            Row((S(d),) * count, (S(d),) * made)
            for d in range(max(free, 0))
            if len({t.shape[d] for t in operands}) == 1
        ]
        return found + (linear_rows((0,), count, made) if linear else [])

    return rows


def _columns(call: OpCall) -> list[Row]:
    """`im2col` and `col2im`: batch; channels, each with its whole window; spatial dims whole."""
    (source,), (made,) = call.tensors, call.outputs
    channel = source.ndim - (2 if "col2im" in call.op.__name__ else 3)
    unit = max(source.shape[channel] // max(made.shape[channel], 1), 1)
    times = max(made.shape[channel] // max(source.shape[channel], 1), 1)
    rows = [Row((S(0),), (S(0),))] if channel else []
    return [*rows, Row((S(channel, unit),), (S(channel, times),)), *linear_rows((0,), 1, 1)]


def _sampled(call: OpCall) -> list[Row]:
    """`grid_sampler`: batch, channels of the image, rows and columns of the grid."""
    spatial = range(2, call.tensors[0].ndim)
    rows = [Row((S(0), S(0)), (S(0),)), Row((S(1), R), (S(1),))]
    rows += [Row((R, S(d - 1)), (S(d),)) for d in spatial]
    return rows + linear_rows((0,), 2, 1)


def _sampled_backward(call: OpCall) -> list[Row]:
    mask = call["output_mask"]
    spatial = range(2, call.tensors[0].ndim)
    cases: list[tuple[tuple[Entry, ...], tuple[Entry, ...]]] = [
        ((S(0), S(0), S(0)), (S(0), S(0))),
        ((S(1), S(1), R), (S(1), P("sum"))),
    ]
    cases += [((S(d), R, S(d - 1)), (P("sum"), S(d - 1))) for d in spatial]
    cases += [((P(op), R, R), (P(op), P(op))) for op in ("sum", "avg")]
    return [Row(inputs, tuple(e for e, wanted in zip(made, mask, strict=True) if wanted)) for inputs, made in cases]


def _shuffled(call: OpCall) -> list[Row]:
    """`channel_shuffle`: channels whole."""
    (source,) = call.tensors
    return [Row((S(d),), (S(d),)) for d in range(source.ndim) if d != 1]


def _pixels(name: str, *, up: bool) -> Callable[[OpCall], list[Row]]:
    """`pixel_shuffle` and back: a channel of the fine image is `factor` squared channels of the coarse one."""

    def rows(call: OpCall) -> list[Row]:
        factor, last = call[name], call.tensors[0].ndim - 1
        pairs = [(S(d), S(d)) for d in range(last - 2)]
        pairs += [(S(last - 2, factor**2), S(last - 2)), (S(last - 1), S(last - 1, factor)), (S(last), S(last, factor))]
        ordered = pairs if up else [(fine, coarse) for coarse, fine in pairs]
        return [*(Row((a,), (b,)) for a, b in ordered), *linear_rows((0,), 1, 1)]

    return rows


def _enlarging(spatial: int) -> Rule:
    return Rule(enlarged_rows(_planes(spatial, linear=True), spatial), enlarged(spatial))


def _reducing(spatial: int) -> Rule:
    return Rule(enlarged_rows(_planes(spatial, linear=True), spatial), enlarged_back(spatial))


def _pool(spatial: int, *, linear: bool = False) -> Rule:
    return Rule(_planes(spatial, linear=linear), or_empty)


# --- pooling windows that slide along cut dims ----------------------------------------------------------------------


def _per_dim(call: OpCall, name: str, count: int) -> list[int]:
    value = call.get(name, [1])
    return [*value] * (count if len(value) == 1 else 1)


def _windows(call: OpCall, spatial: int) -> dict[int, Sliding]:
    """For every spatial dim its windows; averages only where every window counts alike."""
    source, pooled = call["self"], call.get("grad_output") or call.outputs[0]
    if any(argument.is_out for argument in call.op._schema.arguments):  # targets would be those of the widened pieces
        return {}
    if "kernel_size" not in call.bound:
        return _equal_windows(source, pooled, spatial)
    kernel, padding, dilation = (_per_dim(call, n, spatial) for n in ("kernel_size", "padding", "dilation"))
    stride = _per_dim(call, "stride", spatial) if call["stride"] else kernel
    found = {}
    for i in range(spatial):
        dim = source.ndim - spatial + i
        sliding = Sliding(source.shape[dim], pooled.shape[dim], kernel[i], stride[i], padding[i], dilation[i])
        if "max" in call.op.__name__ or _counts_alike(call, sliding):
            found[dim] = sliding
    return found


def _equal_windows(source: TensorMeta, pooled: TensorMeta, spatial: int) -> dict[int, Sliding]:
    """The windows of adaptive pooling, along the dims where they are equally long and do not overlap."""
    dims = range(source.ndim - spatial, source.ndim)
    sizes = [(d, source.shape[d], pooled.shape[d]) for d in dims]
    return {d: Sliding(n, made, n // made, n // made) for d, n, made in sizes if made and n % made == 0}


def _counts_alike(call: OpCall, sliding: Sliding) -> bool:
    """Whether every window of an average divides by the same number along a dim."""
    if call["divisor_override"] is not None:
        return True
    overhangs = sliding.reads((0, sliding.made))[1] > sliding.length + sliding.padding
    return not overhangs and (call["count_include_pad"] or sliding.padding == 0)


def _pooled(spatial: int, *, linear: bool = False) -> Callable[[OpCall], list[Row]]:
    """Rows of planes, then one per spatial dim: what has the result's size lies as the windows do."""
    planes = _planes(spatial, linear=linear)

    def rows(call: OpCall) -> list[Row]:
        found, source = planes(call), call["self"]
        names = [a.name for a in call.op._schema.arguments if isinstance(call.get(a.name), TensorMeta)]
        for dim, sliding in _windows(call, spatial).items():
            whole, pooled = S(dim), S(dim, cut=sliding)
            inputs = tuple(whole if name == "self" else pooled for name in names)
            outputs = tuple(whole if "grad_output" in names else pooled for _ in call.outputs)
            slab = source.dtype.itemsize * prod(source.shape) // max(source.shape[dim], 1)
            found.append(Row(inputs, outputs, traffic=max(1, sliding.overlap * slab)))
        return found

    return rows


def _halos(call: OpCall, source: Spec, spatial: int) -> list[Halo]:
    return [Halo(source, dim, w) for dim, w in _windows(call, spatial).items() if cutting(source, (dim,))]


def _on_piece(call: OpCall, halos: Sequence[Halo], spatial: int) -> LocalFunction:
    """The operator without padding along the cut dims: their pieces are padded one by one."""
    if "output_size" in call.bound:
        made = [*call.outputs[0].shape]
        for halo in halos:
            made[halo.dim] = halo.makes()
        return replacing(call, output_size=made[-spatial:])
    if "padding" not in call.bound:
        return call.op
    padding = _per_dim(call, "padding", spatial)
    for halo in halos:
        padding[halo.dim - (call["self"].ndim - spatial)] = 0
    return replacing(call, padding=padding)


def _pool_local(spatial: int) -> Callable[[LocalCall], LocalFunction | None]:
    def local(decided: LocalCall) -> LocalFunction | None:
        call, source = decided.call, decided.inputs[0]
        halos = _halos(call, source, spatial)
        if not halos:
            return or_empty(decided)
        largest, empty = "max" in call.op.__name__, 0 in decided.outputs[0].local_shape
        pool = zeros(decided) if empty else _on_piece(call, halos, spatial)

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            fill = (-inf if x.is_floating_point() else torch.iinfo(x.dtype).min) if largest else 0.0
            wide = widened(x, halos, fill)
            made = pool(wide, *args, **kwargs)
            if empty or not largest:
                return made
            return made[0], _moved(made[1], wide.shape[-spatial:], source.shape[-spatial:], halos, 1)

        return run

    return local


def _moved(indices: Tensor, sizes: Sequence[int], wanted: Sequence[int], halos: Sequence[Halo], sign: int) -> Tensor:
    """Positions in a plane of `sizes` as positions in one of `wanted` sizes; `sign` 1 from pieces to the whole."""
    count = len(sizes)
    first = {halo.dim - halo.spec.ndim + count: sign * halo.widened()[0] for halo in halos}
    total, scale = torch.zeros_like(indices), 1
    for i in reversed(range(count)):
        place = (indices % sizes[i] + first.get(i, 0)).clamp_(0, wanted[i] - 1)
        indices = indices // sizes[i]
        total += place * scale
        scale *= wanted[i]
    return total


def _pool_back_local(spatial: int) -> Callable[[LocalCall], LocalFunction | None]:
    def local(decided: LocalCall) -> LocalFunction | None:
        call, (gradient, source) = decided.call, decided.inputs[:2]
        halos = _halos(call, source, spatial)
        if not halos:
            return or_empty(decided)
        shape = list(source.local_shape)
        for halo in halos:
            shape[halo.dim] = halo.widened()[1] - halo.widened()[0]
        empty, largest = 0 in gradient.local_shape, "max" in call.op.__name__
        back = _on_piece(call, halos, spatial)

        def run(gradient: Tensor, x: Tensor, *args: Any) -> Tensor:
            wide = gradient.new_zeros(shape)
            if largest and not empty:
                places = _moved(args[-1], source.shape[-spatial:], shape[-spatial:], halos, -1)
                wide.flatten(-spatial).scatter_add_(-1, places.flatten(-spatial), gradient.flatten(-spatial))
            elif not empty:
                wide = back(gradient, wide, *args)
            return narrowed(wide, halos)

        return run

    return local


def _fractional(call: OpCall) -> list[Row]:
    """`fractional_max_pool`: the random samples have batch and channels too, spelt (N, C, spatial)."""
    source, samples = call.tensors
    missing = 3 - samples.ndim
    batched = source.ndim - (2 if "2d" in call.op.__name__ else 3) == 2
    rows = []
    for d in range(2 if batched else 1):
        own = d + (0 if batched else 1) - missing
        if samples.shape[own] == source.shape[d]:
            rows.append(Row((S(d), S(own)), (S(d), S(d))))
    return rows


IMAGE: Table = family(
    {
        "max_pool2d_with_indices": Rule(_pooled(2), _pool_local(2)),
        "max_pool3d_with_indices": Rule(_pooled(3), _pool_local(3)),
        "max_pool2d_with_indices_backward": Rule(_pooled(2, linear=True), _pool_back_local(2)),
        "max_pool3d_with_indices_backward": Rule(_pooled(3, linear=True), _pool_back_local(3)),
        "avg_pool2d": Rule(_pooled(2, linear=True), _pool_local(2)),
        "avg_pool3d": Rule(_pooled(3, linear=True), _pool_local(3)),
        "avg_pool2d_backward": Rule(_pooled(2, linear=True), _pool_back_local(2)),
        "avg_pool3d_backward": Rule(_pooled(3, linear=True), _pool_back_local(3)),
        "adaptive_max_pool2d": Rule(_pooled(2), _pool_local(2)),
        "adaptive_max_pool3d": Rule(_pooled(3), _pool_local(3)),
        "adaptive_max_pool2d_backward": Rule(_pooled(2, linear=True), _pool_back_local(2)),
        "adaptive_max_pool3d_backward": Rule(_pooled(3, linear=True), _pool_back_local(3)),
        "max_unpool2d": _pool(2),
        "max_unpool3d": _pool(3),
        "fractional_max_pool2d fractional_max_pool3d": Rule(_fractional, or_empty),
        "fractional_max_pool2d_backward": _pool(2, linear=True),
        "fractional_max_pool3d_backward": _pool(3, linear=True),
        "_adaptive_avg_pool2d": Rule(_pooled(2, linear=True), _pool_local(2)),
        "_adaptive_avg_pool3d": Rule(_pooled(3, linear=True), _pool_local(3)),
        "_adaptive_avg_pool2d_backward": Rule(_pooled(2, linear=True), _pool_back_local(2)),
        "_adaptive_avg_pool3d_backward": Rule(_pooled(3, linear=True), _pool_back_local(3)),
        "avg_pool1d": _pool(1, linear=True),
        "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d": _enlarging(1),
        "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d": _enlarging(2),
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa": _enlarging(2),
        "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d": _enlarging(3),
        "upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward": _reducing(1),
        "upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward": _reducing(2),
        "upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward": _reducing(2),
        "upsample_nearest3d_backward _upsample_nearest_exact3d_backward upsample_trilinear3d_backward": _reducing(3),
        "im2col col2im": Rule(_columns, or_empty),
        "pixel_shuffle": Rule(_pixels("upscale_factor", up=True), or_empty),
        "pixel_unshuffle": Rule(_pixels("downscale_factor", up=False), or_empty),
        "channel_shuffle native_channel_shuffle": Rule(_shuffled, or_empty),
        "grid_sampler_2d grid_sampler_3d": Rule(_sampled, or_empty),
        "grid_sampler_2d_backward grid_sampler_3d_backward": Rule(_sampled_backward, or_empty),
    }
)
