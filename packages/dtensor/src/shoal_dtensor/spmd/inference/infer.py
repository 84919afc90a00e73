"""Types of an operator's results, from the rule that DTensors follow.

Along one mesh axis the types of the operands select a row of the operator's rule; R and I count as
replicated there. If the rule would have to redistribute an operand, the call is a type error. R and
I differ in their gradients. The operands that take gradients decide whether a replicated result is
R or I, and a mixture of R and I among them is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from ...dispatch.assign import Sharding, ShardingProblem, assign, assign_without_moves
from ...dispatch.global_call import outputs_by_meta_kernel, outputs_by_probe, specs_in
from ...dispatch.propagate import elements_of, rule_of
from ...errors import ShoalTensorError, SpmdTypeError
from ...layout.spec import Spec
from ...layout.tensor_meta import map_instances
from ...rules.language.op_call import OpCall, schema_of
from ...rules.language.rule import LocalCall, Rule
from ...scopes import current as current_scope
from ..types.axis_types import (
    SHARDS,
    AnyAxisType,
    I,
    P,
    R,
    V,
    local_type,
)
from ..types.mesh_axes import MeshAxis
from ..types.tensor_types import TensorType
from .local_calls import is_the_operator
from .messages import describe_call, ways_out
from .operand_layouts import (
    Leading,
    count_runs,
    spec_of_operand,
    type_of_memory,
    types_of_spec,
    with_expanded_shards,
)
from .operator_call import LocalOperatorCall, Operand
from .parts import results_in_parts

# Arguments that are lists of sizes: a program on shards passes local sizes.
_SIZES = frozenset({"size", "normalized_shape", "output_size"})
_NEW_EMPTY = torch.ops.aten.new_empty.default


def infer_types(
    call: LocalOperatorCall,
    axes: Sequence[MeshAxis],
    varying: frozenset[MeshAxis],
    leading: Leading | None = None,
) -> list[TensorType]:
    """Return the type of each output of a call.

    Args:
        call: the call; every operand with a type has one on all of `axes`.
        axes: the mesh axes.
        varying: the axes along which shards count as V: every rank computes on its own.
        leading: the sharded leading dims of the function that runs the operator; they decide
            where local sizes fit several global tensors.

    Raises:
        SpmdTypeError: if the types do not fit the operator.
    """
    if call.op is _NEW_EMPTY:
        return [type_of_memory(call)]
    found: dict[MeshAxis, list[AnyAxisType]] = {}
    by_rule: list[MeshAxis] = []
    for axis in axes:
        kinds = {operand.on(axis) for operand in call.operands}
        is_local = axis in varying and V in {local_type(axis_type) for axis_type in kinds}
        in_parts = None if is_local else results_in_parts(call, axis)
        if in_parts is not None:
            found[axis] = in_parts
        elif V in kinds or is_local:
            found[axis] = [_varying_result(call, axis)] * len(call.outputs)
        elif kinds <= {R, I}:
            found[axis] = [_replicated_result(call, axis)] * len(call.outputs)
        else:
            _refuse_invariant(call, axis)
            by_rule.append(axis)
    if not by_rule:
        # On one rank there are no axes, and every output has a type without axes.
        return [_type_of_output(found, index) for index in range(len(call.outputs))]
    outcomes = _results_by_rule(call, tuple(by_rule), leading)
    typed = [_types_of_outcome(found, outcome, by_rule, axes) for outcome in outcomes]
    return [_common_type(readings) for readings in zip(*typed, strict=True)]


def _type_of_output(found: Mapping[MeshAxis, Sequence[AnyAxisType]], index: int) -> TensorType:
    """Return the type of one output, from the types of all outputs along each axis."""
    return TensorType({axis: kinds[index] for axis, kinds in found.items()})


def _types_of_outcome(
    found: Mapping[MeshAxis, Sequence[AnyAxisType]],
    specs: Sequence[Spec],
    by_rule: Sequence[MeshAxis],
    axes: Sequence[MeshAxis],
) -> list[TensorType]:
    """Return the types of outputs with these layouts along `by_rule`."""
    results = []
    for index, spec in enumerate(specs):
        by_axis, order = types_of_spec(spec, by_rule)
        every: dict[MeshAxis, AnyAxisType] = {}
        for axis in axes:
            every[axis] = by_axis[axis] if axis in by_axis else found[axis][index]
        axes_of_dims = sorted(order.items())
        several = [(dim, listed) for dim, listed in axes_of_dims if len(listed) > 1]
        results.append(TensorType(every, tuple(several)))
    return results


def _common_type(types: Sequence[TensorType]) -> TensorType:
    """Return the common type of several possible types of a result: V where they differ."""
    first = types[0]
    if all(other == first for other in types):
        return first
    by_axis: dict[MeshAxis, AnyAxisType] = {}
    for axis, axis_type in first.by_axis.items():
        agrees = all(other.by_axis[axis] is axis_type for other in types)
        by_axis[axis] = axis_type if agrees else V
    ambiguous = {axis for axis, axis_type in by_axis.items() if axis_type is V}
    kept = [(dim, listed) for dim, listed in first.order if ambiguous.isdisjoint(listed)]
    return TensorType(by_axis, tuple(kept))


def _replicated_result(call: LocalOperatorCall, axis: MeshAxis) -> AnyAxisType:
    """Return R or I for operands that are R or I; operands that take gradients decide."""
    typed = [operand for operand in call.operands if operand.tensor_type is not None]
    kinds = {operand.on(axis) for operand in typed}
    if len(kinds) == 1:
        return kinds.pop()
    deciding = {operand.on(axis) for operand in typed if operand.takes_gradient}
    if len(deciding) > 1:
        raise SpmdTypeError(
            f"{describe_call(call, axis)}: R and I cannot be combined. The gradient of R is a "
            "partial sum and the gradient of I is complete, so one of the two would be wrong. Way "
            f"out: convert the I operand, convert(x, {axis.argument}, src=I, dst=R), whose "
            "backward sums the ranks' gradients"
        )
    return deciding.pop() if deciding else R


def _refuse_invariant(call: LocalOperatorCall, axis: MeshAxis) -> None:
    """Refuse I operands among operands that differ between ranks."""
    for operand in call.operands:
        if operand.tensor_type is None or not operand.takes_gradient:
            continue
        if operand.on(axis) is I and P in {other.on(axis) for other in call.operands}:
            raise SpmdTypeError(
                f"{describe_call(call, axis)}: I cannot be combined with P, an addend of a sum "
                f"that is not done yet. Way out: all_reduce(x, {axis.argument}, src=P, dst=I) for "
                "the P operand"
            )
        if operand.on(axis) is I:
            raise SpmdTypeError(
                f"{describe_call(call, axis)}: I cannot be combined with types that differ "
                "between ranks. The gradient of the I operand would be one rank's addend instead "
                f"of the sum. Way out: convert(x, {axis.argument}, src=I, dst=R), whose backward "
                "sums the ranks' gradients"
            )


def _varying_result(call: LocalOperatorCall, axis: MeshAxis) -> AnyAxisType:
    """Return V, the type of a result that differs between ranks; refuse I and P operands."""
    _refuse_invariant(call, axis)
    kinds = {local_type(operand.on(axis)) for operand in call.operands}
    if not kinds <= {R, I, V}:
        raise SpmdTypeError(
            f"{describe_call(call, axis)}: P cannot be combined with V, because every rank would "
            "use its own addend as if it were the sum. Way out: reduce the P operand first, "
            f"all_reduce(x, {axis.argument}, src=P, dst=R) or "
            f"reduce_scatter(x, {axis.argument}, src=P, dst=V)"
        )
    return V


# --- by the rule table ----------------------------------------------------------------------------


class _Refusal(NamedTuple):
    """The reason why no row of a rule fits a call.

    Attributes:
        reason: the reason, for the error.
        wanted: the layouts to which the rule would move the operands; None if unknown.
    """

    reason: str
    wanted: tuple[Spec, ...] | None


def _results_by_rule(
    call: LocalOperatorCall, axes: tuple[MeshAxis, ...], leading: Leading | None
) -> list[tuple[Spec, ...]]:
    """Return the layouts of the outputs along `axes`, by the row that the operands follow.

    There are several if local sizes fit several global tensors.
    """
    rule = rule_of(call.op, current_scope())
    if rule is None:
        raise SpmdTypeError(
            f"{describe_call(call, *axes)}: the operator does not have a sharding rule. Way out: "
            "register one with shoal_dtensor.register_rule; or make the operands R; or call it "
            "in local_map with declared types"
        )
    operands = {operand: spec_of_operand(operand, axes) for operand in call.operands}
    named = dict(call.kwargs)
    # for each outcome, the number of sizes that had to be multiplied
    outcomes: dict[tuple[Spec, ...], int] = {}
    refusals: list[_Refusal] = []
    for args, multiplied in _global_arguments(call, axes):
        global_call = map_instances((args, named), Operand, operands.__getitem__)
        outcome = _by_row(call, rule, *global_call)
        if isinstance(outcome, _Refusal):
            refusals.append(outcome)
        else:
            outcomes.setdefault(outcome, multiplied)
    if outcomes:
        return _likely_outcomes(call, axes, leading, outcomes)
    expanded = with_expanded_shards(call, axes)
    if expanded is not None:
        return _results_by_rule(expanded, axes, leading)
    refusal = next((refusal for refusal in refusals if refusal.wanted), refusals[0])
    moves = ways_out(call, axes, [*operands.values()], refusal.wanted) or (
        ". Way out: all_gather the sharded operands to R first, or compute in local() or in "
        "local_map with declared types"
    )
    raise SpmdTypeError(f"{describe_call(call, *axes)}: {refusal.reason}{moves}")


def _likely_outcomes(
    call: LocalOperatorCall,
    axes: tuple[MeshAxis, ...],
    leading: Leading | None,
    outcomes: Mapping[tuple[Spec, ...], int],
) -> list[tuple[Spec, ...]]:
    """Return the outcomes that the program most likely means.

    They have the fewest axes whose shards are several runs, and they keep the sharding of leading
    dims.

    Args:
        call: the call.
        axes: the axes of the layouts.
        leading: the axes that shard the leading dims, if a function declares them.
        outcomes: for each outcome the number of sizes that had to be multiplied.
    """
    kept = 0 if leading is None else leading.kept
    keeping = [outcome for outcome in outcomes if _keeps_last_dims(call, axes, outcome, kept)]
    runs = {outcome: count_runs(outcome) for outcome in keeping or outcomes}
    preferred = [outcome for outcome in runs if runs[outcome] == min(runs.values())]
    for dims in (leading, _unchanged_dims(call)):
        if len(preferred) > 1 and dims is not None:
            like = [outcome for outcome in preferred if dims.agrees(outcome, axes)]
            preferred = like or preferred
    has_wildcard = any(-1 in sizes for sizes in _size_lists(call))
    if len(preferred) > 1 and has_wildcard:
        # Sizes next to a -1 are the program's own numbers, such as the size of a head.
        fewest = min(outcomes[outcome] for outcome in preferred)
        preferred = [outcome for outcome in preferred if outcomes[outcome] == fewest]
    return preferred


def _keeps_last_dims(
    call: LocalOperatorCall, axes: tuple[MeshAxis, ...], outcome: Sequence[Spec], count: int
) -> bool:
    """Tell whether the last dims of the outputs are sharded like those of the first operand."""
    operand = call.operands[0]
    if operand.tensor_type is None:
        return True
    for spec in outcome:
        _, order = types_of_spec(spec, axes)
        for back in range(1, min(count, spec.ndim, len(operand.meta.shape)) + 1):
            before = operand.tensor_type.dims.get(len(operand.meta.shape) - back, ())
            if order.get(spec.ndim - back, ()) != before:
                return False
    return True


def _unchanged_dims(call: LocalOperatorCall) -> Leading | None:
    """Return the sharding of the leading dims whose sizes an operator does not change."""
    operand = call.operands[0]
    if operand.tensor_type is None or len(call.outputs) != 1:
        return None
    dims = []
    sizes = zip(operand.meta.shape, call.outputs[0].shape, strict=False)
    for dim, (before, after) in enumerate(sizes):
        if before != after:
            break
        dims.append(operand.tensor_type.dims.get(dim, ()))
    return Leading(tuple(dims))


def _local_sizes(call: LocalOperatorCall, sizes: Sequence[int]) -> list[int]:
    """Return the positions of the sizes that may depend on the shard.

    Next to a -1, only sizes of the operand and products of its consecutive sizes may. The other
    sizes are the program's own numbers, such as the size of a head.
    """
    if -1 not in sizes:
        return [dim for dim, size in enumerate(sizes) if size != 0]
    shape = call.operands[0].meta.shape
    products = set()
    for first in range(len(shape)):
        total = 1
        for size in shape[first:]:
            total *= size
            products.add(total)
    return [dim for dim, size in enumerate(sizes) if size != -1 and size in products]


def _is_sharded(call: LocalOperatorCall, axis: MeshAxis) -> bool:
    return any(isinstance(operand.on(axis), SHARDS) for operand in call.operands)


def _size_places(call: LocalOperatorCall) -> list[int]:
    """Return the positions of the arguments that are lists of sizes."""
    positional = schema_of(call.op).positional
    named = enumerate(zip(positional, call.args, strict=False))
    return [
        place
        for place, (name, value) in named
        if name in _SIZES and isinstance(value, list | tuple)
    ]


def _size_lists(call: LocalOperatorCall) -> list[Sequence[int]]:
    return [call.args[place] for place in _size_places(call)]


def _global_arguments(
    call: LocalOperatorCall, axes: Sequence[MeshAxis]
) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the positional arguments of the global calls that this local call may belong to.

    Each comes with the number of sizes that were multiplied. A list of local sizes may stand for
    global sizes in which each sharding axis multiplies at most one size. For example, (4, 8) on two
    ranks may stand for (4, 8), (8, 8) or (4, 16).
    """
    sharding = [axis for axis in axes if _is_sharded(call, axis)]
    lists = _size_places(call)
    if not lists or not sharding:
        yield call.args, 0
        return
    place = lists[0]
    local: Sequence[int] = call.args[place]
    choices = [None, *_local_sizes(call, local)]
    for dims in product(choices, repeat=len(sharding)):
        sizes = [*local]
        for axis, dim in zip(sharding, dims, strict=True):
            if dim is not None:
                sizes[dim] *= axis.size()
        multiplied = len(dims) - dims.count(None)
        yield (*call.args[:place], sizes, *call.args[place + 1 :]), multiplied


def _by_row(
    local: LocalOperatorCall, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Spec, ...] | _Refusal:
    """Return the layouts of the outputs of one global call, or why it is refused."""
    inputs = (*specs_in(args), *specs_in(kwargs.values()))
    try:
        probed = outputs_by_probe(local.op, rule, args, kwargs, specs=inputs)
        outputs = probed or outputs_by_meta_kernel(local.op, args, kwargs, inputs)
        metas = outputs.metas
    except (ShoalTensorError, RuntimeError, IndexError) as error:
        return _Refusal(f"the global tensors do not fit the operator ({error})", None)
    positional, named = map_instances(
        (tuple(args), {**kwargs}), Spec, lambda spec: spec.tensor_meta
    )
    metas_in = tuple([spec.tensor_meta for spec in inputs])
    call = OpCall(local.op, positional, named, metas_in, outputs=metas)
    if call.has_data_dependent_shape or rule.kind == "dynamic":
        return _Refusal("the shape of its result depends on values", None)
    sharding = _shard_in_place(rule, call, inputs)
    if isinstance(sharding, _Refusal):
        return sharding
    for spec, output in zip(sharding.outputs, local.outputs, strict=True):
        if not spec.even or tuple(spec.local_shape) != tuple(output.shape):
            return _Refusal(
                "on shards the operator does not compute the shard of the global result: its "
                f"result is {tuple(output.shape)} on each rank, but a rank's shard of the global "
                f"result {spec!r} is {tuple(spec.local_shape)}",
                None,
            )
    if not is_the_operator(rule, LocalCall(call, sharding.inputs, sharding.outputs)):
        return _Refusal(
            "on shards the global result needs another computation than the operator itself (an "
            "offset, a mask, or a divisor that counts all elements)",
            None,
        )
    return sharding.outputs


def _shard_in_place(rule: Rule, call: OpCall, inputs: tuple[Spec, ...]) -> Sharding | _Refusal:
    """Return the sharding in which no operand moves, or the moves that the rule would make."""
    if rule.kind == "each":
        return _shard_each_in_place(rule, call, inputs)
    mesh = inputs[0].mesh
    problem = ShardingProblem(inputs, call.outputs, call.fixed, (), unordered=rule.unordered)
    rows = rule.rows_of(call)
    sharding = assign_without_moves(rows, problem, mesh)
    if sharding is not None:
        return sharding
    without_traffic = [row for row in rows if row.traffic is None]
    moved = assign(without_traffic, problem, mesh)
    return _Refusal(
        "no row of the operator's sharding rule has these types, so the result is not a tensor of "
        "the global computation",
        None if moved is None else moved.inputs,
    )


def _shard_each_in_place(rule: Rule, call: OpCall, inputs: tuple[Spec, ...]) -> Sharding | _Refusal:
    """Return the layouts of a `foreach` call if no element needs a move; else the refusal."""
    outputs: dict[int, Spec] = {}
    for element, indices, results in elements_of(call):
        specs = tuple([inputs[index] for index in indices])
        problem = ShardingProblem(specs, element.outputs, element.fixed, (), unordered=True)
        sharding = assign_without_moves(rule.rows_of(element), problem, specs[0].mesh)
        if sharding is None:
            return _Refusal(f"element {indices[0]} has types that no row of the rule has", None)
        outputs.update(zip(results, sharding.outputs, strict=True))
    return Sharding(inputs, tuple([outputs[index] for index in sorted(outputs)]))
