"""Sharding of operators on images: convolution, pooling, resampling, moves between dims.

The dims before the spatial dims may be sharded. In a convolution output channels may be sharded
too, and sharded input channels leave partial sums. Along a sharded spatial dim, ranks fetch the
border rows that their windows read. If an operator cannot run with windows in this way, its spatial
dims are replicated. To enlarge a sharded dim to a multiple of its size, a rank fetches the adjacent
rows, enlarges its rows together with these, and drops the outputs for the adjacent rows. At the
ends of the dim nothing is fetched, so the kernel treats the ends as in the global tensor. For
example, linear interpolation by 2:

    rank 1 holds rows 4 5 6 7, reads 3 4 5 6 7 8, enlarges them to 12 rows, keeps rows 2..9 of these
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import with_dependence

from ...layout.memory_order import contiguous_stride
from ...layout.spec import Spec
from ...layout.tensor_meta import TensorMeta
from ..exchange import Halos, Windows, halo_traffic, per_dim, windows_of
from ..language.local_ops import in_every_form, moved_between_boxes, sharding_axes, with_arguments
from ..language.notation import product, rows_sharded_alike
from ..language.op_call import OpCall, P, R, Row, S, Traffic
from ..language.rule import LocalCall, LocalFunction, Rule, Table, backward, contribution, family


def spatial_dims(call: OpCall) -> int:
    """Return the number of spatial dims of an operator, by its name: 2 for `max_pool2d`."""
    name = call.op.__name__
    return next(n for n in (1, 2, 3) if f"{n}d" in name)


def planes(call: OpCall) -> Iterator[Row]:
    """Yield rows for the leading dims that all operands share.

    The spatial dims are not sharded by these rows, because windows and reflecting pads read them.
    """
    operands = (*call.tensors, *call.outputs)
    free = min(t.ndim for t in operands) - spatial_dims(call)
    dims = range(call.outputs[0].ndim)
    unshared = [d for d in dims if d >= free or not _have_equal_sizes(operands, d)]
    return rows_sharded_alike(call, *unshared)


def _have_equal_sizes(tensors: Iterable[TensorMeta], dim: int) -> bool:
    return len({tensor.shape[dim] for tensor in tensors}) == 1


# --- pooling, resampling --------------------------------------------------------------------------

# The largest factor by which a sharded dim is enlarged. Kernels compute positions with float32
# scales: nearest neighbors are exact for factors up to 40, and 41 / 41 is rounded down.
LARGEST_FACTOR = 16
# The number of inputs that an output reads on either side of its own input.
BESIDE = {"nearest": 0, "linear": 1, "cubic": 2, "lanczos": 3}


def _takes_maximum(call: OpCall) -> bool:
    return "max" in call.op.__name__


def _windows(call: OpCall) -> dict[int, Windows]:
    """Return the windows of the spatial dims; for averages, only if all have the same divisor."""
    # `out=` targets would need the size of shards with halos.
    if call.schema.outs:
        return {}
    if "upsample" in call.op.__name__:
        return _windows_of_enlarged_dims(call)
    source = call["self"]
    pooled = call.get("grad_output") or call.outputs[0]
    spatial = spatial_dims(call)
    if "kernel_size" not in call.arguments:
        return _adaptive_windows(source, pooled, spatial)
    by_dim = windows_of(call, source, pooled, per_dim(call, "kernel_size", spatial))
    if _takes_maximum(call) or call["divisor_override"] is not None:
        return by_dim
    counts_padding = bool(call["count_include_pad"])
    return {d: windows for d, windows in by_dim.items() if _divides_alike(windows, counts_padding)}


def _adaptive_windows(source: TensorMeta, pooled: TensorMeta, spatial: int) -> dict[int, Windows]:
    """Return the windows of adaptive pooling, where they are equally long and do not overlap."""
    windows = {}
    for d in range(source.ndim - spatial, source.ndim):
        n = source.shape[d]
        outputs = pooled.shape[d]
        if outputs and n % outputs == 0:
            # Example: 8 inputs and 4 outputs have windows of 2 with a stride of 2.
            length = n // outputs
            windows[d] = Windows(n, outputs, length, length)
    return windows


def _divides_alike(windows: Windows, counts_padding: bool) -> bool:
    """Tell whether every window of an average divides by the same number."""
    # Example: 5 inputs in windows of 2 with ceil_mode are read up to position 6.
    _, last = windows.reads((0, windows.outputs))
    overhangs = last > windows.length + windows.padding
    return not overhangs and (counts_padding or windows.padding == 0)


def _windows_of_enlarged_dims(call: OpCall) -> dict[int, Windows]:
    """Return the windows of every spatial dim that is enlarged to a multiple of its size.

    Each input has the same number of outputs.
    """
    if call.get("align_corners") or "scale_factors" in call.arguments:
        return {}
    gradient = call.get("grad_output")
    spatial = spatial_dims(call)
    small = call.tensors[0].shape if gradient is None else call["input_size"]
    large = (gradient or call.outputs[0]).shape
    beside = next(reach for kind, reach in BESIDE.items() if kind in call.op.__name__)
    scale_names = ("scales",) if spatial == 1 else ("scales_d", "scales_h", "scales_w")[-spatial:]
    windows = {}
    for dim, name in enumerate(scale_names, len(small) - spatial):
        # Example: from 4 rows to 8 rows, the factor is 2.
        n = small[dim]
        factor = large[dim] // max(n, 1)
        is_multiple = factor * n == large[dim]
        is_scale = call.get(name) in (None, float(factor))
        if is_multiple and is_scale and 1 <= factor <= LARGEST_FACTOR:
            windows[dim] = Windows(n, large[dim], factor, factor, transposed=True, beside=beside)
    return windows


def window_rows(call: OpCall) -> Iterator[Row]:
    """Yield the rows of planes, then one row per spatial dim.

    Tensors of the size of the result are sharded like the result.
    """
    is_gradient = "grad_output" in call.places
    yield from planes(call)
    for dim, windows in _windows(call).items():
        whole = S(dim)
        result = S(dim, windows.stride) if windows.transposed else S(dim, map=windows)
        inputs = {name: whole if name in ("self", "input") else result for name in call.places}
        traffic = halo_traffic(windows, call.get("self", call.tensors[0]), dim)
        yield call.row(inputs, out=whole if is_gradient else result, traffic=traffic)


def _on_halos(local_call: LocalCall, halos: Halos) -> LocalFunction:
    """Return the operator for shards with halos, without padding along the dims with halos.

    The shards themselves are padded along these dims.
    """
    call = local_call.call
    spatial = spatial_dims(local_call.call)
    if "upsample" in call.op.__name__:
        windows = _windows(call)
        large = (call.get("grad_output") or call.outputs[0]).shape
        sizes = []
        for d in range(len(large) - spatial, len(large)):
            # Example: 6 rows with a factor of 2 are 12 rows.
            has_halo = d in halos.exchanges
            sizes.append(halos.shape[d] * windows[d].stride if has_halo else large[d])
        if "input_size" in call.arguments:
            return with_arguments(call, output_size=sizes, input_size=halos.shape)
        return with_arguments(call, output_size=sizes)
    if "output_size" in call.arguments:
        output_size = [*local_call.outputs[0].local_shape[-spatial:]]
        return with_arguments(call, output_size=output_size)
    return with_arguments(call, **halos.remaining_paddings(call, spatial))


def _run_with_halos(local_call: LocalCall) -> LocalFunction | None:
    """Run the operator, or its gradient, on a shard with halos.

    Other ranks send their part of the gradient of elements that their windows read.
    """
    call = local_call.call
    is_gradient = "grad_output" in call.places
    source = local_call.inputs[0]
    result = local_call.outputs[0]
    if is_gradient:
        source, result = result, source
    halos = Halos(source, _windows(call))
    if not halos and "input_size" not in call.arguments:
        return None
    is_empty = 0 in result.local_shape
    on_halos = contribution(local_call) if is_empty else _on_halos(local_call, halos)
    takes_maximum = _takes_maximum(call)
    spatial = spatial_dims(call)
    whole = source.shape[-spatial:]
    local = halos.shape[-spatial:]
    first = halos.first[-spatial:]

    def forwards(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        fill = _lowest(x.dtype) if takes_maximum else 0.0
        result = on_halos(halos.fetch(x, fill), *args, **kwargs)
        if is_empty:
            return result
        if not takes_maximum:
            return halos.crop_outputs(result)
        maxima, places = result
        global_places, _ = moved_between_boxes(places, local, whole, first)
        return maxima, global_places

    def backwards(gradient: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_empty:
            return halos.return_gradient(gradient.new_zeros(halos.shape))
        # The last argument is the places of the maxima.
        if takes_maximum:
            *others, places = args
            shift = [-n for n in first]
            local_places, _ = moved_between_boxes(places, whole, local, shift)
            args = (*others, local_places)
        # Only the shape of the input is read.
        if "self" in call.places:
            args = (gradient.new_empty(halos.shape), *args[1:])
        return halos.return_gradient(on_halos(halos.pad_gradient(gradient), *args, **kwargs))

    return backwards if is_gradient else forwards


def _lowest(dtype: torch.dtype) -> float:
    """Return the lowest value of a dtype."""
    return -inf if dtype.is_floating_point else torch.iinfo(dtype).min


def fractional_max_pool(call: OpCall) -> Iterator[Row]:
    """Yield the rows of a fractional max-pool, whose random samples are (N, C, spatial)."""
    source = call["self"]
    samples = call["random_samples"]
    # Example: for (C, H, W) it is 1, so dim 0 (channels) is dim 1 of the samples.
    new = 2 + spatial_dims(call) - source.ndim
    for d in range(2 - new):
        if samples.shape[d + new] == source.shape[d]:
            yield call.row(self=S(d), random_samples=S(d + new), out=S(d))


def _images(text: str, replicated: str = "") -> Rule:
    """Return the rule of a product in which sizes matter, linear in its first operand."""
    rule = product(text, linear=(0,), replicated=replicated, skip_empty=True)
    return replace(rule, sizes=None)


# --- convolution ----------------------------------------------------------------------------------

Case = dict[str, Any]


def _cases(call: OpCall) -> Iterator[tuple[Case, Traffic | None]]:
    """Yield entries of input, weight, bias and `out`, each with the local function's traffic."""
    source = call["input"]
    channel = _channel(call)
    groups = call["groups"]
    of_input = 0 if call["transposed"] else 1
    of_output = 1 - of_input
    if channel:
        yield {"input": S(0), "out": S(0)}, None
    if groups == 1:
        yield {"weight": S(of_output), "bias": S(0), "out": S(channel)}, None
        sums: Case = {"bias": P("sum"), "out": P("sum")}
        yield {"input": S(channel), "weight": S(of_input), **sums}, None
    else:
        # Example: 4 groups of 2 input channels and 3 output channels are sharded in 4 steps, each
        # of 2 input channels and 3 output channels. The weight is (12, 2, ...), with 4 steps of 3
        # along its first dim. If transposed, it is (8, 3, ...), with 4 steps of 2.
        first, second, *_ = call["weight"].shape
        unit = first // groups
        inputs = unit if call["transposed"] else second
        outputs = second if call["transposed"] else unit
        case: Case = {"input": S(channel, inputs), "bias": S(0, outputs)}
        case["out"] = S(channel, outputs)
        case["weight"] = S(0, unit)
        yield case, None
    for dim, windows in _windows_of_convolution(call).items():
        yield {"input": S(dim), "out": S(dim, map=windows)}, halo_traffic(windows, source, dim)


def _windows_of_convolution(call: OpCall) -> dict[int, Windows]:
    """Return the windows of every spatial dim; none for `out=` targets.

    The targets would have to be of the size of shards with halos.
    """
    result = call.get("grad_output") or call.outputs[0]
    may_have_targets = call["transposed"] or "output_mask" in call.arguments
    has_targets = bool(call.schema.outs) and may_have_targets
    if has_targets or 0 in call["weight"].shape:
        return {}
    kernel = call["weight"].shape[2:]
    return windows_of(call, call["input"], result, kernel, transposed=call["transposed"])


def _channel(call: OpCall) -> int:
    """Return the dim of channels, which is the first one if there is no batch."""
    return 1 if call["input"].ndim == call["weight"].ndim else 0


def convolution(call: OpCall) -> Iterator[Row]:
    for case, traffic in _cases(call):
        yield call.row(traffic=traffic, **case)
    for factor in ("input", "weight"):
        yield from call.keeping_partials(factor, "bias", ops=("sum", "avg"))


def convolution_backward(call: OpCall) -> Iterator[Row]:
    """Yield rows whose gradient is sharded as the result, replicated if the result is summed.

    Replicated inputs get partial sums.
    """
    for case, traffic in _cases(call):
        is_summed = isinstance(case["out"], P)
        gradients = [case.get(name, P("sum")) for name in ("input", "weight", "bias")]
        if is_summed:
            gradients[2] = R
        entries: Case = {name: case[name] for name in ("input", "weight") if name in case}
        entries |= {f"out{i}": entry for i, entry in enumerate(gradients)}
        yield call.row(entries, grad_output=R if is_summed else case["out"], traffic=traffic)


def _local_groups(call: OpCall, weight: Spec) -> int:
    """Return the number of groups on this rank."""
    groups = int(call["groups"])
    if groups == 1:
        return 1
    channels_of_group = max(weight.shape[0] // groups, 1)
    return weight.local_shape[0] // channels_of_group


def _in_global_memory_format(local_call: LocalCall) -> LocalFunction | None:
    """Return a local function whose result has the memory format of the global result.

    The kernel chooses a format by its operands, and shards may lead to another choice.
    """
    convolve = _convolve(local_call)
    result = local_call.outputs[0]
    specs = (result, *local_call.inputs[:2])
    are_contiguous = [spec.stride == contiguous_stride(spec.shape) for spec in specs]
    if all(are_contiguous) or local_call.call.schema.outs:
        return convolve
    wanted = torch.contiguous_format if are_contiguous[0] else torch.channels_last
    function = convolve or local_call.call.op
    return lambda *args, **kwargs: function(*args, **kwargs).contiguous(memory_format=wanted)


def _convolve(local_call: LocalCall) -> LocalFunction | None:
    """Convolve a shard with its halos; without elements to convolve, return only the bias.

    In a transposed convolution with halos, the bias is added after the outputs are cropped or
    filled.
    """
    call = local_call.call
    source, weight, *_ = local_call.inputs
    shape = local_call.outputs[0].local_shape
    halos = Halos(source, _windows_of_convolution(call))
    groups = _local_groups(call, weight)
    is_empty = 0 in (*weight.local_shape, *shape, *halos.shape)
    if not halos and not is_empty:
        return None if groups == call["groups"] else with_arguments(call, groups=groups)
    unpadded = halos.remaining_paddings(call, weight.ndim - 2)
    convolve = with_arguments(call, groups=groups, **unpadded)
    adds_bias_last = is_empty or (call["transposed"] and bool(halos))
    dims_behind_channel = len(shape) - 1 - _channel(call)
    per_channel = (-1, *(1,) * dims_behind_channel)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        wide = halos.fetch(x)
        if is_empty:
            result = with_dependence(x.new_zeros(shape), wide, weight)
        else:
            bias_of_kernel = None if adds_bias_last else bias
            result = halos.crop_outputs(convolve(wide, weight, bias_of_kernel, *args, **kwargs))
        if adds_bias_last and bias is not None:
            return result + bias.view(per_channel)
        return result

    return in_every_form(call, run) if is_empty else run


def _convolve_backward(local_call: LocalCall) -> LocalFunction | None:
    """Compute the gradients; if a shard is empty, they are zeros except for the bias.

    The gradient of the bias does not depend on input and weight.
    """
    call = local_call.call
    gradient, source, weight = local_call.inputs
    halos = Halos(source, _windows_of_convolution(call))
    channel = _channel(call)
    wants_input, wants_weight, wants_bias = call["output_mask"]
    is_empty = 0 in (*gradient.local_shape, *weight.local_shape, *halos.shape)
    channels = gradient.local_shape[channel]
    groups = _local_groups(call, weight)
    bias_sizes = call["bias_sizes"] and [channels]
    if not halos and not is_empty:
        has_all_channels = not sharding_axes(weight) and channels == gradient.shape[channel]
        changes = {} if has_all_channels else {"groups": groups, "bias_sizes": bias_sizes}
        return _without_unwanted(call, changes)
    sums_bias_apart = is_empty or (call["transposed"] and bool(halos))
    kernel_mask = [wants_input, wants_weight, wants_bias and not sums_bias_apart]
    unpadded = halos.remaining_paddings(call, weight.ndim - 2)
    sizes = {"groups": groups, "bias_sizes": bias_sizes}
    back = with_arguments(call, output_mask=kernel_mask, **sizes, **unpadded)
    other_dims = [d for d in range(gradient.ndim) if d != channel]

    def run(
        gradient: Tensor, x: Tensor, weight: Tensor, *args: Any, **_: Any
    ) -> tuple[Tensor | None, ...]:
        wide = halos.fetch(x)
        of_input: Tensor
        of_weight: Tensor
        of_bias: Tensor | None = None
        if is_empty:
            of_input = with_dependence(torch.zeros_like(wide), gradient)
            of_weight = with_dependence(torch.zeros_like(weight), gradient)
        else:
            of_input, of_weight, of_bias = back(halos.pad_gradient(gradient), wide, weight, *args)
        if sums_bias_apart:
            of_bias = gradient.sum(other_dims)
        results: list[Tensor | None] = [None, None, None]
        if wants_input:
            results[0] = halos.return_gradient(of_input)
        if wants_weight:
            results[1] = of_weight
        if wants_bias:
            results[2] = of_bias
        return tuple(results)

    return in_every_form(call, run)


def _without_unwanted(call: OpCall, changes: Mapping[str, Any]) -> LocalFunction | None:
    """Return the operator with other arguments, without the gradient of a frozen weight.

    On CPUs, oneDNN computes and returns it for float32 along with the gradient of the bias. Return
    None if the operator itself can run.
    """
    _, wants_weight, wants_bias = call["output_mask"]
    back = with_arguments(call, **changes)
    if wants_weight or not wants_bias or call.schema.outs:
        return back if changes else None

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        of_input, _, of_bias = back(*args, **kwargs)
        return of_input, None, of_bias

    return run


_MAXIMA = "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d"
_SUMS = (
    "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa"
)
_SAMPLED = "fractional_max_pool2d fractional_max_pool3d"
_PADS = (
    "reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad1d replication_pad2d replication_pad3d"
)

WINDOWED: Table = family(
    {
        "convolution": Rule(convolution, _in_global_memory_format),
        "convolution_backward": Rule(
            convolution_backward, _convolve_backward, linear="grad_output"
        ),
        # In im2col, k is the number of elements of a window. In pixel_unshuffle by 2, a channel of
        # 2 x 2 fine pixels becomes 4 channels of one coarse pixel.
        "im2col": _images("... c h w -> ... (c k) l", "h w"),
        "col2im": _images("... (c k) l -> ... c h w", "l"),
        "pixel_shuffle": _images("... (c r s) h w -> ... c (h r) (w s)"),
        "pixel_unshuffle": _images("... c (h r) (w s) -> ... (c r s) h w"),
        "channel_shuffle native_channel_shuffle": Rule(
            lambda call: rows_sharded_alike(call, 1), skip_empty=True
        ),
        _MAXIMA: Rule(window_rows, _run_with_halos, skip_empty=True),
        _SUMS: Rule(window_rows, _run_with_halos, skip_empty=True, linear="self input"),
        backward(f"{_MAXIMA} {_SUMS}"): Rule(
            window_rows, _run_with_halos, skip_empty=True, linear="grad_output"
        ),
        _PADS: Rule(planes, skip_empty=True, moves="self"),
        backward(f"{_PADS} {_SAMPLED}"): Rule(planes, skip_empty=True, linear="grad_output"),
        # Without `out=`, torch splits the adaptive one into operators on images.
        "avg_pool1d adaptive_avg_pool1d": Rule(planes, skip_empty=True, linear="self"),
        "max_unpool2d max_unpool3d": Rule(planes, skip_empty=True),
        _SAMPLED: Rule(fractional_max_pool, skip_empty=True),
        # n is the batch, c the channels, h and w the image, p and q the grid; t holds the places.
        "grid_sampler_2d": _images("n c h w, n p q t -> n c p q", "h w t"),
        "grid_sampler_3d": _images("n c d h w, n o p q t -> n c o p q", "d h w t"),
        "grid_sampler_2d_backward": _images(
            "n c p q, n c h w, n p q t -> n c h w, n p q t", "h w t"
        ),
        "grid_sampler_3d_backward": _images(
            "n c o p q, n c d h w, n o p q t -> n c d h w, n o p q t", "d h w t"
        ),
    }
)
