"""Decisions as data, the wrapping of results in DTensors, and views that follow their base.

Views that had to be redistributed do not share memory with their base, but they follow it: if the
base's version shows that it was written to since, the view's values are recomputed from it before
they are read. All ranks write and read in the same order, so they recompute at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._torch.compiling import is_tracing
from .._torch.operators import OpOverload, change_shape, has_views, makes_views, view_of
from ..errors import InPlaceError
from ..layout.memory_order import memory_order
from ..layout.spec import Spec
from ..layout.tensor_meta import TensorMeta, flatten, has_symbols, map_instances
from ..redistribute.execution.execute import in_memory_order
from ..redistribute.steps import Plan
from ..rules.language.op_call import OpCall, schema_of


class ResultKind(IntEnum):
    """The form of a local call's result, which determines how it becomes DTensors."""

    ONE = 0  # one new tensor
    FIRST = 1  # the first argument, written in place
    LIST = 2  # a list or tuple of new tensors
    NONE = 3  # no tensor at all
    NESTED = 4  # anything else
    # replicated tensors whose shapes are known only afterwards
    DYNAMIC = 5
    COMPOSITE = 6  # DTensors already
    # views that autograd ties to their base: one, or a list of them
    VIEW = 7
    VIEWS = 8
    # DTensors and plain tensors already, of a `foreach` call that runs group by group
    GROUPS = 9


# The place of a tensor among arguments: the position or name of the argument, and the index of the
# tensor if the argument is a list.
ArgumentPosition = tuple[int | str, int | None]


def container_of(place: ArgumentPosition, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the container of a tensor among the arguments, and its index or name in there."""
    argument, item = place
    container = args if isinstance(argument, int) else kwargs
    return (container, argument) if item is None else (container[argument], item)


@dataclass(slots=True, frozen=True, eq=False)
class Decision:
    """A decided call: redistribute inputs, call a function on local tensors, wrap its result."""

    call: Callable[..., Any]  # the function of local tensors
    result_kind: ResultKind  # the form of its result
    # the spec of every tensor output, flattened
    outputs: tuple[Spec, ...] = ()
    # for each output the flat index of the input that it is (in-place and `out=` forms), or None
    aliased: tuple[int | None, ...] = ()
    # arguments that an operator without a result writes to; torch does not count these writes
    unreported_writes: tuple[int | str, ...] = ()
    # whether a call needs more than `call`, as the following fields describe
    slow_path: bool = False
    # how inputs must be redistributed first
    moves: Mapping[ArgumentPosition, Plan] = field(default_factory=dict)
    # functions that refuse wrong values of an input before it is sliced, while every rank has all
    # of them, so that all ranks raise
    checks: Mapping[ArgumentPosition, Callable[[Tensor], None]] = field(default_factory=dict)
    # for each moved input that the call writes to, the plan back to its own layout
    write_backs: Mapping[ArgumentPosition, Plan] = field(default_factory=dict)
    # whether a view operator's output does not alias its input, because that was redistributed
    view_copied: bool = False
    # whether the operator does the same to every element of its lists, one after the other
    foreach: bool = False
    # whether the ranks compare the plain tensors among the inputs, in every call
    verifies_plain: bool = False
    # the purpose of the collectives, which debug modes and errors of the mesh layer repeat
    reason: str = ""
    notice: str = ""  # the warning when the call runs
    # the operator with its inputs, if the communication policy holds for its local function; else
    # empty
    watched: str = ""
    # torch's default dtype, if the dtypes of the outputs follow from it; else None
    default_dtype: torch.dtype | None = None
    # whether the slow path has only this dtype to compare
    only_compares_dtype: bool = False

    @classmethod
    def composite(cls, function: Callable[..., Any]) -> Decision:
        """Return a decision that calls a function on the DTensors, which runs other operators."""
        return cls(function, ResultKind.COMPOSITE, slow_path=True)

    @classmethod
    def in_groups(cls, function: Callable[..., Any]) -> Decision:
        """Return a decision that runs a `foreach` call group by group; plain tensors stay plain."""
        return cls(function, ResultKind.GROUPS, slow_path=True)

    def with_outputs(self, result: Any, function: Callable[[Tensor, Spec, int | None], Any]) -> Any:
        """Replace each tensor of a result by the return value of `function`.

        `function` gets the tensor, its spec, and the index of the input that it aliases, or None.
        """
        # `mapped` visits the tensors in the order of `outputs`, so each one takes the next pair.
        placed = zip(self.outputs, self.aliased, strict=True)
        return map_instances(result, Tensor, lambda local: function(local, *next(placed)))

    def describe(self, op: OpOverload, specs: Sequence[Any]) -> str:
        """Return a text for logs: the operator, the specs of its inputs, moves, and outputs."""
        moves = []
        for (argument, _), plan in self.moves.items():
            moves.append(f"\n  argument {argument}: {plan}")
        inputs = ", ".join(map(str, specs))
        outputs = ", ".join(map(str, self.outputs)) or self.result_kind.name.lower()
        return f"{op}({inputs}) -> {outputs}{''.join(moves)}"


def result_kind(call: OpCall) -> ResultKind:
    """Determine how the result of a local call becomes DTensors."""
    schema = call.schema
    aliased = call.aliased
    if not call.outputs:
        return ResultKind.NONE
    is_view = schema.is_view and makes_views(call.op)
    if schema.is_list == (False,) and schema.returns_only_tensors:
        if aliased == (None,):
            return ResultKind.VIEW if is_view else ResultKind.ONE
        is_first = aliased == (0,) and isinstance(call.args[0], TensorMeta)
        return ResultKind.FIRST if is_first else ResultKind.NESTED
    is_new = all(index is None for index in aliased)
    is_flat = schema.returns_only_tensors and len(schema.returns) in (1, len(call.outputs))
    if not (is_new and is_flat):
        return ResultKind.NESTED
    return ResultKind.VIEWS if is_view else ResultKind.LIST


def dtype_that_decides(call: OpCall) -> torch.dtype | None:
    """Return the default dtype if the call's output dtypes follow from it; None otherwise.

    Examples are `x * 2.5`, `x / 2` and `x.sqrt()` of integers: their outputs have fractions and
    their inputs do not.
    """
    if any(has_fractions(meta.dtype) for meta in call.tensors):
        return None
    if any(has_fractions(meta.dtype) for meta in call.outputs):
        return torch.get_default_dtype()
    return None


def has_fractions(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is a floating-point or complex dtype."""
    return dtype.is_floating_point or dtype.is_complex


def with_observed_outputs(op: OpOverload, decision: Decision, result: Any) -> tuple[Decision, Any]:
    """Correct a decision by the first result of its local call; return it and the result.

    Replicated outputs are taken from the kernel: for auxiliary outputs (of `embedding_bag`, for
    example) the meta kernel, which predicted the shape, and the device's kernel may differ. The
    dtype of all outputs except the first is taken from the kernel too (torch 2.11 predicts float32
    for attention's log-sums of float64). If a sharded or partial output differs from its spec, the
    rule is wrong: an AssertionError is raised.

    A result that is computed around a collective keeps the memory order of its input, although the
    kernel on one device makes a row-major result. Such a result is put in the order of its spec.
    """
    specs = [*decision.outputs]
    is_out_of_order = False
    outputs = zip(decision.outputs, decision.aliased, flatten(result), strict=True)
    for i, (predicted, alias, local) in enumerate(outputs):
        if alias is not None or predicted.coordinate is None:
            continue
        is_auxiliary = bool(i)
        specs[i] = _observed_spec(op, predicted, local, is_auxiliary=is_auxiliary)
        is_out_of_order = is_out_of_order or _is_out_of_order(local, specs[i])
    observed = decision
    if specs != [*decision.outputs]:
        observed = replace(decision, outputs=tuple(specs))
    if not is_out_of_order or schema_of(op).is_view:
        return observed, result

    def put_in_order(local: Tensor, spec: Spec, alias: int | None) -> Tensor:
        return local if alias is not None else in_memory_order(spec)(local)

    def run(*args: Any, **kwargs: Any) -> Any:
        return observed.with_outputs(decision.call(*args, **kwargs), put_in_order)

    return replace(observed, call=run), observed.with_outputs(result, put_in_order)


def _observed_spec(op: OpOverload, predicted: Spec, local: Tensor, *, is_auxiliary: bool) -> Spec:
    """Return the spec of an output whose local result is `local`; see `with_observed_outputs`."""
    has_shape = local.shape == predicted.local_shape
    has_dtype = local.dtype == predicted.dtype
    if has_shape and has_dtype:
        return predicted
    if is_auxiliary and has_shape:
        return predicted.with_(dtype=local.dtype)
    assert predicted.replicated, (
        f"the rule of {op} is wrong: its local result is {local.dtype} of shape "
        f"{tuple(local.shape)}, but {predicted!r} has {tuple(predicted.local_shape)}; please "
        "report this error"
    )
    return predicted.with_(shape=local.shape, stride=local.stride(), dtype=local.dtype)


def _is_out_of_order(local: torch.Tensor, spec: Spec) -> bool:
    """Tell whether a local result has its dims in another memory order than the global tensor.

    Symbolic sizes and strides are not compared.
    """
    if has_symbols((local.shape, local.stride())):
        return False
    order = memory_order(spec.shape, spec.stride) or range(spec.ndim)
    steps = [local.stride(dim) for dim in order if local.shape[dim] != 1]
    return any(outer < inner for outer, inner in pairwise(steps))


# --- writes and views of one storage --------------------------------------------------------------


def check_writes(
    op: OpOverload, specs: Sequence[Spec], writes: Sequence[int], copies: frozenset[int]
) -> None:
    """Refuse writes to copied views (`copies`), and to elements that share memory.

    A copied view does not share its storage with its base.
    """
    if copies.intersection(writes):
        raise InPlaceError(
            f"{op} writes to a view whose base had to be redistributed to take it, so the write "
            "would not reach the base; write to the base itself, or redistribute the base before "
            "taking the view"
        )
    for spec in (specs[i] for i in writes):
        # Kernels refuse this too, but not on ranks whose shard is empty, and these ranks would
        # continue alone.
        if 0 not in spec.shape and _overlaps_itself(spec):
            raise InPlaceError(
                f"{op} writes to an expanded tensor of shape {tuple(spec.shape)} and stride "
                f"{spec.stride}: several of its elements share one place in memory; write to the "
                "tensor before expand or unfold, or to a clone"
            )


def _overlaps_itself(spec: Spec) -> bool:
    """Tell whether a tensor's elements share memory: expanded dims or `unfold` with small steps."""
    strided_dims = zip(spec.stride, spec.shape, strict=True)
    dims = [(step, n) for step, n in strided_dims if n > 1]
    if has_symbols(spec.stride):
        return any(step == 0 for step, _ in dims)
    # The largest offset of an element along the dims with smaller strides. Example: shape (2, 3)
    # with strides (3, 1) reaches 2, then 5.
    reach = 0
    for step, n in sorted(dims):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def check_outs(op: OpOverload, outs: Sequence[Spec], results: Sequence[TensorMeta]) -> None:
    """Refuse `out=` tensors of another shape than the results."""
    for out, meta in zip(outs, results, strict=False):
        if tuple(out.shape) != tuple(meta.shape):
            raise InPlaceError(
                f"{op} got out= of shape {tuple(out.shape)} for a result of shape "
                f"{tuple(meta.shape)}: a DTensor cannot be resized; pass a DTensor of the "
                "result's shape"
            )


def with_overlap_fallback(
    call: Callable[..., Any], written: Sequence[int | str], *, shards_differ: bool
) -> Callable[..., Any]:
    """Return a local function that may write to tensors that its other arguments overlap.

    Kernels refuse overlaps by a rank's own sizes and strides, so they may refuse on some ranks
    only: a shard of at most one element overlaps nothing, and a view of all elements has other
    strides than its base if a dim has one element. The function then reads the arguments before
    it writes.

    Args:
        call: the local function of an operator.
        written: the positions or names of the arguments that it writes to, none of them a list.
        shards_differ: whether ranks have shards of different sizes, so that they may disagree about
            any overlap; otherwise only views of all elements are read first.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith(_OVERLAP):
                raise
        targets = [
            args[place] if isinstance(place, int) else kwargs.get(place) for place in written
        ]

        def read_first(value: Any) -> Any:
            if not isinstance(value, Tensor) or any(value is target for target in targets):
                return value
            is_copied = shards_differ or any(_has_same_elements(value, one) for one in targets)
            return value.clone() if is_copied else value

        copies = {name: read_first(value) for name, value in kwargs.items()}
        return call(*map(read_first, args), **copies)

    return run


_OVERLAP = "unsupported operation: some elements of the input tensor"


def _has_same_elements(one: Tensor, other: Any) -> bool:
    """Tell whether two tensors have the same elements at the same places in memory."""
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    if one.data_ptr() != other.data_ptr():
        return False
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(step == other_step for size, step, other_step in steps if size > 1)


def in_place_view(op: OpOverload) -> Callable[..., Any] | None:
    """Return a function that views a DTensor in place; None if `op` is not such a view."""
    view = view_of(op)
    if view is None:
        return None
    # Imported here, because only such views need it.
    from .plain_tensors import is_made_inside

    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(tensor, "_spec"):
            raise InPlaceError(
                f"{op} would make a plain tensor of shape {tuple(tensor.shape)} a DTensor in "
                "place: use the DTensor itself, or its to_local()"
            )
        # Autograd repeats the views of a tensor that has changed, here on the new shape.
        is_recorded = torch.is_grad_enabled() or tensor.requires_grad
        is_of_user = is_recorded and not is_tracing() and not is_made_inside(tensor)
        if is_of_user and has_views(tensor):
            raise InPlaceError(
                f"{op} changes the shape of {tensor._spec!r}, which has views or is saved for "
                "backward: gradients through these would be wrong; take a view of it, as in x = "
                f"x.{view.overloadpacket.__name__}(...)"
            )
        viewed = view(tensor, *args, **kwargs)
        change_shape(op, tensor, *args, **kwargs)
        tensor._become(viewed._local_tensor, viewed._spec)
        return tensor

    return run


def track_base(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], views: Any) -> Any:
    """Have the copied outputs of a view operator follow their base, and return them."""
    base = next(flatten([*args, *kwargs.values()]))
    spec: Spec = base._spec

    def take(item: int) -> Any:
        if base._spec is not spec:
            raise InPlaceError(
                f"a view by {op} of {spec!r} was made before its base became {base._spec!r}; make "
                "the view again"
            )
        with torch.no_grad():
            return [*flatten(op(*args, **kwargs))][item]

    # While tracing there are no writes, and writes to inference tensors are not counted.
    if not (is_tracing() or base.is_inference()):
        for item, view in enumerate(flatten(views)):
            view._source = base, base._version, partial(take, item)
    return views


def local_of_copied_view(slot: Any) -> property:
    """Return the property that refreshes a copied view when its local tensor is read.

    It replaces the slot that holds the local tensor.
    """

    def current_values(view: Any) -> Any:
        base, version, take = view.__dict__.get("_source", (None, None, None))
        if base is not None and base._version != version:
            view._local_tensor = take()._local_tensor
            view._source = base, base._version, take
        return slot.__get__(view)

    return property(current_values, slot.__set__)
