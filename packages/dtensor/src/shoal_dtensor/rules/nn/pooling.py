"""Sharding of pooling: the dims before the spatial ones, and spatial dims along which windows slide.

Along those, ranks fetch the border rows that their windows read; other spatial dims are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from ...layout.spec import Spec
from ...layout.tensor_meta import TensorMeta
from ..exchange.halo import Halo, SlidingWindows, halo_traffic, with_halos, without_halos
from ..language.local_ops import sharding_axes, with_arguments, zeros
from ..language.rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table
from ..language.rule_tables import family
from .planes import RowFunction, planes


def _per_dim(call: OpCall, name: str, count: int) -> list[int]:
    value = call.get(name, [1])
    return [*value] * (count if len(value) == 1 else 1)


def _windows(call: OpCall, spatial: int) -> dict[int, SlidingWindows]:
    """For every spatial dim its windows; averages only where every window counts alike."""
    source, pooled = call["self"], call.get("grad_output") or call.outputs[0]
    if call.schema.outs:  # the targets would be those of the shards with halos
        return {}
    if "kernel_size" not in call.bound:
        return _equal_windows(source, pooled, spatial)
    kernel, padding, dilation = (_per_dim(call, n, spatial) for n in ("kernel_size", "padding", "dilation"))
    stride = _per_dim(call, "stride", spatial) if call["stride"] else kernel
    by_dim = {}
    for i in range(spatial):
        dim = source.ndim - spatial + i
        windows = SlidingWindows(source.shape[dim], pooled.shape[dim], kernel[i], stride[i], padding[i], dilation[i])
        if "max" in call.op.__name__ or _counts_alike(call, windows):
            by_dim[dim] = windows
    return by_dim


def _equal_windows(source: TensorMeta, pooled: TensorMeta, spatial: int) -> dict[int, SlidingWindows]:
    """The windows of adaptive pooling, along the dims where they are equally long and do not overlap."""
    dims = range(source.ndim - spatial, source.ndim)
    sizes = [(d, source.shape[d], pooled.shape[d]) for d in dims]
    return {d: SlidingWindows(n, out, n // out, n // out) for d, n, out in sizes if out and n % out == 0}


def _counts_alike(call: OpCall, windows: SlidingWindows) -> bool:
    """Whether every window of an average divides by the same number along a dim."""
    if call["divisor_override"] is not None:
        return True
    overhangs = windows.reads((0, windows.outputs))[1] > windows.length + windows.padding
    return not overhangs and (call["count_include_pad"] or windows.padding == 0)


def _pool(spatial: int, *, linear: str = "") -> RowFunction:
    """Rows of planes, then one per spatial dim: what has the result's size is sharded as its windows are."""
    leading = planes(spatial, linear=linear)

    def pool(call: OpCall) -> Iterator[Row]:
        yield from leading(call)
        source = call["self"]
        for dim, windows in _windows(call, spatial).items():
            unpooled, pooled = S(dim), S(dim, map=windows)
            inputs: dict[str, Any] = {name: unpooled if name == "self" else pooled for name in call.places}
            result = unpooled if "grad_output" in call.places else pooled
            row_bytes = source.dtype.itemsize * prod(n for d, n in enumerate(source.shape) if d != dim)
            yield call.row(**inputs, out=result, traffic=halo_traffic(windows, row_bytes))

    return pool


def _halos(call: OpCall, source: Spec, spatial: int) -> list[Halo]:
    return [Halo(source, dim, w) for dim, w in _windows(call, spatial).items() if sharding_axes(source, (dim,))]


def _on_shard(call: OpCall, halos: Sequence[Halo], spatial: int) -> LocalFunction:
    """The operator without padding along the sharded dims: there, shards are padded with their halos."""
    if "output_size" in call.bound:
        size = [*call.outputs[0].shape]
        for halo in halos:
            size[halo.dim] = halo.outputs
        return with_arguments(call, output_size=size[-spatial:])
    if "padding" not in call.bound:
        return call.op
    padding = _per_dim(call, "padding", spatial)
    for halo in halos:
        padding[halo.dim - (call["self"].ndim - spatial)] = 0
    return with_arguments(call, padding=padding)


def _pool_local(spatial: int) -> Callable[[LocalCall], LocalFunction | None]:
    def local(decided: LocalCall) -> LocalFunction | None:
        call, source = decided.call, decided.inputs[0]
        halos = _halos(call, source, spatial)
        if not halos:
            return None
        largest, empty = "max" in call.op.__name__, 0 in decided.outputs[0].local_shape
        pool = zeros(decided) if empty else _on_shard(call, halos, spatial)

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            fill = (-inf if x.is_floating_point() else torch.iinfo(x.dtype).min) if largest else 0.0
            wide = with_halos(x, halos, fill)
            result = pool(wide, *args, **kwargs)
            if empty or not largest:
                return result
            return result[0], _moved(result[1], wide.shape[-spatial:], source.shape[-spatial:], halos, 1)

        return run

    return local


def _moved(indices: Tensor, sizes: Sequence[int], wanted: Sequence[int], halos: Sequence[Halo], sign: int) -> Tensor:
    """Positions in a plane of `sizes` as positions in one of `wanted` sizes; `sign` 1 from shards to the global plane.

    Element 5 of a (2, 4) shard that begins at row 3 of an (8, 4) plane is row 1, column 1, so element 17 of the plane.
    """
    count = len(sizes)
    first = {halo.dim - halo.spec.ndim + count: sign * halo.reads[0] for halo in halos}
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
            return None
        shape = list(source.local_shape)
        for halo in halos:
            shape[halo.dim] = halo.reads[1] - halo.reads[0]
        empty, largest = 0 in gradient.local_shape, "max" in call.op.__name__
        back = _on_shard(call, halos, spatial)

        def run(gradient: Tensor, x: Tensor, *args: Any) -> Tensor:
            wide = gradient.new_zeros(shape)
            if largest and not empty:
                places = _moved(args[-1], source.shape[-spatial:], shape[-spatial:], halos, -1)
                wide.flatten(-spatial).scatter_add_(-1, places.flatten(-spatial), gradient.flatten(-spatial))
            elif not empty:
                wide = back(gradient, wide, *args)
            return without_halos(wide, halos)

        return run

    return local


def fractional_max_pool(call: OpCall) -> Iterator[Row]:
    """The random samples have batch and channels too, spelt (N, C, spatial)."""
    source, samples = call["self"], call["random_samples"]
    missing = 3 - samples.ndim
    is_batched = source.ndim - (2 if "2d" in call.op.__name__ else 3) == 2
    for d in range(2 if is_batched else 1):
        own = d + (0 if is_batched else 1) - missing
        if samples.shape[own] == source.shape[d]:
            yield call.row(self=S(d), random_samples=S(own), out=S(d))


def _planewise(spatial: int, *, linear: str = "") -> Rule:
    return Rule(planes(spatial, linear=linear), skip_empty=True)


def _pooling(spatial: int, *, linear: str = "") -> Rule:
    return Rule(_pool(spatial, linear=linear), _pool_local(spatial), skip_empty=True)


def _pooling_backward(spatial: int) -> Rule:
    return Rule(_pool(spatial, linear="grad_output"), _pool_back_local(spatial), skip_empty=True)


POOLING: Table = family(
    {
        "max_pool2d_with_indices adaptive_max_pool2d": _pooling(2),
        "max_pool3d_with_indices adaptive_max_pool3d": _pooling(3),
        "max_pool2d_with_indices_backward adaptive_max_pool2d_backward": _pooling_backward(2),
        "max_pool3d_with_indices_backward adaptive_max_pool3d_backward": _pooling_backward(3),
        "avg_pool1d": _planewise(1, linear="self"),
        "avg_pool2d _adaptive_avg_pool2d": _pooling(2, linear="self"),
        "avg_pool3d _adaptive_avg_pool3d": _pooling(3, linear="self"),
        "avg_pool2d_backward _adaptive_avg_pool2d_backward": _pooling_backward(2),
        "avg_pool3d_backward _adaptive_avg_pool3d_backward": _pooling_backward(3),
        "max_unpool2d": _planewise(2),
        "max_unpool3d": _planewise(3),
        "fractional_max_pool2d fractional_max_pool3d": Rule(fractional_max_pool, skip_empty=True),
        "fractional_max_pool2d_backward": _planewise(2, linear="grad_output"),
        "fractional_max_pool3d_backward": _planewise(3, linear="grad_output"),
    }
)
