"""The layouts of a torch function's results, from the layouts of its arguments.

Each function is run once for each combination of layouts, on DTensors without memory: the layouts
of the results of this run are the layouts of the local results. Sizes in arguments are sizes of
shards, and are replaced by global sizes before (`global_sizes`).

For example, 2 ranks hold shards (4, 6) of a tensor of shape (8, 6), in the layout S(0). For
`x.transpose(0, 1)`, a DTensor of shape (8, 6) without memory is transposed. The result has the
layout S(1), so the local result of shape (6, 4) is a shard of (6, 8).

Only layouts are considered, not values. A function that mixes the elements of shards (a softmax
over sharded features) is taken to compute what its author intended, and its result is a shard like
its input. All decisions depend only on specs and global sizes, so they are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from .._torch.tensors import pytree
from ..dispatch.global_call import replicated_spec, specs_in
from ..errors import LayoutError
from ..layout.boxes import spans
from ..layout.spec import Spec
from ..layout.tensor_meta import flatten
from ..tensor.dtensor import DTensor
from .global_sizes import (
    MAKING,
    RESHAPING,
    SpecCall,
    expand_call,
    reshape_call,
    spec_of_new_tensor,
)
from .layouts import (
    WAY_OUT,
    LocalLayout,
    UnknownLayoutError,
    known_spec,
    shard_sizes_along,
)

_MOST_ENTRIES = 4096
# layouts of the results of functions, by the function and the layouts of its arguments
_cached_layouts: dict[Hashable, tuple[LocalLayout, ...]] = {}


def infer_layouts(
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outs: Sequence[Tensor],
    layouts: Sequence[LocalLayout],
) -> Sequence[LocalLayout]:
    """Return the layouts of the tensors that a function returned.

    Args:
        name: the name of the function.
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outs: the local tensors that it returned.
        layouts: the layouts of the tensors among its arguments. At least one of them does not count
            as equal on all ranks.

    Raises:
        LayoutError: random numbers that are equal on all ranks are combined with shards, and the
            layout of the result is unknown.
    """
    for layout in layouts:
        if layout.unknown_reason:
            return _layouts_from_unknown(layout, args, outs)
    specs = [layout.spec for layout in layouts if layout.spec is not None]
    if all(spec.replicated for spec in specs):
        # Replicated tensors have a spec only if they follow from random numbers.
        mesh = specs[0].mesh
        return [LocalLayout(replicated_spec(mesh, out), has_equal_draws=True) for out in outs]
    has_draws = any(layout.has_equal_draws for layout in layouts)
    metas = [(out.shape, out.dtype) for out in outs]
    key = (func, has_draws, *metas, _key_of((args, kwargs)))
    try:
        return _cached_layouts[key]
    except (KeyError, TypeError):
        pass
    spec_args, spec_kwargs = pytree.tree_map(_spec_or_value, (tuple(args), dict(kwargs)))
    call = SpecCall(name, func, spec_args, spec_kwargs)
    results = _layouts_from_call(call, outs, has_draws)
    if len(_cached_layouts) < _MOST_ENTRIES:
        # Some arguments cannot be part of a key.
        with suppress(TypeError):
            _cached_layouts[key] = results
    return results


def _spec_or_value(value: Any) -> Any:
    return known_spec(value) or value


def _key_of(value: Any) -> Hashable:
    """Return all properties of an argument that a layout can depend on, as part of a key."""
    if isinstance(value, Tensor):
        return known_spec(value) or (value.shape, value.stride(), value.dtype)
    if type(value) in (tuple, list):
        return tuple(map(_key_of, value))
    if type(value) is dict:
        return tuple((name, _key_of(item)) for name, item in value.items())
    if type(value) is slice:
        return value.start, value.stop, value.step
    # The type tells values that are equal apart, such as 1 and True.
    return type(value), value


# --- a run on DTensors without memory -------------------------------------------------------------


def _layouts_from_call(
    call: SpecCall, outs: Sequence[Tensor], has_draws: bool
) -> tuple[LocalLayout, ...]:
    """Return the layouts of results; `has_draws` tells whether an argument has equal draws."""
    try:
        specs = _specs_from_call(call, outs)
    except UnknownLayoutError as error:
        if has_draws:
            raise LayoutError(
                f"{call.name}: equal random numbers on all ranks are combined with shards of "
                f"different elements ({error}). Draw them with the sharded tensor (rand_like, "
                f"dropout). {WAY_OUT}"
            ) from error
        return (LocalLayout(unknown_reason=f"{call.name}: {error}"),) * len(outs)
    return tuple(LocalLayout(spec, has_equal_draws=has_draws) for spec in specs)


def _specs_from_call(call: SpecCall, outs: Sequence[Tensor]) -> list[Spec]:
    """Return the specs of the global tensors that the local results `outs` are shards of."""
    if call.name in MAKING:
        return [spec_of_new_tensor(call.args[0], outs[0])]
    if call.name in RESHAPING:
        call = reshape_call(call, outs[0])
    elif call.name == "expand":
        call = expand_call(call, outs[0])
    # Imported here, because only the first call of a function with these layouts needs it.
    from .shadow_calls import run_without_memory

    inputs = specs_in((call.args, call.kwargs))
    mesh = inputs[0].mesh
    try:
        results: list[Any] = run_without_memory(mesh, call.function, call.args, call.kwargs)
    except Exception as error:
        # An error of any type is the reason why the layout is unknown.
        raise UnknownLayoutError(str(error).partition("\n")[0]) from error
    if len(results) != len(outs) or not all(isinstance(result, DTensor) for result in results):
        raise UnknownLayoutError("it returns another result for DTensors")
    specs: list[Spec] = [result.spec for result in results]
    for spec, out in zip(specs, outs, strict=True):
        _check_result(spec, out, inputs)
    return [spec.with_(dtype=out.dtype) for spec, out in zip(specs, outs, strict=True)]


def _check_result(spec: Spec, out: Tensor, inputs: Sequence[Spec]) -> None:
    """Raise an error if the local result `out` is not this rank's shard of the global result."""
    if spec.partials:
        raise UnknownLayoutError("ranks hold summands of it")
    for axis, placement in enumerate(spec.placements):
        if placement.is_shard() and not _has_fractions_of_input(spec, axis, inputs):
            raise UnknownLayoutError("it takes a part of a sharded dim")
    if spec.local_shape != out.shape:
        raise UnknownLayoutError(f"its shape {tuple(out.shape)} is not that of a shard of {spec}")


def _has_fractions_of_input(spec: Spec, axis: int, inputs: Sequence[Spec]) -> bool:
    """Tell whether each rank along an axis holds the same fraction of the result as of some input.

    This is not so if a function has selected a part of the input. For example, shards of 2 and 2
    elements are half of the result, like shards of 4 and 4. The shards 3 and 0 of x[:3] are not.
    """
    sizes = shard_sizes_along(spec, axis)
    return any(
        _are_equal_fractions(sizes, shard_sizes_along(operand, axis))
        for operand in inputs
        if operand.placements[axis].is_shard()
    )


def _are_equal_fractions(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Tell whether ranks with these sizes have the same fractions of two sums."""
    total = sum(sizes)
    total_of_others = sum(others)
    # The fractions are compared as products, without division.
    return all(
        size * total_of_others == other * total for size, other in zip(sizes, others, strict=True)
    )


# --- blocks of a fused output ---------------------------------------------------------------------


def _layouts_from_unknown(
    layout: LocalLayout, args: Sequence[Any], outs: Sequence[Tensor]
) -> list[LocalLayout]:
    """Return the layouts of results if an argument has an unknown layout.

    Views of a fused output that are its blocks have a layout. Other results do not.
    """
    if layout.block_specs:
        fused_output = next(flatten(args))
        layouts_of_blocks = _layouts_of_blocks(fused_output, layout.block_specs, outs)
        if layouts_of_blocks:
            return layouts_of_blocks
    return [LocalLayout(unknown_reason=layout.unknown_reason)] * len(outs)


def _layouts_of_blocks(
    fused_output: Tensor, block_specs: Sequence[Spec], outs: Sequence[Tensor]
) -> list[LocalLayout]:
    """Return for each view of a fused output the layout of the block that it is.

    Return [] if a view is another part of the output. For example, a fused output (3, 5, 12) holds
    a block of 8 and one of 4 features. The views [..., :8] and [..., 8:] are blocks.
    """
    block_spans = spans(spec.local_shape[-1] for spec in block_specs)
    block_at = dict(zip(block_spans, block_specs, strict=True))
    layouts: list[LocalLayout] = []
    start = 0
    for out in outs:
        has_same_strides = out.stride() == fused_output.stride()
        if not has_same_strides or out.shape[:-1] != fused_output.shape[:-1]:
            return []
        # Several views follow each other; a single view may be anywhere.
        if len(outs) == 1:
            distance = out.storage_offset() - fused_output.storage_offset()
            start = distance // fused_output.stride(-1)
        stop = start + out.shape[-1]
        if (start, stop) not in block_at:
            return []
        layouts.append(LocalLayout(block_at[start, stop]))
        start = stop
    return layouts
