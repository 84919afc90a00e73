"""DTensors around what local functions return; writes and views of one storage.

Of these: checks before an operator writes, alike on all ranks; views that change a tensor's own shape (`squeeze_`,
`t_`); and views that had to be redistributed.  The latter share no memory with their base, and follow it all the same:
the base's version says whether it was written to since, and then the view's values are taken from it again before
anything reads them.  All ranks write and read in the same order, so they do this at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._torch import OpOverload, around, change_shape, count_write, has_views, is_tracing, view_of
from ..errors import InPlaceError
from ..layout.placements import Replicate
from ..layout.tensor_meta import TensorMeta, flatten, has_symbols, mapped, memory_order
from ..redistribute.execution.execute import in_memory_order
from .decision import ResultKind

if TYPE_CHECKING:
    from ..layout.spec import Spec
    from ..rules.language.rule import OpCall


def result_kind(call: OpCall) -> ResultKind:
    """What becomes of the result of a local call."""
    schema, aliased = call.schema, call.aliased
    if not call.outputs:
        return ResultKind.NONE
    if schema.is_list == (False,) and schema.returns_only_tensors:
        if aliased == (None,):
            return ResultKind.ONE
        return ResultKind.FIRST if aliased == (0,) and isinstance(call.args[0], TensorMeta) else ResultKind.NESTED
    is_new = all(index is None for index in aliased)
    is_flat = schema.returns_only_tensors and len(schema.returns) in (1, len(call.outputs))
    return ResultKind.LIST if is_new and is_flat else ResultKind.NESTED


def wrap_dynamic(cls: Any, result: Any, like: Spec) -> Any:
    """Wrap results whose shapes depend on data: every rank has computed the same ones.  Sparse ones stay plain."""
    everywhere = like.with_(placements=(Replicate(),) * like.mesh.ndim)

    def wrapped(local: torch.Tensor) -> Any:
        if local.layout is not torch.strided:
            return local
        return around(cls, local, everywhere.with_(shape=local.shape, stride=local.stride(), dtype=local.dtype), False)

    return mapped(result, Tensor, wrapped)


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
    order = memory_order(spec.shape, spec.stride) or range(spec.ndim)
    steps = [local.stride(dim) for dim in order if local.shape[dim] != 1]
    return any(outer < inner for outer, inner in pairwise(steps))


def in_order(result: Any, outputs: Sequence[Spec], aliased: Sequence[int | None]) -> Any:
    """A result, its fresh tensors in the memory order of the global ones."""
    placed = zip(outputs, aliased, strict=True)

    def ordered(local: torch.Tensor) -> torch.Tensor:
        spec, alias = next(placed)
        return local if alias is not None else in_memory_order(spec)(local)

    return mapped(result, Tensor, ordered)


# --- writes and views of one storage ----------------------------------------------------------------------------------


def check_writes(op: OpOverload, specs: Sequence[Spec], writes: Sequence[int], copies: frozenset[int]) -> None:
    """Refuse writes to some of an operator's tensors that would not do what they do on one device.

    Raises:
        InPlaceError: if one of them is a view whose storage is not its base's (`copies`), or has elements that share
            memory.
    """
    if copies.intersection(writes):
        raise InPlaceError(
            f"{op} writes to a view whose base had to be redistributed to take it, so the write would not "
            f"reach the base; write to the base itself, or redistribute the base before taking the view"
        )
    for spec in (specs[i] for i in writes):
        # Kernels refuse this too, but not on ranks whose shard is empty, and the others would go on without those.
        if 0 not in spec.shape and _overlaps_itself(spec):
            raise InPlaceError(
                f"{op} writes to an expanded tensor of shape {tuple(spec.shape)} and stride {spec.stride}: several of "
                f"its elements are one place in memory; write to the tensor before expand or unfold, or to a clone"
            )


def _overlaps_itself(spec: Spec) -> bool:
    """Whether dims of a tensor are expanded, or reach into one another, as those of `unfold` with a smaller step."""
    dims = [(step, n) for step, n in zip(spec.stride, spec.shape, strict=True) if n > 1]
    if has_symbols(spec.stride):
        return any(step == 0 for step, _ in dims)
    reach = 0  # of the dims with smaller strides: shape (2, 3), strides (3, 1) reach 2, then 5
    for step, n in sorted(dims):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def check_outs(op: OpOverload, outs: Sequence[Spec], results: Sequence[TensorMeta]) -> None:
    """Refuse `out=` tensors of another shape than the results.

    Raises:
        InPlaceError: if there is one.
    """
    for out, meta in zip(outs, results, strict=False):
        if tuple(out.shape) != tuple(meta.shape):
            raise InPlaceError(
                f"{op} got out= of shape {tuple(out.shape)} for a result of shape {tuple(meta.shape)}: a DTensor is "
                f"not resized; pass one of the result's shape"
            )


def with_overlap_fallback(call: Callable[..., Any]) -> Callable[..., Any]:
    """A local function that writes to its first argument, also where another argument overlaps with it.

    Kernels refuse overlaps, but not on a rank whose shard has no or one element, and the others would stop without it.
    Where shards differ in size, the arguments are read before the first one is written to, on every rank.
    """

    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(first, *args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith("unsupported operation: some elements of the input tensor"):
                raise
        return call(first, *(arg.clone() if isinstance(arg, Tensor) else arg for arg in args), **kwargs)

    return run


def count_writes(places: Sequence[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let autograd know that these arguments were written to: what it has saved of them is out of date.

    Raises:
        InPlaceError: if a list that autograd records has a tensor twice, or beside a view of it: it would be given one
            history where there are two, as torch gives plain ones.
    """
    for place in places:
        written = args[place] if isinstance(place, int) else kwargs[place]
        count_write(written)
        if torch.is_grad_enabled() and isinstance(written, list | tuple) and _overlap(written):
            raise InPlaceError(
                "an in-place operator on a list wrote to a tensor twice, as itself and as a view of it, and autograd "
                "records it: the gradients would be wrong. Write to them one after the other, or under torch.no_grad()"
            )


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor is among several twice, or beside a view of it, and one of them has a gradient."""
    ids = {*map(id, tensors)}
    twice = len(ids) < len(tensors) or any(id(tensor._base) in ids for tensor in tensors)
    return twice and any(tensor.requires_grad for tensor in tensors)


def in_place_view(op: OpOverload) -> Callable[..., Any] | None:
    """A function that runs `op` on a DTensor, which becomes its own view; None if `op` is not a view in place.

    Autograd repeats the views of a tensor that has changed, here on the new shape: gradients would be wrong.

    Raises:
        InPlaceError: (the function) if the tensor has views and gradients are recorded.
    """
    view = view_of(op)
    if view is None:
        return None

    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if (torch.is_grad_enabled() or tensor.requires_grad) and not is_tracing() and has_views(tensor):
            raise InPlaceError(
                f"{op} changes the shape of {tensor._spec!r}, which has views or is saved for backward: gradients "
                f"through these would be wrong; take a view of it, as in x = x.{view.overloadpacket.__name__}(...)"
            )
        viewed = view(tensor, *args, **kwargs)
        change_shape(op, tensor, *args, **kwargs)
        tensor._become(viewed._local_tensor, viewed._spec)
        return tensor

    return run


class _ViewSource(NamedTuple):
    """Where the values of a redistributed view come from."""

    op: OpOverload  # the call that returned it; `base` is the first tensor among its arguments
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    item: int  # which of the call's outputs it is
    base: Any
    spec: Spec  # of the base at that time
    version: int  # of the base when the values were taken


def follow(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], views: Any) -> Any:
    """What a view operator has returned by copying; its tensors follow the base from here on."""
    base = next(flatten([*args, *kwargs.values()]))
    if not (is_tracing() or base.is_inference()):  # there nothing is written, or nobody counts
        for item, view in enumerate(flatten(views)):
            view._source = _ViewSource(op, args, kwargs, item, base, base._spec, base._version)
    return views


def following_base(slot: Any) -> property:
    """The attribute of such views that is read in place of the slot that holds their local tensor."""
    return property(
        lambda view: _current_values(view, slot.__get__(view)), lambda view, local: slot.__set__(view, local)
    )


def _current_values(view: Any, local: torch.Tensor) -> torch.Tensor:
    """The local tensor of such a view, whose values were `local` when it was last read.

    Raises:
        InPlaceError: if the base has changed its shape in place since.
    """
    source: _ViewSource | None = view.__dict__.get("_source")
    if source is None or source.base._version == source.version:
        return local
    base = source.base
    if base._spec is not source.spec:
        raise InPlaceError(
            f"a view by {source.op} of {source.spec!r} is read after its base became {base._spec!r}; "
            f"take the view again"
        )
    with torch.no_grad():
        again = [*flatten(source.op(*source.args, **source.kwargs))][source.item]
    view._local_tensor = values = again._local_tensor
    view._source = source._replace(version=base._version)
    return values  # type: ignore[no-any-return]  # a tensor
