"""Calls that differ in sizes only: what is decided for one of them is instantiated for the others.

Where a rule says so (`Rule.sizes`), an operator asks of sizes no more than which are equal to each other, to 0 or to 1.
The sizes of a call are then numbered by first appearance: (24, 6) @ (6, 10) is (2, 3) @ (3, 4), and so is every other
such product.  Those numbers are sizes too: one run of the operator on tensors of these few elements shows which size
each output dim has, in which memory order, without a meta kernel (of many operators that is Python code, which takes
0.2 to 2 ms and imports a compiler).

A sharding is remembered beside it if nothing moves in it, for inputs that are sharded as `torch.chunk` does it: then
no price had a say, and outputs get the same placements.  All else is assigned for each shape.

Reshapes are classes of their own, of calls that differ in the first dim only: (8, 4, 6) -> (32, 6) is (9, 4, 6) ->
(36, 6).  Both first dims are the same number of units, however large, so what becomes of every dim is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

import torch

from shoal_mesh.internal import cached_property

from .._torch import Build, OpOverload, direct, results_of, shapes_of
from ..layout.dim_sharding import DimSharding
from ..layout.placements import Placement, Shard
from ..layout.spec import Spec
from ..layout.tensor_meta import MemoryOrder, TensorMeta, contiguous_stride, dense_order, dense_stride
from ..rules.language.op_schema import schema_of
from ..rules.language.rule import LocalFunction, Rule, flatten
from .decision import Decision, ResultKind, SimpleDecision

MAX_CLASSES = 4096  # when there are more, the oldest goes
MAX_LAYOUTS = 64  # of one class; more are assigned for each shape
FEW = 3  # number 2 is shown by dims of 5 elements: a result of 2 elements by nature is not taken for it
_NUMBERS = (int, float, bool, complex)


class SizeClass(NamedTuple):
    """The class of one call, and what is special to the call.

    Attributes:
        key: what decides about the outputs: operator, rule, numbers in place of sizes, dtypes, memory orders and the
            other arguments.
        layout: what decides about the sharding besides; None if it is to be assigned for each shape.
        numbers: the number of every size, ascending; 0 and 1 are their own.
        device_type: where the operator will run.
        reshaped: the output of a reshape; None of other operators.
    """

    key: tuple[Any, ...]
    layout: tuple[Any, ...] | None
    numbers: Mapping[int, int]
    device_type: str
    reshaped: TensorMeta | None = None


class KnownLayout(NamedTuple):
    """What calls of one class have in common whose inputs are placed alike.

    Attributes:
        outputs: the placements of each output, and for each of its sharded dims the input and dim sharded likewise.
        decision: of one of these calls, if it is simple.
        runs_operator: whether its rank runs the operator itself: then others do who have elements.
    """

    outputs: list[tuple[tuple[Placement, ...], dict[int, tuple[int, int]]]]
    decision: SimpleDecision | None
    runs_operator: bool

    def placed(self, inputs: Sequence[Spec], outputs: Sequence[TensorMeta]) -> tuple[Spec, ...]:
        """The specs of a call's outputs."""
        specs = []
        for (placements, origins), meta in zip(self.outputs, outputs, strict=True):
            by_dim = {dim: _of_length(inputs[i].dim_shardings[d], meta.shape[dim]) for dim, (i, d) in origins.items()}
            specs.append(Spec.sharded(inputs[0].mesh, placements, meta, by_dim))
        return tuple(specs)


class KnownClass:
    """What the calls of a class have in common.

    Args:
        op: the overload.
        build: makes the arguments of one of these calls.
        results: what the operator returned for them.
        numbers: the number of every size of those arguments.

    Raises:
        KeyError: if an output has a size that no input has.
        ValueError: if the elements of an output are not dense in memory.
    """

    def __init__(self, op: OpOverload, build: Build, results: Sequence[torch.Tensor], numbers: Mapping[int, int]):
        self._op, self._build, self._results = (
            op,
            build,
            [TensorMeta(tuple(t.shape), t.stride(), t.dtype) for t in results],
        )
        self._outputs = [
            (tuple(numbers[n] for n in meta.shape), _dense(dense_order(meta.shape, meta.stride)), meta.dtype)
            for meta in self._results
        ]
        self._layouts: dict[tuple[Any, ...], KnownLayout] = {}

    @cached_property
    def binding(self) -> Callable[..., Any]:
        """The cheapest callable for these calls (see `direct`)."""
        return direct(self._op, self._build, self._results)

    def outputs(self, call: SizeClass) -> tuple[TensorMeta, ...]:
        """Global shape, stride and dtype of every output of a call."""
        if call.reshaped is not None:
            return (call.reshaped,)
        sizes, metas = (*call.numbers,), []
        for numbers, order, dtype in self._outputs:
            shape = tuple([sizes[i] for i in numbers])
            metas.append(TensorMeta(shape, dense_stride(shape, order), dtype))
        return tuple(metas)

    def layout_of(self, call: SizeClass) -> KnownLayout | None:
        """What is known of the calls of this class whose inputs are placed as those of this call."""
        return None if call.layout is None else self._layouts.get(call.layout)

    def alike(
        self,
        layout: KnownLayout,
        inputs: Sequence[Spec],
        outputs: tuple[Spec, ...],
        local: Callable[[], LocalFunction | None],
    ) -> SimpleDecision | None:
        """The decision of a call in a known layout, made like that of another; None if there is none to follow.

        Args:
            layout: the layout; inputs: specs of the call's inputs; outputs: of its outputs.
            local: what a rank runs instead of the operator, if it does.
        """
        first = layout.decision
        if first is None:
            return None
        run = first.call
        if not layout.runs_operator or any([0 in spec.local_shape for spec in (*inputs, *outputs)]):  # noqa: C419  # half the time
            if first.result_kind is ResultKind.FIRST:
                return None
            run = local() or self.binding
        return SimpleDecision(run, first.result_kind, outputs, first.aliased, first.unreported_writes)

    def remember(self, call: SizeClass, inputs: Sequence[Spec], decision: Decision) -> None:
        """Keep a decision in which nothing moves for the calls of this class in the same layout."""
        if call.layout is None or call.layout in self._layouts or not isinstance(decision, SimpleDecision):
            return
        origins = [_origins(spec, inputs, reshaped=call.reshaped is not None) for spec in decision.outputs]
        if len(self._layouts) < MAX_LAYOUTS and None not in origins:
            placements = [spec.placements for spec in decision.outputs]
            outputs = [(p, o) for p, o in zip(placements, origins, strict=True) if o is not None]
            simple = decision if type(decision) is SimpleDecision else None
            self._layouts[call.layout] = KnownLayout(outputs, simple, decision.call is self.binding)


def _of_length(sharding: Any, length: int) -> Any:
    """The same sharding; of another number of elements, that of a reshape, it is even."""
    if sharding.length == length:
        return sharding
    return DimSharding.chunks(sharding.axes, sharding.axis_sizes, length, length // sharding.shards)


def _origins(spec: Spec, inputs: Sequence[Spec], *, reshaped: bool) -> dict[int, tuple[int, int]] | None:
    """For each sharded dim of an output an input and its dim that are sharded likewise; None if there is none."""
    found: dict[int, tuple[int, int]] = {}
    for dim, sharding in enumerate(spec.dim_shardings):
        alike = ((i, d) for i, one in enumerate(inputs) for d, s in enumerate(one.dim_shardings) if s == sharding)
        if sharding.axes:
            scaled = reshaped and dim == 0 and inputs[0].dim_shardings[0].axes == sharding.axes
            found[dim] = (0, 0) if scaled else next(alike, (-1, -1))
    return found if _is_plain(spec) and (-1, -1) not in found.values() else None


_known: dict[tuple[Any, ...], KnownClass | None] = {}


def forget() -> None:
    """Forget all classes."""
    _known.clear()


def known_class(
    op: OpOverload, rule: Rule, call: SizeClass | None, args: Sequence[Any], kwargs: Mapping[str, Any], build: Build
) -> KnownClass | None:
    """What the calls of a class have in common, shown by one run if this is the first; None if that cannot be shown.

    Args:
        op: the overload; rule: its rule.
        call: the class of this call; None if it has none.
        args: the arguments of this call, each tensor as its spec; kwargs: likewise.
        build: makes them, without memory.
    """
    if call is None:
        return None
    if call.key in _known:
        return _known[call.key]
    if len(_known) >= MAX_CLASSES:
        del _known[next(iter(_known))]
    reshape = call.reshaped is not None
    known = KnownClass(op, build, (), {}) if reshape else _shown(op, rule.sizes or (), call, args, kwargs, build)
    _known[call.key] = known
    return known


def _shown(
    op: OpOverload,
    size_arguments: tuple[str, ...],
    call: SizeClass,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    build: Build,
) -> KnownClass | None:
    """What one run shows: of the kernel on few elements, or of the meta kernel where the CPU's would not do."""
    numbers = call.numbers
    try:
        if call.device_type != "cpu":
            return KnownClass(op, build, [*flatten(shapes_of(op, build, call.device_type))], numbers)
        few = {size: number + FEW * (number > 1) for size, number in numbers.items()}
        named = zip(schema_of(op).positional, args, strict=False)
        positional = [_resized(value, few, name in size_arguments) for name, value in named]
        by_name = {name: _resized(value, few, name in size_arguments) for name, value in kwargs.items()}
        numbers = {few[size]: number for size, number in numbers.items()}
        tensors = [value for value in (*positional, *by_name.values()) if isinstance(value, TensorMeta)]
        if any(map(_is_of_integers, tensors)) and any(0 in meta.shape for meta in tensors):
            return None  # no index is one of a dim of no elements, and some kernels do not check
        build = _with_ones(positional, by_name)
        results = [*flatten(results_of(op, build))]
        resized = schema_of(op).written and any(t.shape != positional[0].shape for t in results)
        return None if resized else KnownClass(op, build, results, numbers)
    except (RuntimeError, ValueError, TypeError, LookupError):  # the caller's own run says what is wrong, if anything
        return None


def class_of(op: OpOverload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SizeClass | None:
    """The class of a call, its tensors given as specs; None if each shape is a case of its own."""
    if rule.kind == "reshape" and len(args) == 2 and not kwargs:
        return _class_of_reshape(op, *args)
    schema = schema_of(op)
    if rule.sizes is None or schema.is_random:
        return None
    numbers: dict[int, int] = {0: 0, 1: 1}
    key: list[Any] = [op, rule]
    layout: list[Any] | None = []
    device_type = ""
    for name, value in (*zip(schema.positional, args, strict=False), *kwargs.items()):
        if isinstance(value, Spec):
            order, device_type = dense_order(value.shape, value.stride), value.mesh.device_type
            if order is None:
                return None
            key += (name, tuple([numbers.setdefault(n, len(numbers)) for n in value.shape]), order, value.dtype)
            if layout is not None:
                even = value.even or tuple([sharding.even for sharding in value.dim_shardings])
                layout = [*layout, value.mesh, value.placements, value.shard_order, even] if _is_plain(value) else None
        elif isinstance(value, list | tuple):
            if not all(type(item) in _NUMBERS for item in value):
                return None
            if name in rule.sizes:
                value = [numbers.setdefault(n, len(numbers)) for n in value]
            key += (name, tuple(value), tuple(map(type, value)))
        else:
            key += (name, type(value), value if rule.by_value or type(value) not in _NUMBERS else None)
    key.append(device_type)
    return SizeClass(tuple(key), None if layout is None else tuple(layout), numbers, device_type)


def _class_of_reshape(op: OpOverload, source: Spec, sizes: Sequence[int]) -> SizeClass | None:
    """The class of a reshape: all sizes but the first of both shapes, whose ratio is that of the others' products."""
    count, given, first = prod(source.shape), prod(sizes), source.shape[:1]
    if not (first and given and source.even and _is_plain(source) and {*map(type, sizes)} == {int}):
        return None
    target = tuple([count // -given if n == -1 else n for n in sizes])
    units = gcd(first[0], *target[:1])
    if (
        min(target, default=0) < 1
        or prod(target) != count
        or units < 2
        or dense_order(source.shape, source.stride) != ()
    ):
        return None
    if units % source.dim_sharding(0).shards:
        return None
    key = (op, source.shape[1:], target[1:], source.dtype)
    layout = (source.mesh, source.placements, source.shard_order)
    return SizeClass(key, layout, {}, "", TensorMeta(target, contiguous_stride(target), source.dtype))


def _is_plain(spec: Spec) -> bool:
    """Whether every dim is sharded as `torch.chunk` does it, and by several axes only evenly.

    Then two dims of one size that the same axes shard are sharded alike, and two of other sizes are not.
    """
    if spec.is_strided or not _all_plain(spec.placements):
        return False
    return spec.even or all(len(sharding.axes) < 2 for sharding in spec.dim_shardings)


@lru_cache(maxsize=1024)
def _all_plain(placements: tuple[Placement, ...]) -> bool:
    return not any(type(p) is Shard and p is not Shard(p.dim) for p in placements)


def _dense(order: MemoryOrder | None) -> MemoryOrder:
    if order is None:
        raise ValueError("an output with gaps or overlaps")
    return order


def _resized(value: Any, sizes: Mapping[int, int], is_sizes: bool) -> Any:
    """An argument with other sizes, a tensor as its `TensorMeta`."""
    if is_sizes:
        return [sizes[n] for n in value]
    if not isinstance(value, Spec):
        return value
    shape = tuple(sizes[n] for n in value.shape)
    return TensorMeta(shape, dense_stride(shape, _dense(dense_order(value.shape, value.stride))), value.dtype)


def _with_ones(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Build:
    """Makes these arguments with tensors of ones, on the CPU whatever the device asked for.

    Of integers they are zeros: an index of every dim that has elements, where 1 is behind a dim of one.  Some kernels
    do not check (nll_loss_backward), and write there.
    """

    def build(device: torch.device) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return [_ones(value) for value in args], {name: _ones(value) for name, value in kwargs.items()}

    return build


def _ones(value: Any) -> Any:
    if not isinstance(value, TensorMeta):
        return value
    made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="cpu")
    return made.fill_(0 if _is_of_integers(value) else 1)


def _is_of_integers(meta: TensorMeta) -> bool:
    return not (meta.dtype.is_floating_point or meta.dtype.is_complex or meta.dtype is torch.bool)
