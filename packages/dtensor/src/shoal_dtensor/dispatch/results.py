"""DTensors around what local functions return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from .._torch import around
from ..layout.placements import Replicate
from ..layout.symbolic_sizes import has_symbols
from ..redistribute.execution.memory_format import in_memory_order, memory_order

if TYPE_CHECKING:
    from ..layout.spec import Spec


def wrap(cls: Any, local: torch.Tensor, spec: Spec) -> Any:
    """A DTensor around a local tensor with the layout of `spec`."""
    return around(cls, local, spec, False)


def mapped(result: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A result with something else in place of each of its tensors, in order."""
    if isinstance(result, torch.Tensor):
        return function(result)
    if isinstance(result, list | tuple):
        items = [mapped(item, function) for item in result]
        return items if isinstance(result, list) else tuple(items)
    return result


def wrap_dynamic(cls: Any, result: Any, like: Spec) -> Any:
    """Wrap results whose shapes depend on data: every rank has computed the same ones.  Sparse ones stay plain."""
    everywhere = like.with_(placements=(Replicate(),) * like.mesh.ndim)

    def wrapped(local: torch.Tensor) -> Any:
        if local.layout is not torch.strided:
            return local
        return wrap(cls, local, everywhere.with_(shape=local.shape, stride=local.stride(), dtype=local.dtype))

    return mapped(result, wrapped)


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


def in_order(result: Any, outputs: Sequence[Spec], aliased: Sequence[int | None]) -> Any:
    """A result, its fresh tensors in the memory order of the global ones."""
    placed = zip(outputs, aliased, strict=True)

    def ordered(local: torch.Tensor) -> torch.Tensor:
        spec, alias = next(placed)
        return local if alias is not None else in_memory_order(spec)(local)

    return mapped(result, ordered)
