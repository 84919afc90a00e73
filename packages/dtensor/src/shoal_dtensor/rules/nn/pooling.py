"""Sharding of pooling: the dims before the spatial ones, and spatial dims along which windows slide.

Along those, ranks fetch the border rows that their windows read; other spatial dims are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..exchange.halo import Halos, Windows, halo_traffic, per_dim, windows_of
from ..language.index_bounds import moved_between_boxes
from ..language.local_ops import with_arguments, zeros
from ..language.rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table
from ..language.rule_tables import family
from .planes import planes, spatial_dims


def _takes_maximum(call: OpCall) -> bool:
    return "max" in call.op.__name__


def _windows(call: OpCall) -> dict[int, Windows]:
    """For every spatial dim its windows; averages only where every window counts alike."""
    source, pooled, spatial = call["self"], call.get("grad_output") or call.outputs[0], spatial_dims(call)
    if call.schema.outs:  # the targets would be those of the shards with halos
        return {}
    if "kernel_size" not in call.bound:  # adaptive: where windows are equally long and do not overlap
        dims = range(source.ndim - spatial, source.ndim)
        sizes = [(d, source.shape[d], pooled.shape[d]) for d in dims]
        return {d: Windows(n, out, n // out, n // out) for d, n, out in sizes if out and n % out == 0}
    by_dim = windows_of(call, source, pooled, per_dim(call, "kernel_size", spatial))
    return {d: windows for d, windows in by_dim.items() if _takes_maximum(call) or _counts_alike(call, windows)}


def _counts_alike(call: OpCall, windows: Windows) -> bool:
    """Whether every window of an average divides by the same number along a dim."""
    if call["divisor_override"] is not None:
        return True
    overhangs = windows.reads((0, windows.outputs))[1] > windows.length + windows.padding
    return not overhangs and (call["count_include_pad"] or windows.padding == 0)


def pool(call: OpCall) -> Iterator[Row]:
    """Rows of planes, then one per spatial dim: what has the result's size is sharded as its windows are."""
    is_gradient = "grad_output" in call.places
    yield from planes(call, "grad_output" if is_gradient else "" if _takes_maximum(call) else "self")
    for dim, windows in _windows(call).items():
        unpooled, pooled = S(dim), S(dim, map=windows)
        inputs: dict[str, Any] = {name: unpooled if name == "self" else pooled for name in call.places}
        traffic = halo_traffic(windows, call["self"], dim)
        yield call.row(**inputs, out=unpooled if is_gradient else pooled, traffic=traffic)


def _on_halos(local_call: LocalCall, halos: Halos) -> LocalFunction:
    """The operator without padding along the dims with halos, which are the shards' padding."""
    call, spatial = local_call.call, spatial_dims(local_call.call)
    if "output_size" in call.bound:
        return with_arguments(call, output_size=[*local_call.outputs[0].local_shape[-spatial:]])
    return (
        with_arguments(call, padding=halos.unpadded(call, "padding", spatial)) if "padding" in call.bound else call.op
    )


def _pool(local_call: LocalCall) -> LocalFunction | None:
    call, source = local_call.call, local_call.inputs[0]
    halos, spatial, largest = Halos(source, _windows(call)), spatial_dims(call), _takes_maximum(call)
    if not halos:
        return None
    empty = 0 in local_call.outputs[0].local_shape
    on_halos = zeros(local_call) if empty else _on_halos(local_call, halos)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        fill = (-inf if x.is_floating_point() else torch.iinfo(x.dtype).min) if largest else 0.0
        result = on_halos(halos.fetch(x, fill), *args, **kwargs)
        if empty or not largest:
            return result
        sizes, first = (halos.shape[-spatial:], source.shape[-spatial:]), halos.first[-spatial:]
        return result[0], moved_between_boxes(result[1], *sizes, first)[0]

    return run


def _pool_backward(local_call: LocalCall) -> LocalFunction | None:
    call, (gradient, source) = local_call.call, local_call.inputs[:2]
    halos, spatial, empty = Halos(source, _windows(call)), spatial_dims(call), 0 in gradient.local_shape
    if not halos:
        return None
    back = _on_halos(local_call, halos)

    def run(gradient: Tensor, x: Tensor, *args: Any) -> Tensor:
        wide = gradient.new_zeros(halos.shape)
        if _takes_maximum(call) and not empty:
            sizes, here = (source.shape[-spatial:], halos.shape[-spatial:]), [-n for n in halos.first[-spatial:]]
            places, _ = moved_between_boxes(args[-1], *sizes, here)
            wide.flatten(-spatial).scatter_add_(-1, places.flatten(-spatial), gradient.flatten(-spatial))
        elif not empty:
            wide = back(gradient, wide, *args)
        return halos.return_gradient(wide)

    return run


def fractional_max_pool(call: OpCall) -> Iterator[Row]:
    """The random samples have batch and channels too, spelt (N, C, spatial)."""
    source, samples = call["self"], call["random_samples"]
    missing = 3 - samples.ndim
    is_batched = source.ndim - spatial_dims(call) == 2
    for d in range(2 if is_batched else 1):
        own = d + (0 if is_batched else 1) - missing
        if samples.shape[own] == source.shape[d]:
            yield call.row(self=S(d), random_samples=S(own), out=S(d))


_POOL = Rule(pool, _pool, skip_empty=True)
_POOL_BACKWARD = Rule(pool, _pool_backward, skip_empty=True)

POOLING: Table = family(
    {
        "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d": _POOL,
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward": _POOL_BACKWARD,
        "adaptive_max_pool2d_backward adaptive_max_pool3d_backward": _POOL_BACKWARD,
        "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d": _POOL,
        "avg_pool2d_backward avg_pool3d_backward": _POOL_BACKWARD,
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward": _POOL_BACKWARD,
        "avg_pool1d": Rule(partial(planes, linear="self"), skip_empty=True),
        "max_unpool2d max_unpool3d": Rule(planes, skip_empty=True),
        "fractional_max_pool2d fractional_max_pool3d": Rule(fractional_max_pool, skip_empty=True),
        "fractional_max_pool2d_backward fractional_max_pool3d_backward": Rule(
            partial(planes, linear="grad_output"), skip_empty=True
        ),
    }
)
