"""Decisions about operators: the spec that each input must get, and the spec of each output.

`decide` computes the global outputs, asks the operator's rule for possible shardings, and chooses
the cheapest one. This module does not access values, and it does not refer to operators by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from shoal_mesh import DeviceMesh

from .._torch.operators import OpOverload, decomposition_of, is_collective, signature_of
from ..errors import InPlaceError, MixedTensorError, NoRuleError
from ..layout.placements import Replicate
from ..layout.spec import Spec
from ..layout.tensor_meta import TensorMeta, flatten, has_symbols, is_list, map_instances
from ..rng.state import draws_at_once
from ..rules.language.notation import pointwise
from ..rules.language.op_call import schema_of
from ..rules.language.rule import (
    Check,
    LocalCall,
    LocalFunction,
    OpCall,
    Row,
    Rule,
    S,
    local_function,
    no_rows,
    nothing_of,
)
from ..scopes import Scope
from .assign import Sharding, ShardingProblem, assign, assign_without_moves
from .composites import SIZED_BY_VALUES, collective_on_shards
from .global_call import (
    NeedsConstantsError,
    outputs_by_meta_kernel,
    outputs_by_probe,
    specs_in,
    without_symbols,
)
from .input_moves import (
    CommunicationTexts,
    InputMove,
    ShardedCall,
    communication_of,
    plan_moves,
)
from .plain_tensors import instead
from .results import (
    ArgumentPosition,
    Decision,
    ResultKind,
    check_outs,
    dtype_that_decides,
    in_place_view,
    result_kind,
    with_overlap_fallback,
)


def rule_of(op: OpOverload, scope: Scope) -> Rule | None:
    """Return the rule of an operator, or None.

    The overlays of the scope come first, then the tables. An overlay is a rule table that holds
    inside a block of the user's program; the innermost one comes first. The pointwise rule is last,
    for operators outside of aten that torch tags as pointwise and that do not write to arguments.
    """
    # Imported here, so that the tables take their 0.15 s at the first operator, not at import.
    from ..rules.all_rules import TABLE

    for table in (*scope.overlays, TABLE):
        rule: Rule | None = table.get(op)
        if rule:
            return rule
    is_foreign = op.namespace != "aten"
    is_pointwise = torch.Tag.pointwise in op.tags
    if is_foreign and is_pointwise and not signature_of(op).is_mutable:
        return _ELEMENT_BY_ELEMENT
    return None


def decide(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    scope: Scope,
    copies: frozenset[int] = frozenset(),
) -> Decision:
    """Decide how to run `op`, given its arguments with a `Spec` in place of each tensor.

    Keyword arguments are in the order of the schema.

    The scope has the policies in force. `copies` are the flat indices of inputs that are copied
    views: they do not share the storage of their base, because the base was redistributed for the
    view. Forbidden calls (MixedTensorError of several meshes,
    NoRuleError, InPlaceError, CommunicationForbiddenError) are refused here.
    """
    try:
        return _decide(op, args, kwargs, scope, copies=copies)
    except (NeedsConstantsError, TypeError):
        # Code that hashes sizes, or uses them as counts, does not support symbols. The call is then
        # decided for constants. `as_traced=False` adds guards, so that the compiler compiles again
        # for other sizes.
        if not has_symbols((*args, *kwargs.values())):
            raise
        args, kwargs = without_symbols((args, kwargs), as_traced=False)
        return _decide(op, args, kwargs, scope, copies=copies)


def _decide(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    scope: Scope,
    copies: frozenset[int],
) -> Decision:
    """Decide as `decide` does, but raise an error where code does not support symbolic sizes."""
    if op in SIZED_BY_VALUES:
        function_that_reads_size = SIZED_BY_VALUES[op](args, kwargs)
        if function_that_reads_size is not None:
            return Decision.composite(function_that_reads_size)
    rule = rule_of(op, scope)
    if rule is None:
        composite = _composite_of(op)
        if composite is not None:
            return Decision.composite(composite)
        rule = _without_rule(op, scope)
    specs = (*specs_in(args), *specs_in(kwargs.values()))
    out_arguments = [kwargs.get(name) for name in schema_of(op).outs]
    outs = tuple(specs_in(out_arguments))
    # `out=` arguments are the last keyword arguments of every schema.
    inputs = specs[: len(specs) - len(outs)]
    # A probe is a call of the operator on few elements (global_call.py).
    result = None if outs else outputs_by_probe(op, rule, args, kwargs, specs=inputs)
    if result is None:
        result = outputs_by_meta_kernel(op, args, kwargs, specs)
    # Some operators write to `out=` arguments without returning them.
    returns_all_outs = len(outs) <= len(result.metas)
    if not returns_all_outs and not all(spec.replicated for spec in outs):
        raise NoRuleError(
            f"{op} writes to {', '.join(map(repr, outs))} and does not return it, so its sharding "
            "cannot be kept; pass replicated tensors, or use the form that returns its result"
        )
    check_outs(op, outs, result.metas)
    # the arguments with a `TensorMeta` in place of each `Spec`
    args_of_metas, kwargs_of_metas = map_instances(
        (tuple(args), {**kwargs}), Spec, attrgetter("tensor_meta")
    )
    input_metas = tuple([spec.tensor_meta for spec in inputs])
    call = OpCall(op, args_of_metas, kwargs_of_metas, input_metas, outputs=result.metas)
    sharding = _sharding_by_rule(rule, call, inputs, outs)
    sharded = ShardedCall(rule, call, specs, sharding)
    # `binding` searches for the cheapest callable that runs the operator.
    return _decision_of(sharded, result.binding, scope, copies)


def _composite_of(op: OpOverload) -> Callable[..., Any] | None:
    """Return a function that computes the result of an operator by other operators, or None.

    It is for operators without a rule.
    """
    if is_collective(op):
        return collective_on_shards(op)
    return in_place_view(op) or decomposition_of(op)


def _sharding_by_rule(
    rule: Rule, call: OpCall, inputs: tuple[Spec, ...], outs: tuple[Spec, ...]
) -> Sharding:
    """Return the layouts in which a call runs, as its rule requires."""
    # `_LOCAL`, defined at the end of this file, is the rule for unknown_ops("local").
    if rule is _LOCAL:
        return _as_first_input(call, inputs)
    # "each" is the kind of `foreach` operators, which do the same to every element of their lists.
    if rule.kind == "each":
        return _sharding_of_each(rule, call, inputs)
    problem = ShardingProblem(inputs, call.outputs, call.fixed, outs, unordered=rule.unordered)
    return _sharding(rule, call, problem)


def _sharding(rule: Rule, call: OpCall, problem: ShardingProblem) -> Sharding:
    """Return the cheapest sharding that keeps the layouts of written tensors.

    If there is none, return a sharding with these tensors reduced, or replicated.
    """
    specs = problem.specs + problem.outs
    mesh = specs[0].mesh
    for spec in specs[1:]:
        if spec.mesh is not mesh and spec.mesh != mesh:
            raise MixedTensorError(
                f"{call.op}: its inputs are on different meshes: {mesh} and {spec.mesh}; "
                f"redistribute one of them to the other's mesh first{instead(str(call.op))}"
            )
    if has_symbols((*problem.specs, *problem.outs, *problem.outputs)):
        return _symbolic_sharding(rule, call, problem, mesh)
    rows = rule.rows_of(call)
    # An output whose shape depends on data cannot be sharded: the ranks' results would not fit
    # together.
    if call.has_data_dependent_shape and rule.kind != "dynamic":
        rows = [row for row in rows if row.outputs and _replicates_outputs(row)]
    sharding = assign(rows, problem, mesh)
    # `fixed` has the inputs that the call writes to in place, which must keep their layouts.
    written = {index for index, _ in problem.fixed}
    # If a written tensor cannot keep its layout, its pending reductions are done for the call. If
    # this does not suffice, it is replicated for the call. The result is sent back to its layout.
    # The loop ends when a sharding is found.
    for relax in (Spec.without_partials, Spec.all_replicated):
        if sharding is not None:
            break
        relaxed = [relax(spec) if i in written else spec for i, spec in enumerate(problem.specs)]
        outs = tuple(map(relax, problem.outs))
        sharding = assign(rows, problem._replace(specs=tuple(relaxed), outs=outs), mesh)
    if sharding is None:
        targets = [problem.specs[i] for i in sorted(written)] + list(problem.outs)
        target_texts = ", ".join(map(repr, targets))
        input_texts = ", ".join(map(repr, problem.specs))
        raise InPlaceError(
            f"{call.op} writes to {target_texts}, but with the inputs {input_texts} no result can "
            "be written there; use the out-of-place form"
        )
    return sharding


def _symbolic_sharding(
    rule: Rule, call: OpCall, problem: ShardingProblem, mesh: DeviceMesh
) -> Sharding:
    """Return the sharding of a call whose sizes are symbols of torch.compile.

    The layouts are chosen for the sizes that the compiler traces with. NeedsConstantsError is
    raised if these layouts are not possible for all values of the symbols.
    """
    if call.schema.is_random and not draws_at_once(mesh.device_type):
        raise NeedsConstantsError
    traced = without_symbols((call.args, call.kwargs, call.tensors, call.outputs), as_traced=True)
    traced_problem = ShardingProblem(*without_symbols(problem, as_traced=True))
    chosen = _sharding(rule, OpCall(call.op, *traced), traced_problem)
    pairs = zip(problem.specs, chosen.inputs, strict=True)
    # the specs with symbols, in the layouts that were chosen without symbols
    specs_at_chosen_layout = tuple([_in_layout_of(spec, to) for spec, to in pairs])
    # A row is left out if it merges a sharded dim with an earlier dim of symbolic size. The merged
    # dim would have as many runs as this size, and placements only support integers there.
    rows = [row for row in rule.rows_of(call) if _has_constant_runs(row)]
    problem = problem._replace(specs=specs_at_chosen_layout)
    # `communicating` has the mesh axes over which the local function communicates. If it is empty
    # for the traced sizes, rows whose local function communicates are left out.
    sharding = assign_without_moves(rows, problem, mesh, communicating=bool(chosen.communicating))
    if sharding is None:
        raise NeedsConstantsError
    return sharding


def _replicates_outputs(row: Row) -> bool:
    return all(isinstance(entry, Replicate) for entry in row.outputs)


def _has_constant_runs(row: Row) -> bool:
    sharded = [entry for entry in (*row.inputs, *row.outputs) if isinstance(entry, S)]
    return all(type(entry.runs) is int for entry in sharded)


def _in_layout_of(spec: Spec, chosen: Spec) -> Spec:
    """Return a spec with symbols in the layout that was chosen for its traced sizes."""
    traced = spec.example or spec
    # An input that does not move is the same object in the chosen sharding.
    if traced is chosen:
        return spec
    return spec.in_layout_of(chosen)


class ListElement(NamedTuple):
    """An element of a `foreach` call, as a call of its own.

    Attributes:
        call: the call of the element.
        inputs: the flat indices of its inputs among the inputs of the whole call.
        outputs: the flat indices of its outputs among the outputs of the whole call.
    """

    call: OpCall
    inputs: list[int]
    outputs: range


def elements_of(call: OpCall) -> Iterator[ListElement]:
    """Yield the elements of a `foreach` call.

    Element i has the i-th entry of each list; it shares the other arguments with all elements.
    """
    values = (*call.args, *call.kwargs.values())
    count = max(len(value) for value in values if is_list(value))
    for i in range(count):
        element = []
        for value in values:
            is_filled_list = is_list(value) and bool(value)
            element.append(value[i] if is_filled_list else value)
        args = tuple(element[: len(call.args)])
        kwargs = dict(zip(call.kwargs, element[len(call.args) :], strict=True))
        indices = []
        for name, tensors_of_argument in call.places.items():
            if tensors_of_argument:
                position = i if is_list(call[name]) else 0
                indices.append(tensors_of_argument[position])
        # The outputs are flattened list by list, and each list has `count` elements.
        results = range(i, len(call.outputs), count)
        tensors = tuple(call.tensors[j] for j in indices)
        outputs = tuple(call.outputs[j] for j in results)
        element_call = OpCall(call.op, args, kwargs, tensors, outputs=outputs)
        yield ListElement(element_call, indices, results)


def _sharding_of_each(rule: Rule, call: OpCall, inputs: tuple[Spec, ...]) -> Sharding:
    """Return the layouts of a `foreach` call; each element is decided on its own."""
    decided: dict[int, Spec] = {}
    outputs: dict[int, Spec] = {}
    communicating: set[int] = set()
    for element, indices, results in elements_of(call):
        specs = tuple([inputs[j] for j in indices])
        problem = ShardingProblem(
            specs, element.outputs, element.fixed, (), unordered=rule.unordered
        )
        sharding = _sharding(rule, element, problem)
        communicating.update(sharding.communicating)
        for j, spec in zip(indices, sharding.inputs, strict=True):
            if decided.setdefault(j, spec) != spec:
                raise MixedTensorError(
                    f"{call.op}: the shared input {inputs[j]!r} would need two layouts"
                )
        outputs.update(zip(results, sharding.outputs, strict=True))
    final_inputs = tuple(decided.get(j, spec) for j, spec in enumerate(inputs))
    final_outputs = tuple(outputs[j] for j in sorted(outputs))
    return Sharding(final_inputs, final_outputs, tuple(sorted(communicating)))


def _decision_of(
    sharded: ShardedCall,
    binding: Callable[[], LocalFunction],
    scope: Scope,
    copies: frozenset[int],
) -> Decision:
    """Return the decision that gives every input of a call the spec that its sharding requires."""
    rule, call, specs, sharding = sharded
    writes = bool(call.written or call.updated)
    # A call that only reads, and whose inputs keep their layouts, moves nothing.
    moves = plan_moves(sharded, copies) if writes or sharding.inputs != specs else []
    communication = CommunicationTexts()
    if moves or scope.communication != "allow":
        communication = communication_of(sharded, moves, scope)
    is_dynamic = rule.kind == "dynamic" or call.has_data_dependent_shape
    kind = result_kind(call)
    positions = _argument_positions(call) if moves else []
    outputs_have_own_memory = bool(moves or sharding.communicating or copies or rule.kind == "copy")
    is_copied_view = call.schema.is_view and outputs_have_own_memory
    # If the decision depends on torch's default dtype, every call compares this dtype first.
    default_dtype = _deciding_dtype(rule, call)
    # A notice is the warning of the communication policy. If a call is watched, the policy also
    # holds while its local function runs.
    has_more_to_do = bool(moves or is_copied_view or communication.notice or communication.watched)
    moves_by_argument = {positions[move.position]: move.plan for move in moves}
    write_backs = {}
    for move in moves:
        if move.write_back is not None:
            write_backs[positions[move.position]] = move.write_back
    return Decision(
        _choose_local_function(sharded, binding, is_dynamic=is_dynamic),
        ResultKind.DYNAMIC if is_dynamic else kind,
        outputs=sharding.outputs,
        aliased=call.aliased,
        unreported_writes=_written_arguments(call) if kind is ResultKind.NONE else (),
        slow_path=has_more_to_do or default_dtype is not None,
        moves=moves_by_argument,
        checks=_checks_before_slicing(rule, call, moves, positions),
        write_backs=write_backs,
        view_copied=is_copied_view,
        foreach=rule.kind == "each",
        reason=communication.reason,
        notice=communication.notice,
        watched=communication.watched,
        default_dtype=default_dtype,
        only_compares_dtype=not has_more_to_do,
    )


def _choose_local_function(
    sharded: ShardedCall, binding: Callable[[], LocalFunction], *, is_dynamic: bool
) -> LocalFunction:
    """Return the function that a rank runs on its local tensors."""
    rule, call, specs, sharding = sharded
    local_call = LocalCall(call, sharding.inputs, sharding.outputs)
    is_outside = specs[0].coordinate is None
    run: LocalFunction | None
    # Ranks outside the mesh draw random numbers too, so that all generators advance equally.
    if is_outside and not is_dynamic and not call.schema.is_random:
        run = nothing_of(local_call)
    else:
        run = local_function(rule, local_call, bool(sharding.communicating))
    if run is None:
        run = binding()
    return _with_reads_first(sharded, run)


def _with_reads_first(sharded: ShardedCall, run: LocalFunction) -> LocalFunction:
    """Return the local function, with a fallback that reads the arguments before it writes.

    Kernels refuse to write to a tensor that overlaps another argument. They check the local sizes
    and strides, so kernels of some ranks may refuse a call that others run. The fallback runs it on
    all ranks. It is not needed if the written tensors have even shards and no dims of one element,
    because all kernels then agree.
    """
    _, call, specs, sharding = sharded
    outs = specs[len(sharding.inputs) :]
    writes_first = result_kind(call) is ResultKind.FIRST and not outs
    in_place = specs[:1] if writes_first else ()
    targets = (*outs, *in_place)
    if len(specs) < 2 or not targets:
        return run
    shards_differ = not all(spec.even for spec in targets)
    has_dims_of_one = any(1 in spec.local_shape for spec in targets)
    if not shards_differ and not has_dims_of_one:
        return run
    written: Sequence[int | str] = call.schema.outs if outs else (0,)
    return with_overlap_fallback(run, written, shards_differ=shards_differ)


def _written_arguments(call: OpCall) -> tuple[int | str, ...]:
    """Return the positions or names of the arguments with tensors that an operator writes to."""
    positions = dict(zip(call.schema.positional, range(len(call.args)), strict=False))
    names = (*call.schema.written, *call.schema.outs)
    # `flatten` yields the `TensorMeta`s of an argument, which count as true, and nothing for None.
    written = [name for name in names if any(flatten(call.get(name)))]
    return tuple([positions.get(name, name) for name in written])


def _checks_before_slicing(
    rule: Rule, call: OpCall, moves: Sequence[InputMove], positions: Sequence[ArgumentPosition]
) -> dict[ArgumentPosition, Check]:
    """Return the rule's checks of the values of inputs that are sliced for the call.

    Before such an input is sliced, every rank has all of its values. So all ranks find the same
    wrong values.
    """
    if rule.checks is None or not moves:
        return {}
    check_of: dict[int, Check] = {}
    for name, checks_of_tensors in rule.checks(call).items():
        check_of |= zip(call.places[name], checks_of_tensors, strict=True)
    plans = {move.position: move.plan for move in moves}
    checks = {}
    for index, check in check_of.items():
        plan_of_input = plans.get(index)
        if plan_of_input and plan_of_input.slices and not plan_of_input.collectives:
            checks[positions[index]] = check
    return checks


def _deciding_dtype(rule: Rule, call: OpCall) -> torch.dtype | None:
    """Return torch's default dtype if the output dtypes follow from it; None otherwise."""
    if rule.kind != "each":
        return dtype_that_decides(call)
    for element, *_ in elements_of(call):
        dtype = dtype_that_decides(element)
        if dtype:
            return dtype
    return None


def _argument_positions(call: OpCall) -> list[ArgumentPosition]:
    """Return the position of each tensor of a call in its arguments, by flat index."""
    positions: list[ArgumentPosition] = []
    arguments: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for at, value in arguments:
        if isinstance(value, TensorMeta):
            positions.append((at, None))
        elif is_list(value):
            for item, element in enumerate(value):
                if isinstance(element, TensorMeta):
                    positions.append((at, item))
    return positions


_ELEMENT_BY_ELEMENT = pointwise()
# the rules for unknown_ops("replicate") and unknown_ops("local"); `_LOCAL` is compared by identity
_REPLICATE = Rule(no_rows)
_LOCAL = Rule(no_rows)


def _without_rule(op: OpOverload, scope: Scope) -> Rule:
    """Return the rule for an operator without one, or refuse it, as `unknown_ops` tells."""
    if scope.unknown == "error":
        raise NoRuleError(
            f"{op} does not have a sharding rule or a decomposition; register a rule with "
            "shoal_dtensor.register_rule, or allow replicated inputs with "
            "unknown_ops('replicate')"
        )
    if scope.unknown == "local":
        return _LOCAL
    warnings.warn(
        f"{op} does not have a sharding rule or a decomposition, so its inputs are replicated "
        "(unknown_ops('error') forbids this; register a rule with shoal_dtensor.register_rule)",
        stacklevel=2,
    )
    return _REPLICATE


def _as_first_input(call: OpCall, inputs: tuple[Spec, ...]) -> Sharding:
    """Return the sharding for unknown_ops("local"): inputs stay, outputs are as the first input."""
    first = inputs[0]
    for meta in call.outputs:
        if meta.shape != first.shape:
            raise NoRuleError(
                f"{call.op} does not have a sharding rule, and unknown_ops('local') cannot infer "
                f"the layout of an output of shape {tuple(meta.shape)} when its first input is "
                f"{first!r}"
            )
    outputs = [first.with_(stride=meta.stride, dtype=meta.dtype) for meta in call.outputs]
    return Sharding(inputs, tuple(outputs))
