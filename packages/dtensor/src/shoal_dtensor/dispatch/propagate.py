"""Decisions: the specs that each input of an operator must get and that its outputs have.

This module does not access values, and it does not refer to operators by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from shoal_mesh import DeviceMesh

from .._torch.operators import OpOverload, decomposition_of, is_collective
from ..errors import InPlaceError, MixedTensorError, NoRuleError
from ..layout.placements import Replicate
from ..layout.spec import Spec
from ..layout.tensor_meta import TensorMeta, flatten, has_symbols, is_list, mapped
from ..redistribute.plan import plan
from ..redistribute.steps import Plan
from ..rng.state import draws_at_once
from ..rules.language.notation import pointwise
from ..rules.language.op_call import schema_of
from ..rules.language.rule import (
    Check,
    LocalCall,
    LocalFunction,
    OpCall,
    Rule,
    S,
    local_function,
    nothing_of,
    replicated,
)
from ..scopes import Scope, notice_of
from .assign import Sharding, ShardingProblem, assign, unmoved
from .composites import collective_on_shards, sized_by_values
from .global_call import (
    NeedsConstantsError,
    by_few_elements,
    by_meta_kernel,
    specs_in,
    without_symbols,
)
from .plain_tensors import instead
from .results import (
    Decision,
    Place,
    ResultKind,
    check_outs,
    check_writes,
    dtype_that_decides,
    in_place_view,
    result_kind,
    with_overlap_fallback,
)


def rule_of(op: OpOverload, scope: Scope) -> Rule | None:
    """Return the rule of an operator, or None.

    The innermost overlay comes first, then the tables, then the pointwise rule for operators that
    torch tags as pointwise.
    """
    # here: the first operator pays 0.15 s for the tables, not `import`
    from ..rules.all_rules import TABLE

    rules: Iterator[Rule | None] = (table.get(op) for table in (*scope.overlays, TABLE))
    rule = next(filter(None, rules), None)
    if (
        rule is None
        and op.namespace != "aten"
        and torch.Tag.pointwise in op.tags
        and not op._schema.is_mutable
    ):
        return _ELEMENT_BY_ELEMENT
    return rule


def decide(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    scope: Scope,
    copies: frozenset[int] = frozenset(),
) -> Decision:
    """Decide how to run `op`, given its arguments with a `Spec` in place of each tensor.

    Keyword arguments are in the order of the schema.

    The scope has the policies in force; `copies` are the flat indices of inputs that are views with
    another storage than their base. Forbidden calls (MixedTensorError of several meshes,
    NoRuleError, InPlaceError, CommunicationForbiddenError) are refused here.
    """
    try:
        return _decide(op, args, kwargs, scope, copies=copies)
    except (NeedsConstantsError, TypeError):
        # code that hashes sizes, or counts with them, does not support symbols
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
    looks_up_size = sized_by_values(op, args, kwargs)
    if looks_up_size is not None:
        return Decision.composite(looks_up_size)
    rule = rule_of(op, scope)
    if rule is None:
        composite = (
            collective_on_shards(op)
            if is_collective(op)
            else in_place_view(op) or decomposition_of(op)
        )
        if composite is not None:
            return Decision.composite(composite)
        rule = _without_rule(op, scope)
    specs = (*specs_in(args), *specs_in(kwargs.values()))
    outs = tuple(specs_in([kwargs.get(name) for name in schema_of(op).outs]))
    inputs = specs[: len(specs) - len(outs)]
    shown = None if outs else by_few_elements(op, rule, args, kwargs, specs=inputs)
    metas, binding = shown or by_meta_kernel(op, args, kwargs, specs)
    if len(outs) > len(metas) and not all(spec.replicated for spec in outs):
        raise NoRuleError(
            f"{op} writes to {', '.join(map(repr, outs))} and does not return it, so its sharding "
            "cannot be kept; pass replicated tensors, or use the form that returns its result"
        )
    check_outs(op, outs, metas)
    given, named = mapped((tuple(args), {**kwargs}), Spec, attrgetter("tensor_meta"))
    call = OpCall(op, given, named, tuple([spec.tensor_meta for spec in inputs]), outputs=metas)
    if rule is _LOCAL:
        sharding = _as_first_input(call, inputs)
    elif rule.kind == "each":
        sharding = _sharding_of_each(rule, call, inputs)
    else:
        sharding = _sharding(
            rule,
            call,
            ShardingProblem(inputs, call.outputs, call.fixed, outs, unordered=rule.unordered),
        )
    return _decision(rule, call, specs, sharding, binding=binding, scope=scope, copies=copies)


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
    # ranks' results would not fit together
    if call.has_data_dependent_shape and rule.kind != "dynamic":
        rows = [
            row
            for row in rows
            if row.outputs and all(isinstance(entry, Replicate) for entry in row.outputs)
        ]
    sharding = assign(rows, problem, mesh)
    written = {index for index, _ in problem.fixed}
    # the written tensors' layouts: reduced, or replicated; the result is sent back
    for sharded in (True, False):
        if sharding is None:
            specs = tuple(
                _relaxed(s, sharded) if i in written else s for i, s in enumerate(problem.specs)
            )
            outs = tuple(_relaxed(spec, sharded) for spec in problem.outs)
            sharding = assign(rows, problem._replace(specs=specs, outs=outs), mesh)
    if sharding is None:
        targets = [problem.specs[i] for i in sorted(written)] + list(problem.outs)
        raise InPlaceError(
            f"{call.op} writes to {', '.join(map(repr, targets))}, but with the inputs "
            f"{', '.join(map(repr, problem.specs))} no result can be written there; use the "
            "out-of-place form"
        )
    return sharding


def _symbolic_sharding(
    rule: Rule, call: OpCall, problem: ShardingProblem, mesh: DeviceMesh
) -> Sharding:
    """Return the sharding for sizes with symbols, if the operator runs for the traced sizes."""
    if call.schema.is_random and not draws_at_once(mesh.device_type):
        raise NeedsConstantsError
    traced = without_symbols((call.args, call.kwargs, call.tensors, call.outputs), as_traced=True)
    chosen = _sharding(
        rule, OpCall(call.op, *traced), ShardingProblem(*without_symbols(problem, as_traced=True))
    )
    there = [
        spec
        if (spec.example or spec) is to
        else spec.with_(placements=to.placements, shard_order=to.shard_order)
        for spec, to in zip(problem.specs, chosen.inputs, strict=True)
    ]
    # Shardings that fold a sharded dim behind a dim of symbolic size are excluded, because
    # placements count runs in integers.
    rows = [
        row
        for row in rule.rows_of(call)
        if all(type(e.runs) is int for e in (*row.inputs, *row.outputs) if isinstance(e, S))
    ]
    sharding = unmoved(
        rows, problem._replace(specs=tuple(there)), mesh, communicating=bool(chosen.communicating)
    )
    if sharding is None:
        raise NeedsConstantsError
    return sharding


def _relaxed(spec: Spec, sharded: bool) -> Spec:
    """Return a spec without its partial placements, or without any sharding as well."""
    return spec.with_(
        placements=[p if sharded and not p.is_partial() else Replicate() for p in spec.placements]
    )


def elements_of(call: OpCall) -> Iterator[tuple[OpCall, list[int], range]]:
    """Yield the elements of a `foreach` call as calls, with the flat indices of inputs and outputs.

    The indices count the inputs and outputs of the whole call.
    """
    # Lists are walked in step, other arguments are shared.
    values = (*call.args, *call.kwargs.values())
    count = max(len(value) for value in values if is_list(value))
    for i in range(count):
        element = [value[i] if is_list(value) and value else value for value in values]
        args = element[: len(call.args)]
        kwargs = dict(zip(call.kwargs, element[len(call.args) :], strict=True))
        indices = [
            place[i if is_list(call[name]) else 0] for name, place in call.places.items() if place
        ]
        results = range(i, len(call.outputs), count)
        tensors = tuple(call.tensors[j] for j in indices)
        outputs = tuple(call.outputs[j] for j in results)
        yield OpCall(call.op, tuple(args), kwargs, tensors, outputs=outputs), indices, results


def _sharding_of_each(rule: Rule, call: OpCall, inputs: tuple[Spec, ...]) -> Sharding:
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
    final = tuple(decided.get(j, spec) for j, spec in enumerate(inputs))
    return Sharding(final, tuple(outputs[j] for j in sorted(outputs)), tuple(sorted(communicating)))


def _decision(  # noqa: PLR0913  # what a decision is made of
    rule: Rule,
    call: OpCall,
    specs: tuple[Spec, ...],
    sharding: Sharding,
    binding: Callable[[], LocalFunction],
    scope: Scope,
    copies: frozenset[int],
) -> Decision:
    """Return the decision that gives every input of a call the spec that its sharding requires."""
    # `out=` takes a result in its own layout, if that can be
    outs = specs[len(sharding.inputs) :]
    wanted = [*sharding.inputs]
    for out, to in zip(outs, (*sharding.outputs, *outs[len(sharding.outputs) :]), strict=False):
        wanted.append(out.with_(placements=to.placements, shard_order=to.shard_order))
    changed = [
        (i, a, b)
        for i, (a, b) in enumerate(zip(specs, wanted, strict=True))
        if not a.same_layout(b)
    ]
    plans = {i: plan(a, b) for i, a, b in changed}
    written = (*call.written, *range(len(sharding.inputs), len(specs)))
    stored = (*written, *call.updated)
    check_writes(call.op, specs, stored, copies)
    write_backs = {i: plan(b, a) for i, a, b in changed if i in stored}
    allowed = scope.communication == "allow"
    moving = any(p.collectives for p in plans.values())
    what = f"{call.op}({', '.join(map(repr, specs))})" if moving or not allowed else ""
    needs = (
        []
        if allowed
        else _needs(call, [*plans.items(), *write_backs.items()], sharding, specs[0].mesh)
    )
    notice = notice_of(what, needs, scope) if needs else ""
    aliased = call.aliased
    kind = result_kind(call)
    dynamic = rule.kind == "dynamic" or call.has_data_dependent_shape
    local_call = LocalCall(call, sharding.inputs, sharding.outputs)
    # generators keep step
    if specs[0].coordinate is None and not dynamic and not call.schema.is_random:
        run: LocalFunction | None = nothing_of(local_call)
    else:
        run = local_function(rule, local_call, bool(sharding.communicating))
    run = binding() if run is None else run
    if kind is ResultKind.FIRST and len(specs) > 1 and not sharding.inputs[0].even:
        run = with_overlap_fallback(run)
    positions = dict(zip(call.schema.positional, range(len(call.args)), strict=False))
    where = _places_of(call) if plans else []
    stores = [
        name for name in (*call.schema.written, *call.schema.outs) if any(flatten(call.get(name)))
    ]
    checks = rule.checks(call) if rule.checks is not None and plans else {}
    check_of: dict[int, Check] = {}
    for name, checks_of_tensors in checks.items():
        check_of |= zip(call.places[name], checks_of_tensors, strict=True)
    copied = call.schema.is_view and bool(
        plans or sharding.communicating or copies or rule.kind == "copy"
    )
    watched = what if not allowed and not sharding.communicating else ""
    elements = [one for one, *_ in elements_of(call)] if rule.kind == "each" else [call]
    default_dtypes = filter(None, map(dtype_that_decides, elements))
    default_dtype = next(default_dtypes, None)
    has_more_to_do = bool(plans or copied or notice or watched)
    return Decision(
        run,
        ResultKind.DYNAMIC if dynamic else kind,
        sharding.outputs,
        aliased,
        unreported_writes=tuple([positions.get(name, name) for name in stores])
        if kind is ResultKind.NONE
        else (),
        slow_path=has_more_to_do or default_dtype is not None,
        moves={where[i]: p for i, p in plans.items()},
        checks={
            where[i]: check
            for i, check in check_of.items()
            if i in plans and plans[i].slices and not plans[i].collectives
        },
        write_backs={where[i]: p for i, p in write_backs.items()},
        view_copied=copied,
        foreach=rule.kind == "each",
        reason=what if moving else "",
        notice=notice,
        watched=watched,
        default_dtype=default_dtype,
        only_compares_dtype=not has_more_to_do,
    )


def _places_of(call: OpCall) -> list[Place]:
    """Return the place of each tensor of a call in its arguments, by flat index."""
    places: list[Place] = []
    arguments: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for at, value in arguments:
        if is_list(value):
            places += [
                (at, item) for item, part in enumerate(value) if isinstance(part, TensorMeta)
            ]
        elif isinstance(value, TensorMeta):
            places.append((at, None))
    return places


def _needs(
    call: OpCall, plans: Sequence[tuple[int, Plan]], sharding: Sharding, mesh: DeviceMesh
) -> list[str]:
    """Describe everything that a call communicates, one line each.

    These are the plans of its inputs, and the collectives of its local function along mesh axes.
    """
    moves = [f"  input {i}: {p.src!r} -> {p.dst!r}\n{p}" for i, p in plans if p.collectives]
    axes = [mesh.axis_names[axis] for axis in sharding.communicating if mesh.shape[axis] > 1]
    return (
        [*moves, f"  collectives of its local function along {', '.join(map(repr, axes))}"]
        if axes
        else moves
    )


_ELEMENT_BY_ELEMENT = pointwise()
_REPLICATE = Rule(replicated)
_LOCAL = Rule(replicated)


def _without_rule(op: OpOverload, scope: Scope) -> Rule:
    if scope.unknown == "error":
        raise NoRuleError(
            f"{op} has no sharding rule and no decomposition; give it one with "
            "shoal_dtensor.register_rule, or allow replicated inputs with unknown_ops('replicate')"
        )
    if scope.unknown == "local":
        return _LOCAL
    warnings.warn(
        f"{op} has no sharding rule and no decomposition: its inputs are replicated "
        "(unknown_ops('error') forbids this; shoal_dtensor.register_rule gives it a rule)",
        stacklevel=2,
    )
    return _REPLICATE


def _as_first_input(call: OpCall, inputs: tuple[Spec, ...]) -> Sharding:
    """Return the `unknown_ops("local")` sharding: no input moves, outputs follow the first input."""
    first = inputs[0]
    for meta in call.outputs:
        if meta.shape != first.shape:
            raise NoRuleError(
                f"{call.op} has no sharding rule, and unknown_ops('local') cannot tell the layout "
                f"of an output of shape {tuple(meta.shape)} when its first input is {first!r}"
            )
    outputs = tuple(first.with_(stride=meta.stride, dtype=meta.dtype) for meta in call.outputs)
    return Sharding(inputs, outputs)
