"""DTensors around what local functions return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from .._torch import around
from ..layout.placements import Replicate
from ..layout.symbolic_sizes import has_symbols
from ..layout.tensor_meta import TensorMeta
from ..redistribute.execution.execute import in_memory_order, memory_order

if TYPE_CHECKING:
    from ..layout.spec import Spec


_LISTS, _ONE_TENSOR = (list, tuple), (TensorMeta, torch.Size)


def wrap(cls: Any, local: torch.Tensor, spec: Spec) -> Any:
    """A DTensor around a local tensor with the layout of `spec`."""
    return around(cls, local, spec, False)


def wrap_all(cls: Any, result: Any, outputs: Iterator[tuple[Spec, int | None]], originals: Sequence[Any]) -> Any:
    """Wrap every tensor of a result in order; an output that aliases a written input is that input itself."""
    if isinstance(result, torch.Tensor):
        spec, index = next(outputs)
        return wrap(cls, result, spec) if index is None else originals[index]
    if isinstance(result, list | tuple):
        wrapped = [wrap_all(cls, item, outputs, originals) for item in result]
        return wrapped if isinstance(result, list) else tuple(wrapped)
    return result


def wrap_dynamic(cls: Any, result: Any, originals: Sequence[Any]) -> Any:
    """Wrap results whose shapes depend on data: every rank has computed the same ones.  Sparse ones stay plain."""
    if isinstance(result, torch.Tensor) and result.layout is not torch.strided:
        return result
    if isinstance(result, torch.Tensor):
        spec = next(item._spec for item in originals if isinstance(item, cls))
        everywhere = spec.with_(placements=(Replicate(),) * spec.mesh.ndim)
        return wrap(cls, result, everywhere.with_(shape=result.shape, stride=result.stride(), dtype=result.dtype))
    if isinstance(result, list | tuple):
        return type(result)(wrap_dynamic(cls, item, originals) for item in result)
    return result


def with_kernel_metadata(
    op: object, outputs: Sequence[Spec], aliased: Sequence[int | None], locals_: Sequence[torch.Tensor]
) -> tuple[Spec, ...]:
    """The specs of an operator's outputs, held against what its first call returned on this rank.

    A replicated output is what the kernel says: for auxiliary outputs (of `embedding_bag`, for one) the meta kernel,
    which predicted the shape, and the device's kernel need not agree.  So is the dtype of all outputs but the first
    (torch 2.11 predicts float32 for attention's log-sums of float64).

    Raises:
        AssertionError: if a sharded or partial output is not what its spec says: the rule errs, and that must be seen.
    """
    specs = list(outputs)
    for i, (spec, alias, local) in enumerate(zip(outputs, aliased, locals_, strict=True)):
        if alias is not None or spec.coordinate is None:
            continue
        if local.shape == spec.local_shape and local.dtype == spec.dtype:
            continue
        if i and local.shape == spec.local_shape:
            specs[i] = spec.with_(dtype=local.dtype)
            continue
        assert spec.replicated, (
            f"the rule of {op} is wrong: its local result is {local.dtype} of shape {tuple(local.shape)} where "
            f"{spec!r} has {tuple(spec.local_shape)}; please report it"
        )
        specs[i] = spec.with_(shape=local.shape, stride=local.stride(), dtype=local.dtype)
    return tuple(specs)


def is_out_of_order(local: torch.Tensor, spec: Spec) -> bool:
    """Whether the dims of a fresh local result follow one another in memory otherwise than those of the global tensor.

    What is computed around a collective keeps the order of its input, where one device's kernel makes row-major.  Not
    asked of sizes that a compiler knows as symbols only.
    """
    if has_symbols((local.shape, local.stride())):
        return False
    order = memory_order(spec) or range(spec.ndim)
    steps = [local.stride(dim) for dim in order if local.shape[dim] != 1]
    return any(outer < inner for outer, inner in pairwise(steps))


def in_order(result: Any, outputs: Iterator[tuple[Spec, int | None]]) -> Any:
    """A result, its fresh tensors in the memory order of the global ones."""
    if isinstance(result, torch.Tensor):
        spec, alias = next(outputs)
        return result if alias is not None else in_memory_order(spec)(result)
    if isinstance(result, list | tuple):
        return type(result)([in_order(item, outputs) for item in result])
    return result


def tensors_in(values: Any) -> Iterator[Any]:
    """The tensors of a structure, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, _LISTS) and not isinstance(value, _ONE_TENSOR):
            yield from tensors_in(value)
