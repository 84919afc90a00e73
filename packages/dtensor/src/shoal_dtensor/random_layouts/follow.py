"""What torch functions do to the layouts of local tensors, remembered: a hot path, run for every call under a watch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from shoal_mesh import DeviceMesh

from ..errors import LayoutError
from ..layout.placements import Replicate
from ..layout.spec import Spec
from .layouts import UnknownLayoutError, results_of
from .local_layout import LocalLayout, layout_of, tensors_in

_MOST_KNOWN = 4096
_known: dict[Any, tuple[LocalLayout, ...]] = {}  # what functions did to layouts
WAY_OUT = (
    "Draw where the layout is known (before the function), let the module run on DTensors (use_local_output=False), or "
    "let every rank draw for itself: shoal_dtensor.random_mode('local')"
)


def followed(
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outs: Sequence[Tensor],
    layouts: Sequence[LocalLayout | None],
) -> Sequence[LocalLayout]:
    """The layouts of what a function returned, given those of its tensors."""
    for layout in layouts:
        if layout is not None and layout.unknown:
            taken = _taken_blocks(next(tensors_in(args)), layout, outs) if layout.blocks else []
            return taken or [LocalLayout(unknown=layout.unknown)] * len(outs)
    drawn = any(layout is not None and layout.drawn for layout in layouts)
    specs = [layout.spec for layout in layouts if layout is not None and layout.spec is not None]
    if all(spec.replicated for spec in specs):
        return [LocalLayout(replicated(specs[0].mesh, out), drawn=True) for out in outs]
    key: list[Any] = [func, *((out.shape, out.dtype) for out in outs)]
    _describe((args, kwargs), key)
    known = tuple(key)
    try:
        return _known[known]
    except (KeyError, TypeError):
        pass
    given = _with_specs((tuple(args), dict(kwargs)))
    try:
        results = tuple(LocalLayout(spec, drawn=drawn) for spec in results_of(name, func, given[0], given[1], outs))
    except UnknownLayoutError as error:
        if drawn:
            raise LayoutError(
                f"{name}: random numbers that every rank drew alike meet shards of other elements ({error}). Draw them "
                f"with the sharded tensor (rand_like, dropout). {WAY_OUT}"
            ) from error
        results = (LocalLayout(unknown=f"{name}: {error}"),) * len(outs)
    if len(_known) < _MOST_KNOWN:
        with suppress(TypeError):  # an argument that cannot be part of a key
            _known[known] = results
    return results


def replicated(mesh: DeviceMesh, tensor: Tensor) -> Spec:
    """The spec of a tensor that every rank holds."""
    return Spec(mesh, (Replicate(),) * mesh.ndim, tensor.shape, tensor.stride(), tensor.dtype)


def _describe(value: Any, key: list[Any]) -> None:
    """Append to a key all that a layout can depend on."""
    if isinstance(value, Tensor):
        layout = layout_of(value)
        spec = None if layout is None else layout.spec
        key.append((value.shape, value.stride(), value.dtype) if spec is None else spec)
    elif type(value) in (tuple, list):
        key.append(len(value))
        for item in value:
            _describe(item, key)
    elif type(value) is dict:
        for name, item in value.items():
            key.append(name)
            _describe(item, key)
    elif type(value) is slice:
        key.append((value.start, value.stop, value.step))
    else:
        key.append((type(value), value))


def _with_specs(value: Any) -> Any:
    """Arguments with specs in the place of tensors that have one."""
    if isinstance(value, Tensor):
        layout = layout_of(value)
        return value if layout is None or layout.spec is None else layout.spec
    if type(value) in (tuple, list):
        return type(value)(map(_with_specs, value))
    if type(value) is dict:
        return {name: _with_specs(item) for name, item in value.items()}
    return value


def _taken_blocks(source: Tensor, layout: LocalLayout, outs: Sequence[Tensor]) -> list[LocalLayout]:
    """The blocks that views of a fused output are, each; none if some view is another part of it."""
    taken: list[LocalLayout] = []
    starts, start = {}, 0
    for spec in layout.blocks:
        size = spec.local_shape[-1]
        starts[start, size] = spec
        start += size
    at = 0
    for out in outs:
        if out.ndim != source.ndim or out.stride() != source.stride() or out.shape[:-1] != source.shape[:-1]:
            return []
        at = at if len(outs) > 1 else (out.storage_offset() - source.storage_offset()) // source.stride(-1)
        block = starts.get((at, out.shape[-1]))
        if block is None:
            return []
        taken.append(LocalLayout(block))
        at += out.shape[-1]
    return taken
