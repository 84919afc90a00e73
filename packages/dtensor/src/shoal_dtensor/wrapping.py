"""DTensors around what local functions return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._torch import make_wrapper
from .placements import Replicate
from .spec import Spec, TensorMeta

__all__ = ["check_local", "replace_tensors", "tensors_in", "wrap", "wrap_all", "wrap_dynamic"]


def wrap(cls: Any, local: torch.Tensor, spec: Spec) -> Any:
    """A DTensor around a local tensor that lies as `spec` says."""
    result = make_wrapper(cls, spec.shape, spec.stride, None, None, local.dtype, torch.strided, local.device)
    result._local_tensor = local
    result._spec = spec
    return result


def wrap_all(cls: Any, result: Any, outputs: Iterator[tuple[Spec, int | None]], originals: Sequence[Any]) -> Any:
    """Wrap every tensor of a result in order; an output that aliases a written input is that input itself."""
    if isinstance(result, torch.Tensor):
        spec, index = next(outputs)
        return wrap(cls, result, spec) if index is None else originals[index]
    if isinstance(result, list | tuple):
        made = [wrap_all(cls, item, outputs, originals) for item in result]
        return made if isinstance(result, list) else tuple(made)
    return result


def wrap_dynamic(cls: Any, result: Any, originals: Sequence[Any]) -> Any:
    """Wrap results whose shapes depend on data: every rank has computed the same ones."""
    mesh = next(item._spec.mesh for item in originals if isinstance(item, cls))
    if isinstance(result, torch.Tensor):
        spec = Spec(mesh, (Replicate(),) * mesh.ndim, result.shape, result.stride(), result.dtype)
        return wrap(cls, result, spec)
    if isinstance(result, list | tuple):
        return type(result)(wrap_dynamic(cls, item, originals) for item in result)
    return result


def check_local(op: object, made: Any) -> None:
    """Assert that the local tensors of a result are what their specs say: a rule that errs must not go on unseen.

    Run at the first call of every decision; later calls of it have the same shapes.
    """
    for item in tensors_in([made]):
        spec = getattr(item, "_spec", None)
        if spec is not None and spec.coordinate is not None:
            local = item._local_tensor
            right = local.shape == spec.local_shape and local.dtype == spec.dtype
            assert right, (
                f"the rule of {op} is wrong: its local result is {local.dtype} of shape {tuple(local.shape)} where "
                f"{spec!r} has {tuple(spec.local_shape)}; please report it"
            )


def replace_tensors(value: Any, tensors: Iterator[Any]) -> Any:
    """A structure with its tensors replaced, in order."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    return [replace_tensors(item, tensors) for item in value] if isinstance(value, list | tuple) else value


def tensors_in(values: Any) -> Iterator[Any]:
    """The tensors of a structure, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple) and not isinstance(value, TensorMeta | torch.Size):
            yield from tensors_in(value)
